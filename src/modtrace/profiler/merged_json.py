"""A merged trace in JSON: the profiler's own bytes, the recording's events, and spans above the streams.

The recording has the events of a saved trace. Its rows are right above the rows of the profiler's threads.

A reader converts the text of a time to a double of µs. The trace processor multiplies it by 1000 and rounds once more.
So a slice may start a nanosecond later than its text, and up to 130 ns earlier or later in traces from before torch
2.4; its duration stays. Slices that nest only by their texts would then partly overlap and be dropped. So this file
chooses ends with which slices nest in both readings.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from .._arrays import Int64Array, SignedIntArray, split_by
from .._files import Sink
from ..formats.chrome_values import TrackKey, microseconds_text, read_microseconds_array
from ..formats.event_stream import Chunk, EventStream
from ..formats.limits import escaped, escaped_name
from ..formats.own_table import Checksum, json_table
from ..formats.table_bytes import make_header
from ..formats.trace_file import BYTE_ORDER_MARK, MERGED, metadata_json
from ..timeline import Slices, Timeline
from ..write.chrome import ChromeTimeline, row_metadata_events
from ..write.lanes import Lanes
from ..write.written_parts import part_counters
from .device_work import count_overlapping
from .event_collector import ProfilerEvents
from .overlay import Overlay
from .stream_spans import describe_slices

_MAX_EXACT_NS = 1000 << 43
"""Time from the base (101 days) from which neighbouring doubles of µs are 2 ns or more apart."""
_UNIX_QUANTUM_NS = 250
"""Distance of neighbouring doubles of µs since 1970, in ns."""


def time_quantum_ns(latest: int) -> int:
    """Return the resolution in ns of doubles of µs, for times up to `latest` ns."""
    return 1 if latest < _MAX_EXACT_NS else _UNIX_QUANTUM_NS


def perfetto_rounding(nanoseconds: Int64Array) -> Int64Array:
    """Return the times that the trace processor reads from the texts of times."""
    microseconds = nanoseconds // 1000
    return read_microseconds_array(microseconds + (nanoseconds - microseconds * 1000) / 1000.0)


def nested_timeline(timeline: Timeline, quantum: int) -> Timeline:
    """Return a timeline in ns from the trace's base whose slices nest in every reading, see `time_quantum_ns`."""
    slices = timeline.slices
    start, duration = _nest_slices(slices, quantum)
    return replace(timeline, slices=replace(slices, start=start, end=start + duration))


def _nest_slices(slices: Slices, quantum: int) -> tuple[Int64Array, Int64Array]:
    track = slices.track.astype(np.int64)
    return nest_after_rounding(track, slices.start, slices.end, slices.parent, slices.depth, quantum)


def nest_after_rounding(
    track: Int64Array, start: Int64Array, end: Int64Array, parent: Int64Array, depth: SignedIntArray, quantum: int
) -> tuple[Int64Array, Int64Array]:
    """Move starts to multiples of `quantum` (see `time_quantum_ns`), and choose durations that nest in every reading.

    Slices are in order and nest on each track; times are ns from the base.
    """
    if not len(start):
        return start, start
    levels = [np.flatnonzero(depth == level) for level in range(int(depth.max()) + 1)]
    sibling = _next_siblings(track, start, parent)
    new_start = _separated_starts(track, start, parent, levels=levels, sibling=sibling, quantum=quantum)
    readings = (new_start, perfetto_rounding(new_start))
    # A slice is not shorter than its children …
    duration = _enclosing_durations(np.maximum(end - new_start, 0), readings, parent, levels)
    # … but ends before its next sibling starts, and within its parent.
    for rows in levels:
        outer, next_row = parent[rows], sibling[rows]
        for reading in readings:
            limit = np.where(outer >= 0, reading[outer] + duration[outer] - reading[rows], duration[rows])
            limit = np.minimum(limit, np.where(next_row >= 0, reading[next_row] - reading[rows], duration[rows]))
            duration[rows] = np.maximum(np.minimum(duration[rows], limit), 0)
    return new_start, duration


