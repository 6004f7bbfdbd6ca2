"""Protobuf records of varying length and packets of track events, thousands at a time, as columns in NumPy."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket

from .._arrays import AnyIntArray, BoolArray, Int64Array, RecordArray, UInt8Array
from ..formats.packet_stream import PACKET_TAG, varint_bytes


class BytesColumn(NamedTuple):
    """One field of every record."""

    data: UInt8Array  # uint8[n, width]
    lengths: Int64Array | None  # int64[n], number of bytes used in each row; None if all rows are full

    @property
    def sizes(self) -> Int64Array | int:
        """The number of bytes of each record."""
        return self.data.shape[1] if self.lengths is None else self.lengths

    def where(self, present: BoolArray) -> "BytesColumn":
        """Return the column without the field in records whose `present` is False."""
        return BytesColumn(self.data, np.where(present, self.sizes, 0))


class RaggedColumn(NamedTuple):
    """One field of every record, unpadded because the lengths differ too much."""

    data: UInt8Array  # uint8[m], the fields of all records one after the other
    lengths: Int64Array  # int64[n], number of bytes of each record's field; their sum is m

    @property
    def sizes(self) -> Int64Array:
        """The number of bytes of each record."""
        return self.lengths

    @classmethod
    def from_strings(cls, strings: Sequence[bytes]) -> "RaggedColumn":
        """Return a column of given byte strings."""
        lengths = np.fromiter(map(len, strings), np.int64, len(strings))
        return cls(np.frombuffer(b"".join(strings), np.uint8), lengths)


Column: TypeAlias = BytesColumn | RaggedColumn


class ByteTable:
    """A table of byte strings, padded to the longest, from which columns are made."""

    def __init__(self, strings: Sequence[bytes]) -> None:
        self._lengths = np.array([len(string) for string in strings], np.int64)
        width = int(self._lengths.max(initial=1))
        self._is_even = bool(np.all(self._lengths == width))
        padded = b"".join(string.ljust(width, b"\0") for string in strings)
        self._data = np.frombuffer(padded, f"V{width}")

    def pick(self, index: AnyIntArray) -> BytesColumn:
        """Return the strings at `index`."""
        picked = self._data[index]
        data = picked.view(np.uint8).reshape(len(picked), -1)
        return BytesColumn(data, None if self._is_even else self._lengths[index])


def repeat(string: bytes, count: int) -> BytesColumn:
    """Return the same bytes `count` times."""
    return BytesColumn(np.broadcast_to(np.frombuffer(string, np.uint8), (count, len(string))), None)


def varint(numbers: AnyIntArray, prefix: bytes = b"") -> BytesColumn:
    """Return integers as protobuf varints after a prefix: seven bits a byte, lowest first; negative ones as 64 bits."""
    unsigned = numbers.astype(np.int64).view(np.uint64)
    highest, first = int(unsigned.max(initial=0)), len(prefix)
    width = max(1, -(-highest.bit_length() // 7))
    remaining_bits: AnyIntArray = unsigned.astype(np.min_scalar_type(highest))
    data = np.empty((len(numbers), first + width), np.uint8)
    data[:, :first] = np.frombuffer(prefix, np.uint8)
    if width == 1:
        data[:, first] = remaining_bits
        return BytesColumn(data, None)
    lengths = np.full(len(numbers), first + 1, np.int64)
    for column in range(first, first + width):
        lowest_bits, remaining_bits = remaining_bits.astype(np.uint8), remaining_bits >> 7
        continues = remaining_bits > 0
        data[:, column] = lowest_bits & 0x7F | continues.view(np.uint8) << 7
        lengths += continues
    return BytesColumn(data, lengths)


def record_lengths(fields: Sequence[Column]) -> Int64Array:
    """Return int64[n], the number of bytes of the fields in each record."""
    sizes, first = [field.sizes for field in fields], fields[0]
    count = len(first.lengths) if isinstance(first, RaggedColumn) else len(first.data)
    lengths = np.full(count, sum(size for size in sizes if isinstance(size, int)), np.int64)
    for size in sizes:
        if not isinstance(size, int):
            lengths += size
    return lengths


def interleave(parts: Sequence[tuple[Int64Array, Sequence[Column]]], count: int) -> bytes:
    """Return `count` records one after the other; a part has the positions of its records, and their fields."""
    lengths = np.zeros(count, np.int64)
    for positions, fields in parts:
        lengths[positions] = record_lengths(fields)
    ends = np.cumsum(lengths)
    out = np.empty(int(ends[-1]) if count else 0, np.uint8)
    for positions, fields in parts:
        offset = (ends - lengths)[positions]
        min_sizes = [int(np.min(field.sizes)) for field in fields]
        for index, field in enumerate(fields):
            if isinstance(field, RaggedColumn):
                _scatter_ragged(out, offset, field)
            else:
                _scatter(out, offset, field, sum(min_sizes[index:]))
            offset += field.sizes
    return out.tobytes()


def _scatter_ragged(out: UInt8Array, offset: Int64Array, field: RaggedColumn) -> None:
    """Copy a field into all records, at `offset`."""
    ends = np.cumsum(field.lengths)
    shift = np.repeat(offset - (ends - field.lengths), field.lengths)
    out[shift + np.arange(len(field.data))] = field.data


def _scatter(out: UInt8Array, offset: Int64Array, field: BytesColumn, min_bytes: int) -> None:
    """Copy a field into all records, at `offset`; each record has `min_bytes` or more bytes from there on.

    The fields that follow overwrite bytes that are copied beyond the field's length.
    """
    data, lengths = field
    if lengths is None or data.shape[1] <= min_bytes:
        _windows(out, data.shape[1])[offset] = _as_items(data)
        return
    for size in np.flatnonzero(np.bincount(lengths)).tolist():
        if size:
            rows = np.flatnonzero(lengths == size)
            _windows(out, size)[offset[rows]] = _as_items(data[rows, :size])


def _windows(out: UInt8Array, size: int) -> RecordArray:
    """Return all windows of `size` bytes by their start, as items, each of which NumPy copies at once."""
    windows: RecordArray = np.ndarray((len(out) - size + 1,), f"V{size}", out, 0, (1,))
    return windows


def _as_items(data: UInt8Array) -> RecordArray:
    """Return the rows as one item each."""
    items: RecordArray = np.ascontiguousarray(data).view(f"V{data.shape[1]}")[:, 0]
    return items


VARINT, FIXED64, LENGTH_DELIMITED = range(3)
"""Wire types of protobuf, the encodings of a field's value."""


