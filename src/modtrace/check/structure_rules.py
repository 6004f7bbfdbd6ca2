"""The rules between events, for every format: pairs of begin and end, nesting, and flows."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator

from .model import CheckedEvent, TrackKey, Violation
from .track_layout import CheckedSlice, TrackLayout

__all__ = ["MAX_DRAWN_DEPTH", "STRUCTURE_RULES"]

MAX_DRAWN_DEPTH = 512
"""How many slices may nest before viewers stop drawing them."""


def end_without_begin(layout: TrackLayout) -> Iterator[Violation]:
    """Find ends that close nothing; viewers ignore them."""
    for event in layout.unbegun:
        subject = f"{event.name!r} ends" if event.name else "an end"
        yield Violation("end-without-begin", f"{subject} where nothing of that name is open", event.position)


def begin_without_end(layout: TrackLayout) -> Iterator[Violation]:
    """Find begins that nothing closes; viewers draw them to the end of the trace."""
    for event in layout.unended:
        yield Violation("begin-without-end", f"{event.name!r} is never ended", event.position)


def partial_overlap(layout: TrackLayout) -> Iterator[Violation]:
    """Find slices that begin inside another and end after it; viewers drop them or draw them wrongly."""
    for track, slices in layout.slices.items():
        stack: list[CheckedSlice] = []
        for slice_ in slices:
            if slice_.end == math.inf:
                continue  # begin_without_end reports it; where it would have ended is unknown
            while stack and stack[-1].end <= slice_.start:
                stack.pop()
            if stack and stack[-1].end < slice_.end:
                outer = stack[-1]
                message = (
                    f"{slice_.name!r} begins in {outer.name!r} (event {outer.position}) on {_track_text(track)}"
                    f" and ends {slice_.end - outer.end:.0f} ns after it"
                )
                yield Violation("partial-overlap", message, slice_.position)
            else:
                stack.append(slice_)


def too_deep(layout: TrackLayout) -> Iterator[Violation]:
    """Find the first slice of each track that lies deeper than viewers draw."""
    for track, slices in layout.slices.items():
        open_ends: list[float] = []
        for slice_ in slices:
            while open_ends and open_ends[-1] <= slice_.start:
                open_ends.pop()
            open_ends.append(slice_.end)
            if len(open_ends) > MAX_DRAWN_DEPTH:
                message = f"{slice_.name!r} lies {len(open_ends)} deep on {_track_text(track)}"
                message += f"; viewers draw {MAX_DRAWN_DEPTH}"
                yield Violation("too-deep", message, slice_.position)
                break


def flow_without_end(layout: TrackLayout) -> Iterator[Violation]:
    """Find flows that start and never end."""
    for ends in layout.flows.values():
        from_start = list(itertools.dropwhile(lambda end: end.phase != "s", ends))
        if from_start and all(end.phase == "s" for end in from_start):
            message = f"{_flow_text(from_start[0])} starts and never ends"
            yield Violation("flow-without-end", message, from_start[0].position)


def flow_without_start(layout: TrackLayout) -> Iterator[Violation]:
    """Find ends of flows with no start before them."""
    for ends in layout.flows.values():
        for end in itertools.takewhile(lambda end: end.phase != "s", ends):
            yield Violation("flow-without-start", f"{_flow_text(end)} ends and has not started", end.position)


def duplicate_flow(layout: TrackLayout) -> Iterator[Violation]:
    """Find second starts of a flow: flows cannot fork, and the second one is not drawn."""
    for ends in layout.flows.values():
        starts = [end for end in ends if end.phase == "s"]
        for restart in starts[1:]:
            message = f"{_flow_text(restart)} has already started at event {starts[0].position}"
            yield Violation("duplicate-flow", message, restart.position)


def flow_outside_slice(layout: TrackLayout) -> Iterator[Violation]:
    """Find ends of flows where there is no slice to bind them to."""
    starts = {track: [slice_.start for slice_ in slices] for track, slices in layout.slices.items()}
    latest_end = {
        track: list(itertools.accumulate((slice_.end for slice_ in slices), max))
        for track, slices in layout.slices.items()
    }
    for end in itertools.chain.from_iterable(layout.flows.values()):
        track_starts = starts.get(end.track, [])
        if end.binding == "next":
            is_bound = bool(track_starts) and track_starts[-1] >= end.time
        else:
            before = bisect.bisect_right(track_starts, end.time)
            is_bound = before > 0 and latest_end[end.track][before - 1] >= end.time
        if not is_bound:
            message = f"the {end.phase} of {_flow_text(end)} touches no slice on {_track_text(end.track)}"
            yield Violation("flow-outside-slice", message, end.position)


def _flow_text(end: CheckedEvent) -> str:
    return f"flow {end.flow[0]!r}" if end.flow else "flow"


def _track_text(track: TrackKey) -> str:
    return "track " + "/".join(map(str, track))


STRUCTURE_RULES: tuple[Callable[[TrackLayout], Iterator[Violation]], ...] = (
    end_without_begin,
    begin_without_end,
    partial_overlap,
    too_deep,
    flow_without_end,
    flow_without_start,
    duplicate_flow,
    flow_outside_slice,
)