def _separated_starts(
    track: Int64Array,
    start: Int64Array,
    parent: Int64Array,
    *,
    levels: Sequence[Int64Array],
    sibling: Int64Array,
    quantum: int,
) -> Int64Array:
    """Round starts down to multiples of `quantum` so that a slice can end after its children and before its sibling.

    An inner slice and the next sibling of its parent may get the same start. If the readings then disagree about its
    distance from the parent's start, no duration satisfies both: the sibling and all later slices move by one quantum.
    That happens at most once per level of slices that end there.
    """
    new_start = start // quantum * quantum
    rows_by_track = split_by(track)
    row = np.flatnonzero(sibling >= 0)
    next_row = sibling[row]
    while True:
        readings = (new_start, perfetto_rounding(new_start))
        min_duration = _enclosing_durations(np.zeros(len(new_start), np.int64), readings, parent, levels)
        max_duration = np.minimum(*(reading[next_row] - reading[row] for reading in readings))
        early_rows = next_row[min_duration[row] > max_duration]
        if not len(early_rows):
            return new_start
        new_start[early_rows] += quantum
        for rows in rows_by_track:
            new_start[rows] = np.maximum.accumulate(new_start[rows])


def _enclosing_durations(
    duration: Int64Array, readings: Sequence[Int64Array], parent: Int64Array, levels: Sequence[Int64Array]
) -> Int64Array:
    """Lengthen durations until each slice contains its children in every reading of their starts."""
    for rows in reversed(levels[1:]):
        outer = parent[rows]
        for reading in readings:
            np.maximum.at(duration, outer, reading[rows] + duration[rows] - reading[outer])
    return duration


def _next_siblings(track: Int64Array, start: Int64Array, parent: Int64Array) -> Int64Array:
    """Return the next sibling of each slice, or -1."""
    order = np.lexsort((np.arange(len(start)), start, parent, track))
    sibling = np.full(len(start), -1, np.int64)
    row, next_row = order[:-1], order[1:]
    is_sibling = (track[row] == track[next_row]) & (parent[row] == parent[next_row])
    sibling[row[is_sibling]] = next_row[is_sibling]
    return sibling


_SPANS_PER_BLOCK = 1 << 12
"""Number of spans whose text is in memory at a time."""

_ROUNDING_NS = 2
"""Distance of starts in ns below which the rounding of the trace processor may make them equal."""


_FIRST_RESERVED_TID = 4_040_000_000
"""The first thread id that modtrace reserves. A profiler writes its ids as signed 32-bit numbers, all below 2**31. The
trace processor reads unsigned 32 bits, so these ids fit."""


class JsonOutput:
    """Writes a merged trace as JSON: the profiler's own bytes, and after them the recording's events."""

    def __init__(self, stream: EventStream, sink: Sink) -> None:
        self._stream, self._sink = stream, Checksum(sink.write)
        self._comma = b""
        self._sink.write(b'{"traceEvents":[' if stream.bare else _readable_envelope(stream.head))

    def add(self, chunk: Chunk, *_: object) -> None:
        """Copy the bytes of a chunk of the profiler's events."""
        self._sink.write(self._comma)
        self._sink.write(chunk.raw)
        self._comma = b","

    def notes(self, events: ProfilerEvents) -> list[str]:
        """Return notes on events that JSON can represent, but viewers drop."""
        count = count_overlapping(events.work)
        note = (
            f"{count:,} kernels, memcpys and memsets begin before another one on their stream ends, and end after it: "
            "viewers of .json drop them or draw them wrongly; a merge to .pftrace shows them on an extra row"
        )
        return [note] if count else []

    def finish(self, overlaid: Overlay, events: ProfilerEvents, metadata: Mapping[str, Any], table: bytes) -> None:
        """Write the recording's events, the spans above streams, and the JSON after the events."""
        allocator = _RowAllocator(events.tids | events.int_pids, events.sort_indexes)
        quantum = time_quantum_ns(max(events.last, int(overlaid.timeline.columns.end.max(initial=0))))
        recording = _recording_events(overlaid, allocator, quantum)
        recorded_texts = (text for _, text in recording.events())
        for text in itertools.chain(recorded_texts, _device_events(overlaid, events, allocator, quantum)):
            self._sink.write(self._comma + b"\n")
            self._sink.write(text)
            self._comma = b","
        self._sink.write(b"\n]")
        trailer = _trailer_json({**metadata, "header": make_header(recording.timeline)}, self._stream)
        self._sink.write(json_table(table, self._sink.value, trailer))


def _readable_envelope(data: bytes) -> bytes:
    """Return the bytes around a trace's events without a byte order mark and invalid UTF-8, which readers refuse."""
    return data.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "replace").encode()


