"""Perfetto's own format: `.pftrace` and `.pftrace.gz`, track events as protobuf."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import DebugAnnotation, TracePacket, TrackEvent

from .._arrays import INT64_MIN, Float64Array, IndexArray, Int32Array, Int64Array, Numbering
from .._errors import WriteError
from .._files import atomic_writer
from ..formats.limits import escaped, escaped_name
from ..formats.own_table import Checksum, packet_table
from ..formats.packet_stream import varint_bytes
from ..formats.slice_args import CALL_FIELDS, SharedTexts, extra_arg_texts, slice_texts
from ..formats.table_bytes import TableWriter
from ..timeline import PHASES, Mark, Pieces, Slices, Timeline
from ..timeline.nesting import clip_and_nest, depth_by_time, nest_times
from ..timeline.slices import Value, distinct_args
from .lanes import Lanes
from .perfetto_descriptors import ArgNumbers, InternTable, TrackDescriptors, TrackParents, sequence_start, serialize
from .protobuf_columns import (
    FIXED64,
    LENGTH_DELIMITED,
    BytesColumn,
    ByteTable,
    Column,
    RaggedColumn,
    field_tag,
    interleave,
    message_field_tag,
    packets_of,
    record_lengths,
    repeat,
    track_event_packets,
    varint,
)
from .slices import CollectiveFlows, FlowRole, flow_roles
from .written_parts import WrittenPart, written_parts

_CHUNK = 1 << 15
"""Number of spans whose packets are in memory at a time."""

# The varint fields need two or three bytes, `flow_ids` needs eight.
_FLOW_BEGIN = message_field_tag(TrackEvent, "flow_ids_old")
_FLOW_END = message_field_tag(TrackEvent, "terminating_flow_ids_old")
_CALL, _STEP, _LINK, _COMPLETE, _FQN, _CLASS = (
    field_tag(CALL_FIELDS[name]) for name in ("call", "step", "link", "complete", "fqn", "module_class")
)
_BEGIN = TrackEvent(type=TrackEvent.TYPE_SLICE_BEGIN).SerializeToString()
_END = TrackEvent(type=TrackEvent.TYPE_SLICE_END)
_NAME = message_field_tag(TrackEvent, "name", LENGTH_DELIMITED)
_COUNTER_KIND = TrackEvent(type=TrackEvent.TYPE_COUNTER).SerializeToString()
_INTEGER_VALUE = message_field_tag(TrackEvent, "counter_value")
_DOUBLE_VALUE = message_field_tag(TrackEvent, "double_counter_value", FIXED64)

_Events = Callable[[slice], list[Column]]
"""A function that returns the fields of a slice of events."""


def write_perfetto(timeline: Timeline | Pieces, path: str | os.PathLike[str], *, mode: int | None = None) -> None:
    """Write a Perfetto trace of track events in Unix nanoseconds; `mode` is passed to `atomic_writer`.

    Raises WriteError if spans of a track overlap partly, or the file cannot be written; an existing file is intact.
    """
    table, writer = TableWriter(), PerfettoWriter()
    with atomic_writer(path, mode) as file:
        checksum = Checksum(file.write)
        for packets in written_parts(timeline, path, table, writer.packets):
            checksum.write(packets)
        for packet in packet_table(table.finish(), checksum.value):
            file.write(packet)


class PerfettoWriter:
    """Makes the packets of a trace, part by part; each track, name and number is defined before its first use.

        part 1   schema · track 1 forward · its names · its spans
        part 2   track 2 backward · names of both · spans of both · metadata, marks, counters and other slices

    `parents` has the tracks of threads if the file already describes them.
    """

    def __init__(self, parents: TrackParents | None = None) -> None:
        self._parents, self._sequences = parents, Numbering[object](1)
        self._lanes: Lanes | None = None

    def packets(self, part: WrittenPart) -> Iterator[tuple[int, bytes]]:
        """Yield the packets of a part in blocks: the number of spans that end in a block, and its bytes."""
        timeline, step_parts, _ = part
        is_first = self._lanes is None
        lanes = self._lanes = Lanes.from_timeline(timeline, self._lanes)
        for index in range(len(lanes.lanes)):
            _ = self._sequences["lane", index]  # gives the sequences of lanes the smallest numbers
        if is_first:
            self._tracks = TrackDescriptors(timeline, lanes, self._sequences["metadata"], self._parents)
            self._interned = InternTable(timeline, [escaped_name(name) for name in timeline.names])
            yield 0, serialize(self._interned.description())
        tracks = self._tracks
        yield from ((0, serialize(packet)) for packet in tracks.packets(timeline, lanes, step_parts))
        moments = np.array([mark.time_ns for mark in timeline.marks], np.int64)
        for packets in _moments(moments, tracks.uuid("marks"), self._sequences["marks"], _marks(timeline.marks)):
            yield 0, packets
        counters = [(counter.time, _integers(counter.value)) for counter in timeline.counters]
        counters += [(counter.time_ns, _doubles(counter.ns / 1e6)) for counter in step_parts or ()]
        for index, (time, events) in enumerate(counters):
            for packets in _moments(time, tracks.uuid("counter", index), self._sequences["counter", index], events):
                yield 0, packets
        flows = CollectiveFlows(timeline)
        yield from ((0, packets) for _, packets in self._slice_packets(_other_slices(timeline, lanes, flows)))
        module_events = _ModuleEvents(timeline.columns, self._interned, flows)
        spans = _LanePackets(lanes, timeline.columns, depth_by_time(timeline.columns), module_events)
        yield from self._slice_packets(spans, module_events.texts)

    def _slice_packets(
        self, lane_packets: _LanePackets, texts: ArgNumbers | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the packets of slices in blocks of several lanes, with the number of slices that end in a block.

        The start of a lane's sequence precedes its packets; with `texts` also the names and args of its modules.
        """
        slices, group, count = lane_packets.slices, list[tuple[int, int, IndexArray]](), 0
        for index, rows in enumerate(lane_packets.lanes.rows_by_lane(slices)):
            if len(rows):
                sequence, first_ns = self._sequences["lane", index], int(slices.start[rows[0]])
                yield 0, serialize(sequence_start(sequence, self._tracks.uuid("lane", index), first_ns))
                if texts is not None:
                    yield 0, serialize(*self._interned.packets(sequence, slices.name[rows], texts))
                group.append((index, sequence, rows))
                count += len(rows)
            if count >= _CHUNK:
                yield from lane_packets.packets(group)
                group, count = [], 0
        yield from lane_packets.packets(group)


