"""Collect events by track and flow, pair begins with ends, and sort: what the rules on nesting and flows look at."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .._numbering import Numbering
from .._typing import AnyArray, BoolArray, Int32Array, Int64Array
from ..formats.chrome_values import find_ended

TrackKey = tuple[str | int, ...]
"""Identifies a track: (pid, tid) in a Chrome trace, (uuid,) in a Perfetto trace."""
FlowKey = tuple[object, ...]
"""Identifies a flow, the same for all its ends; its id comes first."""


class Fault(NamedTuple):
    """One fault that `check` found: where a file breaks a rule.

    Attributes:
        rule: the rule's name (`partial-overlap`).
        message: what is wrong, with the values that are.
        event: position of the event in the file, from 0 (of the packet in a Perfetto trace); None if the file as a
            whole is concerned.
        of_profiler: whether it is a fault of torch.profiler, in an event of its own; modtrace keeps these as they are.
    """

    rule: str
    message: str
    event: int | None = None
    of_profiler: bool = False

    def __str__(self) -> str:
        where = "" if self.event is None else f"event {self.event}: "
        return f"{self.rule}: {where}{self.message}"


def _extend(columns: Iterable[array[int] | bytearray], values: Iterable[AnyArray]) -> None:
    for column, more in zip(columns, values, strict=True):
        typecode = column.typecode if isinstance(column, array) else "B"
        column.extend(array(typecode, more.astype(typecode).tobytes()))


class FlowEnd(NamedTuple):
    """Where a flow starts, passes through, or ends.

    Attributes:
        position: of its event in the file, from 0.
        phase: Chrome's letter: s, t or f.
        track: the track it lies on.
        time: ns.
        flow: the flow it belongs to.
    """

    position: int
    phase: str
    track: TrackKey
    time: int
    flow: FlowKey


START, STEP, END = b"stf"
"""What an end of a flow does, by Chrome's letters."""
ONWARD = ord("o")
"""It starts its flow where it is the flow's first in time, else the flow passes through it."""


@dataclass(slots=True)
class FlowEnds:
    """The ends of all flows; columns of equal length.

    Attributes:
        position: of each one's event in the file, from 0.
        time: ns.
        track: index of the track it lies on.
        flow: the flow it belongs to: an id, or an index into `keys`.
        phase: `START`, `STEP`, `END` or `ONWARD`; no longer the last once `arrange` was called.
        binds_next: 1 where it belongs to the next slice that begins, 0 for the one around it.
        keys: what identifies a flow, where an id alone does not, and its index.
        order: the indexes of all ends by flow, and in each by time, once `arrange` was called.
    """

    position: array[int] = field(default_factory=lambda: array("q"))
    time: array[int] = field(default_factory=lambda: array("q"))
    track: array[int] = field(default_factory=lambda: array("l"))
    flow: array[int] = field(default_factory=lambda: array("Q"))
    phase: bytearray = field(default_factory=bytearray)
    binds_next: bytearray = field(default_factory=bytearray)
    keys: Numbering[FlowKey] = field(default_factory=Numbering)
    order: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    _first: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.position)

    def add(self, position: int, phase: int, track: int, time: int, flow: int, *, binds_next: bool = False) -> None:
        """Add the start, a step or the end of a flow; time in ns."""
        self.position.append(position)
        self.time.append(time)
        self.track.append(track)
        self.flow.append(flow)
        self.phase.append(phase)
        self.binds_next.append(binds_next)

    def add_all(self, *columns: AnyArray, keys: Iterable[object]) -> None:
        """Add the ends of all flows.

        Args:
            columns: as those of this, from `position` to `binds_next`.
            keys: the id of each flow.
        """
        _extend((self.position, self.time, self.track, self.flow, self.phase, self.binds_next), columns)
        for number, key in enumerate(keys):
            self.keys[key, number] = number

    def arrange(self) -> None:
        """Order the ends by flow, and in each by time, once all were added."""
        if not len(self):
            return
        _, appearance, flow = np.unique(np.frombuffer(self.flow, np.uint64), return_index=True, return_inverse=True)
        # Flows in the order in which they appear in the file; ends of the same time stay in file order.
        order = np.lexsort((np.frombuffer(self.time, np.int64), appearance[flow]))
        self.order = order
        self._first = np.flatnonzero(np.diff(appearance[flow][order], prepend=-1))
        phase = np.frombuffer(self.phase, np.uint8)
        is_onward = phase[order] == ONWARD
        if is_onward.any():
            onward = order[is_onward]
            of_flow = flow[onward]
            phase[onward] = np.where(np.diff(of_flow, prepend=-1) != 0, START, STEP)

    def irregular(self, tracks: list[TrackKey]) -> Iterator[list[FlowEnd]]:
        """Yield the ends of flows that may break a rule: all but flows with a start and one other end.

        Args:
            tracks: keys by index.
        """
        if not len(self):
            return
        is_start: BoolArray = np.frombuffer(self.phase, np.uint8)[self.order] == START
        first, last = self._first, np.append(self._first[1:], len(self.order))
        second = np.minimum(first + 1, len(self.order) - 1)
        regular = (last - first == 2) & is_start[first] & ~is_start[second]
        texts = list(self.keys)
        for begin, end in zip(first[~regular].tolist(), last[~regular].tolist(), strict=True):
            yield [self._end(row, tracks, texts) for row in self.order[begin:end].tolist()]

    def ends(self, rows: Int64Array, tracks: list[TrackKey]) -> Iterator[FlowEnd]:
        """Yield some ends by their indexes."""
        texts = list(self.keys)
        for row in rows.tolist():
            yield self._end(row, tracks, texts)

    def _end(self, row: int, tracks: list[TrackKey], texts: list[FlowKey]) -> FlowEnd:
        flow = texts[self.flow[row]] if texts else (self.flow[row],)
        return FlowEnd(self.position[row], chr(self.phase[row]), tracks[self.track[row]], self.time[row], flow)


