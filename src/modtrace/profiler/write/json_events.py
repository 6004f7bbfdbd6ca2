"""What a merge adds to a JSON trace: the recording's events, as a saved trace has them, and spans above the streams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import orjson

from ...formats.escape import UNNAMED, escaped
from ...timeline import PHASES, Name, Timeline
from ...write.chrome import ChromeTimeline, microseconds, row_metadata_events
from ...write.chrome_events import span_head
from ...write.lanes import Lanes
from ..attribute.gpu_times import NO_MODULE
from ..attribute.gpu_work import StreamSpans
from .double_safe_nesting import nest_after_rounding, nested_timeline
from .trace_rows import DeviceRow

__all__ = ["device_events", "recording_events"]

_BLOCK = 1 << 12
"""Spans whose text is in memory at a time."""

_ROUNDING_NS = 2
"""Starts closer than this may be one to the trace processor, which rounds them, see `double_safe_nesting`."""


def recording_events(timeline: Timeline, pid: int | str, tids: Iterator[int], quantum: int) -> ChromeTimeline:
    """Return a recording as a merged trace has it: above the threads of a process.

    Its sync marks are left out: each is a slice of the profiler's already.

    Args:
        timeline: in ns from the trace's base.
        pid: the process it belongs to, as it stands in the trace.
        tids: ids that the trace does not use.
        quantum: see `time_quantum_ns`.
    """
    timeline = nested_timeline(timeline, quantum)
    timeline = replace(timeline, marks=[mark for mark in timeline.marks if mark.kind != "sync"])
    lanes = Lanes.from_timeline(timeline).above_threads(pid, tids)
    return ChromeTimeline(timeline, lanes, base=0, resolution_ns=_ROUNDING_NS)


def device_events(
    timeline: Timeline, slices: StreamSpans, rows: Mapping[int, DeviceRow], quantum: int
) -> Iterator[bytes]:
    """Yield the rows above the streams and their spans, several events with commas at a time.

    A span has the args of the call whose kernels ran, and `gpu_work`, how many these are.

    Args:
        timeline: the calls.
        slices: the spans, in ns from the trace's base.
        rows: the row of each of the trace's tracks that has such spans.
        quantum: see `time_quantum_ns`.
    """
    for row in rows.values():
        yield from row_metadata_events(*row)
    start, duration = nest_after_rounding(slices.track, slices.start, slices.end, slices.parent, slices.depth, quantum)
    columns = timeline.columns
    names = [
        Name(escaped(name.label) or UNNAMED, escaped(name.fqn), escaped(name.module_class)) for name in timeline.names
    ]
    texts: list[bytes] = []
    fields = zip(
        slices.track.tolist(),
        start.tolist(),
        duration.tolist(),
        slices.span.tolist(),
        slices.work.tolist(),
        strict=True,
    )
    for track, start_ns, duration_ns, span, work in fields:
        row = rows[track]
        times = b'"gpu_work":%d},"ts":%b,"dur":%b}' % (work, microseconds(start_ns), microseconds(duration_ns))
        if span >= 0:
            head = span_head(row.pid, row.tid, PHASES[columns.phase[span]], names[columns.name[span]])
            texts.append(head + b'%d,"step":%d,' % (columns.call[span], columns.step[span]) + times)
        else:
            event = {"ph": "X", "pid": row.pid, "tid": row.tid, "cat": "gpu", "name": NO_MODULE}
            texts.append(orjson.dumps(event)[:-1] + b',"args":{' + times)
        if len(texts) == _BLOCK:
            yield b",\n".join(texts)
            texts.clear()
    if texts:
        yield b",\n".join(texts)