def _trailer_json(metadata: Mapping[str, Any], stream: EventStream) -> bytes:
    """Return the JSON after the events: the metadata of the merge, and the JSON after the profiler's events."""
    trailer = b',\n"%b":%b' % (MERGED.encode(), metadata_json(metadata))
    if stream.tail and not stream.bare:
        return trailer + _readable_envelope(stream.tail)[1:]
    base = stream.keys.get("baseTimeNanoseconds")
    if base is not None and b'"baseTimeNanoseconds"' not in stream.head:
        trailer += b',\n"baseTimeNanoseconds":%d' % base
    return trailer + b"\n}\n"


def _recording_events(overlaid: Overlay, allocator: "_RowAllocator", quantum: int) -> ChromeTimeline:
    """Return the recording of a merged trace, with rows above the threads of a process.

    Its sync marks are left out: the profiler already has a slice for each.
    """
    timeline = nested_timeline(overlaid.shown_timeline, quantum)
    lanes = Lanes.from_timeline(timeline)
    tracks = [timeline.tracks[lane.track] for lane in lanes.lanes]
    rows = [allocator.row_above(overlaid.pid_of(track.process), track.tid) for track in tracks]
    pid = overlaid.pid_of(next(iter(lanes.pids))) if lanes.pids else overlaid.pid
    lanes = lanes.at(overlaid.pid_of, [*rows, allocator.top_row(pid)])
    return ChromeTimeline(timeline, lanes, base=0, resolution_ns=_ROUNDING_NS, parts=part_counters(overlaid.timeline))


def _device_events(
    overlaid: Overlay, events: ProfilerEvents, allocator: "_RowAllocator", quantum: int
) -> Iterator[bytes]:
    """Yield the rows above the streams and their spans, several events with commas at a time.

    A span has the args of the call whose kernels ran, and their number as `gpu_work`; without a call it has a `reason`.
    """
    rows: dict[int, tuple[int | str, int]] = {}
    for track in sorted(set(overlaid.stream_spans.track.tolist())):
        pid, stream = events.tracks[track]
        tid, sort_index = allocator.row_above(pid, stream)
        rows[track] = pid, tid
        stream_name = events.thread_names.get((pid, stream), f"stream {stream}").strip()
        yield from row_metadata_events(pid, tid, escaped(f"modules · {stream_name}"), sort_index)
    slices = overlaid.stream_spans
    start, duration = _nest_slices(slices, quantum)
    descriptions = describe_slices(slices, [*map(escaped_name, overlaid.stream_names)])
    columns = slices.track.tolist(), start.tolist(), duration.tolist(), descriptions
    texts = (_slice_event(rows[track], *span) for track, *span in zip(*columns, strict=True))
    while block := [*itertools.islice(texts, _SPANS_PER_BLOCK)]:
        yield b",\n".join(block)


def _slice_event(
    row: tuple[int | str, int], start_ns: int, duration_ns: int, description: tuple[str, str, dict[str, Any]]
) -> bytes:
    (pid, tid), (label, category, args) = row, description
    text = orjson.dumps({"ph": "X", "pid": pid, "tid": tid, "cat": category, "name": label, "args": args})
    return b'%b,"ts":%b,"dur":%b}' % (text[:-1], microseconds_text(start_ns), microseconds_text(duration_ns))


class _RowAllocator:
    """Finds ids and sort indexes for the rows that a merge adds right above rows of the profiler.

    Viewers show the id of a thread after its name, so ids are small if possible. They sort the rows of a process by
    their indexes, and rows of equal index by their ids, with the main thread first.
    """

    def __init__(self, used_ids: Collection[int], sort_indexes: Mapping[TrackKey, int]) -> None:
        self._reserved_ids = (tid for tid in itertools.count(_FIRST_RESERVED_TID) if tid not in used_ids)
        self._small_ids = (tid for tid in itertools.count(1) if tid not in used_ids)
        self._indexes = sort_indexes
        self._used_indexes = {(pid, index) for (pid, tid), index in sort_indexes.items() if tid != pid}

    def row_above(self, pid: int | str, tid: int | str) -> tuple[int, int]:
        """Return id and sort index for a row right above the profiler's row of a thread or stream."""
        index = self._indexes.get((pid, tid))
        if index is None:
            return next(self._small_ids), self._min_index(pid) - 1
        # To come after another row of the same index, the new row needs a greater id.
        return next(self._reserved_ids if (pid, index - 1) in self._used_indexes else self._small_ids), index - 1

    def top_row(self, pid: int | str) -> tuple[int, int]:
        """Return id and sort index for a row above all other rows of a process."""
        return next(self._small_ids), self._min_index(pid) - 2

    def _min_index(self, pid: int | str) -> int:
        return min((index for (row_pid, _), index in self._indexes.items() if row_pid == pid), default=0)