NEVER_NS = 2**63 - 1
"""The end of a slice whose end never came."""


@dataclass(slots=True)
class TrackEvents:
    """The slices of one track as a reader finds them, in columns: a trace has millions.

    Attributes:
        index: of the track among all.
        start: ns, of each X.
        end: ns, of each X.
        position: in the file, of each X.
        name: of each X, in the layout's `names`.
        half_time: ns, of each B and E.
        half_position: in the file, of each B and E.
        half_name: of each B and E; 0 for an E that closes whatever is open.
        is_begin: 1 for each B, 0 for each E.
    """

    index: int
    start: array[int] = field(default_factory=lambda: array("q"))
    end: array[int] = field(default_factory=lambda: array("q"))
    position: array[int] = field(default_factory=lambda: array("q"))
    name: array[int] = field(default_factory=lambda: array("i"))
    half_time: array[int] = field(default_factory=lambda: array("q"))
    half_position: array[int] = field(default_factory=lambda: array("q"))
    half_name: array[int] = field(default_factory=lambda: array("i"))
    is_begin: bytearray = field(default_factory=bytearray)

    def add_slices(self, start: Int64Array, duration: Int64Array, position: Int64Array, name: Int32Array) -> None:
        """Add X; times in ns."""
        end = start + np.minimum(duration, NEVER_NS - 1 - start)
        _extend((self.start, self.end, self.position, self.name), (start, end, position, name))

    def add_halves(self, is_begin: BoolArray, time: Int64Array, position: Int64Array, name: Int32Array) -> None:
        """Add B and E; times in ns."""
        columns = (self.is_begin, self.half_time, self.half_position, self.half_name)
        _extend(columns, (is_begin, time, position, name))

    def add_slice(self, start: int, duration: int, position: int, name: int) -> None:
        """Add an X; times in ns."""
        self.start.append(start)
        self.end.append(min(start + duration, NEVER_NS - 1))
        self.position.append(position)
        self.name.append(name)

    def add_half(self, is_begin: bool, time: int, position: int, name: int) -> None:
        """Add a B or an E; time in ns."""
        self.half_time.append(time)
        self.half_position.append(position)
        self.half_name.append(name)
        self.is_begin.append(is_begin)

    def first_position(self) -> int:
        """Return the position in the file of the first event."""
        return min(positions[0] for positions in (self.position, self.half_position) if positions)


