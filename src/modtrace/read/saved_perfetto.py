"""Perfetto's protobuf as modtrace wrote it, saved or merged.

Packets of spans are read thousands at a time, since their fields come in the order of the writer. Of a merged trace the
recording's packets are read in this way, and from the others the spans above the streams of GPUs.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError
from perfetto.protos.perfetto.trace import perfetto_trace_pb2
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import DebugAnnotation, Trace, TracePacket, TrackEvent

from .._errors import TraceError
from .._typing import BoolArray, Int64Array, UInt8Array
from ..formats.header import EDITED_FILE_ERRORS, WHAT_TO_DO, checked_header
from ..formats.packet_stream import MAX_VARINT_BYTES, PACKET_TAG, FramingError, packet_batches
from ..formats.perfetto_ids import INCREMENTAL_CLOCK, PROFILER_SEQUENCE, SequenceIds, add_call_message
from ..formats.slice_args import CATEGORIES, FileSlice
from ..formats.span_args import CALL_FIELDS
from ..formats.trace_file import END_PACKET, MERGED_PACKET, TraceFile, gpu_work_in, with_annotated_ranges
from ..timeline import PHASES, Mark, Name, Timeline
from ..write.protobuf_columns import LENGTH_DELIMITED, field_tag, message_field_tag
from .timeline_builder import ROW_PREFIX, SpanColumns, StreamSpan, add_stream_spans, build_timeline_from, stream_number

_TIMESTAMP, _SEQUENCE = (message_field_tag(TracePacket, name) for name in ("timestamp", "trusted_packet_sequence_id"))
_EVENT = message_field_tag(TracePacket, "track_event", LENGTH_DELIMITED)
_TYPE, _PHASE, _LABEL, _FLOW, _END_FLOW, _COLOUR = (
    message_field_tag(TrackEvent, name)
    for name in ("type", "category_iids", "name_iid", "flow_ids_old", "terminating_flow_ids_old", "correlation_id")
)
_ARG = message_field_tag(TrackEvent, "debug_annotations", LENGTH_DELIMITED)
_ARG_NAME, _ARG_VALUE = (message_field_tag(DebugAnnotation, name) for name in ("name_iid", "string_value_iid"))
_CALL = {name: field_tag(number) for name, number in CALL_FIELDS.items()}
_PACKET = bytes([PACKET_TAG])

NUMBERS = ("phase", "call", "step", "link", "complete")
"""What spans have as numbers: index into `PHASES`, which call of the module, which step, what joins calls, 1 or 0."""


class SpanPackets(NamedTuple):
    """What packets of spans say.

    Attributes:
        sequence: int64[n], the packet sequence; -1 for a packet that is none of a span, or not as we write it.
        delta: int64[n], nanoseconds since the packet before on the sequence.
        is_begin: bool[n], whether a span begins, else one ends; all of the following is of begins.
        names: int64[3, n], iid of the label, and enum values of the qualified name and the class.
        numbers: int64[5, n], one row for each of `NUMBERS`.
        args: index of a packet, iid of the name and iid of the value of an arg of its own.
        row: int64[n], where a reader has put the span.
    """

    sequence: Int64Array
    delta: Int64Array
    is_begin: BoolArray
    names: Int64Array
    numbers: Int64Array
    args: list[tuple[int, int, int]]
    row: Int64Array


class _Fields:
    """Packets of which fields are taken one after the other.

    Args:
        data: the bytes of all, and some zeros after them.
        at: where each begins.
        end: where it ends.
    """

    def __init__(self, data: UInt8Array, at: Int64Array, end: Int64Array) -> None:
        self._data, self.at, self._end = data, at.copy(), end

    def take(self, tag: bytes, otherwise: int = -1) -> Int64Array:
        """Return the number in a field of each packet, and go past it; `otherwise` where another field comes next."""
        data, at, value = self._data, self.at, np.full(len(self.at), otherwise)
        is_next = data[at] == tag[0]
        for place, byte in enumerate(tag[1:], 1):
            is_next &= data[at + place] == byte
        rows = np.flatnonzero(is_next)
        at[rows] += len(tag)
        value[rows] = 0
        for shift in range(0, 7 * MAX_VARINT_BYTES, 7):
            byte = data[at[rows]]
            value[rows] |= (byte & 0x7F).astype(np.int64) << shift
            at[rows] += 1
            rows = rows[byte >= 0x80]
            if not len(rows):
                break
        return value

    def holds(self, tag: bytes) -> BoolArray:
        """Whether a message comes next in each packet and is all that is left of it; go to its first field."""
        length = self.take(tag)
        return np.asarray((length >= 0) & (self.at + length == self._end), np.bool_)

    def are_read(self) -> BoolArray:
        """Whether each packet was read to its end."""
        return np.asarray(self.at == self._end, np.bool_)


def read_span_packets(data: bytes, end: Int64Array, extension: int) -> SpanPackets:
    """Return what packets say that are ours.

    Args:
        data: their bytes.
        end: where each ends; the first begins with the data, each other one where one ends.
        extension: the field of a TrackEvent that has the args of a span.
    """
    padded = np.frombuffer(data + bytes(2 * MAX_VARINT_BYTES), np.uint8)
    packets = _Fields(padded, np.append(0, end[:-1]), end)
    fits = packets.holds(_PACKET)
    delta, sequence = packets.take(_TIMESTAMP), packets.take(_SEQUENCE)
    fits &= packets.holds(_EVENT)
    args: list[tuple[int, int, int]] = []
    while len(rows := np.flatnonzero(packets.take(_ARG) >= 0)):
        arg = rows, packets.take(_ARG_NAME)[rows], packets.take(_ARG_VALUE)[rows]
        args += zip(*(column.tolist() for column in arg), strict=True)
    while np.any(packets.take(_FLOW) >= 0):
        pass  # to a collective that the span launched
    phase, kind = packets.take(_PHASE), packets.take(_TYPE)
    is_begin = kind == TrackEvent.TYPE_SLICE_BEGIN
    fits &= is_begin | (kind == TrackEvent.TYPE_SLICE_END) & packets.are_read()
    rows = np.flatnonzero(is_begin)
    spans = _Fields(padded, packets.at[rows], end[rows])
    label, flow, end_flow, _ = (spans.take(tag) for tag in (_LABEL, _FLOW, _END_FLOW, _COLOUR))
    fits[rows] &= spans.holds(field_tag(extension, LENGTH_DELIMITED))
    fqn, module_class, call, step = (spans.take(_CALL[name], 0) for name in ("fqn", "module_class", "call", "step"))
    link, complete = spans.take(_CALL["link"]), spans.take(_CALL["complete"], 1)
    fits[rows] &= spans.are_read()
    names, numbers = np.zeros((3, len(end)), np.int64), np.zeros((5, len(end)), np.int64)
    names[:, rows] = label, fqn, module_class
    numbers[:, rows] = (
        phase[rows] - 1,
        call,
        step,
        np.where(flow >= 0, flow, np.where(end_flow >= 0, end_flow, link)),
        complete != 0,
    )
    sequence, row = np.where(fits, sequence, -1), np.full(len(end), -1)
    return SpanPackets(sequence, delta, is_begin, names, numbers, [arg for arg in args if fits[arg[0]]], row)


BATCH_BYTES = 1 << 19
"""Bytes of packets that are parsed at a time; their objects take many times as much."""

_NAME_BITS = 21
"""A trace has less than two million names."""


def load_perfetto(
    path: Path,
    blocks: Iterable[bytes],
    take_other: Callable[[TracePacket], None] | None = None,
    check: Callable[[], None] = lambda: None,
) -> Timeline:
    """Read the timeline out of a Perfetto trace.

    Args:
        path: the trace, for errors.
        blocks: its bytes, some at a time.
        take_other: of a merged trace, called with each packet of the profiler's sequence.
        check: called when all packets were read.

    Raises:
        TraceError: it is no such trace, is cut off, or was not written by modtrace.
    """
    reader = _Reader(path, take_other)
    try:
        for offset, part, ends in packet_batches(blocks, BATCH_BYTES):
            reader.take(part, np.array(ends), offset)
        check()
        return reader.timeline()
    except FramingError as error:
        raise TraceError(path, str(error), error.offset) from None
    except EDITED_FILE_ERRORS as error:
        raise TraceError(path, f"its packets are not as modtrace writes them: {error!r}; {WHAT_TO_DO}") from error


class _Reader:
    def __init__(self, path: Path, take_other: Callable[[TracePacket], None] | None) -> None:
        self._path = path
        self._take_other = take_other
        self._parser: Any = Trace
        self._args: Any = None
        self._header: dict[str, Any] | None = None
        self._fqns: list[str] = []
        self._classes: list[str] = []
        self._labels: dict[int, str] = {}
        self._annotations: dict[int, str] = {}
        self._texts: dict[int, str] = {}
        self._clock: dict[int, int] = {}
        self._open: dict[int, list[int]] = {}
        self._sequences = SequenceIds(0)
        self._of_modules: set[int] = set()
        self._rows = SpanColumns()
        # The category of the slices on each sequence that has no modules.
        self._categories: dict[int, str] = {}
        self._slice_args: dict[tuple[tuple[str, Any], ...], dict[str, Any]] = {}

    def take(self, part: bytes, end: Int64Array, offset: int) -> None:
        """Take the next packets of the file.

        Args:
            part: their bytes.
            end: where each ends.
            offset: of the first.
        """
        if self._args is None:
            self._describe(part)
        spans = read_span_packets(part, end, 1 if self._args is None else self._args.number)
        self._of_modules.update(np.unique(spans.sequence[spans.is_begin]).tolist())
        spans.sequence[~np.isin(spans.sequence, [*self._of_modules - {-1}])] = -1  # other slices have such ends too
        others = np.flatnonzero(spans.sequence < 0).tolist()
        begin = np.append(0, end)
        try:
            packets = self._parser.FromString(b"".join([part[begin[at] : end[at]] for at in others])).packet
        except DecodeError as error:
            raise TraceError(self._path, f"its packets cannot be parsed: {error}; {WHAT_TO_DO}", offset) from error
        done = 0
        for index, packet in zip(others, packets, strict=True):
            if self._take_other is not None and packet.trusted_packet_sequence_id == PROFILER_SEQUENCE:
                self._take_other(packet)
            elif packet.HasField("track_event"):
                self._event(packet)
            else:
                if packet.HasField("clock_snapshot"):
                    self._add(spans, done, index)
                    done = index
                self._define(packet)
        self._add(spans, done, len(end))
        for index, arg, value in spans.args:
            args: Any = self._rows.span_args.setdefault(int(spans.row[index]), {})
            args[self._annotations[arg]] = self._texts[value]

    def timeline(self) -> Timeline:
        """Return what has been read."""
        header = checked_header(self._path, self._header)
        return build_timeline_from(header, self._rows)

    def _describe(self, part: bytes) -> None:
        """Learn what the args are called; another tool's trace does not say it, and a merged one does so later."""
        try:
            packets = Trace.FromString(part).packet
        except DecodeError:
            packets = ()
        described = [file for packet in packets for file in packet.extension_descriptor.extension_set.file]
        if len(described) == 1 and described[0].package.startswith("modtrace") and described[0].extension:
            self._fqns, self._classes = ([value.name for value in enum.value] for enum in described[0].enum_type)
            self._parser, self._args = _parser(described[0].extension[0].number)
        elif self._take_other is None:
            checked_header(self._path, None)

    def _define(self, packet: Any) -> None:
        if packet.HasField("clock_snapshot"):
            for clock in packet.clock_snapshot.clocks:
                if clock.clock_id == INCREMENTAL_CLOCK:
                    self._clock[packet.trusted_packet_sequence_id] = clock.timestamp
        if packet.HasField("interned_data"):
            interned = packet.interned_data
            self._labels.update((entry.iid, entry.name) for entry in interned.event_names)
            self._annotations.update((entry.iid, entry.name) for entry in interned.debug_annotation_names)
            self._texts.update((entry.iid, entry.str.decode()) for entry in interned.debug_annotation_string_values)
        for entry in packet.chrome_events.metadata:
            if entry.name == "modtrace":
                self._header = checked_header(self._path, orjson.loads(entry.string_value))
                self._sequences = SequenceIds(len(self._header["lanes"]))
                tracks = self._header["tracks"]
                kinds = [tracks[lane["track"]]["kind"] for lane in self._header["lanes"]]
                self._categories = {
                    self._sequences.lane(lane): kind for lane, kind in enumerate(kinds) if kind in CATEGORIES
                }

    def _event(self, packet: Any) -> None:
        sequence, event = packet.trusted_packet_sequence_id, packet.track_event
        time = self._clock[sequence] = self._clock[sequence] + packet.timestamp
        if sequence in self._categories:
            self._slice(sequence, event, time)
        elif event.type == TrackEvent.TYPE_INSTANT:
            self._rows.marks.append(Mark(time, event.categories[0], event.name))
        elif event.type != TrackEvent.TYPE_COUNTER:
            raise ValueError(f"an event is of type {event.type}")
        elif event.WhichOneof("counter_value_field") != "double_counter_value":  # of a part of the steps, of slices
            times, values = self._rows.samples.setdefault(self._sequences.counter_of(sequence), ([], []))
            times.append(time)
            values.append(event.counter_value)

    def _slice(self, sequence: int, event: Any, time: int) -> None:
        rows = self._rows.slices
        open_rows = self._open.setdefault(sequence, [])
        if event.type == TrackEvent.TYPE_SLICE_END:
            row = open_rows.pop()
            rows[row] = rows[row]._replace(end=time)
            return
        args = {entry.name: getattr(entry, entry.WhichOneof("value")) for entry in event.debug_annotations}
        open_rows.append(len(rows))
        lane = sequence - self._sequences.lane(0)
        args = self._slice_args.setdefault(tuple(args.items()), args)  # most have those of others
        rows.append(FileSlice(self._categories[sequence], lane, time, time, event.name, args))

    def _add(self, spans: SpanPackets, first: int, last: int) -> None:
        """Add the spans of some packets that follow each other, and the ends of those that are open."""
        packets = first + np.flatnonzero(spans.sequence[first:last] >= 0)
        sequence, is_begin, time = spans.sequence[packets], spans.is_begin[packets], spans.delta[packets]
        row = spans.row[packets] = len(self._rows.start) + np.cumsum(is_begin) - 1
        ended: list[tuple[Int64Array, Int64Array]] = []
        for number in np.unique(sequence).tolist():
            own = np.flatnonzero(sequence == number)
            time[own] = self._clock[number] + np.cumsum(time[own])
            self._clock[number] = int(time[own[-1]])
            open_ = self._open.get(number, [])
            level = len(open_) + np.cumsum(np.where(is_begin[own], 1, -1)) - is_begin[own]
            if level.min() < 0:
                raise ValueError("a span ends that did not begin")
            # Sorted by level, and there as they come, a span's end is right after its begin.
            order = np.argsort(np.append(np.arange(len(open_)), level), kind="stable")
            begins = np.append(np.ones(len(open_), np.bool_), is_begin[own])[order]
            rows = np.append(np.array(open_, np.int64), row[own])[order]
            ends = np.flatnonzero(~begins)
            ended.append((rows[ends - 1], time[own[order[ends] - len(open_)]]))
            begins[ends - 1] = False
            self._open[number] = rows[begins].tolist()
        begun = packets[is_begin]
        lane = sequence[is_begin] - self._sequences.lane(0)
        columns = lane, *spans.numbers[:, begun], self._name(*spans.names[:, begun]), time[is_begin], time[is_begin]
        for field_name, column in zip(("lane", *NUMBERS, "name", "start", "end"), columns, strict=True):
            self._rows.extend(field_name, column)
        for rows, times in ended:
            np.asarray(self._rows.end)[rows] = times

    def _name(self, label: Int64Array, fqn: Int64Array, module_class: Int64Array) -> Int64Array:
        """Return the number of each name; they are numbered as they come."""
        if len(label) and not 0 <= max(label.max(), fqn.max(), module_class.max()) < 1 << _NAME_BITS:
            raise ValueError("a name has too large a number")
        key, first, inverse = np.unique(
            (label << _NAME_BITS | fqn) << _NAME_BITS | module_class, return_index=True, return_inverse=True
        )
        number = np.zeros(len(key), np.int64)
        for index in np.argsort(first).tolist():
            of_label, of_fqn, of_class = (int(column[first[index]]) for column in (label, fqn, module_class))
            number[index] = self._rows.names[self._labels[of_label], self._fqns[of_fqn], self._classes[of_class]]
        return number[inverse]


