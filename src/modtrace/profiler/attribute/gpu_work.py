"""GPU work and the modules that asked for it: from a kernel by its correlation id to its launch, and so to a call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..._typing import Int8Array, Int64Array
from ...timeline import Timeline
from ...timeline.gpu_tracks import GpuSpans
from ..trace.event_columns import ProfilerEvents
from .call_lookup import CallIndex, InnermostLookup, threads_of
from .interval_spans import LabelledInterval, spans_from_intervals

__all__ = ["KINDS", "NO_CALL", "StreamSpans", "attribute_gpu_work", "build_stream_spans", "gpu_spans"]

KINDS = ("kernel", "memcpy", "memset")
"""What `ProfilerEvents.work.other` counts."""

NO_CALL = (-1, -1)
"""The key of what no module asked for."""


@dataclass(frozen=True)
class StreamSpans:
    """Slices above the work of the streams, in order of (track, start, depth); arrays of equal length.

    Attributes:
        track: index into `ProfilerEvents.tracks`.
        start: int64[n], ns from the base.
        end: int64[n].
        span: the span of the recording whose work this is, or -1.
        depth: spans around each.
        parent: index of the span around each, or -1.
        work: kernels, memcpys and memsets in each.
    """

    track: Int64Array
    start: Int64Array
    end: Int64Array
    span: Int64Array
    depth: Int64Array
    parent: Int64Array
    work: Int64Array

    def __len__(self) -> int:
        return len(self.start)


def attribute_gpu_work(timeline: Timeline, events: ProfilerEvents, threads: Int64Array) -> Int64Array:
    """Return for each piece of GPU work the innermost span in which it was launched, or -1.

    Args:
        timeline: the recording, in the trace's time.
        events: the trace's.
        threads: the OS thread of each of the trace's tracks, or -1.
    """
    work, launches = events.work, events.launches
    columns = timeline.columns
    if not len(work) or not len(launches) or not len(columns):
        return np.full(len(work), -1, np.int64)
    order = np.argsort(launches.value, kind="stable")
    known = launches.value[order]
    position = np.minimum(np.searchsorted(known, work.value), len(known) - 1)
    launch = np.where((known[position] == work.value) & (work.value >= 0), order[position], -1)
    thread = threads_of(columns, (track.tid for track in timeline.tracks))
    running = InnermostLookup(
        thread,
        columns.track.astype(np.int64),
        columns.start,
        columns.end,
        columns.parent,
        np.ones(len(columns), np.bool_),
    )
    found = np.full(len(work), -1, np.int64)
    launched = np.flatnonzero(launch >= 0)
    launch_row = launch[launched]
    found[launched] = running.on_threads(threads[launches.track[launch_row]], launches.start[launch_row])
    return found


def build_stream_spans(timeline: Timeline, events: ProfilerEvents, span: Int64Array) -> StreamSpans:
    """Cut the spans of each device's streams.

    Args:
        timeline: the recording.
        events: the trace's.
        span: for each piece of work the span that it belongs to, or -1.
    """
    paths = _Paths(timeline)
    work = events.work
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    for track in np.unique(work.track).tolist():
        rows_of_track = np.flatnonzero(work.track == track)
        rows_of_track = rows_of_track[np.argsort(work.start[rows_of_track], kind="stable")]
        starts = work.start[rows_of_track]
        intervals = (
            LabelledInterval(start, end, paths.of(owner))
            for start, end, owner in zip(
                starts.tolist(), work.end[rows_of_track].tolist(), span[rows_of_track].tolist(), strict=True
            )
        )
        stack: list[int] = []
        for piece_span in spans_from_intervals(intervals):
            del stack[piece_span.depth :]
            first, last = np.searchsorted(starts, [piece_span.start, piece_span.end])
            around = stack[-1] if stack else -1
            stack.append(len(rows))
            owner = paths.span(piece_span.key)
            rows.append((track, piece_span.start, piece_span.end, owner, piece_span.depth, around, int(last - first)))
    return StreamSpans(*np.array(rows, np.int64).reshape(-1, 7).T)


def gpu_spans(timeline: Timeline, events: ProfilerEvents, spans: StreamSpans) -> GpuSpans:
    """Return the spans above the streams as a timeline takes them; work that no module asked for is not in them.

    Args:
        timeline: the recording that `spans` were built of.
        events: the trace's.
        spans: as `build_stream_spans` returns them.
    """
    known = np.flatnonzero(spans.span >= 0)
    used, stream = np.unique(spans.track[known], return_inverse=True)
    owner = spans.span[known]
    columns = timeline.columns
    return GpuSpans(
        streams=[
            (pid if isinstance(pid, int) else 0, tid if isinstance(tid, int) else 0)
            for pid, tid in (events.tracks[track] for track in used.tolist())
        ],
        stream=stream.astype(np.int64),
        start=spans.start[known],
        end=spans.end[known],
        name=columns.name[owner].astype(np.int64),
        phase=columns.phase[owner].astype(np.int64),
        call=columns.call[owner],
        step=columns.step[owner],
        names=timeline.names,
    )


class _Paths:
    """The chain of calls around a span: keys that all spans of one call and phase share."""

    def __init__(self, timeline: Timeline) -> None:
        self._calls = CallIndex(timeline)
        self._phase: Int8Array = timeline.columns.phase
        self._parent = timeline.columns.parent
        self._known: dict[int, tuple[tuple[int, int], ...]] = {-1: (NO_CALL,)}
        self._spans: dict[object, int] = {NO_CALL: -1}

    def of(self, span: int) -> tuple[tuple[int, int], ...]:
        path = self._known.get(span)
        if path is None:
            around = int(self._parent[span])
            key = (self._calls.forward_span_of(span), int(self._phase[span]))
            self._spans.setdefault(key, span)
            path = self._known[span] = (*(self.of(around) if around >= 0 else ()), key)
        return path

    def span(self, key: object) -> int:
        return self._spans[key]