def _marks(marks: Sequence[Mark]) -> _Events:
    kinds, instant = Numbering[str](), TrackEvent.TYPE_INSTANT
    number, texts = [kinds[mark.kind] for mark in marks], [escaped(mark.text).encode() for mark in marks]
    prefixes = ByteTable([TrackEvent(type=instant, categories=[kind]).SerializeToString() for kind in kinds])

    def events(part: slice) -> list[Column]:
        text = RaggedColumn.from_strings(texts[part])
        return [prefixes.pick(np.array(number[part])), varint(text.lengths, _NAME), text]

    return events


def _integers(value: Int64Array) -> _Events:
    return lambda part: [varint(value[part], _COUNTER_KIND + _INTEGER_VALUE)]


def _doubles(value: Float64Array) -> _Events:
    data = np.empty((len(value), len(_COUNTER_KIND) + len(_DOUBLE_VALUE) + 8), np.uint8)
    data[:, :-8] = np.frombuffer(_COUNTER_KIND + _DOUBLE_VALUE, np.uint8)
    data[:, -8:] = value.astype("<f8").view(np.uint8).reshape(-1, 8)
    return lambda part: [BytesColumn(data[part], None)]


def _moments(time: Int64Array, track: int, sequence: int, events: _Events) -> Iterator[bytes]:
    """Yield the packets of a track of events without a duration: marks, or samples of a counter."""
    if not len(time):
        return
    yield serialize(sequence_start(sequence, track, int(time[0])))
    sequence_field = TracePacket(trusted_packet_sequence_id=sequence).SerializeToString()
    for first in range(0, len(time), _CHUNK):
        part = slice(first, first + _CHUNK)
        delta = np.diff(time[part], prepend=time[max(first - 1, 0)])
        packets = track_event_packets(delta, repeat(sequence_field, len(delta)), events(part))
        yield interleave([(np.arange(len(delta)), packets)], len(delta))


