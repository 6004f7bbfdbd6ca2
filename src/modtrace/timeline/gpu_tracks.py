"""Tracks of GPU streams: which module's kernels ran when, beside the tracks of the threads that launched them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .._typing import BoolArray, Int64Array
from .contents import GPU, Process, Track
from .join import with_slices
from .nesting import nest_by_time
from .select import keep_tracks
from .slices import BACKWARD, RECOMPUTE, Slices

if TYPE_CHECKING:
    from .contents import Name
    from .timeline import Timeline

DEVICE_METADATA = ("device_clock_bound_ns", "device_events_dropped", "device_events_unread")
"""What the metadata of a recording with device times says of them."""


def add_gpu_tracks(
    timeline: Timeline, streams: Sequence[tuple[int, int]], spans: Slices, names: Sequence[Name] | None = None
) -> Timeline:
    """Return the timeline with a track per stream; a span there has the link of the call that launched its work.

    The tracks belong to the process of the timeline's first track.

    Args:
        timeline: what ran on threads.
        streams: device and stream of each track that is to be made.
        spans: those above the streams, nested on each; their tracks are indices into `streams`, and phase and call are
            those of the call that launched the work.
        names: those of the timeline, and behind them what it does not know; None: it knows all.
    """
    if not len(spans):
        return timeline
    process = timeline.tracks[0].process if timeline.tracks else Process(0)
    track, link = spans.track + len(timeline.tracks), _links(timeline.columns, spans)
    tracks = [Track(GPU, f"stream {stream}", stream, process, device, stream) for device, stream in streams]
    known = replace(timeline, names=timeline.names if names is None else names, tracks=[*timeline.tracks, *tracks])
    return with_slices(known, nest_by_time(replace(spans, track=track, link=link)))


def on_gpu(timeline: Timeline) -> BoolArray:
    """Return bool[n]: whether a span lies on the track of a GPU stream."""
    tracks = np.array([track.device is not None for track in timeline.tracks] or [False])
    chosen: BoolArray = tracks[timeline.columns.track]
    return chosen


def without_gpu(timeline: Timeline) -> Timeline:
    """Return what ran on threads, without the tracks of GPU streams."""
    return keep_tracks(timeline, np.array([track.device is None for track in timeline.tracks], np.bool_))


def _links(columns: Slices, spans: Slices) -> Int64Array:
    """Return the link of each span's call, -1 where it has none; a recompute has none on its thread either."""
    known: dict[tuple[int, int], int] = {}
    for row in np.flatnonzero((columns.link >= 0) & (columns.phase <= BACKWARD)).tolist():
        known.setdefault((int(columns.name[row]), int(columns.call[row])), int(columns.link[row]))
    keys = zip(spans.name.tolist(), spans.call.tolist(), spans.phase.tolist(), strict=True)
    return np.array([-1 if phase == RECOMPUTE else known.get((name, call), -1) for name, call, phase in keys], np.int64)
