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
"""The number of spans whose packets are in memory at a time."""

# The varint forms: `flow_ids` takes eight bytes for what is two or three.
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
"""Returns the fields of a range of events."""


def write_perfetto(timeline: Timeline | Pieces, path: str | os.PathLike[str], *, mode: int | None = None) -> None:
    """Write a trace of track events, as Perfetto reads it, in Unix nanoseconds; `mode` as for `atomic_writer`.

    Raises WriteError if spans of a track overlap partly, or the file cannot be written; an existing file is intact.
    """
    table, writer = TableWriter(), PerfettoWriter()
    with atomic_writer(path, mode) as file:
        summed = Checksum(file.write)
        for packets in written_parts(timeline, path, table, writer.packets):
            summed.write(packets)
        for packet in packet_table(table.finish(), summed.value):
            file.write(packet)


class PerfettoWriter:
    """Makes the packets of a trace, part by part: what a track, a name or a number is, is said where it comes first.

        part 1   schema · track 1 forward · its names · its spans
        part 2   track 2 backward · names of both · spans of both · metadata, marks, counters and other slices

    `parents` has the tracks of threads if the file describes them already.
    """

    def __init__(self, parents: TrackParents | None = None) -> None:
        self._parents, self._sequences = parents, Numbering[object](1)
        self._lanes: Lanes | None = None

    def packets(self, part: WrittenPart) -> Iterator[tuple[int, bytes]]:
        """Yield the packets of a part: how many spans have ended in some, and these."""
        timeline, step_parts, _ = part
        is_first = self._lanes is None
        lanes = self._lanes = Lanes.from_timeline(timeline, self._lanes)
        for index in range(len(lanes.lanes)):
            _ = self._sequences["lane", index]  # those of lanes have the smallest numbers
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
        counters += [(counter.time, _doubles(counter.ns / 1e6)) for counter in step_parts or ()]
        for index, (time, events) in enumerate(counters):
            for packets in _moments(time, tracks.uuid("counter", index), self._sequences["counter", index], events):
                yield 0, packets
        flows = CollectiveFlows(timeline)
        yield from ((0, packets) for _, packets in self._slice_packets(_other_slices(timeline, lanes, flows)))
        begins = _ModuleEvents(timeline.columns, self._interned, flows)
        spans = _LanePackets(lanes, timeline.columns, depth_by_time(timeline.columns), begins)
        yield from self._slice_packets(spans, begins.texts)

    def _slice_packets(self, drawn: _LanePackets, texts: ArgNumbers | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield the packets of slices, some lanes at a time, and how many slices they end.

        Before those of a lane is the start of its sequence; with `texts` also the names and args of its modules.
        """
        slices, group, count = drawn.slices, list[tuple[int, int, IndexArray]](), 0
        for index, rows in enumerate(drawn.lanes.rows_by_lane(slices)):
            if len(rows):
                sequence, first_ns = self._sequences["lane", index], int(slices.start[rows[0]])
                yield 0, serialize(sequence_start(sequence, self._tracks.uuid("lane", index), first_ns))
                if texts is not None:
                    yield 0, serialize(*self._interned.packets(sequence, slices.name[rows], texts))
                group.append((index, sequence, rows))
                count += len(rows)
            if count >= _CHUNK:
                yield from drawn.of_lanes(group)
                group, count = [], 0
        yield from drawn.of_lanes(group)


def _marks(marks: Sequence[Mark]) -> _Events:
    kinds, instant = Numbering[str](), TrackEvent.TYPE_INSTANT
    number, texts = [kinds[mark.kind] for mark in marks], [escaped(mark.text).encode() for mark in marks]
    begins = ByteTable([TrackEvent(type=instant, categories=[kind]).SerializeToString() for kind in kinds])

    def events(part: slice) -> list[Column]:
        text = RaggedColumn.from_strings(texts[part])
        return [begins.pick(np.array(number[part])), varint(text.lengths, _NAME), text]

    return events


def _integers(value: Int64Array) -> _Events:
    return lambda part: [varint(value[part], _COUNTER_KIND + _INTEGER_VALUE)]


def _doubles(value: Float64Array) -> _Events:
    data = np.empty((len(value), len(_COUNTER_KIND) + len(_DOUBLE_VALUE) + 8), np.uint8)
    data[:, :-8] = np.frombuffer(_COUNTER_KIND + _DOUBLE_VALUE, np.uint8)
    data[:, -8:] = value.astype("<f8").view(np.uint8).reshape(-1, 8)
    return lambda part: [BytesColumn(data[part], None)]


def _moments(time: Int64Array, track: int, sequence: int, events: _Events) -> Iterator[bytes]:
    """Yield the packets of a track whose events last for no time: marks, or samples of a counter."""
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
    """Slices as begin and end packets, lane by lane; their depth is as readers find it."""

    def __init__(
        self, lanes: Lanes, slices: Slices, depth: Int32Array, begin_event: Callable[[IndexArray], Sequence[Column]]
    ) -> None:
        self.slices, self.lanes, self._depth, self._begin_event = slices, lanes, depth, begin_event

    def of_lanes(self, lanes: Sequence[tuple[int, int, IndexArray]]) -> Iterator[tuple[int, bytes]]:
        """Yield packets of some lanes, some thousand at a time, and how many spans they end.

        A lane is its index, the id of its packet sequence, and its spans, by start and outermost first. Raises
        WriteError if two spans of a lane overlap without one lying in the other.
        """
        if not lanes:
            return
        rows = np.concatenate([of_lane for _, _, of_lane in lanes])
        first_of_lane = np.cumsum([0, *(len(of_lane) for _, _, of_lane in lanes)])
        start, end = self._one_after_the_other(rows, first_of_lane)
        packets = [
            [TracePacket(trusted_packet_sequence_id=lane[1], track_event=e) for lane in lanes] for e in (None, _END)
        ]
        sequence, ends = (ByteTable([packet.SerializeToString() for packet in column]) for column in packets)
        lane_of = np.repeat(np.arange(len(lanes)), np.diff(first_of_lane))
        last_time = int(start[0])
        still_open = np.empty(0, np.int64)
        for first in range(0, len(rows), _CHUNK):
            last = min(first + _CHUNK, len(rows))
            # A begin comes after all earlier begins, and the ends of those of them that are no longer open.
            begun = np.arange(first, last)
            begin = 2 * begun - self._depth[rows[begun]]
            next_begin = 2 * last - int(self._depth[rows[last]]) if last < len(rows) else 2 * last
            open_ = np.concatenate([still_open, begun])
            ended_at = 2 * _begun_before(start, end, open_) - self._depth[rows[open_]] - 1
            ends_here = ended_at < next_begin
            ended, still_open = open_[ends_here], open_[~ends_here]
            begin, ended_at = begin - begin[0], ended_at[ends_here] - begin[0]
            count = len(begun) + len(ended)
            time = np.full(count, -1, np.int64)
            if next_begin - (2 * first - int(self._depth[rows[first]])) != count:
                raise self._overlap(lanes)
            time[begin], time[ended_at] = start[begun], end[ended]
            delta = np.diff(time, prepend=last_time)
            if np.any(delta < 0):
                raise self._overlap(lanes)
            last_time = int(time[-1])
            delta[begin[np.isin(begun, first_of_lane)]] = 0
            events = self._begin_event(rows[begun])
            parts = [(begin, track_event_packets(delta[begin], sequence.pick(lane_of[begun]), events))]
            if len(ended):
                parts.append((ended_at, packets_of(delta[ended_at], [ends.pick(lane_of[ended])])))
            yield len(ended), interleave(parts, count)

    def _one_after_the_other(self, rows: IndexArray, first_of_lane: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return starts and ends of the spans of some lanes, moved so that each lane begins after the one before it."""
        start, end = self.slices.start[rows], self.slices.end[rows]
        if len(first_of_lane) == 2:
            return start, end
        begins = start[first_of_lane[:-1]]
        took = np.maximum.reduceat(end, first_of_lane[:-1]) - begins + 1
        shift = np.repeat(np.cumsum(took) - took - begins, np.diff(first_of_lane))
        return start + shift, end + shift

    def _overlap(self, lanes: Sequence[tuple[int, int, IndexArray]]) -> WriteError:
        """Return the error that names the lane with an overlap; of several lanes, raise it."""
        for lane in lanes if len(lanes) > 1 else ():
            for _ in self.of_lanes([lane]):
                pass
        return WriteError(f"spans on {self.lanes.lanes[lanes[0][0]].name} overlap without one lying in the other")


class _ModuleEvents:
    """The fields of the events that begin the spans of modules: `events(rows)`; bytes that many share are made once."""

    def __init__(self, columns: Slices, interned: InternTable, flows: CollectiveFlows) -> None:
        self._columns = columns
        self._names = len(interned.label)
        self._roles = flow_roles(columns)
        call_message = field_tag(interned.extension, LENGTH_DELIMITED)
        begin, names = TrackEvent.TYPE_SLICE_BEGIN, [*zip(interned.label.tolist(), interned.fqn.tolist(), strict=True)]
        # Slices of one correlation id have one colour in Perfetto: a module's is the same wherever it runs.
        begins = [
            TrackEvent(type=begin, category_iids=[1 + phase], name_iid=iid, correlation_id=1 + fqn)
            for phase, (iid, fqn) in itertools.product(range(len(PHASES)), names)
        ]
        self._begin = ByteTable([event.SerializeToString() + call_message for event in begins])
        modules = zip(interned.fqn.tolist(), interned.module_class.tolist(), strict=True)
        self._module = ByteTable([_module(fqn, module_class) for fqn, module_class in modules])
        extra, self.texts = _extra_args(columns)
        self._fields_of_some = [*extra, *_launches(flows, len(columns))]

    def __call__(self, rows: IndexArray) -> list[BytesColumn]:
        columns = self._columns
        count, name, roles = len(rows), columns.name[rows], self._roles[rows]
        link, has_flow = np.maximum(columns.link[rows], 0), roles >= FlowRole.BEGIN
        in_args, incomplete = roles == FlowRole.LINK_ARG, ~columns.complete[rows]
        flow = varint(link * has_flow, _FLOW_BEGIN).where(has_flow)
        flow.data[roles == FlowRole.END, : len(_FLOW_END)] = np.frombuffer(_FLOW_END, np.uint8)
        call = [self._module.pick(name), varint(columns.call[rows], _CALL), varint(columns.step[rows], _STEP)]
        if np.any(in_args):
            call.append(varint(link, _LINK).where(in_args))
        if np.any(incomplete):
            call.append(repeat(_COMPLETE + b"\0", count).where(incomplete))
        return [
            *(table.pick(index[rows]) for index, table in self._fields_of_some),
            *([flow] if np.any(has_flow) else []),
            self._begin.pick(columns.phase[rows].astype(np.int64) * self._names + name),
            varint(record_lengths(call)),
            *call,
        ]


def _other_slices(timeline: Timeline, lanes: Lanes, flows: CollectiveFlows) -> _LanePackets:
    """Return the slices of all kinds but modules as packets; one that outlasts another around it ends with that."""
    first = len(timeline.columns)
    others = timeline.slices.take(slice(first, None))
    depth = depth_by_time(others)
    if np.any((others.parent >= 0) & (others.end > timeline.slices.end[others.parent])):
        end, _, _ = clip_and_nest(others.track.astype(np.int64), others.start, others.end, np.arange(len(others)))
        others = replace(others, end=end)
        depth, _ = nest_times(others.start, end, others.track)
    texts = slice_texts(timeline, slice(first, None))
    shared = [_BEGIN + _event(shared_texts) for shared_texts in texts.shared]
    numbers = [
        (DebugAnnotation(name=name).SerializeToString() + _NUMBER_VALUE, column.dense(len(others), _ABSENT))
        for name, column in texts.numbers.items()
    ]

    def events(rows: IndexArray) -> list[Column]:
        fields: list[Column] = [RaggedColumn.from_strings([shared[key] for key in texts.key[rows].tolist()])]
        for prefix, values in numbers:
            value, has = varint(values[rows], prefix), values[rows] != _ABSENT
            if np.any(has):
                fields += [varint(record_lengths([value]), _ANNOTATION).where(has), value.where(has)]
        with_flows = np.flatnonzero(flows.has_flow(first + rows)).tolist()
        ends = [b""] * len(rows) if with_flows else []
        for place in with_flows:
            going_on, ending = flows.of_row(first + int(rows[place]))
            ends[place] = TrackEvent(flow_ids_old=going_on, terminating_flow_ids_old=ending).SerializeToString()
        return [*fields, *([RaggedColumn.from_strings(ends)] if ends else [])]

    return _LanePackets(lanes, others, depth, events)


_ABSENT = INT64_MIN
_ANNOTATION = message_field_tag(TrackEvent, "debug_annotations", LENGTH_DELIMITED)
_NUMBER_VALUE = message_field_tag(DebugAnnotation, "int_value")


def _event(texts: SharedTexts) -> bytes:
    """Return the texts that slices share, as fields of a TrackEvent."""
    event = TrackEvent(name=texts.label, categories=[texts.category])
    for name, value in texts.args.items():
        kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "string"
        event.debug_annotations.add(name=name, **{f"{kind}_value": value})
    serialized: bytes = event.SerializeToString()
    return serialized


def _begun_before(start: Int64Array, end: Int64Array, spans: Int64Array) -> Int64Array:
    """Return how many slices begin before the end of each of some of them; all are in start order."""
    ends = end[spans]
    empty = ends == start[spans]
    before = np.searchsorted(start, ends, side="left")
    if np.any(empty):
        # An empty slice ends after all that begins in its instant, and others end before that.
        before[empty] = np.searchsorted(start, ends[empty], side="right")
    return before


def _module(fqn: int, module_class: int) -> bytes:
    return _FQN + varint_bytes(fqn) + _CLASS + varint_bytes(module_class)


def _launches(flows: CollectiveFlows, span_count: int) -> Iterator[tuple[Int32Array, ByteTable]]:
    """Yield which flows to collectives each span begins, and all sets of them as bytes; nothing if there are none."""
    launches = flows.launches()
    if not launches:
        return
    index = np.zeros(span_count, np.int32)
    index[[*launches]] = np.arange(1, len(launches) + 1)
    events = [TrackEvent(flow_ids_old=ids).SerializeToString() for ids in launches.values()]
    yield index, ByteTable([b"", *events])


def _extra_args(columns: Slices) -> tuple[list[tuple[Int32Array, ByteTable]], ArgNumbers]:
    """Return which args of its own each span has, and all that occur as bytes; and the numbers of their texts."""
    numbers = ArgNumbers(Numbering[str](1), Numbering[str](1))
    if not columns.args:
        return [], numbers
    index = np.zeros(len(columns), np.int32)
    rows, of_rows, kinds = distinct_args(columns.args)
    index[rows] = of_rows + 1
    return [(index, ByteTable([b"", *(_annotations(args, numbers) for args in kinds)]))], numbers


def _annotations(args: Mapping[str, Value], numbers: ArgNumbers) -> bytes:
    event = TrackEvent()
    for name, text in extra_arg_texts(args).items():
        event.debug_annotations.add(name_iid=numbers.names[name], string_value_iid=numbers.texts[text])
    serialized: bytes = event.SerializeToString()
    return serialized
