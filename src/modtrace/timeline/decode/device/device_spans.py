"""Points of devices → spans above their streams: of calls, and of what belongs to calls in backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ...._typing import Int64Array
from ....ring import Events, Kind
from ....ring.slot_format import BACKWARD_PASS_MASK, CALL_INDEX_MASK
from ...columns import BACKWARD, FORWARD, RECOMPUTE
from ..call_tree import Intervals
from ..interval_spans import LabelledInterval, spans_from_intervals
from ..pairing import segment_pass
from ..recompute import forward_of_recompute
from .points import DevicePoints

__all__ = ["DeviceSpan", "device_spans"]


class DeviceSpan(NamedTuple):
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


def device_spans(events: Events, intervals: Intervals, call: Int64Array, points: DevicePoints) -> list[DeviceSpan]:
    """Return the spans of all devices.

    Args:
        events: those of modules.
        intervals: calls and nodes.
        call: for each node the call it belongs to, or -1.
        points: when devices came by.
    """
    if not len(points.event):
        return []
    point_at = np.full(len(events), -1, np.int64)
    point_at[points.event] = np.arange(len(points.event))
    start = _point_at(point_at, intervals.start_position)
    end = _point_at(point_at, intervals.end_position)
    original = forward_of_recompute(intervals, call)
    found = list(_spans_of_calls(intervals, original, points, start, end))
    found.extend(_spans_of_backward(events, intervals, call, original, points, start))
    return found


def _point_at(point_at: Int64Array, position: Int64Array) -> Int64Array:
    """Return the point that belongs to the event at each position, or -1."""
    event = position >> 1
    known = (position >= 0) & (position & 1 == 1) & (event < len(point_at))
    return np.where(known, point_at[np.where(known, event, 0)], -1)


def _spans_of_calls(
    intervals: Intervals, original: Int64Array, points: DevicePoints, start: Int64Array, end: Int64Array
) -> Iterator[DeviceSpan]:
    whole = ~intervals.is_node & (start >= 0) & (end >= 0)
    whole &= (points.stream[start] == points.stream[end]) & (points.device_ns[start] <= points.device_ns[end])
    recompute = intervals.is_recompute
    for row in np.flatnonzero(whole).tolist():
        first, last = int(start[row]), int(end[row])
        yield DeviceSpan(
            int(points.stream[first]),
            int(points.device_ns[first]),
            int(points.device_ns[last]),
            int(intervals.name[row]),
            RECOMPUTE if recompute[row] else FORWARD,
            int(intervals.call_key[original[row]]) & CALL_INDEX_MASK,
            int(points.event[first]),
        )


def _spans_of_backward(
    events: Events,
    intervals: Intervals,
    call: Int64Array,
    original: Int64Array,
    points: DevicePoints,
    start: Int64Array,
) -> Iterator[DeviceSpan]:
    """A segment lasts until its stream comes by the next one of the pass; the last one until the pass is over."""
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
        paths = [_chosen_path(intervals, original, int(call[row]), chosen) for row in rows.tolist()]
        parts = [
            LabelledInterval(begin, max(end, begin), path)
            for begin, end, path in zip(begins, [*begins[1:], until], paths, strict=True)
        ]
        event_at = dict(zip(reversed(begins), reversed(points.event[own].tolist()), strict=True))
        for span in spans_from_intervals(parts):
            row = span.key
            assert isinstance(row, int)
            yield DeviceSpan(
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
    path: list[int] = []
    while call >= 0 and not intervals.is_node[call]:
        if np.isin(intervals.name[call], chosen):
            path.append(int(original[call]))
        call = int(intervals.parent[call])
    return path[::-1]