@functools.cache
def _parser(extension: int) -> tuple[Any, Any]:
    """Return a class for traces whose args have this field number, and the extension.

    Its own pool, because the number differs from trace to trace, and an enum's values stay numbers here: texts that
    are no identifiers could not be its names.
    """
    schema = FileDescriptorProto(dependency=[perfetto_trace_pb2.DESCRIPTOR.name])
    add_call_message(schema, "modtrace", extension, {})
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(perfetto_trace_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(schema.SerializeToString())
    trace = message_factory.GetMessageClass(pool.FindMessageTypeByName("perfetto.protos.Trace"))
    return trace, pool.FindExtensionByName("modtrace.debug")


def load_merged_perfetto(path: Path) -> Timeline:
    """Read the recording out of a merged trace.

    Raises:
        TraceError: it cannot be read, is cut off, or is no such trace.
    """
    rows = _StreamRows(path)
    with TraceFile(path) as source:
        timeline = load_perfetto(path, source.whole_blocks(), rows.take, rows.check_end)
    timeline = with_annotated_ranges(add_stream_spans(timeline, rows.spans), str(path), rows.metadata)
    return replace(timeline, gpu_work=gpu_work_in(str(path), rows.metadata))


@dataclass
class _StreamRows:
    """Takes the packets of the profiler's sequence, and picks out the spans above streams.

    Attributes:
        path: the trace, for errors.
        spans: those that have ended.
        metadata: what the trace says of how it was made.
    """

    path: Path
    spans: list[StreamSpan] = field(default_factory=list)
    metadata: object = None
    _has_end: bool | None = None
    _device_names: dict[int, str] = field(default_factory=dict)
    _rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    _interned: defaultdict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    _open: dict[int, list[tuple[int, TrackEvent]]] = field(default_factory=dict)

    def take(self, packet: TracePacket) -> None:
        """Take a packet, in file order."""
        for entry in packet.chrome_events.metadata:
            if entry.name == MERGED_PACKET:
                self.metadata = orjson.loads(entry.string_value)
                self._has_end = False if f'"end":"{END_PACKET}"' in entry.string_value else None
            if entry.name == END_PACKET:
                if not entry.bool_value:
                    raise ValueError(f"{END_PACKET} is {entry.WhichOneof('value') or 'empty'} and not true")
                self._has_end = True
        for kind, entries in packet.interned_data.ListFields():
            self._interned[kind.name].update((entry.iid, entry.name) for entry in entries)
        if packet.HasField("track_descriptor"):
            track = packet.track_descriptor
            if track.name.startswith(ROW_PREFIX):
                device = stream_number(self._device_names.get(track.parent_uuid, ""))
                self._rows[track.uuid] = (device, stream_number(track.name))
            elif not track.parent_uuid:
                self._device_names[track.uuid] = track.name
        if packet.HasField("track_event") and packet.track_event.track_uuid in self._rows:
            event = packet.track_event
            stack = self._open.setdefault(event.track_uuid, [])
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                stack.append((packet.timestamp, event))
            elif event.type == TrackEvent.TYPE_SLICE_END:
                self._close(*stack.pop(), packet.timestamp)

    def check_end(self) -> None:
        """Raise if the packet that ends a merged trace is missing, where the trace says that there is one."""
        if self._has_end is False:
            raise TraceError(self.path, "it is cut off: the packet that ends it is missing")

    def _close(self, start: int, event: TrackEvent, end: int) -> None:
        kinds = ("event_names", "event_categories", "debug_annotation_names")
        names, known, arg_names = (self._interned[kind] for kind in kinds)
        categories = [*event.categories, *(known[iid] for iid in event.category_iids)]
        if not categories or categories[0] not in PHASES:
            return  # work that no module asked for
        args = {arg.name or arg_names[arg.name_iid]: _value(arg) for arg in event.debug_annotations}
        device, stream = self._rows[event.track_uuid]
        name = Name(event.name or names[event.name_iid], str(args["fqn"]), str(args["module_class"]))
        self.spans.append(
            StreamSpan(device, stream, start, end, name, categories[0], int(args["call"]), int(args["step"]))
        )


def _value(annotation: Any) -> Any:
    return getattr(annotation, annotation.WhichOneof("value"))
