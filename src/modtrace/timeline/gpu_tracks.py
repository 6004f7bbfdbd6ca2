"""Tracks of GPU streams: which module's kernels ran when, beside the tracks of the threads that launched them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

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


class GpuSpans(NamedTuple):
    """Spans above the streams of GPUs, nested on each stream; columns of equal length.

    Attributes:
        streams: device and stream of each track that is to be made.
        stream: int64[n], index into `streams`.
        start: int64[n], nanoseconds in the timeline's time.
        end: int64[n].
        name: int64[n], index into `names`.
        phase: int64[n], index into `PHASES`: the phase of the call that launched the work.
        call: int64[n], that call.
        step: int64[n], its step.
        names: those of the timeline, and behind them what it does not know.
    """

    streams: Sequence[tuple[int, int]]
    stream: Int64Array
    start: Int64Array
    end: Int64Array
    name: Int64Array
    phase: Int64Array
    call: Int64Array
    step: Int64Array
    names: Sequence[Name]


def add_gpu_tracks(timeline: Timeline, spans: GpuSpans) -> Timeline:
    """Return the timeline with a track per stream; a span there has the link of the call that launched its work.

    The tracks belong to the process of the timeline's first track.
    """
    if not len(spans.start):
        return timeline
    columns = timeline.columns
    process = timeline.tracks[0].process if timeline.tracks else Process(0)
    first_track = len(timeline.tracks)
    added = nest_by_time(
        Slices.of(
            start=spans.start,
            end=spans.end,
            name=spans.name,
            phase=spans.phase,
            track=spans.stream + first_track,
            call=spans.call,
            step=spans.step,
            link=_links(columns, spans),
        )
    )
    tracks = [Track(GPU, f"stream {stream}", stream, process, device, stream) for device, stream in spans.streams]
    return with_slices(replace(timeline, names=spans.names, tracks=[*timeline.tracks, *tracks]), added)


def on_gpu(timeline: Timeline) -> BoolArray:
    """Return bool[n]: whether a span lies on the track of a GPU stream."""
    tracks = np.array([track.device is not None for track in timeline.tracks] or [False])
    chosen: BoolArray = tracks[timeline.columns.track]
    return chosen


def without_gpu(timeline: Timeline) -> Timeline:
    """Return what ran on threads, without the tracks of GPU streams."""
    return keep_tracks(timeline, np.array([track.device is None for track in timeline.tracks], np.bool_))


def _links(columns: Slices, spans: GpuSpans) -> Int64Array:
    """Return the link of each span's call, -1 where it has none; a recompute has none on its thread either."""
    known: dict[tuple[int, int], int] = {}
    for row in np.flatnonzero((columns.link >= 0) & (columns.phase <= BACKWARD)).tolist():
        known.setdefault((int(columns.name[row]), int(columns.call[row])), int(columns.link[row]))
    keys = zip(spans.name.tolist(), spans.call.tolist(), spans.phase.tolist(), strict=True)
    return np.array([-1 if phase == RECOMPUTE else known.get((name, call), -1) for name, call, phase in keys], np.int64)
