"""How events lie on their tracks: what the rules on nesting and flows look at."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .model import Event, Track

__all__ = ["Layout", "Slice", "lay_out"]


class Slice(NamedTuple):
    """What an X, or a B with its E, covers: [start, end) in ns, without end where the E never came."""

    start: int
    end: float
    position: int
    name: str


@dataclass(slots=True)
class Layout:
    """Events by what they are.

    Attributes:
        slices: per track by start, the longer one first.
        never_ended: begins without an end.
        never_begun: ends without a begin.
        flows: the ends of each flow in time order.
    """

    slices: dict[Track, list[Slice]] = field(default_factory=dict)
    never_ended: list[Event] = field(default_factory=list)
    never_begun: list[Event] = field(default_factory=list)
    flows: dict[tuple[object, ...], list[Event]] = field(default_factory=dict)


def lay_out(events: Sequence[Event]) -> Layout:
    """Sort events onto their tracks and pair begins with ends."""
    layout = Layout()
    halves: dict[Track, list[Event]] = defaultdict(list)
    for event in events:
        if event.flow is not None:
            layout.flows.setdefault(event.flow, []).append(event)
        elif event.phase == "X":
            whole = Slice(event.time, event.time + event.duration, event.position, event.name)
            layout.slices.setdefault(event.track, []).append(whole)
        else:
            halves[event.track].append(event)
    for track, of_track in halves.items():
        layout.slices.setdefault(track, []).extend(_paired(of_track, layout))
    for slices in layout.slices.values():
        slices.sort(key=lambda piece: (piece.start, -piece.end, piece.position))
    for ends in layout.flows.values():
        ends.sort(key=lambda end: end.time)
    return layout


def _paired(halves: list[Event], layout: Layout) -> list[Slice]:
    """Pair as viewers do: an E closes the innermost open B, of its name where it has one, and all inside it."""
    slices: list[Slice] = []
    open_: list[Event] = []
    for half in sorted(halves, key=lambda event: event.time):
        if half.phase == "B":
            open_.append(half)
            continue
        while_open = range(len(open_) - 1, -1, -1)
        match = next((at for at in while_open if half.name in ("", open_[at].name)), None)
        if match is None:
            layout.never_begun.append(half)
            continue
        layout.never_ended.extend(open_[match + 1 :])
        slices.extend(Slice(begin.time, half.time, begin.position, begin.name) for begin in open_[match:])
        del open_[match:]
    layout.never_ended.extend(open_)
    slices.extend(Slice(begin.time, math.inf, begin.position, begin.name) for begin in open_)
    return slices
