"""The rules on how events stand to each other: pairs, nesting and flows, for every format."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator

from .model import Event, Track, Violation
from .track_layout import Layout, Slice

__all__ = ["DEEPEST", "RULES"]

DEEPEST = 512
"""How many slices may lie in each other before viewers give up."""


def end_without_begin(layout: Layout) -> Iterator[Violation]:
    """Find ends that close nothing; viewers ignore them."""
    for event in layout.never_begun:
        what = f"{event.name!r} ends" if event.name else "an end"
        yield Violation("end-without-begin", f"{what} where nothing of that name is open", event.position)


def begin_without_end(layout: Layout) -> Iterator[Violation]:
    """Find begins that nothing closes; viewers draw them to the end of the trace."""
    for event in layout.never_ended:
        yield Violation("begin-without-end", f"{event.name!r} is never ended", event.position)


def partial_overlap(layout: Layout) -> Iterator[Violation]:
    """Find slices that begin in another and end after it; viewers drop them or draw them wrongly."""
    for track, slices in layout.slices.items():
        around: list[Slice] = []
        for piece in slices:
            if piece.end == math.inf:
                continue  # told by begin_without_end; where it would have ended, nobody knows
            while around and around[-1].end <= piece.start:
                around.pop()
            if around and around[-1].end < piece.end:
                outer = around[-1]
                message = (
                    f"{piece.name!r} begins in {outer.name!r} (event {outer.position}) on {_named(track)}"
                    f" and ends {piece.end - outer.end:.0f} ns after it"
                )
                yield Violation("partial-overlap", message, piece.position)
            else:
                around.append(piece)


def too_deep(layout: Layout) -> Iterator[Violation]:
    """Find the first slice of each track that has more around it than viewers draw."""
    for track, slices in layout.slices.items():
        ends: list[float] = []
        for piece in slices:
            while ends and ends[-1] <= piece.start:
                ends.pop()
            ends.append(piece.end)
            if len(ends) > DEEPEST:
                message = f"{piece.name!r} lies {len(ends)} deep on {_named(track)}; viewers draw {DEEPEST}"
                yield Violation("too-deep", message, piece.position)
                break


def flow_without_end(layout: Layout) -> Iterator[Violation]:
    """Find flows that start and arrive nowhere."""
    for ends in layout.flows.values():
        from_start = list(itertools.dropwhile(lambda end: end.phase != "s", ends))
        if from_start and all(end.phase == "s" for end in from_start):
            message = f"{_flow(from_start[0])} starts and never ends"
            yield Violation("flow-without-end", message, from_start[0].position)


def flow_without_start(layout: Layout) -> Iterator[Violation]:
    """Find ends of flows with no start before them."""
    for ends in layout.flows.values():
        for end in itertools.takewhile(lambda end: end.phase != "s", ends):
            yield Violation("flow-without-start", f"{_flow(end)} ends and has not started", end.position)


def duplicate_flow(layout: Layout) -> Iterator[Violation]:
    """Find second starts of a flow: flows cannot fork, and the second one is not drawn."""
    for ends in layout.flows.values():
        starts = [end for end in ends if end.phase == "s"]
        for again in starts[1:]:
            message = f"{_flow(again)} has already started at event {starts[0].position}"
            yield Violation("duplicate-flow", message, again.position)


def flow_outside_slice(layout: Layout) -> Iterator[Violation]:
    """Find ends of flows where there is no slice to tie them to."""
    starts = {track: [piece.start for piece in slices] for track, slices in layout.slices.items()}
    latest_end = {
        track: list(itertools.accumulate((piece.end for piece in slices), max))
        for track, slices in layout.slices.items()
    }
    for end in itertools.chain.from_iterable(layout.flows.values()):
        on_track = starts.get(end.track, [])
        if end.binding == "next":
            tied = bool(on_track) and on_track[-1] >= end.time
        else:
            before = bisect.bisect_right(on_track, end.time)
            tied = before > 0 and latest_end[end.track][before - 1] >= end.time
        if not tied:
            message = f"the {end.phase} of {_flow(end)} touches no slice on {_named(end.track)}"
            yield Violation("flow-outside-slice", message, end.position)


def _flow(end: Event) -> str:
    return f"flow {end.flow[0]!r}" if end.flow else "flow"


def _named(track: Track) -> str:
    return "track " + "/".join(map(str, track))


RULES: tuple[Callable[[Layout], Iterator[Violation]], ...] = (
    end_without_begin,
    begin_without_end,
    partial_overlap,
    too_deep,
    flow_without_end,
    flow_without_start,
    duplicate_flow,
    flow_outside_slice,
)
