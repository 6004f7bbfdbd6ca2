"""A merged trace in JSON: the profiler's own bytes, the recording's events, and spans above the streams.

The recording is written as a saved trace has it. Its rows go right above those of the profiler's threads.

A reader turns the text of a time into a double of µs. The trace processor multiplies it by 1000 and rounds once more.
So a slice may begin a nanosecond later than its text says, in traces of before torch 2.4 up to 130 ns earlier or later;
its duration stays. Slices that nest by their texts alone would partly overlap there and be dropped. So ends are chosen
with which slices nest in both readings.
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

# 2**43 µs (101 days) from the base doubles of µs begin to be 2 ns apart.
_EXACT_UNTIL_NS = 1000 << 43
_UNIX_QUANTUM_NS = 250
"""The distance of neighbouring doubles of µs since 1970, ns."""


def time_quantum_ns(latest: int) -> int:
    """Return the steps in ns in which a double of µs can tell times up to `latest` ns apart."""
    return 1 if latest < _EXACT_UNTIL_NS else _UNIX_QUANTUM_NS


def perfetto_rounding(nanoseconds: Int64Array) -> Int64Array:
    """Return what the trace processor makes of the text of times."""
    whole = nanoseconds // 1000
    micros = whole + (nanoseconds - whole * 1000) / 1000.0
    return read_microseconds_array(micros)


def nested_timeline(timeline: Timeline, quantum: int) -> Timeline:
    """Return a timeline, in ns from the trace's base, with times that nest in every reading, see `time_quantum_ns`."""
    slices = timeline.slices
    start, duration = _nest_slices(slices, quantum)
    return replace(timeline, slices=replace(slices, start=start, end=start + duration))


def _nest_slices(slices: Slices, quantum: int) -> tuple[Int64Array, Int64Array]:
    track = slices.track.astype(np.int64)
    return nest_after_rounding(track, slices.start, slices.end, slices.parent, slices.depth, quantum)


def nest_after_rounding(
    track: Int64Array, start: Int64Array, end: Int64Array, parent: Int64Array, depth: SignedIntArray, quantum: int
) -> tuple[Int64Array, Int64Array]:
    """Move starts onto the reader's steps, and choose durations with which slices nest in every reading.

    Slices are in order and nest on each track; times are ns from the base, and the steps those of `time_quantum_ns`.
    """
    if not len(start):
        return start, start
    levels = [np.flatnonzero(depth == level) for level in range(int(depth.max()) + 1)]
    sibling = _next_siblings(track, start, parent)
    begin = _starts_with_room(track, start, parent, levels=levels, sibling=sibling, quantum=quantum)
    readings = (begin, perfetto_rounding(begin))
    # Each is at least as long as its children …
    duration = _enclosing_durations(np.maximum(end - begin, 0), readings, parent, levels)
    # … but ends before its next sibling begins, and with the slice around it.
    for rows in levels:
        outer, after = parent[rows], sibling[rows]
        for reading in readings:
            most = np.where(outer >= 0, reading[outer] + duration[outer] - reading[rows], duration[rows])
            most = np.minimum(most, np.where(after >= 0, reading[after] - reading[rows], duration[rows]))
            duration[rows] = np.maximum(np.minimum(duration[rows], most), 0)
    return begin, duration


def _starts_with_room(
    track: Int64Array,
    start: Int64Array,
    parent: Int64Array,
    *,
    levels: Sequence[Int64Array],
    sibling: Int64Array,
    quantum: int,
) -> Int64Array:
    """Move starts onto the reader's steps so that each slice can end after its children and before its next sibling.

    Steps are rounded down. The start of an inner slice and that of the outer's next sibling may fall on one step. If
    readers then disagree how far that is from the outer's start, no duration suits both: the sibling and all after it
    begin a step later. That happens at most once per level of slices that end there.
    """
    begin = start // quantum * quantum
    of_tracks = split_by(track)
    followed = np.flatnonzero(sibling >= 0)
    after = sibling[followed]
    while True:
        readings = (begin, perfetto_rounding(begin))
        least = _enclosing_durations(np.zeros(len(begin), np.int64), readings, parent, levels)
        room = np.minimum(*(reading[after] - reading[followed] for reading in readings))
        late = after[least[followed] > room]
        if not len(late):
            return begin
        begin[late] += quantum
        for rows in of_tracks:
            begin[rows] = np.maximum.accumulate(begin[rows])


