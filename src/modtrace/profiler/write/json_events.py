"""What a merge adds to a JSON trace: the recording's events, as a saved trace has them, and spans above the streams."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import orjson

from ...formats.escape import UNNAMED, escaped
from ...timeline import PHASES, Name, Timeline
from ...write.chrome import ChromeTimeline, microseconds, row_metadata_events
from ...write.chrome_events import span_head
from ...write.lanes import Lanes
from ...write.rows.whole_passes import with_pass_tracks
from ..attribute.gpu_work import NO_MODULE, Reason
from ..attribute.overlay import Overlay
from ..attribute.stream_spans import collective_name
from .double_safe_nesting import nest_after_rounding, nested_timeline
from .trace_rows import DeviceRow, RowPlaces

__all__ = ["device_events", "recording_events"]

_BLOCK = 1 << 12
"""Spans whose text is in memory at a time."""

_ROUNDING_NS = 2
"""Starts closer than this may be one to the trace processor, which rounds them, see `double_safe_nesting`."""


def recording_events(timeline: Timeline, pid: int | str, places: RowPlaces, quantum: int) -> ChromeTimeline:
    """Return a recording as a merged trace has it: above the threads of a process.

    Its sync marks are left out: each is a slice of the profiler's already.

    Args:
        timeline: in ns from the trace's base.
        pid: the process it belongs to, as it stands in the trace.
        places: where rows go.
        quantum: see `time_quantum_ns`.
    """
    timeline = with_pass_tracks(nested_timeline(timeline, quantum))
    timeline = replace(timeline, marks=[mark for mark in timeline.marks if mark.kind != "sync"])
    lanes = Lanes.from_timeline(timeline)
    above = [places.above(pid, timeline.tracks[lane.track].tid) for lane in lanes.lanes]
    lanes = lanes.at(pid, [*above, places.top(pid)])
    return ChromeTimeline(timeline, lanes, base=0, resolution_ns=_ROUNDING_NS)


def device_events(overlaid: Overlay, rows: Mapping[int, DeviceRow], quantum: int) -> Iterator[bytes]:
    """Yield the rows above the streams and their spans, several events with commas at a time.

    A span has the args of the call whose kernels ran, and `gpu_work`, how many these are; what belongs to no call has a
    `reason`.

    Args:
        overlaid: the spans.
        rows: the row of each of the trace's tracks that has such spans.
        quantum: see `time_quantum_ns`.
    """
    for row in rows.values():
        yield from row_metadata_events(*row)
    slices, columns, names = overlaid.devices, overlaid.known.columns, overlaid.known.names
    start, duration = nest_after_rounding(slices.track, slices.start, slices.end, slices.parent, slices.depth, quantum)
    head_of = functools.lru_cache(maxsize=1 << 14)(span_head)
    texts: list[bytes] = []
    fields = zip(
        slices.track.tolist(),
        start.tolist(),
        duration.tolist(),
        slices.span.tolist(),
        slices.work.tolist(),
        slices.collective.tolist(),
        slices.step.tolist(),
        slices.reason.tolist(),
        strict=True,
    )
    for track, start_ns, duration_ns, span, work, collective, step, reason in fields:
        row = rows[track]
        times = b'"gpu_work":%d},"ts":%b,"dur":%b}' % (work, microseconds(start_ns), microseconds(duration_ns))
        name = names[columns.name[span]] if span >= 0 else None
        if collective >= 0:
            name = collective_name(overlaid.collective_names[collective], name)
        if span >= 0 and name is not None:
            escaped_name = Name(escaped(name.label) or UNNAMED, escaped(name.fqn), escaped(name.module_class))
            head = head_of(row.pid, row.tid, PHASES[columns.phase[span]], escaped_name)
            texts.append(head + b'%d,"step":%d,' % (columns.call[span], step) + times)
        else:
            label = NO_MODULE if name is None else name.label
            event = {"ph": "X", "pid": row.pid, "tid": row.tid, "cat": "gpu", "name": label}
            reason_text = orjson.dumps(Reason(reason).text)
            texts.append(orjson.dumps(event)[:-1] + b',"args":{"reason":' + reason_text + b"," + times)
        if len(texts) == _BLOCK:
            yield b",\n".join(texts)
            texts.clear()
    if texts:
        yield b",\n".join(texts)