@dataclass(frozen=True, slots=True)
class ArrangedSlices:
    """The slices of one track, by start; of several with the same start the longest first.

    Attributes:
        start: int64[n], ns.
        end: int64[n], ns; `NEVER_NS` where the end never came.
        position: int64[n], of the event that begins it, in the file.
        name: int32[n], in the layout's `names`.
        is_paired: whether all of them are pairs of B and E.
    """

    start: Int64Array
    end: Int64Array
    position: Int64Array
    name: Int32Array
    is_paired: bool


class TracksByKey(dict[TrackKey, TrackEvents]):
    """Makes a track when its key is first asked for."""

    def __missing__(self, key: TrackKey) -> TrackEvents:
        events = self[key] = TrackEvents(len(self))
        return events


@dataclass(slots=True)
class TrackLayout:
    """All events of a trace, by what they are.

    Attributes:
        names: of slices, with their indexes.
        tracks: the slices of each track, as found.
        flows: the ends of flows.
        slices: the slices of each track, arranged.
        work: kernels, memcpys and memsets, some at a time: index of the track, start, end, position and name of each.
        stop: when the profiler stopped, ns; None: nothing says it.
        unended: begins that nothing closes; viewers draw them to the end of the trace.
        unbegun: ends that close nothing; viewers ignore them.
    """

    names: Numbering[str] = field(default_factory=Numbering)
    tracks: TracksByKey = field(default_factory=TracksByKey)
    flows: FlowEnds = field(default_factory=FlowEnds)
    slices: dict[TrackKey, ArrangedSlices] = field(default_factory=dict)
    work: list[Int64Array] = field(default_factory=list)
    stop: int | None = None
    unended: list[Fault] = field(default_factory=list)
    unbegun: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        _ = self.names[""]  # 0: no name

    def arrange(self) -> None:
        """Pair begins with ends, and sort slices and flow ends, once everything was added."""
        names = list(self.names)
        for key in list(self.tracks):
            events = self.tracks.pop(key)  # so that both forms are in memory for one track only
            is_paired = not events.start
            self._pair(events, names)
            start, end, position = (np.frombuffer(c, np.int64) for c in (events.start, events.end, events.position))
            order = np.lexsort((position, -end, start))
            name = np.frombuffer(events.name, np.int32)[order]
            self.slices[key] = ArrangedSlices(start[order], end[order], position[order], name, is_paired)
        self.flows.arrange()

    def _pair(self, events: TrackEvents, names: list[str]) -> None:
        """Pair B with E as viewers do: an E closes the innermost open B (of its name, if it has one) and all inside."""
        times, positions, is_begin = events.half_time, events.half_position, events.is_begin
        half_name = events.half_name
        begins, ends = array("q"), array("q")  # the rows of each pair's halves; -1 if it never ends
        stack: list[int] = []
        for index in np.argsort(np.frombuffer(times, np.int64), kind="stable").tolist():
            if is_begin[index]:
                stack.append(index)
                continue
            name = half_name[index]
            if (match := find_ended(stack, half_name, name)) < 0:
                subject = f"{names[name]!r} ends" if name else "an end"
                message = f"{subject} where nothing of that name is open"
                self.unbegun.append(Fault("end-without-begin", message, positions[index]))
                continue
            for begin in reversed(stack[match + 1 :]):
                self._add_unended(names[half_name[begin]], positions[begin])
            for begin in stack[match:]:
                begins.append(begin)
                ends.append(index)
            del stack[match:]
        for begin in stack:
            self._add_unended(names[half_name[begin]], positions[begin])
            begins.append(begin)
            ends.append(-1)
        time, position, rows = np.frombuffer(times, np.int64), np.frombuffer(positions, np.int64), np.array(begins)
        end_time = np.append(np.minimum(time, NEVER_NS - 1), NEVER_NS)
        events.start.frombytes(time[rows].tobytes())
        events.end.frombytes(end_time[np.array(ends)].tobytes())
        events.position.frombytes(position[rows].tobytes())
        events.name.frombytes(np.frombuffer(half_name, np.int32)[rows].tobytes())

    def _add_unended(self, name: str, position: int) -> None:
        self.unended.append(Fault("begin-without-end", f"{name!r} is never ended", position))
