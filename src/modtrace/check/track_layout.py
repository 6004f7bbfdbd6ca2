"""Collect events by track, pair begins with ends, and sort: what the rules on nesting and flows look at."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .._typing import Int64Array
from .model import FlowEnd, FlowKey, TrackKey, UnpairedEvent

__all__ = ["NEVER_NS", "SliceColumns", "TrackEvents", "TrackLayout"]

NEVER_NS = 2**63 - 1
"""The end of a slice whose end never came."""


@dataclass(slots=True)
class TrackEvents:
    """The slices of one track as a reader finds them, in columns: a trace has millions.

    Attributes:
        start: ns, of each X.
        end: ns, of each X.
        position: in the file, of each X.
        name: of each X.
        half_time: ns, of each B and E.
        half_position: in the file, of each B and E.
        half_name: of each B and E; "" for an E that closes whatever is open.
        is_begin: 1 for each B, 0 for each E.
    """

    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    position: array[int] = field(default_factory=lambda: array("q"))
    name: list[str] = field(default_factory=list)
    half_time: array[int] = field(default_factory=lambda: array("q"))
    half_position: array[int] = field(default_factory=lambda: array("q"))
    half_name: list[str] = field(default_factory=list)
    is_begin: bytearray = field(default_factory=bytearray)

    def add_slice(self, start: int, duration: int, position: int, name: str) -> None:
        """Add an X; times in ns."""
        self.start.append(start)
        self.end.append(min(start + duration, NEVER_NS - 1))
        self.position.append(position)
        self.name.append(name)

    def add_half(self, is_begin: bool, time: int, position: int, name: str) -> None:
        """Add a B or an E; time in ns."""
        self.half_time.append(time)
        self.half_position.append(position)
        self.half_name.append(name)
        self.is_begin.append(is_begin)


@dataclass(frozen=True, slots=True)
class SliceColumns:
    """The slices of one track, by start; of several with the same start the longest first.

    Attributes:
        start: int64[n], ns.
        end: int64[n], ns; `NEVER_NS` where the end never came.
        position: int64[n], of the event that begins it, in the file.
        name: the slices' names.
        is_paired: whether all of them are pairs of B and E.
    """

    start: Int64Array
    end: Int64Array
    position: Int64Array
    name: list[str]
    is_paired: bool


@dataclass(slots=True)
class TrackLayout:
    """All events of a trace, by what they are.

    Attributes:
        tracks: the slices of each track, as found.
        flows: the ends of each flow; in time order once `arrange` was called.
        slices: the slices of each track, arranged.
        unended: begins without an end.
        unbegun: ends without a begin.
    """

    tracks: dict[TrackKey, TrackEvents] = field(default_factory=dict)
    flows: dict[FlowKey, list[FlowEnd]] = field(default_factory=dict)
    slices: dict[TrackKey, SliceColumns] = field(default_factory=dict)
    unended: list[UnpairedEvent] = field(default_factory=list)
    unbegun: list[UnpairedEvent] = field(default_factory=list)

    def track(self, key: TrackKey) -> TrackEvents:
        """Return the events of a track, to be added to."""
        events = self.tracks.get(key)
        if events is None:
            events = self.tracks[key] = TrackEvents()
        return events

    def add_flow_end(self, end: FlowEnd) -> None:
        """Add the start, a step or the end of a flow."""
        self.flows.setdefault(end.flow, []).append(end)

    def arrange(self) -> None:
        """Pair begins with ends, and sort slices and flow ends, once everything was added."""
        for key in list(self.tracks):
            events = self.tracks.pop(key)  # so that both forms are in memory for one track only
            is_paired = not events.start
            self._pair(events)
            self.slices[key] = _sort(events, is_paired)
        for ends in self.flows.values():
            if len(ends) > 1:
                ends.sort(key=lambda end: end.time)

    def _pair(self, events: TrackEvents) -> None:
        """Pair B with E as viewers do: an E closes the innermost open B (of its name, if it has one) and all inside."""
        times, positions, names, is_begin = events.half_time, events.half_position, events.half_name, events.is_begin
        stack: list[int] = []
        for index in _time_order(times):
            if is_begin[index]:
                stack.append(index)
                continue
            name = names[index]
            match = len(stack) - 1
            while match >= 0 and name and names[stack[match]] != name:
                match -= 1
            if match < 0:
                self.unbegun.append(UnpairedEvent(positions[index], name))
                continue
            self.unended.extend(UnpairedEvent(positions[begin], names[begin]) for begin in stack[match + 1 :])
            for begin in stack[match:]:
                events.add_slice(times[begin], times[index] - times[begin], positions[begin], names[begin])
            del stack[match:]
        for begin in stack:
            self.unended.append(UnpairedEvent(positions[begin], names[begin]))
            events.add_slice(times[begin], 0, positions[begin], names[begin])
            events.end[-1] = NEVER_NS


def _time_order(times: array[int]) -> Sequence[int]:
    """Return the indexes in time order; events of the same time stay in file order."""
    column = np.frombuffer(times, np.int64) if times else np.empty(0, np.int64)
    if np.all(column[1:] >= column[:-1]):
        return range(len(column))
    order: list[int] = np.argsort(column, kind="stable").tolist()
    return order


def _sort(events: TrackEvents, is_paired: bool) -> SliceColumns:
    if not events.start:
        empty = np.empty(0, np.int64)
        return SliceColumns(empty, empty, empty, [], True)
    start, end, position = (np.frombuffer(part, np.int64) for part in (events.start, events.end, events.position))
    order = np.lexsort((position, -end, start))
    names = events.name
    return SliceColumns(
        start[order], end[order], position[order], [names[index] for index in order.tolist()], is_paired
    )
