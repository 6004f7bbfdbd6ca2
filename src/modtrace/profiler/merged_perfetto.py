"""A merged trace in Perfetto's own format: the profiler's events as track events, the recording as in a saved trace.

In this format a slice is a pair of events, begin and end, and an end closes the innermost open slice. So the slices of
a track are sorted before they are written; a slice that partly overlaps another goes to an extra row. The content of
each event is a message, all other data are columns.

A slice lists its flows. In JSON an end of a flow is an event of its own, or the slice has a `bind_id`. The profiler
writes such an event right after its slice, other programs write it anywhere. Many flows of the profiler have only one
end, and some end before they start: readers of its JSON draw neither, so both are left out here.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
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
_SHOWN_PHASES = b"XiI"


class EventEncoder:
    """Encodes names, categories and args of events; the trace contains each repeated text once, events refer to it."""

    def __init__(self) -> None:
        self._names = Numbering[str](first=1)
        self._categories = Numbering[str](first=1)
        self._arg_names = Numbering[str](first=1)
        self._messages: dict[tuple[str | None, tuple[str, ...]], tuple[TrackEvent, list[Any]]] = {}

    def fields(self, name: str | None, category: object, args: Mapping[str, Any]) -> bytes:
        """Return an event's name, if any, its category and its args, which are JSON values, as TrackEvent fields."""
        values = args.values()
        event_kind = (category if category is None else str(category), tuple(args))
        event, annotations = self._messages.get(event_kind) or self._new_message(event_kind)
        for annotation, value in zip(annotations, values, strict=True):
            kind = type(value)
            if kind is int:
                # Catching the error instead of checking each number's bounds saves a tenth of the time.
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
        """Return an event with a category and named args, and the args, whose values the caller sets.

        Most events are of a few kinds: each kind has one message, which is reused for every event.
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
        """Yield the packets that map ids to texts; they come before all events."""
        names = {iid: escaped(name) or UNNAMED for name, iid in self._names.items()}
        return interned_packets(PROFILER_SEQUENCE, names, map(escaped, self._categories), map(escaped, self._arg_names))


_MAX_OPEN_SLICES = 512
"""Maximum depth at which the slice around a moment is searched: viewers draw no deeper."""


class ProfilerSlices:
    """Encodes slices and instants while their chunk is read; their times are in the table.

    Each chunk is added to the table first.

    Attributes:
        encoder: encodes their args.
        lost_arrows: number of arrows with an end outside all slices; set by `notes`.
    """

    def __init__(self, table: EventTable) -> None:
        self.encoder = EventEncoder()
        self.lost_arrows = 0
        self._table = table
        self._row = array("q")
        self._fields: list[bytes] = []
        self._end_fields: dict[int, bytes] = {}

    def add(self, events: Sequence[Any]) -> None:
        """Add events right after the table has added them; they are the return value of `EventTable.add`."""
        fields, rows, encoded = self.encoder.fields, self._row, self._fields
        for row, event in enumerate(events, len(self._table) - len(events)):
            if (phase := event["ph"]) in "XBiI":
                args = event.get("args")
                encoded.append(fields(str(event.get("name", "")), event.get("cat"), args if type(args) is dict else {}))
                rows.append(row)
            elif phase == "E" and type(event.get("args")) is dict:
                self._end_fields[row] = fields(None, None, event["args"])

    @cached_property
    def tracks(self) -> dict[int, TrackSlices]:
        """The slices and instants of each track, by its number in the table."""
        table, rows = self._table, np.array(self._row, np.int64)
        for begin, end in zip(*(half.tolist() for half in table.pairs), strict=True):
            if end in self._end_fields:
                self._fields[int(np.searchsorted(rows, begin))] += self._end_fields[end]
        shown_indices = np.flatnonzero(np.isin(table.phase[rows], list(_SHOWN_PHASES)) & (table.start_us[rows] > 0))
        slices_by_track = {}
        for indices in sorted(split_by(table.track[rows[shown_indices]], shown_indices), key=itemgetter(0)):
            row = rows[indices]
            duration = np.where(table.phase[row] == SLICE, table.duration_us[row], -1)
            fields = [self._fields[index] for index in indices.tolist()]
            slices_by_track[int(table.track[row[0]])] = TrackSlices(row, table.start_us[row], duration, fields)
        return slices_by_track

    @cached_property
    def _flows_by_track(self) -> dict[int, list[tuple[int, int]]]:
        """The ends of flows that lead from a slice to a slice, by track.

        Each end is the index of a slice, ascending, and the number of a flow that starts or ends there. The trace may
        reuse an id once its flow has ended; here each flow has its own number, from 1.
        """
        table = self._table
        flows = table.flows
        track, bound_slice = table.track[flows.row], np.full(len(flows.row), -1, np.int64)
        for ends in split_by(track):
            if (slices := self.tracks.get(int(track[ends[0]]))) is not None:
                bound_slice[ends] = slices.bound(flows.row[ends], table.start_us[flows.row[ends]], flows.binds[ends])
        ends_by_track = defaultdict[int, list[tuple[int, int]]](list)
        open_flows: dict[int, int] = {}
        flow_count = 0
        order = np.lexsort((table.start_us[flows.row], flows.flow))  # stable: ends of one time stay in file order
        columns = (order, flows.flow[order], flows.ways[order])
        for end, flow, ways in zip(*(column.tolist() for column in columns), strict=True):
            if ways & ENDS and flow in open_flows:
                pair = open_flows.pop(flow), end
                if min(bound_slice[pair[0]], bound_slice[end]) < 0:
                    self.lost_arrows += 1
                else:
                    flow_count += 1
                    for flow_end in pair:
                        ends_by_track[int(track[flow_end])].append((int(bound_slice[flow_end]), flow_count))
            if ways & BEGINS:
                open_flows.setdefault(flow, end)  # a second start of a flow that is already open is ignored
        return {track: sorted(ends) for track, ends in ends_by_track.items()}

    def notes(self) -> list[str]:
        """Return notes on events that the Perfetto format cannot represent."""
        _ = self._flows_by_track
        phase = self._table.phase
        is_handled = np.isin(phase, [0, BEGIN, METADATA, *FLOW_PHASES])
        skipped = np.count_nonzero(~is_handled) - sum(len(slices.row) for slices in self.tracks.values())
        notes = []
        if skipped:
            notes.append(f"{skipped} of the profiler's events are of a kind that .pftrace cannot represent")
        if self.lost_arrows:
            problem = "are left out: they begin or end outside all slices"
            notes.append(f"{self.lost_arrows} of the profiler's arrows {problem}")
        return notes

    def packets(self, track: int, base: int, uuid: int, describe_row: Callable[[int], TracePacket]) -> Iterator[bytes]:
        """Yield the packets of a track, see `profiler_packets`; its times count from `base`, in Unix ns."""
        slices = self.tracks[track]
        for index, ends in groupby(self._flows_by_track.get(track, []), key=itemgetter(0)):
            flows = [flow + PROFILER_FLOW for _, flow in ends]
            slices.fields[index] += TrackEvent(flow_ids=flows).SerializeToString()
        start, duration = microseconds_to_ns(slices.start_us) + base, microseconds_to_ns(slices.duration_us)
        yield from profiler_packets(start, duration, slices.fields, uuid, describe_row)


class TrackSlices(NamedTuple):
    """The slices and instants of one track, in file order; columns of equal length."""

    row: Int64Array  # in the table of events
    start_us: Float64Array  # from the trace's base
    duration_us: Float64Array  # -1 for an instant
    fields: list[bytes]  # name, category and args of each, see `EventEncoder.fields`

    def bound(self, row: Int64Array, time: Float64Array, binds: Int64Array) -> Int64Array:
        """Return the slice to which each end of a flow belongs, as readers of JSON find it, or -1.

        An end whose event comes right after a slice that starts at its time belongs to that slice.
        """
        last = np.searchsorted(self.row, row, side="right") - 1
        is_last = (last >= 0) & np.where(binds == AT_LAST, self.row[last] == row, self.start_us[last] == time)
        order = np.lexsort((-self.duration_us, self.start_us))
        starts = self.start_us[order]
        next_index = np.searchsorted(starts, time)
        next_slice = np.where(next_index < len(order), order[np.minimum(next_index, len(order) - 1)], -1)
        bound_slice: Int64Array = np.where(is_last, last, np.where(binds == NEXT, next_slice, -1))
        start_count = np.searchsorted(starts, time, side="right")
        for end in np.flatnonzero(~is_last & (binds == AROUND)).tolist():
            candidates = order[max(start_count[end] - _MAX_OPEN_SLICES, 0) : start_count[end]][::-1]
            open_slices = candidates[self.start_us[candidates] + self.duration_us[candidates] >= time[end]]
            bound_slice[end] = open_slices[0] if len(open_slices) else -1
        return bound_slice


def profiler_packets(
    start: Int64Array, duration: Int64Array, fields: Sequence[bytes], uuid: int, describe: Callable[[int], TracePacket]
) -> Iterator[bytes]:
    """Yield the packets of a track's slices and instants on the profiler's sequence, a few thousand at a time.

    Times are Unix ns; an instant has a negative duration. `describe` makes the descriptor of an extra row, from 1 on,
    for slices that partly overlap slices of lower rows.
    """
    ordered = _order_slices(start, duration)
    uuids = [uuid]
    for row in range(1, int(ordered[2].max(initial=0)) + 1):
        descriptor = describe(row)
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
"""Number of packets in memory at a time."""
_BEGIN, _END, _INSTANT = TrackEvent.TYPE_SLICE_BEGIN, TrackEvent.TYPE_SLICE_END, TrackEvent.TYPE_INSTANT
_TYPE_BITS = 2
"""Number of low bits for the type in the packet codes of `_order_slices`; the higher bits are the slice's index."""


