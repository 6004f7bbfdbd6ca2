"""Packets of track events as columns: what stands around the fields of thousands of events at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

from ..._typing import Int64Array
from ...formats.packet_stream import PACKET_TAG
from .protobuf_columns import Column, record_lengths, varint

__all__ = ["LENGTH_DELIMITED", "VARINT", "field_tag", "message_field_tag", "track_event_packets"]

VARINT, LENGTH_DELIMITED = 0, 2
"""Wire types of protobuf: how the value of a field is encoded."""


def field_tag(number: int, wire_type: int = VARINT) -> bytes:
    """Return what stands before a field: its number and its wire type."""
    return varint(np.array([number << 3 | wire_type])).text.tobytes()


def message_field_tag(message: type[Any], name: str, wire_type: int = VARINT) -> bytes:
    """Return what stands before a field of one of the perfetto package's messages."""
    return field_tag(message.DESCRIPTOR.fields_by_name[name].number, wire_type)


_PACKET = bytes([PACKET_TAG])
_TIMESTAMP = message_field_tag(TracePacket, "timestamp")
_EVENT = message_field_tag(TracePacket, "track_event", LENGTH_DELIMITED)


def track_event_packets(timestamp: Int64Array, sequence: bytes, event: Sequence[Column]) -> list[Column]:
    """Return packets of track events as they stand in a file, for `interleave`.

    Args:
        timestamp: int64[n], on the clock of the sequence.
        sequence: the fields that all packets of the sequence have, serialized.
        event: the fields of each event.
    """
    packet = [varint(timestamp, _TIMESTAMP), varint(record_lengths(event), sequence + _EVENT), *event]
    return [varint(record_lengths(packet), _PACKET), *packet]
