"""Device points → spans on the tracks of streams: of calls, and of the nodes of calls in backward."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..._arrays import Int64Array
from ...ring import Kind
from ...ring.slot_format import BACKWARD_PASS_MASK, CALL_INDEX_MASK, STREAM_NUMBER_BITS, STREAM_NUMBER_MASK
from ..join import add_gpu_tracks
from ..nesting import LabelledInterval, clip_and_nest, spans_from_intervals
from ..slices import BACKWARD, FORWARD, RECOMPUTE, Slices
from ..timeline import Timeline
from .analysis import DevicePoints, RingAnalysis, device_points
from .intervals import Intervals, segment_pass

_EVENT_RESOLUTION_NS = 500
"""Approximate resolution of CUDA event times, in nanoseconds."""


def add_device_spans(timeline: Timeline, analysis: RingAnalysis) -> Timeline:
    """Return the timeline with a track per stream, and metadata on missing events and the error bound of clocks."""
    points = device_points(analysis.all_events, analysis.queued)
    collective_points = device_points(analysis.all_events, analysis.queued, of_collectives=True)
    device = np.append(points.device, collective_points.device)
    device_ns = np.append(points.device_ns, collective_points.device_ns)
    dropped, unread = len(analysis.queued.dropped), int(np.count_nonzero(analysis.queued.reached < 0))
    if not len(device) and not dropped and not unread:
        return timeline
    clocks, to_unix, ids = analysis.device_clocks, analysis.clock.to_other, analysis.stream_ids
    spans = _device_spans(analysis, points)
    spans = spans[:, np.isin(spans[0] >> STREAM_NUMBER_BITS, list(clocks))]
    metadata = {"device_events_dropped": dropped, "device_events_unread": unread}
    key, start, end, name, phase, call_index, event = spans
    for number, clock in clocks.items():
        rows = key >> STREAM_NUMBER_BITS == number
        start[rows], end[rows] = (to_unix(clock.to_other(edge[rows])) for edge in (start, end))
        if np.any(device == number):
            bound = int(clock.at(device_ns[device == number]).bound_ns.max()) + _EVENT_RESOLUTION_NS
            metadata["device_clock_bound_ns"] = max(bound, metadata.get("device_clock_bound_ns", 0))
    timeline = replace(timeline, metadata={**timeline.metadata, **metadata})
    keys, stream = np.unique(key, return_inverse=True)
    # Calls of threads that take turns on one stream overlap there.
    end, _, _ = clip_and_nest(stream, start, np.maximum(end, start), event)
    streams = [(number >> STREAM_NUMBER_BITS, ids.get(number, number & STREAM_NUMBER_MASK)) for number in keys.tolist()]
    step = analysis.steps_before(2 * event + 1)
    rows = Slices.of(start=start, end=end, name=name, phase=phase, track=stream, call=call_index, step=step)
    return add_gpu_tracks(timeline, streams, rows)


def _device_spans(analysis: RingAnalysis, points: DevicePoints) -> Int64Array:
    """Return int64[7, n], the spans of all devices, from the points at which devices reached events of modules.

    The rows are: stream (see `DevicePoints`), start and end on the device's clock, number of the module's name, phase,
    number of the module's call, and the host's event of modules at which the span starts.
    """
    if not len(points.event):
        return np.zeros((7, 0), np.int64)
    intervals = analysis.intervals
    point_at = np.full(len(analysis.events), -1, np.int64)
    point_at[points.event] = np.arange(len(points.event))
    start = _point_at(point_at, intervals.start_position)
    end = _point_at(point_at, intervals.end_position)
    backward = np.array([*_backward_spans(analysis, points, start)], np.int64).reshape(-1, 7).T
    return np.append(_call_spans(analysis, points, start, end), backward, axis=1)


def _point_at(point_at: Int64Array, position: Int64Array) -> Int64Array:
    """Return the point of the event at each position; -1 if there is none."""
    is_event = (position >= 0) & (position & 1 == 1) & (position < 2 * len(point_at))
    return np.append(point_at, -1)[np.where(is_event, position >> 1, -1)]


def _call_spans(analysis: RingAnalysis, points: DevicePoints, start: Int64Array, end: Int64Array) -> Int64Array:
    intervals, ns = analysis.intervals, points.device_ns
    has_points = ~intervals.is_node & (start >= 0) & (end >= 0)
    has_points &= (points.stream[start] == points.stream[end]) & (ns[start] <= ns[end])
    rows = np.flatnonzero(has_points)
    first, phase = start[rows], np.where(intervals.is_recompute[rows], RECOMPUTE, FORWARD)
    call = intervals.call_key[analysis.forward_call[rows]] & CALL_INDEX_MASK
    times = ns[first], ns[end[rows]]
    return np.stack([points.stream[first], *times, intervals.name[rows], phase, call, points.event[first]])


def _backward_spans(analysis: RingAnalysis, points: DevicePoints, start: Int64Array) -> Iterator[tuple[int, ...]]:
    """Yield the spans of segments: each lasts until its stream reaches the next segment, the last to the pass's end."""
    events, intervals, call = analysis.events, analysis.intervals, analysis.call_of_node
    segments = np.flatnonzero(intervals.is_node & (start >= 0))
    timed_names = np.unique(intervals.name[~intervals.is_node & (start >= 0)])
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
    for rows, row_points in zip(np.split(segments, groups), np.split(point, groups), strict=True):
        if not len(rows):
            continue
        starts = points.device_ns[row_points].tolist()
        until = over_ns.get(int(pass_id[row_points[0]]), starts[-1])
        paths = [_timed_path(intervals, analysis.forward_call, int(call[row]), timed_names) for row in rows.tolist()]
        parts = [
            LabelledInterval(start_ns, max(end_ns, start_ns), path)
            for start_ns, end_ns, path in zip(starts, [*starts[1:], until], paths, strict=True)
        ]
        event_at = dict(zip(reversed(starts), reversed(points.event[row_points].tolist()), strict=True))
        for span in spans_from_intervals(parts):
            assert isinstance(span.key, int)
            call_fields = int(intervals.name[span.key]), BACKWARD, int(intervals.call_key[span.key]) & CALL_INDEX_MASK
            yield int(points.stream[row_points[0]]), span.start_ns, span.end_ns, *call_fields, event_at[span.start_ns]


def _timed_path(intervals: Intervals, original: Int64Array, call: int, names: Int64Array) -> list[int]:
    """Return the calls around a node whose names have device times, outermost first: recomputes as their forward."""
    path = [int(original[outer]) for outer in intervals.call_path(call) if np.isin(intervals.name[outer], names)]
    return path[::-1]
