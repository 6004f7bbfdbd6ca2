"""The rules between events, for every format: pairs of begin and end, nesting, and flows."""

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from .._numbering import split_by
from .._typing import Int64Array
from ..profiler.device_work import possible_ends
from ..timeline.nesting import nest_times
from .track_layout import NEVER_NS, ArrangedSlices, Fault, FlowEnd, TrackKey, TrackLayout

MAX_DRAWN_DEPTH = 512
"""How many slices may nest before viewers stop drawing them."""


def partial_overlap(layout: TrackLayout) -> Iterator[Fault]:
    """Find slices that begin inside another and end after it; viewers drop them or draw them wrongly."""
    for track, slices in layout.slices.items():
        if slices.is_paired:
            continue  # pairs of B and E nest as they are paired
        if _depths(slices).max(initial=0) <= MAX_DRAWN_DEPTH:  # `nest_times` goes from level to level
            long = (slices.end != NEVER_NS) & (slices.end > slices.start)
            start, end = slices.start[long], slices.end[long]
            _, parent = nest_times(start, end, np.zeros(len(start), np.int32))
            if not np.any(end > end[parent], where=parent >= 0):
                continue  # each ends in the slice around it
        ends, names = slices.end.tolist(), layout.names
        stack: list[int] = []
        for index, start in enumerate(slices.start.tolist()):
            end = ends[index]
            if end == NEVER_NS:
                continue  # it is among `unended`; where it would have ended is unknown
            while stack and ends[stack[-1]] <= start:
                stack.pop()
            if stack and ends[stack[-1]] < end:
                outer = stack[-1]
                message = (
                    f"{names[slices.name[index]]!r} begins in {names[slices.name[outer]]!r}"
                    f" (event {slices.position[outer]})"
                    f" on {_track_text(track)} and ends {end - ends[outer]} ns after it"
                )
                yield Fault("partial-overlap", message, int(slices.position[index]))
            else:
                stack.append(index)


def device_overlap(layout: TrackLayout) -> Iterator[Fault]:
    """Find work in which the next of its stream begins and ends, or that outlasts the profiler: its end is wrong."""
    if layout.work is None:
        return
    names, tracks = layout.names, list(layout.slices)
    track, start, end, position, name = layout.work
    until = possible_ends(track, start, end, layout.stop)
    for row in np.flatnonzero(until != end).tolist():
        what = "the profiler stopped" if until[row] == layout.stop else "the next one on it began, which ends before it"
        message = (
            f"{names[name[row]]!r} on {_track_text(tracks[track[row]])} lasts {end[row] - start[row]} ns, "
            f"{end[row] - until[row]} of them after {what}: no device works so; `merge` counts it until then"
        )
        yield Fault("device-overlap", message, int(position[row]))


def too_deep(layout: TrackLayout) -> Iterator[Fault]:
    """Find the first slice of each track that is deeper than viewers draw."""
    for track, slices in layout.slices.items():
        if len(slices.start) <= MAX_DRAWN_DEPTH:
            continue
        depth = _depths(slices)
        first = int(np.argmax(depth > MAX_DRAWN_DEPTH))
        if depth[first] > MAX_DRAWN_DEPTH:
            name = layout.names[slices.name[first]]
            message = f"{name!r} lies {depth[first]} deep on {_track_text(track)}; viewers draw {MAX_DRAWN_DEPTH}"
            yield Fault("too-deep", message, int(slices.position[first]))


def _depths(slices: ArrangedSlices) -> Int64Array:
    """Return the depth of each slice: how many are around it by their times, and itself."""
    is_empty = slices.start == slices.end
    ended = np.searchsorted(np.sort(slices.end[~is_empty]), slices.start, side="right")
    depth: Int64Array = np.cumsum(~is_empty) - ended + is_empty
    return depth


def flow_without_end(layout: TrackLayout) -> Iterator[Fault]:
    """Find flows that start and never end."""
    for ends in layout.flows.irregular(list(layout.slices)):
        from_start = list(itertools.dropwhile(lambda end: end.phase != "s", ends))
        if from_start and all(end.phase == "s" for end in from_start):
            message = f"{_flow_text(from_start[0])} starts and never ends"
            yield Fault("flow-without-end", message, from_start[0].position)


def flow_without_start(layout: TrackLayout) -> Iterator[Fault]:
    """Find ends of flows with no start before them."""
    for ends in layout.flows.irregular(list(layout.slices)):
        for end in itertools.takewhile(lambda end: end.phase != "s", ends):
            yield Fault("flow-without-start", f"{_flow_text(end)} ends and has not started", end.position)


def duplicate_flow(layout: TrackLayout) -> Iterator[Fault]:
    """Find second starts of a flow: flows cannot fork, and the second one is not drawn."""
    for ends in layout.flows.irregular(list(layout.slices)):
        starts = [end for end in ends if end.phase == "s"]
        for restart in starts[1:]:
            message = f"{_flow_text(restart)} has already started at event {starts[0].position}"
            yield Fault("duplicate-flow", message, restart.position)


def flow_outside_slice(layout: TrackLayout) -> Iterator[Fault]:
    """Find ends of flows that no slice holds."""
    flows, tracks = layout.flows, list(layout.slices)
    if not len(flows):
        return
    is_unbound = np.zeros(len(flows), np.bool_)
    for rows in split_by(flows.track, np.arange(len(flows))):
        slices, times = layout.slices[tracks[flows.track[rows[0]]]], flows.time[rows]
        if not len(slices.start):
            is_unbound[rows] = True
            continue
        begun = np.searchsorted(slices.start, times, side="right")
        # The latest end of all slices begun by then says whether one of them is still open.
        latest_end = np.maximum.accumulate(slices.end)
        is_around = (begun > 0) & (latest_end[np.maximum(begun, 1) - 1] >= times)
        is_unbound[rows] = ~np.where(flows.binds_next[rows], slices.start[-1] >= times, is_around)
    for end in flows.ends(flows.order[is_unbound[flows.order]], tracks):
        message = f"the {end.phase} of {_flow_text(end)} touches no slice on {_track_text(end.track)}"
        yield Fault("flow-outside-slice", message, end.position)


def _flow_text(end: FlowEnd) -> str:
    return f"flow {end.flow[0]!r}"


def _track_text(track: TrackKey) -> str:
    return "track " + "/".join(map(str, track))


STRUCTURE_RULES: tuple[Callable[[TrackLayout], Iterator[Fault]], ...] = (
    partial_overlap,
    device_overlap,
    too_deep,
    flow_without_end,
    flow_without_start,
    duplicate_flow,
    flow_outside_slice,
)
