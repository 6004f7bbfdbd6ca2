"""Protobuf records of varying length, thousands at a time: varints and byte strings side by side in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Field", "Table", "constant", "joined", "length", "varint"]

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


class Field(NamedTuple):
    """One part of every record: `text` is (n, width), of which row i has `lengths[i]` bytes; all of them if None."""

    text: Bytes
    lengths: Ints | None

    def where(self, present: npt.NDArray[np.bool_]) -> Field:
        """Leave the field out of the records where `present` is False."""
        return Field(self.text, np.where(present, self.text.shape[1] if self.lengths is None else self.lengths, 0))


class Table:
    """Byte strings to choose from."""

    def __init__(self, strings: Sequence[bytes]) -> None:
        self._lengths = np.array([len(string) for string in strings], np.int64)
        width = int(self._lengths.max(initial=1))
        padded = b"".join(string.ljust(width, b"\0") for string in strings)
        self._text = np.frombuffer(padded, np.uint8).reshape(len(strings), width)

    def pick(self, index: npt.NDArray[np.integer]) -> Field:
        """Return the strings at `index`."""
        return Field(self._text[index], self._lengths[index])


def constant(string: bytes, count: int) -> Field:
    """Return the same bytes `count` times."""
    return Field(np.broadcast_to(np.frombuffer(string, np.uint8), (count, len(string))), None)


def varint(numbers: npt.NDArray[np.integer]) -> Field:
    """Encode integers as protobuf does: seven bits a byte, the least first; negative ones as 64 bits."""
    rest = numbers.astype(np.int64).view(np.uint64)
    width = max(1, -(-int(rest.max(initial=0)).bit_length() // 7))
    lengths = np.ones(len(rest), np.int64)
    text = np.empty((len(rest), width), np.uint8)
    for place in range(width):
        text[:, place] = rest  # the lowest byte
        text[:, place] |= 0x80
        rest = rest >> np.uint64(7)
        lengths += rest > 0
    text[np.arange(len(rest)), lengths - 1] &= 0x7F
    return Field(text, lengths)


def length(fields: Sequence[Field]) -> Ints:
    """Return how many bytes the fields have in each record."""
    fixed = sum(field.text.shape[1] for field in fields if field.lengths is None)
    counts = np.full(len(fields[0].text), fixed, np.int64)
    for field in fields:
        if field.lengths is not None:
            counts += field.lengths
    return counts


def joined(parts: Sequence[tuple[Ints, Sequence[Field]]], count: int) -> bytes:
    """Return `count` records one after the other; each part has records of one kind, and the places where they go."""
    width = max(sum(field.text.shape[1] for field in fields) for _, fields in parts)
    text = np.zeros((count, width), np.uint8)
    kept = np.zeros((count, width), bool)
    for places, fields in parts:
        whole = np.concatenate([field.text for field in fields], axis=1)
        present = np.concatenate([_present(field) for field in fields], axis=1)
        text[places, : whole.shape[1]] = whole
        kept[places, : whole.shape[1]] = present
    return text[kept].tobytes()


def _present(field: Field) -> npt.NDArray[np.bool_]:
    if field.lengths is None:
        return np.broadcast_to(np.True_, field.text.shape)
    present: npt.NDArray[np.bool_] = np.arange(field.text.shape[1]) < field.lengths[:, None]
    return present
