"""Sort events onto their tracks and pair begins with ends: what the rules on nesting and flows look at."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .model import CheckedEvent, TrackKey

__all__ = ["CheckedSlice", "TrackLayout", "lay_out"]


class CheckedSlice(NamedTuple):
    """An X, or a B with its E: [start, end) in ns, with an infinite end where the E never came.

    Attributes:
        start: ns.
        end: ns, or `math.inf`.
        position: of the event that begins it, in the file.
        name: the slice's name.
    """

    start: int
    end: float
    position: int
    name: str


@dataclass(slots=True)
class TrackLayout:
    """All events of a trace, by what they are.

    Attributes:
        slices: per track, by start; of several with the same start the longest first.
        unended: begins without an end.
        unbegun: ends without a begin.
        flows: per flow its ends, in time order.
    """

    slices: dict[TrackKey, list[CheckedSlice]] = field(default_factory=dict)
    unended: list[CheckedEvent] = field(default_factory=list)
    unbegun: list[CheckedEvent] = field(default_factory=list)
    flows: dict[tuple[object, ...], list[CheckedEvent]] = field(default_factory=dict)


def lay_out(events: Sequence[CheckedEvent]) -> TrackLayout:
    """Sort events onto their tracks and pair begins with ends."""
    layout = TrackLayout()
    begins_and_ends: dict[TrackKey, list[CheckedEvent]] = defaultdict(list)
    for event in events:
        if event.flow is not None:
            layout.flows.setdefault(event.flow, []).append(event)
        elif event.phase == "X":
            complete = CheckedSlice(event.time, event.time + event.duration, event.position, event.name)
            layout.slices.setdefault(event.track, []).append(complete)
        else:
            begins_and_ends[event.track].append(event)
    for track, track_events in begins_and_ends.items():
        layout.slices.setdefault(track, []).extend(_pair(track_events, layout))
    for slices in layout.slices.values():
        slices.sort(key=lambda slice_: (slice_.start, -slice_.end, slice_.position))
    for ends in layout.flows.values():
        ends.sort(key=lambda end: end.time)
    return layout


def _pair(begins_and_ends: list[CheckedEvent], layout: TrackLayout) -> list[CheckedSlice]:
    """Pair B with E as viewers do: an E closes the innermost open B (of its name, if it has one) and all inside it."""
    slices: list[CheckedSlice] = []
    stack: list[CheckedEvent] = []
    for event in sorted(begins_and_ends, key=lambda event: event.time):
        if event.phase == "B":
            stack.append(event)
            continue
        innermost_first = range(len(stack) - 1, -1, -1)
        match = next((index for index in innermost_first if event.name in ("", stack[index].name)), None)
        if match is None:
            layout.unbegun.append(event)
            continue
        layout.unended.extend(stack[match + 1 :])
        slices.extend(CheckedSlice(begin.time, event.time, begin.position, begin.name) for begin in stack[match:])
        del stack[match:]
    layout.unended.extend(stack)
    slices.extend(CheckedSlice(begin.time, math.inf, begin.position, begin.name) for begin in stack)
    return slices