def field_tag(number: int, wire_type: int = VARINT) -> bytes:
    """Return the bytes before a field: its number and its wire type."""
    return varint_bytes(number << 3 | wire_type)


def message_field_tag(message: type[Any], name: str, wire_type: int = VARINT) -> bytes:
    """Return the bytes before a field of one of the perfetto package's messages."""
    return field_tag(message.DESCRIPTOR.fields_by_name[name].number, wire_type)


_PACKET = bytes([PACKET_TAG])
_TIMESTAMP = message_field_tag(TracePacket, "timestamp")
_EVENT = message_field_tag(TracePacket, "track_event", LENGTH_DELIMITED)


def track_event_packets(timestamp: Int64Array, sequence: BytesColumn, event: Sequence[Column]) -> list[Column]:
    """Return packets of track events for `interleave`; `sequence` has the common fields of a sequence's packets."""
    return packets_of(timestamp, [sequence, varint(record_lengths(event), _EVENT), *event])


def packets_of(timestamp: Int64Array, fields: Sequence[Column]) -> list[Column]:
    """Return packets in a file's form, from their timestamps on the clock of their sequence, and their other fields."""
    packet = [varint(timestamp, _TIMESTAMP), *fields]
    return [varint(record_lengths(packet), _PACKET), *packet]