def _enclosing_durations(
    duration: Int64Array, readings: Sequence[Int64Array], parent: Int64Array, levels: Sequence[Int64Array]
) -> Int64Array:
    """Lengthen durations until each slice holds those in it, in every reading of their starts."""
    for rows in reversed(levels[1:]):
        outer = parent[rows]
        for reading in readings:
            np.maximum.at(duration, outer, reading[rows] + duration[rows] - reading[outer])
    return duration


def _next_siblings(track: Int64Array, begin: Int64Array, parent: Int64Array) -> Int64Array:
    """Return for each slice the next one beside it, or -1."""
    order = np.lexsort((np.arange(len(begin)), begin, parent, track))
    sibling = np.full(len(begin), -1, np.int64)
    row, following = order[:-1], order[1:]
    beside = (track[row] == track[following]) & (parent[row] == parent[following])
    sibling[row[beside]] = following[beside]
    return sibling


_BLOCK = 1 << 12
"""The number of spans whose text is in memory at a time."""

_ROUNDING_NS = 2
"""The trace processor rounds times: starts closer than this may become one."""


_FIRST_RESERVED_TID = 4_040_000_000
"""Our thread ids begin here. A profiler writes its own as signed 32-bit numbers, all below 2**31. The trace processor
reads unsigned 32 bits, so ours fit."""


class JsonOutput:
    """Writes a merged trace as JSON: the profiler's own bytes, and after them the recording's events."""

    def __init__(self, stream: EventStream, sink: Sink) -> None:
        self._stream, self._sink = stream, Checksum(sink.write)
        self._comma = b""
        self._sink.write(b'{"traceEvents":[' if stream.bare else _readable_envelope(stream.head))

    def add(self, chunk: Chunk, *_: object) -> None:
        """Copy the bytes of some of the profiler's events."""
        self._sink.write(self._comma)
        self._sink.write(chunk.raw)
        self._comma = b","

    def notes(self, events: ProfilerEvents) -> list[str]:
        """Return what viewers drop, though it has a place in JSON."""
        count = count_overlapping(events.work)
        note = (
            f"{count:,} kernels, memcpys and memsets begin before another one on their stream ends, and end after it: "
            "viewers of .json drop them or draw them wrongly; a merge to .pftrace shows them on a row beside"
        )
        return [note] if count else []

    def finish(self, overlaid: Overlay, events: ProfilerEvents, metadata: Mapping[str, Any], table: bytes) -> None:
        """Write the recording's events, the spans above streams, and what follows the events."""
        places = _RowPlaces(events.tids | events.int_pids, events.sort_indexes)
        quantum = time_quantum_ns(max(events.last, int(overlaid.timeline.columns.end.max(initial=0))))
        recording = _recording_events(overlaid, places, quantum)
        added = (text for _, text in recording.events())
        for text in itertools.chain(added, _device_events(overlaid, events, places, quantum)):
            self._sink.write(self._comma + b"\n")
            self._sink.write(text)
            self._comma = b","
        self._sink.write(b"\n]")
        after = _trailer_json({**metadata, "header": make_header(recording.timeline)}, self._stream)
        self._sink.write(json_table(table, self._sink.value, after))


def _readable_envelope(data: bytes) -> bytes:
    """Return the bytes around a trace's events without what readers refuse: a byte order mark, bytes of no UTF-8."""
    return data.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "replace").encode()


def _trailer_json(metadata: Mapping[str, Any], stream: EventStream) -> bytes:
    """Return what follows the events: the metadata of the merge, and what followed them in the profiler's trace."""
    trailer = b',\n"%b":%b' % (MERGED.encode(), metadata_json(metadata))
    if stream.tail and not stream.bare:
        return trailer + _readable_envelope(stream.tail)[1:]
    base = stream.keys.get("baseTimeNanoseconds")
    if base is not None and b'"baseTimeNanoseconds"' not in stream.head:
        trailer += b',\n"baseTimeNanoseconds":%d' % base
    return trailer + b"\n}\n"


