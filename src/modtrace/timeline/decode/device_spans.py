"""Device points → spans on the tracks of streams: of calls, and of runs of nodes that belong to calls in backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..._typing import Int64Array
from ...ring import Kind
from ...ring.slot_format import BACKWARD_PASS_MASK, CALL_INDEX_MASK, STREAM_NUMBER_BITS, STREAM_NUMBER_MASK
from ..gpu_tracks import add_gpu_tracks
from ..slices import BACKWARD, FORWARD, RECOMPUTE, Slices
from ..timeline import Timeline
from .analysis import RingAnalysis
from .device_points import DevicePoints, collective_points, device_points
from .intervals import Intervals
from .pairing import segment_pass
from .path_spans import LabelledInterval, clip_and_nest, spans_from_intervals

_EVENT_RESOLUTION_NS = 500
"""How exact CUDA's times of events are, about."""


def add_device_spans(timeline: Timeline, analysis: RingAnalysis) -> Timeline:
    """Return the timeline with a track per stream; in its metadata how many events are missing, and the clocks' bound.

    Args:
        timeline: what ran on threads.
        analysis: of the ring.
    """
    points = device_points(analysis.all_events, analysis.queued)
    of_collectives = collective_points(analysis.all_events, analysis.queued)
    device, device_ns = (
        np.append(points.device, of_collectives.device),
        np.append(points.device_ns, of_collectives.device_ns),
    )
    if not len(device) and not points.dropped and not points.unread:
        return timeline
    clocks, to_unix = analysis.device_clocks, analysis.clock.to_other
    spans = [span for span in _device_spans(analysis, points) if span.stream >> STREAM_NUMBER_BITS in clocks]
    bounds = [
        int(clocks[one].at(device_ns[device == one]).bound_ns.max()) + _EVENT_RESOLUTION_NS
        for one in np.unique(device).tolist()
        if one in clocks
    ]
    metadata: dict[str, object] = {"device_events_dropped": points.dropped, "device_events_unread": points.unread}
    if bounds:
        metadata["device_clock_bound_ns"] = max(bounds)
    timeline = replace(timeline, metadata={**timeline.metadata, **metadata})
    if not spans:
        return timeline
    key, device_start, device_end, name, phase, call_index, event = np.array(spans, np.int64).T
    start, end = np.empty_like(device_start), np.empty_like(device_end)
    for number, clock in clocks.items():
        rows = key >> STREAM_NUMBER_BITS == number
        start[rows] = to_unix(clock.to_other(device_start[rows]))
        end[rows] = to_unix(clock.to_other(device_end[rows]))
    used, stream = np.unique(key, return_inverse=True)
    # Threads that take turns on one stream are in calls that overlap there.
    end, _, _ = clip_and_nest(stream, start, np.maximum(end, start), event)
    ids = analysis.stream_ids
    streams = [(one >> STREAM_NUMBER_BITS, ids.get(one, one & STREAM_NUMBER_MASK)) for one in used.tolist()]
    step = analysis.steps_before(2 * event + 1)
    rows = Slices.of(start=start, end=end, name=name, phase=phase, track=stream, call=call_index, step=step)
    return add_gpu_tracks(timeline, streams, rows)


class _DeviceSpan(NamedTuple):
    """A time in which a device was in a call.

    Attributes:
        stream: as of `DevicePoints`.
        start: ns of the device's clock.
        end: ns of the device's clock.
        name: number of the module's name.
        phase: index into `PHASES`.
        call: which call of that module.
        event: index of the host's event that it begins with, among those of modules.
    """

    stream: int
    start: int
    end: int
    name: int
    phase: int
    call: int
    event: int


def _device_spans(analysis: RingAnalysis, points: DevicePoints) -> list[_DeviceSpan]:
    """Return the spans of all devices, from the points at which devices passed events of modules."""
    if not len(points.event):
        return []
    intervals = analysis.intervals
    point_at = np.full(len(analysis.events), -1, np.int64)
    point_at[points.event] = np.arange(len(points.event))
    start = _point_at(point_at, intervals.start_position)
    end = _point_at(point_at, intervals.end_position)
    return [*_spans_of_calls(analysis, points, start, end), *_spans_of_backward(analysis, points, start)]


