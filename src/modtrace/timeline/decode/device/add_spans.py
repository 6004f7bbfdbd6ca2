"""A timeline with the spans of devices, and what is known of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...._typing import Int64Array
from ....ring import Events
from ....ring.slot_format import STREAM_NUMBER_BITS, STREAM_NUMBER_MASK
from ...gpu_tracks import GpuSpans, add_gpu_tracks
from ...timeline import Timeline
from ..call_tree import Intervals
from ..interval_spans import nest
from ..module_events import module_events
from .device_clocks import device_clocks
from .device_spans import device_spans
from .points import collective_points, device_points, stream_ids

__all__ = ["add_device_spans"]


def add_device_spans(
    timeline: Timeline,
    events: Events,
    intervals: Intervals,
    call: Int64Array,
    to_unix: Callable[[Int64Array], Int64Array],
    steps_at: Callable[[Int64Array], Int64Array],
) -> Timeline:
    """Return the timeline with a track per stream; in its metadata how many events are missing, and the clocks' bound.

    Args:
        timeline: what ran on threads.
        events: all events of the ring.
        intervals: calls and nodes.
        call: for each node the call it belongs to, or -1.
        to_unix: monotonic → Unix nanoseconds.
        steps_at: position of an event of modules → the number of steps that had ended.
    """
    points = device_points(events)
    told = collective_points(events)
    device, device_ns = np.append(points.device, told.device), np.append(points.device_ns, told.device_ns)
    if not len(device) and not points.dropped and not points.unread:
        return timeline
    clocks = device_clocks(events)
    own = module_events(events)
    spans = [span for span in device_spans(own, intervals, call, points) if span.stream >> STREAM_NUMBER_BITS in clocks]
    bounds = [
        int(clocks[one].bound_ns(device_ns[device == one]).max()) for one in np.unique(device).tolist() if one in clocks
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
        start[rows] = to_unix(clock.to_monotonic(device_start[rows]))
        end[rows] = to_unix(clock.to_monotonic(device_end[rows]))
    used, stream = np.unique(key, return_inverse=True)
    # Threads that take turns on one stream are in calls that overlap there.
    end, _, _ = nest(stream, start, np.maximum(end, start), event)
    ids = stream_ids(events)
    return add_gpu_tracks(
        timeline,
        GpuSpans(
            streams=[(one >> STREAM_NUMBER_BITS, ids.get(one, one & STREAM_NUMBER_MASK)) for one in used.tolist()],
            stream=stream,
            start=start,
            end=end,
            name=name,
            phase=phase,
            call=call_index,
            step=steps_at(2 * event + 1),
            names=timeline.names,
        ),
    )