def _recording_events(overlaid: Overlay, places: "_RowPlaces", quantum: int) -> ChromeTimeline:
    """Return a recording as a merged trace has it: above the threads of a process.

    Its sync marks are left out: each is a slice of the profiler's already.
    """
    timeline = nested_timeline(overlaid.drawn, quantum)
    lanes = Lanes.from_timeline(timeline)
    tracks = [timeline.tracks[lane.track] for lane in lanes.lanes]
    above = [places.above(overlaid.pid_of(track.process), track.tid) for track in tracks]
    top = overlaid.pid_of(next(iter(lanes.pids))) if lanes.pids else overlaid.pid
    lanes = lanes.at(overlaid.pid_of, [*above, places.top(top)])
    return ChromeTimeline(timeline, lanes, base=0, resolution_ns=_ROUNDING_NS, parts=part_counters(overlaid.timeline))


def _device_events(overlaid: Overlay, events: ProfilerEvents, places: "_RowPlaces", quantum: int) -> Iterator[bytes]:
    """Yield the rows above the streams and their spans, several events with commas at a time.

    A span has the args of the call whose kernels ran, and `gpu_work`, how many these are; what belongs to no call has a
    `reason`.
    """
    rows: dict[int, tuple[int | str, int]] = {}
    for track in sorted(set(overlaid.devices.track.tolist())):
        pid, stream = events.tracks[track]
        tid, sort_index = places.above(pid, stream)
        rows[track] = pid, tid
        name_of_stream = events.thread_names.get((pid, stream), f"stream {stream}").strip()
        yield from row_metadata_events(pid, tid, escaped(f"modules · {name_of_stream}"), sort_index)
    slices = overlaid.devices
    start, duration = _nest_slices(slices, quantum)
    described = describe_slices(slices, [*map(escaped_name, overlaid.device_names)])
    columns = slices.track.tolist(), start.tolist(), duration.tolist(), described
    texts = (_slice_event(rows[track], *span) for track, *span in zip(*columns, strict=True))
    while block := [*itertools.islice(texts, _BLOCK)]:
        yield b",\n".join(block)


def _slice_event(
    row: tuple[int | str, int], start_ns: int, duration_ns: int, description: tuple[str, str, dict[str, Any]]
) -> bytes:
    (pid, tid), (label, category, args) = row, description
    text = orjson.dumps({"ph": "X", "pid": pid, "tid": tid, "cat": category, "name": label, "args": args})
    return b'%b,"ts":%b,"dur":%b}' % (text[:-1], microseconds_text(start_ns), microseconds_text(duration_ns))


class _RowPlaces:
    """Finds ids for the rows that a merge adds, and places right above rows of the profiler.

    Viewers show the id of a thread after its name, so ids are as small as can be. They sort the rows of a process by
    their indexes, and those of equal index by their ids, the main thread first.
    """

    def __init__(self, taken: Collection[int], sort_indexes: Mapping[TrackKey, int]) -> None:
        reserved = (tid for tid in itertools.count(_FIRST_RESERVED_TID) if tid not in taken)
        small = (tid for tid in itertools.count(1) if tid not in taken)
        self._reserved, self._small = reserved, small
        self._indexes = sort_indexes
        self._occupied = {(pid, index) for (pid, tid), index in sort_indexes.items() if tid != pid}

    def above(self, pid: int | str, tid: int | str) -> tuple[int, int]:
        """Return id and sort index for a row right above the profiler's row of a thread or stream."""
        index = self._indexes.get((pid, tid))
        if index is None:
            return next(self._small), self._first(pid) - 1
        # After a row of that very index comes what has a greater id.
        return next(self._reserved if (pid, index - 1) in self._occupied else self._small), index - 1

    def top(self, pid: int | str) -> tuple[int, int]:
        """Return id and sort index for a row above all others of a process."""
        return next(self._small), self._first(pid) - 2

    def _first(self, pid: int | str) -> int:
        return min((index for (of_pid, _), index in self._indexes.items() if of_pid == pid), default=0)