def _point_at(point_at: Int64Array, position: Int64Array) -> Int64Array:
    """Return the point that belongs to the event at each position, or -1."""
    event = position >> 1
    known = (position >= 0) & (position & 1 == 1) & (event < len(point_at))
    return np.where(known, point_at[np.where(known, event, 0)], -1)


def _spans_of_calls(
    analysis: RingAnalysis, points: DevicePoints, start: Int64Array, end: Int64Array
) -> Iterator[_DeviceSpan]:
    intervals, original = analysis.intervals, analysis.original
    whole = ~intervals.is_node & (start >= 0) & (end >= 0)
    whole &= (points.stream[start] == points.stream[end]) & (points.device_ns[start] <= points.device_ns[end])
    recompute = intervals.is_recompute
    for row in np.flatnonzero(whole).tolist():
        first, last = int(start[row]), int(end[row])
        yield _DeviceSpan(
            int(points.stream[first]),
            int(points.device_ns[first]),
            int(points.device_ns[last]),
            int(intervals.name[row]),
            RECOMPUTE if recompute[row] else FORWARD,
            int(intervals.call_key[original[row]]) & CALL_INDEX_MASK,
            int(points.event[first]),
        )


def _spans_of_backward(analysis: RingAnalysis, points: DevicePoints, start: Int64Array) -> Iterator[_DeviceSpan]:
    """Let a segment last until its stream passes the next one of the pass; the last one until the pass is over."""
    events, intervals, call = analysis.events, analysis.intervals, analysis.call
    segments = np.flatnonzero(intervals.is_node & (start >= 0))
    chosen = np.unique(intervals.name[~intervals.is_node & (start >= 0)])
    pass_id = np.where(
        events.kind[points.event] == Kind.SEGMENT_BEGIN,
        segment_pass(events)[points.event],
        events.value[points.event] & BACKWARD_PASS_MASK,
    )
    is_over = events.kind[points.event] == Kind.BACKWARD_OVER
    over_ns = dict(zip(pass_id[is_over].tolist(), points.device_ns[is_over].tolist(), strict=True))
    order = np.lexsort((points.device_ns[start[segments]], points.stream[start[segments]], pass_id[start[segments]]))
    segments = segments[order]
    point = start[segments]
    groups = np.flatnonzero(np.diff(pass_id[point]) | np.diff(points.stream[point])) + 1
    for rows, own in zip(np.split(segments, groups), np.split(point, groups), strict=True):
        if not len(rows):
            continue
        begins = points.device_ns[own].tolist()
        until = over_ns.get(int(pass_id[own[0]]), begins[-1])
        paths = [_chosen_path(intervals, analysis.original, int(call[row]), chosen) for row in rows.tolist()]
        parts = [
            LabelledInterval(begin, max(end, begin), path)
            for begin, end, path in zip(begins, [*begins[1:], until], paths, strict=True)
        ]
        event_at = dict(zip(reversed(begins), reversed(points.event[own].tolist()), strict=True))
        for span in spans_from_intervals(parts):
            row = span.key
            assert isinstance(row, int)
            yield _DeviceSpan(
                int(points.stream[own[0]]),
                span.start,
                span.end,
                int(intervals.name[row]),
                BACKWARD,
                int(intervals.call_key[row]) & CALL_INDEX_MASK,
                event_at[span.start],
            )


def _chosen_path(intervals: Intervals, original: Int64Array, call: int, chosen: Int64Array) -> list[int]:
    """Return the chosen ones of the calls around a node, outermost first: each as the forward that it ran again."""
    path = [int(original[around]) for around in intervals.call_path(call) if np.isin(intervals.name[around], chosen)]
    return path[::-1]