class _LanePackets:
    """Slices as begin and end packets, lane by lane; `depth` is their depth as readers compute it."""

    def __init__(
        self, lanes: Lanes, slices: Slices, depth: Int32Array, begin_event: Callable[[IndexArray], Sequence[Column]]
    ) -> None:
        self.slices, self.lanes, self._depth, self._begin_event = slices, lanes, depth, begin_event

    def packets(self, lanes: Sequence[tuple[int, int, IndexArray]]) -> Iterator[tuple[int, bytes]]:
        """Yield the packets of lanes in blocks of up to `_CHUNK` spans, with the number of spans that end in a block.

        A lane is its index, the id of its packet sequence, and its rows, by start and outermost first. Raises
        WriteError if two spans of a lane overlap and neither contains the other.
        """
        if not lanes:
            return
        rows = np.concatenate([lane_rows for _, _, lane_rows in lanes])
        first_of_lane = np.cumsum([0, *(len(lane_rows) for _, _, lane_rows in lanes)])
        start, end = self._shift_apart(rows, first_of_lane)
        packets = [
            [TracePacket(trusted_packet_sequence_id=lane[1], track_event=e) for lane in lanes] for e in (None, _END)
        ]
        sequence, ends = (ByteTable([packet.SerializeToString() for packet in column]) for column in packets)
        lane_of = np.repeat(np.arange(len(lanes)), np.diff(first_of_lane))
        last_time = int(start[0])
        open_spans = np.empty(0, np.int64)
        for first in range(0, len(rows), _CHUNK):
            last = min(first + _CHUNK, len(rows))
            # A begin packet follows all earlier begins, and the ends of the earlier spans that are closed by then.
            new_spans = np.arange(first, last)
            begin_index = 2 * new_spans - self._depth[rows[new_spans]]
            next_begin = 2 * last - int(self._depth[rows[last]]) if last < len(rows) else 2 * last
            open_spans = np.concatenate([open_spans, new_spans])
            end_index = 2 * _count_earlier_starts(start, end, open_spans) - self._depth[rows[open_spans]] - 1
            ends_here = end_index < next_begin
            ended_spans, open_spans = open_spans[ends_here], open_spans[~ends_here]
            begin_index, end_index = begin_index - begin_index[0], end_index[ends_here] - begin_index[0]
            count = len(new_spans) + len(ended_spans)
            time = np.full(count, -1, np.int64)
            if next_begin - (2 * first - int(self._depth[rows[first]])) != count:
                raise self._overlap(lanes)
            time[begin_index], time[end_index] = start[new_spans], end[ended_spans]
            delta = np.diff(time, prepend=last_time)
            if np.any(delta < 0):
                raise self._overlap(lanes)
            last_time = int(time[-1])
            delta[begin_index[np.isin(new_spans, first_of_lane)]] = 0
            events = self._begin_event(rows[new_spans])
            packets_here = track_event_packets(delta[begin_index], sequence.pick(lane_of[new_spans]), events)
            parts = [(begin_index, packets_here)]
            if len(ended_spans):
                parts.append((end_index, packets_of(delta[end_index], [ends.pick(lane_of[ended_spans])])))
            yield len(ended_spans), interleave(parts, count)

    def _shift_apart(self, rows: IndexArray, first_of_lane: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the starts and ends of the spans of lanes, moved so that each lane starts after the previous one."""
        start, end = self.slices.start[rows], self.slices.end[rows]
        if len(first_of_lane) == 2:
            return start, end
        lane_start = start[first_of_lane[:-1]]
        lane_ns = np.maximum.reduceat(end, first_of_lane[:-1]) - lane_start + 1
        shift = np.repeat(np.cumsum(lane_ns) - lane_ns - lane_start, np.diff(first_of_lane))
        return start + shift, end + shift

    def _overlap(self, lanes: Sequence[tuple[int, int, IndexArray]]) -> WriteError:
        """Return the error that names the lane with an overlap; with several lanes, try each and raise the error."""
        for lane in lanes if len(lanes) > 1 else ():
            for _ in self.packets([lane]):
                pass
        return WriteError(f"spans on {self.lanes.lanes[lanes[0][0]].name} overlap and neither contains the other")


class _ModuleEvents:
    """Returns the fields of begin events of module spans: `events(rows)`; bytes that events share are made once."""

    def __init__(self, columns: Slices, interned: InternTable, flows: CollectiveFlows) -> None:
        self._columns = columns
        self._names = len(interned.label)
        self._roles = flow_roles(columns)
        call_message = field_tag(interned.extension, LENGTH_DELIMITED)
        event_type = TrackEvent.TYPE_SLICE_BEGIN
        names = [*zip(interned.label.tolist(), interned.fqn.tolist(), strict=True)]
        # Slices of one correlation id have one colour in Perfetto, so a module has its colour on all tracks.
        begin_events = [
            TrackEvent(type=event_type, category_iids=[1 + phase], name_iid=iid, correlation_id=1 + fqn)
            for phase, (iid, fqn) in itertools.product(range(len(PHASES)), names)
        ]
        self._begin = ByteTable([event.SerializeToString() + call_message for event in begin_events])
        modules = zip(interned.fqn.tolist(), interned.module_class.tolist(), strict=True)
        self._module = ByteTable([_module(fqn, module_class) for fqn, module_class in modules])
        extra_fields, self.texts = _extra_args(columns)
        self._optional_fields = [*extra_fields, *_launches(flows, len(columns))]

    def __call__(self, rows: IndexArray) -> list[BytesColumn]:
        columns = self._columns
        count, name, roles = len(rows), columns.name[rows], self._roles[rows]
        link, has_flow = np.maximum(columns.link[rows], 0), roles >= FlowRole.BEGIN
        has_link_arg, is_incomplete = roles == FlowRole.LINK_ARG, ~columns.complete[rows]
        flow = varint(link * has_flow, _FLOW_BEGIN).where(has_flow)
        flow.data[roles == FlowRole.END, : len(_FLOW_END)] = np.frombuffer(_FLOW_END, np.uint8)
        call = [self._module.pick(name), varint(columns.call[rows], _CALL), varint(columns.step[rows], _STEP)]
        if np.any(has_link_arg):
            call.append(varint(link, _LINK).where(has_link_arg))
        if np.any(is_incomplete):
            call.append(repeat(_COMPLETE + b"\0", count).where(is_incomplete))
        return [
            *(table.pick(index[rows]) for index, table in self._optional_fields),
            *([flow] if np.any(has_flow) else []),
            self._begin.pick(columns.phase[rows].astype(np.int64) * self._names + name),
            varint(record_lengths(call)),
            *call,
        ]


def _other_slices(timeline: Timeline, lanes: Lanes, flows: CollectiveFlows) -> _LanePackets:
    """Return the slices of all kinds except modules as packets; a slice that outlasts its parent ends with it."""
    first = len(timeline.columns)
    slices = timeline.slices.take(slice(first, None))
    depth = depth_by_time(slices)
    if np.any((slices.parent >= 0) & (slices.end > timeline.slices.end[slices.parent])):
        end, _, _ = clip_and_nest(slices.track.astype(np.int64), slices.start, slices.end, np.arange(len(slices)))
        slices = replace(slices, end=end)
        depth, _ = nest_times(slices.start, end, slices.track)
    texts = slice_texts(timeline, slice(first, None))
    shared = [_BEGIN + _event(shared_texts) for shared_texts in texts.shared]
    numbers = [
        (DebugAnnotation(name=name).SerializeToString() + _NUMBER_VALUE, column.dense(len(slices), _ABSENT))
        for name, column in texts.numbers.items()
    ]

    def events(rows: IndexArray) -> list[Column]:
        fields: list[Column] = [RaggedColumn.from_strings([shared[key] for key in texts.key[rows].tolist()])]
        for prefix, values in numbers:
            value, has_value = varint(values[rows], prefix), values[rows] != _ABSENT
            if np.any(has_value):
                fields += [varint(record_lengths([value]), _ANNOTATION).where(has_value), value.where(has_value)]
        rows_with_flows = np.flatnonzero(flows.has_flow(first + rows)).tolist()
        flow_fields = [b""] * len(rows) if rows_with_flows else []
        for index in rows_with_flows:
            started, ended = flows.ids_in_perfetto(first + int(rows[index]))
            flow_fields[index] = TrackEvent(flow_ids_old=started, terminating_flow_ids_old=ended).SerializeToString()
        return [*fields, *([RaggedColumn.from_strings(flow_fields)] if flow_fields else [])]

    return _LanePackets(lanes, slices, depth, events)


_ABSENT = INT64_MIN
_ANNOTATION = message_field_tag(TrackEvent, "debug_annotations", LENGTH_DELIMITED)
_NUMBER_VALUE = message_field_tag(DebugAnnotation, "int_value")


def _event(texts: SharedTexts) -> bytes:
    """Return the shared texts of slices as fields of a TrackEvent."""
    event = TrackEvent(name=texts.label, categories=[texts.category])
    for name, value in texts.args.items():
        kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "string"
        event.debug_annotations.add(name=name, **{f"{kind}_value": value})
    serialized: bytes = event.SerializeToString()
    return serialized


def _count_earlier_starts(start: Int64Array, end: Int64Array, spans: Int64Array) -> Int64Array:
    """Return the number of slices, in start order, that start before the end of each of `spans`."""
    span_end = end[spans]
    is_empty = span_end == start[spans]
    count = np.searchsorted(start, span_end, side="left")
    if np.any(is_empty):
        # An empty slice ends after all slices that start at its time; other slices end before those.
        count[is_empty] = np.searchsorted(start, span_end[is_empty], side="right")
    return count


def _module(fqn: int, module_class: int) -> bytes:
    return _FQN + varint_bytes(fqn) + _CLASS + varint_bytes(module_class)


def _launches(flows: CollectiveFlows, span_count: int) -> Iterator[tuple[Int32Array, ByteTable]]:
    """Yield the index of each span's set of flows to collectives, and the sets as bytes; nothing without flows."""
    launches = flows.launches()
    if not launches:
        return
    index = np.zeros(span_count, np.int32)
    index[[*launches]] = np.arange(1, len(launches) + 1)
    events = [TrackEvent(flow_ids_old=ids).SerializeToString() for ids in launches.values()]
    yield index, ByteTable([b"", *events])


def _extra_args(columns: Slices) -> tuple[list[tuple[Int32Array, ByteTable]], ArgNumbers]:
    """Return the index of each span's extra args, and the distinct args as bytes; and the numbers of their texts."""
    numbers = ArgNumbers(Numbering[str](1), Numbering[str](1))
    if not columns.args:
        return [], numbers
    index = np.zeros(len(columns), np.int32)
    rows, args_of_row, distinct = distinct_args(columns.args)
    index[rows] = args_of_row + 1
    return [(index, ByteTable([b"", *(_annotations(args, numbers) for args in distinct)]))], numbers


def _annotations(args: Mapping[str, Value], numbers: ArgNumbers) -> bytes:
    event = TrackEvent()
    for name, text in extra_arg_texts(args).items():
        event.debug_annotations.add(name_iid=numbers.names[name], string_value_iid=numbers.texts[text])
    serialized: bytes = event.SerializeToString()
    return serialized
