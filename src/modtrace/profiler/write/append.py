"""A recording added to a trace whose events nobody looks at: as fast as copying, in memory that does not grow."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..._version import __version__
from ...timeline import Timeline
from ...write.atomic_file import Sink, replacing
from ..attribute.alignment import Alignment, align_by_sync_marks
from ..attribute.overlay import for_process, recorded_pid, to_trace_time
from ..result import MergeResult, refuse_merged, trailer_json
from ..trace.event_columns import SYNC, EventCollector, ProfilerEvents
from ..trace.event_stream import EventStream
from ..trace.trace_file import TraceFile, base_time_ns
from .double_safe_nesting import step_of
from .json_copy import Copy, find_ends, find_syncs
from .json_events import row_events, timeline_events
from .trace_rows import free_tids, marks_row, timeline_rows

__all__ = ["add_recording"]

UNSEEN = (
    "merged without attribution: no GPU tracks, backward slices as recorded, and nobody checked that recording and "
    "trace are of the same time"
)


def add_recording(source: TraceFile, timeline: Timeline, out: str) -> MergeResult:
    """Add a timeline to a trace.

    A plain file is copied by the kernel. A compressed one, or one whose end is broken, has to be read.

    Raises:
        TraceError: the trace cannot be read.
        WriteError: `out` cannot be written.
    """
    plain = not source.gzipped and not out.lower().endswith(".gz")
    ends = find_ends(source) if plain else None
    with replacing(out) as sink:
        if ends is None:
            return _read(source, timeline, out, sink)
        refuse_merged(ends.keys, source.path)
        file: Any = sink
        begin = 0
        if ends.head.bare:
            sink.write(b'{"traceEvents":[')
            begin = ends.head.length
        file.flush()
        copy = Copy(source.fileno(), file.fileno(), begin, ends.end)
        copy.start()
        try:
            syncs = find_syncs(source, ends.end)
        finally:
            copy.join()
        if copy.error is not None:
            raise copy.error
        if file.seekable():
            file.seek(0, os.SEEK_END)
        events = ends.sample
        added = _Added(timeline, events, syncs, base_time_ns(ends.keys, source.path))
        for text in added.events(free_tids(events.tids), comma=not ends.empty):
            sink.write(text)
        tail = b"" if ends.head.bare else os.pread(source.fileno(), source.size - ends.end, ends.end)
        merged = added.described(out, [])
        sink.write(trailer_json(merged.metadata, tail, ends.keys, b""))
        return merged


def _read(source: TraceFile, timeline: Timeline, out: str, sink: Sink) -> MergeResult:
    stream = EventStream(source)
    collector = EventCollector()
    sink.write(b'{"traceEvents":[' if stream.bare else stream.head)
    comma = b""
    for chunk in stream.chunks():
        if not comma or SYNC.encode() in chunk.raw:
            collector.add(chunk.events)
        else:
            collector.tids.update(_tids(chunk.events))
        sink.write(comma + chunk.raw)
        comma = b","
    refuse_merged(stream.keys, source.path)
    events = collector.events()
    added = _Added(timeline, events, events.syncs, base_time_ns(stream.keys, source.path))
    for text in added.events(free_tids(events.tids), comma=bool(comma)):
        sink.write(text)
    merged = added.described(out, stream.notes)
    sink.write(trailer_json(merged.metadata, b"" if stream.bare else stream.tail, stream.keys, stream.head))
    return merged


def _tids(events: Sequence[Any]) -> Iterator[int]:
    return (tid for event in events if isinstance(event, dict) and isinstance(tid := event.get("tid"), int))


class _Added:
    def __init__(
        self,
        timeline: Timeline,
        events: ProfilerEvents,
        syncs: Mapping[str, Sequence[tuple[int, int]]],
        base: int,
    ) -> None:
        self._pid = recorded_pid(events, timeline)
        mine, self._notes = for_process(timeline, self._pid)
        self._alignment: Alignment = align_by_sync_marks(mine.marks, syncs, base)
        self._timeline = to_trace_time(mine, self._alignment)

    def events(self, tids: Iterator[int], *, comma: bool) -> Iterator[bytes]:
        rows = timeline_rows(self._timeline, self._pid, tids)
        marks = marks_row(self._timeline, self._pid, tids)
        step = step_of(int(self._timeline.columns.end.max(initial=0)))
        for text in itertools.chain(row_events(rows), timeline_events(self._timeline, rows, marks, step)):
            yield (b",\n" if comma else b"\n") + text
            comma = True

    def described(self, out: str, notes: Sequence[str]) -> MergeResult:
        said = [UNSEEN, *self._notes, *notes]
        metadata = {
            "version": __version__,
            "recording": "recorded",
            "alignment": self._alignment.metadata(),
            "notes": said,
        }
        return MergeResult(out, str(self._alignment), len(self._timeline.columns), 0, None, said, metadata)
