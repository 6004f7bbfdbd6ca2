"""Whole backward passes in a written trace: slices on a row per thread."""

from __future__ import annotations

from collections.abc import Iterator

from ...formats.pass_args import SLICE_NAME, pass_args
from ...timeline import BackwardPass, Timeline, Track
from ...timeline.contents import PASSES
from ..lanes import Lane, Lanes
from .slices import RowSlice, chrome_slice

__all__ = ["chrome_passes", "pass_slices", "pass_track"]


def pass_track(run: BackwardPass) -> Track:
    """Return the track that a pass lies on."""
    return Track(PASSES, run.thread, run.tid, run.process)


def chrome_passes(timeline: Timeline, lanes: Lanes, base: int) -> Iterator[bytes]:
    """Yield the passes as events in JSON.

    Args:
        timeline: what is written, with tracks for its passes.
        lanes: its rows.
        base: nanoseconds from which `ts` counts.
    """
    rows = lanes.by_track()
    lane_of_track = {track: lanes.lanes[rows[index]] for index, track in enumerate(timeline.tracks)}
    for run in timeline.backward_passes:
        lane = lane_of_track[pass_track(run)]
        yield chrome_slice(_slice(run), lane.pid, lane.tid, base)


def pass_slices(timeline: Timeline, lane: Lane) -> list[RowSlice]:
    """Return the slices of the passes of one lane.

    Args:
        timeline: what is written, with tracks for its passes.
        lane: which.
    """
    own = timeline.tracks[lane.track]
    if own.kind != PASSES or lane.first_level:
        return []
    return [_slice(run) for run in timeline.backward_passes if pass_track(run) == own]


def _slice(run: BackwardPass) -> RowSlice:
    return RowSlice(run.start_ns, run.end_ns, SLICE_NAME, PASSES, pass_args(run))
