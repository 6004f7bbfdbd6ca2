"""Protobuf records of varying length, thousands at a time: varints and byte strings side by side in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .._typing import AnyIntArray, BoolArray, Int64Array, RecordArray, UInt8Array

__all__ = ["Field", "Table", "constant", "joined", "length", "varint"]


class Field(NamedTuple):
    """One part of every record: `text` is (n, width), of which row i has `lengths[i]` bytes; all of them if None."""

    text: UInt8Array
    lengths: Int64Array | None

    def where(self, present: BoolArray) -> Field:
        """Leave the field out of the records where `present` is False."""
        return Field(self.text, np.where(present, self.text.shape[1] if self.lengths is None else self.lengths, 0))


class Table:
    """Byte strings to choose from."""

    def __init__(self, strings: Sequence[bytes]) -> None:
        self._lengths = np.array([len(string) for string in strings], np.int64)
        width = int(self._lengths.max(initial=1))
        padded = b"".join(string.ljust(width, b"\0") for string in strings)
        self._text = np.frombuffer(padded, f"V{width}")

    def pick(self, index: AnyIntArray) -> Field:
        """Return the strings at `index`."""
        picked = self._text[index]
        return Field(picked.view(np.uint8).reshape(len(picked), -1), self._lengths[index])


def constant(string: bytes, count: int) -> Field:
    """Return the same bytes `count` times."""
    return Field(np.broadcast_to(np.frombuffer(string, np.uint8), (count, len(string))), None)


def varint(numbers: AnyIntArray, before: bytes = b"") -> Field:
    """Encode integers as protobuf does: seven bits a byte, the least first; negative ones as 64 bits.

    `before` stands in front of each.
    """
    rest = numbers.astype(np.int64).view(np.uint64)
    width = max(1, -(-int(rest.max(initial=0)).bit_length() // 7))
    first = len(before)
    text = np.empty((len(rest), first + width), np.uint8)
    text[:, :first] = np.frombuffer(before, np.uint8)
    if width == 1:
        text[:, first] = rest
        return Field(text, None)
    lengths = np.full(len(rest), first + 1, np.int64)
    for place in range(first, first + width):
        text[:, place] = rest  # the lowest byte
        rest = rest >> np.uint64(7)
        more = rest > 0
        text[:, place] = text[:, place] & 0x7F | more.view(np.uint8) << 7
        lengths += more
    return Field(text, lengths)


def length(fields: Sequence[Field]) -> Int64Array:
    """Return how many bytes the fields have in each record."""
    fixed = sum(field.text.shape[1] for field in fields if field.lengths is None)
    counts = np.full(len(fields[0].text), fixed, np.int64)
    for field in fields:
        if field.lengths is not None:
            counts += field.lengths
    return counts


def joined(parts: Sequence[tuple[Int64Array, Sequence[Field]]], count: int) -> bytes:
    """Return `count` records one after the other; each part has records of one kind, and the places where they go."""
    lengths = np.zeros(count, np.int64)
    for places, fields in parts:
        lengths[places] = length(fields)
    ends = np.cumsum(lengths)
    out = np.empty(int(ends[-1]) if count else 0, np.uint8)
    for places, fields in parts:
        at = (ends - lengths)[places]
        for field in fields:
            _place(out, at, field)
            at += field.text.shape[1] if field.lengths is None else field.lengths
    return out.tobytes()


def _place(out: UInt8Array, at: Int64Array, field: Field) -> None:
    """Copy a field into all records, which want it at `at`."""
    text, lengths = field
    if lengths is None:
        _stretches(out, text.shape[1])[at] = _whole(text)
        return
    for size in np.flatnonzero(np.bincount(lengths)).tolist():
        if size:
            rows = np.flatnonzero(lengths == size)
            _stretches(out, size)[at[rows]] = _whole(text[rows, :size])


def _stretches(out: UInt8Array, size: int) -> RecordArray:
    """Return all stretches of `size` bytes by where they begin; as items, which NumPy copies in one go."""
    stretches: RecordArray = np.ndarray((len(out) - size + 1,), f"V{size}", out, 0, (1,))
    return stretches


def _whole(text: UInt8Array) -> RecordArray:
    """Return the rows as one item each."""
    items: RecordArray = np.ascontiguousarray(text).view(f"V{text.shape[1]}")[:, 0]
    return items
