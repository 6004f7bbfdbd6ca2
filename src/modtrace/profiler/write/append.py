"""Append a recording to a trace without attribution: as fast as copying, in memory that does not grow."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..._system.files import read_at
from ..._version import __version__
from ...formats.trace_kind import BYTE_ORDER_MARK
from ...timeline import Timeline
from ...write.atomic_file import Sink, atomic_writer
from ..align.alignment import Alignment, align_by_sync_marks
from ..attribute.overlay import refuse_malformed, to_trace_time
from ..attribute.profiled_window import clip_to_profile, drop_unused
from ..attribute.recorded_process import for_process, recorded_pid
from ..result import MergeResult, refuse_merged, trailer_json
from ..trace.event_collector import EventCollector
from ..trace.event_columns import ProfilerEvents
from ..trace.event_kinds import SYNC
from ..trace.event_stream import EventStream
from ..trace.trace_file import TraceFile, base_time_ns
from .double_safe_nesting import time_quantum_ns
from .invalid_utf8 import InvalidUtf8, readable_envelope
from .json_copy import CopyThread, find_event_bounds, find_syncs
from .json_events import recording_events
from .stream_copy import copy_chunks, write_added, write_end
from .trace_rows import RowPlaces

__all__ = ["append_recording"]

NO_ATTRIBUTION_NOTE = (
    "merged without attribution: no GPU tracks, backward slices as recorded, and nobody checked that recording and "
    "trace are of the same time"
)


def append_recording(source: TraceFile, timeline: Timeline, out: str) -> MergeResult:
    """Append a timeline to a trace.

    A plain file is copied by the kernel. A compressed one, or one whose end is broken, has to be read.

    Args:
        source: the profiler's trace.
        timeline: the recording.
        out: a path that ends in `.json` or `.json.gz`.

    Raises:
        TraceError: the trace cannot be read.
        WriteError: `out` cannot be written.
    """
    plain = not source.gzipped and not out.lower().endswith(".gz")
    bounds = find_event_bounds(source) if plain else None
    with atomic_writer(out) as sink:
        if bounds is None:
            return _append_to_stream(source, timeline, out, sink)
        refuse_merged(bounds.keys, source.path)
        file: Any = sink
        begin = len(BYTE_ORDER_MARK) if read_at(source.fileno(), len(BYTE_ORDER_MARK), 0) == BYTE_ORDER_MARK else 0
        opening = b""
        if bounds.head.bare:
            begin, opening = bounds.head.length, b'{"traceEvents":['
        sink.write(opening)
        file.flush()
        copy = CopyThread(source.fileno(), file.fileno(), begin, bounds.end)
        copy.start()
        invalid = InvalidUtf8()
        try:
            syncs = find_syncs(source, bounds.end, invalid)
        finally:
            copy.join()
        if copy.error is not None:
            raise copy.error
        notes = []
        if file.seekable():
            file.seek(0, os.SEEK_END)
            if invalid.offsets:
                invalid.replace_in(file, len(opening) - begin)
                first = invalid.offsets[0]
                notes.append(f"byte {first}: {len(invalid.offsets)} bytes from here on are no UTF-8, and became ?")
        events = bounds.sample
        refuse_malformed(events, source.path, empty=bounds.empty)
        added = _Addition(timeline, events, syncs, base_time_ns(bounds.keys, source.path))
        places = RowPlaces(events.tids, events.sort_indexes, all_known=False)
        write_added(sink, added.events(places), follow=not bounds.empty)
        tail = b"" if bounds.head.bare else read_at(source.fileno(), source.size - bounds.end, bounds.end)
        tail = readable_envelope(tail)
        merged = added.result(out, notes)
        sink.write(trailer_json(added.metadata(merged), tail, bounds.keys, b""))
        return merged


def _append_to_stream(source: TraceFile, timeline: Timeline, out: str, sink: Sink) -> MergeResult:
    stream = EventStream(source)
    collector = EventCollector()
    for number, chunk in enumerate(copy_chunks(stream, sink)):
        if not number or SYNC.encode() in chunk.raw or b'"Trace"' in chunk.raw:
            collector.add(chunk.events)
        else:
            collector.tids.update(_tids_of(chunk.events))
    refuse_merged(stream.keys, source.path)
    events = collector.events()
    refuse_malformed(events, source.path)
    added = _Addition(timeline, events, events.syncs, base_time_ns(stream.keys, source.path))
    places = RowPlaces(events.tids, events.sort_indexes, all_known=False)
    write_added(sink, added.events(places), follow=stream.count > 0)
    merged = added.result(out, stream.notes)
    write_end(sink, stream, added.metadata(merged))
    return merged


def _tids_of(events: Sequence[Any]) -> Iterator[int]:
    return (tid for event in events if isinstance(event, dict) and isinstance(tid := event.get("tid"), int))


_NOTHING_IN_WINDOW = (
    "no span of the recording lies in what was profiled, as far as the begin and the end of the trace tell; merge with "
    "attribution, which reads all of it"
)


class _Addition:
    """What is appended: a recording in the time of the trace.

    Args:
        timeline: the recording.
        events: some of the trace's events.
        syncs: start and end of the trace's sync marks, in ns from its base.
        base: Unix ns from which the trace's times count.
    """

    def __init__(
        self,
        timeline: Timeline,
        events: ProfilerEvents,
        syncs: Mapping[str, Sequence[tuple[int, int]]],
        base: int,
    ) -> None:
        self._pid = recorded_pid(events, timeline)
        own, self._notes = for_process(timeline, self._pid)
        self._alignment: Alignment = align_by_sync_marks(own.marks, syncs, base)
        # Without reading the events only the profiler's own slice of its run tells what was profiled.
        self._timeline = drop_unused(clip_to_profile(to_trace_time(own, self._alignment), events.window))
        if len(own.columns) and not len(self._timeline.columns):
            self._notes = [*self._notes, _NOTHING_IN_WINDOW]
        self._count = 0

    def events(self, places: RowPlaces) -> Iterator[bytes]:
        """Yield what is added, some events at a time."""
        latest = int(self._timeline.columns.end.max(initial=0))
        recording = recording_events(self._timeline, self._pid, places, time_quantum_ns(latest))
        self._header = recording.header()
        for _, text in recording.events():
            self._count += text.count(b",\n") + 1  # no event has a line's end inside
            yield text

    def result(self, out: str, notes: Sequence[str]) -> MergeResult:
        """Return what was done; after `events`."""
        all_notes = [NO_ATTRIBUTION_NOTE, *self._notes, *notes]
        metadata = {
            "version": __version__,
            "recording": "recorded",
            "added_events": self._count,
            "alignment": self._alignment.metadata(),
            "notes": all_notes,
        }
        return MergeResult(out, str(self._alignment), len(self._timeline.columns), 0, None, all_notes, metadata)

    def metadata(self, merged: MergeResult) -> dict[str, Any]:
        """Return what the trace says of the merge and of the recording; after `events`."""
        return {**merged.metadata, "header": self._header}
