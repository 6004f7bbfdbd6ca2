"""A merged trace in Perfetto's own format: the profiler's events as track events, the recording as it always is.

A slice of a track event has no duration but a begin and an end, and an end closes the innermost open slice. So the
slices of a track are sorted before they are written; a slice that partly overlaps another goes to a row beside it. The
content of each event is a message, the rest is columns.

A slice names its flows. In JSON an end of a flow is an event of its own, or the slice has a `bind_id`. The profiler
writes such an event right after its slice, others write it anywhere. Many flows of the profiler have only one end, and
some end before they begin: readers of its JSON draw neither, so they are left out here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import orjson
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket, TrackDescriptor, TrackEvent

from .._arrays import Float64Array, Int64Array, Numbering, split_by
from .._files import Sink
from .._interrupts import cached_property
from ..formats.chrome_values import TrackKey, base_time_ns, microseconds_to_ns
from ..formats.event_stream import Chunk, EventStream
from ..formats.event_table import (
    AROUND,
    AT_LAST,
    BEGIN,
    BEGINS,
    ENDS,
    FLOW_PHASES,
    METADATA,
    NEXT,
    SLICE,
    EventTable,
)
from ..formats.limits import UNNAMED, escaped
from ..formats.own_table import Checksum, packet_table
from ..formats.trace_file import MERGED_PACKET, metadata_json
from ..timeline.join import move_times
from ..write.perfetto import PerfettoWriter
from ..write.perfetto_descriptors import (
    PROFILER_FLOW,
    PROFILER_SEQUENCE,
    REALTIME_CLOCK,
    TrackParents,
    describe_track,
    following_packet,
    interned_packets,
    serialize,
    track_uuid,
)
from ..write.protobuf_columns import ByteTable, Column, RaggedColumn, interleave, repeat, track_event_packets
from ..write.written_parts import WrittenPart, part_counters
from .event_collector import ProfilerEvents
from .overlay import Overlay
from .stream_spans import describe_slices

_MAX_MESSAGES = 1000
_DRAWN = b"XiI"


class EventEncoder:
    """Encodes what events say; texts that occur again and again are in the trace once, and events have their ids."""

    def __init__(self) -> None:
        self._names = Numbering[str](first=1)
        self._categories = Numbering[str](first=1)
        self._arg_names = Numbering[str](first=1)
        self._messages: dict[tuple[str | None, tuple[str, ...]], tuple[TrackEvent, list[Any]]] = {}

    def fields(self, name: str | None, category: object, args: Mapping[str, Any]) -> bytes:
        """Return the name, if any, category and args, which are JSON values, of an event as fields of a TrackEvent."""
        values = args.values()
        event_kind = (category if category is None else str(category), tuple(args))
        event, annotations = self._messages.get(event_kind) or self._new_message(event_kind)
        for annotation, value in zip(annotations, values, strict=True):
            kind = type(value)
            if kind is int:
                # Not comparing every number with its bounds saves a tenth of the time.
                try:
                    annotation.int_value = value
                except ValueError:
                    annotation.string_value = str(value)
            elif kind is float:
                annotation.double_value = value
            elif kind is bool:
                annotation.bool_value = value
            elif kind is str:
                annotation.string_value = escaped(value)
            else:
                annotation.string_value = escaped(orjson.dumps(value, default=str).decode())
        if name is None:
            event.ClearField("name_iid")
        else:
            event.name_iid = self._names[name]
        serialized: bytes = event.SerializeToString()
        return serialized

    def _new_message(self, event_kind: tuple[str | None, tuple[str, ...]]) -> tuple[TrackEvent, list[Any]]:
        """Return an event of a category with args of given names, and the args, whose values are to be set.

        Most events are of a few kinds: one message for each is made, and used again for the next event.
        """
        if len(self._messages) == _MAX_MESSAGES:
            self._messages.clear()
        category, names = event_kind
        event = TrackEvent()
        if category is not None:
            event.category_iids.append(self._categories[category])
        annotations = [event.debug_annotations.add(name_iid=self._arg_names[name]) for name in names]
        message = self._messages[event_kind] = event, annotations
        return message

    def interned_packets(self) -> Iterator[TracePacket]:
        """Yield the packets that say what the ids mean; they come before all events."""
        names = {iid: escaped(name) or UNNAMED for name, iid in self._names.items()}
        return interned_packets(PROFILER_SEQUENCE, names, map(escaped, self._categories), map(escaped, self._arg_names))


_MAX_LOOKED_AT = 512
"""The number of slices that are looked at for the one around a moment: viewers draw no deeper."""


class ProfilerSlices:
    """Encodes what slices and instants say while their chunk is read; the rest is in the table.

    The table takes each chunk before it is added here.

    Attributes:
        encoder: encodes their args.
        lost_arrows: arrows with an end that no slice holds, once `notes` was called.
    """

    def __init__(self, table: EventTable) -> None:
        self.encoder = EventEncoder()
        self.lost_arrows = 0
        self._table = table
        self._row = array("q")
        self._fields: list[bytes] = []
        self._of_ends: dict[int, bytes] = {}

    def add(self, events: Sequence[Any]) -> None:
        """Take the events that the table has just taken, as it returned them."""
        fields, rows, encoded = self.encoder.fields, self._row, self._fields
        for row, event in enumerate(events, len(self._table) - len(events)):
            if (phase := event["ph"]) in "XBiI":
                args = event.get("args")
                encoded.append(fields(str(event.get("name", "")), event.get("cat"), args if type(args) is dict else {}))
                rows.append(row)
            elif phase == "E" and type(event.get("args")) is dict:
                self._of_ends[row] = fields(None, None, event["args"])

    @cached_property
    def tracks(self) -> dict[int, TrackSlices]:
        """The slices and instants of each track, by its number in the table."""
        table, rows = self._table, np.array(self._row, np.int64)
        for begin, end in zip(*(half.tolist() for half in table.pairs), strict=True):
            if end in self._of_ends:
                self._fields[int(np.searchsorted(rows, begin))] += self._of_ends[end]
        drawn = np.flatnonzero(np.isin(table.phase[rows], list(_DRAWN)) & (table.start[rows] > 0))
        by_track = {}
        for places in sorted(split_by(table.track[rows[drawn]], drawn), key=itemgetter(0)):
            row = rows[places]
            duration = np.where(table.phase[row] == SLICE, table.duration[row], -1)
            fields = [self._fields[place] for place in places.tolist()]
            by_track[int(table.track[row[0]])] = TrackSlices(row, table.start[row], duration, fields)
        return by_track

    @cached_property
    def _flows_by_track(self) -> dict[int, list[tuple[int, int]]]:
        """The ends of those flows on each track that lead from a slice to a slice.

        The index of a slice, ascending, and the number of a flow that begins or ends there.
        A number may come again for another flow, once the flow before has ended; here each has one of its own, from 1.
        """
        table = self._table
        flows = table.flows
        track, bound = table.track[flows.row], np.full(len(flows.row), -1, np.int64)
        for ends in split_by(track):
            if (slices := self.tracks.get(int(track[ends[0]]))) is not None:
                bound[ends] = slices.bound(flows.row[ends], table.start[flows.row[ends]], flows.binds[ends])
        ends_of_track: dict[int, list[tuple[int, int]]] = {}
        begun: dict[int, int] = {}
        pairs = 0
        order = np.lexsort((table.start[flows.row], flows.flow))  # in file order where they are of one time
        columns = (order, flows.flow[order], flows.ways[order])
        for end, flow, ways in zip(*(column.tolist() for column in columns), strict=True):
            if ways & ENDS and flow in begun:
                both = begun.pop(flow), end
                if min(bound[both[0]], bound[end]) < 0:
                    self.lost_arrows += 1
                else:
                    pairs += 1
                    for flow_end in both:
                        ends_of_track.setdefault(int(track[flow_end]), []).append((int(bound[flow_end]), pairs))
            if ways & BEGINS:
                begun.setdefault(flow, end)  # a begin of what has begun already is none
        return {track: sorted(ends) for track, ends in ends_of_track.items()}

    def notes(self) -> list[str]:
        """Return what a Perfetto trace has no place for."""
        _ = self._flows_by_track
        phase = self._table.phase
        has_place = np.isin(phase, [0, BEGIN, METADATA, *FLOW_PHASES])
        skipped = np.count_nonzero(~has_place) - sum(len(slices.row) for slices in self.tracks.values())
        notes = []
        if skipped:
            notes.append(f"{skipped} of the profiler's events are of a kind that .pftrace has no place for")
        if self.lost_arrows:
            problem = "are left out: no slice is where they begin or end"
            notes.append(f"{self.lost_arrows} of the profiler's arrows {problem}")
        return notes

    def packets(self, track: int, base: int, uuid: int, row_beside: Callable[[int], TracePacket]) -> Iterator[bytes]:
        """Yield the packets of a track, see `profiler_packets`; `base` is what its times count from, in Unix ns."""
        slices = self.tracks[track]
        for index, ends in groupby(self._flows_by_track.get(track, []), key=itemgetter(0)):
            flows = [flow + PROFILER_FLOW for _, flow in ends]
            slices.fields[index] += TrackEvent(flow_ids=flows).SerializeToString()
        start, duration = microseconds_to_ns(slices.start) + base, microseconds_to_ns(slices.duration)
        yield from profiler_packets(start, duration, slices.fields, uuid, row_beside)


class TrackSlices(NamedTuple):
    """The slices and instants of one track, in file order; columns of equal length."""

    row: Int64Array  # in the table of events
    start: Float64Array  # µs from the trace's base
    duration: Float64Array  # µs; -1 for an instant
    fields: list[bytes]  # what else each says, see `EventEncoder.fields`

    def bound(self, row: Int64Array, time: Float64Array, binds: Int64Array) -> Int64Array:
        """Return the slice to which each end of a flow belongs, as readers of JSON find it; -1 if there is none.

        An end whose event comes right after a slice that begins at its time belongs to that slice.
        """
        last = np.searchsorted(self.row, row, side="right") - 1
        is_last = (last >= 0) & np.where(binds == AT_LAST, self.row[last] == row, self.start[last] == time)
        order = np.lexsort((-self.duration, self.start))
        starts = self.start[order]
        after = np.searchsorted(starts, time)
        following = np.where(after < len(order), order[np.minimum(after, len(order) - 1)], -1)
        bound: Int64Array = np.where(is_last, last, np.where(binds == NEXT, following, -1))
        begun = np.searchsorted(starts, time, side="right")
        for end in np.flatnonzero(~is_last & (binds == AROUND)).tolist():
            around = order[max(begun[end] - _MAX_LOOKED_AT, 0) : begun[end]][::-1]
            open_ = around[self.start[around] + self.duration[around] >= time[end]]
            bound[end] = open_[0] if len(open_) else -1
        return bound


def profiler_packets(
    start: Int64Array, duration: Int64Array, fields: Sequence[bytes], uuid: int, beside: Callable[[int], TracePacket]
) -> Iterator[bytes]:
    """Yield the packets of a track's slices and instants on the profiler's sequence, some thousand at a time.

    Times are Unix ns, and a negative duration is an instant's. `beside` describes a row, from 1 on, for slices that
    partly overlap those of the rows before.
    """
    ordered = _order_slices(start, duration)
    uuids = [uuid]
    for row in range(1, int(ordered[2].max(initial=0)) + 1):
        descriptor = beside(row)
        uuids.append(descriptor.track_descriptor.uuid)
        yield serialize(descriptor)
    sequence = following_packet(PROFILER_SEQUENCE).SerializeToString()
    tables = {
        kind: ByteTable([TrackEvent(type=kind, track_uuid=uuid).SerializeToString() for uuid in uuids])
        for kind in (_BEGIN, _END, _INSTANT)
    }
    for first in range(0, len(ordered[0]), _CHUNK):
        index, kinds, rows, time = (column[first : first + _CHUNK] for column in ordered)
        parts = []
        for kind, table in tables.items():
            positions = np.flatnonzero(kinds == kind)
            if len(positions):
                event: list[Column] = [table.pick(rows[positions])]
                if kind != _END:
                    event.append(RaggedColumn.from_strings([fields[row] for row in index[positions].tolist()]))
                parts.append((positions, track_event_packets(time[positions], repeat(sequence, len(positions)), event)))
        yield interleave(parts, len(index))


_CHUNK = 1 << 13
"""Packets that are in memory at a time."""
_BEGIN, _END, _INSTANT = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END, TrackEvent.TYPE_INSTANT
_TYPE_BITS = 2
"""Bits that hold one of these three. `_order_slices` has packets as numbers: above these bits the slice's index."""