def _order_slices(start: Int64Array, duration: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Sort begins and ends so that every end closes its own slice; overlapping slices go to extra rows.

    Returns:
        Four columns, one entry per packet: index of the slice or instant, TrackEvent type, row (0 for the track itself,
        from 1 on for extra rows), and time.
    """
    order = np.lexsort((np.arange(len(start)), -duration, start))
    starts, ends, instants = start[order].tolist(), (start + duration)[order].tolist(), (duration < 0)[order].tolist()
    rows: list[list[tuple[int, int]]] = [[]]  # per row, a stack of end and index of each open slice
    row_of = np.zeros(len(start), np.int64)
    codes, times = list[int](), list[int]()  # per packet, index and type in one number, and the time
    for index, start_time, end, is_instant in zip(order.tolist(), starts, ends, instants, strict=True):
        if not is_instant:
            for row, stack in enumerate(rows):  # noqa: B007
                while stack and stack[-1][0] <= start_time:
                    times.append(stack[-1][0])
                    codes.append(stack.pop()[1] << _TYPE_BITS | _END)
                if not stack or end <= stack[-1][0]:
                    break
            else:
                row, stack = len(rows), []
                rows.append(stack)
            row_of[index] = row
            stack.append((end, index))
        times.append(start_time)
        codes.append(index << _TYPE_BITS | (_INSTANT if is_instant else _BEGIN))
    for stack in rows:
        times += [end for end, _ in reversed(stack)]
        codes += [index << _TYPE_BITS | _END for _, index in reversed(stack)]
    packets = np.array(codes, np.int64)
    slice_index = packets >> _TYPE_BITS
    return slice_index, packets & (1 << _TYPE_BITS) - 1, row_of[slice_index], np.array(times, np.int64)


_THREAD_IDS = range(1, 1 << 31)
"""The thread ids that Perfetto accepts."""
_PIDS = range(-(1 << 31), 1 << 31)
"""The process ids that Perfetto accepts."""


class PacketOutput:
    """Writes a merged trace in Perfetto's format, once all of the profiler's events were added."""

    def __init__(self, stream: EventStream, sink: Sink, table: EventTable) -> None:
        self._stream, self._sink = stream, Checksum(sink.write)
        self._slices = ProfilerSlices(table)

    def add(self, _chunk: Chunk, events: Sequence[Any]) -> None:
        """Add a chunk's events, as `EventTable.add` returned them."""
        self._slices.add(events)

    def notes(self, _: ProfilerEvents) -> list[str]:
        """Return notes on events that are left out."""
        return self._slices.notes()

    def finish(self, overlaid: Overlay, events: ProfilerEvents, metadata: Mapping[str, Any], table: bytes) -> None:
        """Write the recording's packets, the profiler's, and the table."""
        sink, slices, base = self._sink, self._slices, base_time_ns(self._stream.keys, "")
        start = _sequence_start(base, metadata)
        sink.write(serialize(*start, *_tracks(slices, events, overlaid)))
        ids = [(track.process, track.tid, overlaid.pid_of(track.process)) for track in overlaid.shown_timeline.tracks]
        processes = {process: _uuid("process", pid) for process, _, pid in ids}
        threads = {(process, tid): _uuid("track", (pid, tid)) for process, tid, pid in ids}
        parents = TrackParents(_uuid("process", overlaid.pid), processes, threads)
        recorded = move_times(overlaid.shown_timeline, lambda time: time + base)
        counters = [counter._replace(time_ns=counter.time_ns + base) for counter in part_counters(overlaid.timeline)]
        for _, packets in PerfettoWriter(parents).packets(WrittenPart(recorded, counters)):
            sink.write(packets)
        spans, encoder = overlaid.stream_spans, slices.encoder
        fields = [encoder.fields(*texts) for texts in describe_slices(spans, overlaid.stream_names)]
        sink.write(serialize(*encoder.interned_packets()))
        ranks = {events.tracks[track]: rank for rank, track in enumerate(slices.tracks)}
        for track, (key, rank) in zip(slices.tracks, ranks.items(), strict=True):
            for packets in slices.packets(track, base, _uuid("track", key), _row_describer(key, rank, overlaid)):
                sink.write(packets)
        for track in np.unique(spans.track).tolist():
            rows, key = slice(*np.searchsorted(spans.track, [track, track + 1]).tolist()), events.tracks[track]
            times = spans.start[rows] + base, (spans.end - spans.start)[rows]
            describe_row = _row_describer(key, ranks.get(key, 0), overlaid)
            for packets in profiler_packets(*times, fields[rows], _uuid("modules", key), describe_row):
                sink.write(packets)
        for packet in packet_table(table, sink.value):
            sink.write(packet)


def _sequence_start(base: int, metadata: Mapping[str, Any]) -> Iterator[TracePacket]:
    """Yield the packets that start the profiler's sequence and contain the metadata of the merge."""
    first = following_packet(PROFILER_SEQUENCE)
    first.sequence_flags |= TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
    first.trace_packet_defaults.timestamp_clock_id = REALTIME_CLOCK
    # In a trace without module slices, only this snapshot declares the trace's clock; a reader needs it.
    first.clock_snapshot.primary_trace_clock = REALTIME_CLOCK
    first.clock_snapshot.clocks.add(clock_id=REALTIME_CLOCK, timestamp=base)
    yield first
    packet = following_packet(PROFILER_SEQUENCE)
    packet.chrome_events.metadata.add(name=MERGED_PACKET, string_value=metadata_json(metadata).decode())
    yield packet


def _tracks(slices: ProfilerSlices, events: ProfilerEvents, overlaid: Overlay) -> Iterator[TracePacket]:
    """Yield the descriptors of processes, devices, threads and streams, and of modtrace's tracks above the streams.

    A process is one group, which also contains the recording's tracks: below each thread, above its operators.
    """
    with_modules = {events.tracks[track] for track in np.unique(overlaid.stream_spans.track).tolist()}
    recorded: dict[TrackKey, str] = {
        (overlaid.pid_of(track.process), track.tid): track.thread for track in overlaid.shown_timeline.tracks
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
        # Tracks without a process, such as the profiler's own spans, are shown with the profiled process.
        process = _uuid("process", _group_pid(pid, overlaid))
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


def _group_pid(pid: int | str, overlaid: Overlay) -> int | str:
    """Return the pid of the process in whose group a viewer shows the tracks of `pid`."""
    return pid if isinstance(pid, int) or pid in overlaid.pids.values() else overlaid.pid


def _is_process(pid: int | str, events: ProfilerEvents, overlaid: Overlay) -> bool:
    """Return whether a pid belongs to a process, not to a device."""
    return (
        isinstance(pid, int)
        and pid in _PIDS
        and (pid in events.cpu_pids or pid == overlaid.pid or pid in overlaid.pids.values())
    )


def _row_describer(key: TrackKey, rank: int, overlaid: Overlay) -> Callable[[int], TracePacket]:
    """Return a function that makes the descriptor of a track's extra row for overlapping slices, by its number."""

    def describe(row: int) -> TracePacket:
        process = _uuid("process", _group_pid(key[0], overlaid))
        name = escaped(f"{key[1]} · overlapping slices")
        return describe_track(PROFILER_SEQUENCE, _uuid("beside", key, row), process, 3 * rank + 2, name)

    return describe


def _uuid(*key: object) -> int:
    return track_uuid(repr(key))
