"""The packets of spans in a Perfetto trace, thousands at a time: their fields come in the order of the writer."""

from typing import NamedTuple

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import DebugAnnotation, TracePacket, TrackEvent

from .._typing import BoolArray, Int64Array, UInt8Array
from ..formats.packet_stream import MAX_VARINT_BYTES, PACKET_TAG
from ..formats.span_args import CALL_FIELDS
from ..write.protobuf_columns import LENGTH_DELIMITED, field_tag, message_field_tag

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
        data: the bytes of all, and some zeros behind them.
        at: where each begins.
        end: where it ends.
    """

    def __init__(self, data: UInt8Array, at: Int64Array, end: Int64Array) -> None:
        self._data, self.at, self._end = data, at.copy(), end

    def take(self, tag: bytes, otherwise: int = -1) -> Int64Array:
        """Return the number in a field of each packet, and go behind it; `otherwise` where another field comes next."""
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
        complete,
    )
    sequence, row = np.where(fits, sequence, -1), np.full(len(end), -1)
    return SpanPackets(sequence, delta, is_begin, names, numbers, [arg for arg in args if fits[arg[0]]], row)