def _order_slices(start: Int64Array, duration: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Sort begins and ends so that every end closes the slice it belongs to; what outlasts one is on a row beside.

    Returns:
        Of each packet the index of its slice or instant; whether it begins, ends, or is an instant, as TrackEvent has
        it; its row, 0 for the track itself and from 1 on for rows beside it; and its time.
    """
    order = np.lexsort((np.arange(len(start)), -duration, start))
    starts, ends, instants = start[order].tolist(), (start + duration)[order].tolist(), (duration < 0)[order].tolist()
    rows: list[list[tuple[int, int]]] = [[]]  # of each row the end and the index of its open slices
    row_of = np.zeros(len(start), np.int64)
    codes, times = list[int](), list[int]()  # index and type of each packet, and its time
    for index, begin, end, instant in zip(order.tolist(), starts, ends, instants, strict=True):
        if not instant:
            for row, stack in enumerate(rows):  # noqa: B007
                while stack and stack[-1][0] <= begin:
                    times.append(stack[-1][0])
                    codes.append(stack.pop()[1] << _TYPE_BITS | _END)
                if not stack or end <= stack[-1][0]:
                    break
            else:
                row, stack = len(rows), []
                rows.append(stack)
            row_of[index] = row
            stack.append((end, index))
        times.append(begin)
        codes.append(index << _TYPE_BITS | (_INSTANT if instant else _BEGIN))
    for stack in rows:
        times += [end for end, _ in reversed(stack)]
        codes += [index << _TYPE_BITS | _END for _, index in reversed(stack)]
    packets = np.array(codes, np.int64)
    of_packet = packets >> _TYPE_BITS
    return of_packet, packets & (1 << _TYPE_BITS) - 1, row_of[of_packet], np.array(times, np.int64)


_THREAD_IDS = range(1, 1 << 31)
_PIDS = range(-(1 << 31), 1 << 31)
"""The ids that Perfetto takes for a thread and for a process."""


class PacketOutput:
    """Writes a merged trace in Perfetto's format, once all of the profiler's events were taken."""

    def __init__(self, stream: EventStream, sink: Sink, table: EventTable) -> None:
        self._stream, self._sink = stream, Checksum(sink.write)
        self._slices = ProfilerSlices(table)

    def add(self, _chunk: Chunk, events: Sequence[Any]) -> None:
        """Take some of the profiler's events, as the table returned them."""
        self._slices.add(events)

    def notes(self, _: ProfilerEvents) -> list[str]:
        """Return what is left out."""
        return self._slices.notes()

    def finish(self, overlaid: Overlay, events: ProfilerEvents, metadata: Mapping[str, Any], table: bytes) -> None:
        """Write the recording's packets, the profiler's, and the table."""
        sink, slices, base = self._sink, self._slices, base_time_ns(self._stream.keys, "")
        start = _sequence_start(base, metadata)
        sink.write(serialize(*start, *_tracks(slices, events, overlaid)))
        rows = [(track.process, track.tid, overlaid.pid_of(track.process)) for track in overlaid.drawn.tracks]
        processes = {process: _uuid("process", pid) for process, _, pid in rows}
        threads = {(process, tid): _uuid("track", (pid, tid)) for process, tid, pid in rows}
        parents = TrackParents(_uuid("process", overlaid.pid), processes, threads)
        recorded = move_times(overlaid.drawn, lambda time: time + base)
        parts = [part._replace(time=part.time + base) for part in part_counters(overlaid.timeline)]
        for _, part in PerfettoWriter(parents).packets(WrittenPart(recorded, parts)):
            sink.write(part)
        spans, encoder = overlaid.devices, slices.encoder
        fields = [encoder.fields(*texts) for texts in describe_slices(spans, overlaid.device_names)]
        sink.write(serialize(*encoder.interned_packets()))
        ranks = {events.tracks[track]: rank for rank, track in enumerate(slices.tracks)}
        for track, (key, rank) in zip(slices.tracks, ranks.items(), strict=True):
            for part in slices.packets(track, base, _uuid("track", key), _beside(key, rank, overlaid)):
                sink.write(part)
        for track in np.unique(spans.track).tolist():
            on_track, key = slice(*np.searchsorted(spans.track, [track, track + 1]).tolist()), events.tracks[track]
            times = spans.start[on_track] + base, (spans.end - spans.start)[on_track]
            beside = _beside(key, ranks.get(key, 0), overlaid)
            for packets in profiler_packets(*times, fields[on_track], _uuid("modules", key), beside):
                sink.write(packets)
        for packet in packet_table(table, sink.value):
            sink.write(packet)


def _sequence_start(base: int, metadata: Mapping[str, Any]) -> Iterator[TracePacket]:
    """Yield the packets that begin the profiler's sequence and say how the trace was made."""
    first = following_packet(PROFILER_SEQUENCE)
    first.sequence_flags |= TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    first.trace_packet_defaults.timestamp_clock_id = REALTIME_CLOCK
    # Without slices of modules nothing else says that the trace's time is this clock, and a reader drops all.
    first.clock_snapshot.primary_trace_clock = REALTIME_CLOCK
    first.clock_snapshot.clocks.add(clock_id=REALTIME_CLOCK, timestamp=base)
    yield first
    about = following_packet(PROFILER_SEQUENCE)
    about.chrome_events.metadata.add(name=MERGED_PACKET, string_value=metadata_json(metadata).decode())
    yield about


def _tracks(slices: ProfilerSlices, events: ProfilerEvents, overlaid: Overlay) -> Iterator[TracePacket]:
    """Yield descriptors: of processes and devices, their threads and streams, and ours above the streams.

    A process is one group, which holds the recording's tracks too: below each thread, above its operators.
    """
    with_modules = {events.tracks[track] for track in np.unique(overlaid.devices.track).tolist()}
    recorded: dict[TrackKey, str] = {
        (overlaid.pid_of(track.process), track.tid): track.thread for track in overlaid.drawn.tracks
    }
    keys = list(dict.fromkeys([*(events.tracks[track] for track in slices.tracks), *with_modules, *recorded]))
    for pid in dict.fromkeys(
        [overlaid.pid, *overlaid.pids.values(), *(pid for pid, _ in keys if isinstance(pid, int))]
    ):
        packet = describe_track(PROFILER_SEQUENCE, _uuid("process", pid))
        descriptor = packet.track_descriptor
        descriptor.child_ordering = TrackDescriptor.EXPLICIT
        if _is_process(pid, events, overlaid):
            descriptor.process.pid = pid
            descriptor.process.process_name = escaped(events.process_names.get(pid, "python"))
        else:
            descriptor.name = f"GPU {pid}" if isinstance(pid, int) else escaped(pid) or "profiler"
        yield packet
    for rank, key in enumerate(keys):
        pid, tid = key
        # What belongs to no process, as the profiler's own spans, is shown with the one that was profiled.
        process = _uuid("process", _shown_in(pid, overlaid))
        packet = describe_track(PROFILER_SEQUENCE, _uuid("track", key), process)
        descriptor = packet.track_descriptor
        is_process = _is_process(pid, events, overlaid)
        unnamed = str(tid) if is_process or not isinstance(pid, int) else f"stream {tid}"
        name = escaped(events.thread_names.get(key, recorded.get(key, unnamed))).strip() or "profiler"
        if is_process and isinstance(tid, int) and tid in _THREAD_IDS:
            descriptor.thread.pid, descriptor.thread.tid, descriptor.thread.thread_name = int(pid), tid, name
        else:
            descriptor.name = name
            descriptor.sibling_order_rank = 3 * rank + 1
        yield packet
        if key in with_modules:
            yield describe_track(PROFILER_SEQUENCE, _uuid("modules", key), process, 3 * rank, f"modules · {name}")


def _shown_in(pid: int | str, overlaid: Overlay) -> int | str:
    """Return the pid of the process in which a viewer shows what a trace has of a pid."""
    return pid if isinstance(pid, int) or pid in overlaid.pids.values() else overlaid.pid


def _is_process(pid: int | str, events: ProfilerEvents, overlaid: Overlay) -> bool:
    """Return whether a pid is that of a process, not of a device."""
    return (
        isinstance(pid, int)
        and pid in _PIDS
        and (pid in events.cpu_pids or pid == overlaid.pid or pid in overlaid.pids.values())
    )


def _beside(key: TrackKey, rank: int, overlaid: Overlay) -> Callable[[int], TracePacket]:
    """Return what describes the rows for slices of a track that partly overlap others, by their numbers."""

    def describe(row: int) -> TracePacket:
        process = _uuid("process", _shown_in(key[0], overlaid))
        name = escaped(f"{key[1]} · overlapping slices")
        return describe_track(PROFILER_SEQUENCE, _uuid("beside", key, row), process, 3 * rank + 2, name)

    return describe


def _uuid(*key: object) -> int:
    return track_uuid(repr(key))
