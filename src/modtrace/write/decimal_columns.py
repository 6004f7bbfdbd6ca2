"""Integers as decimal digits, a column at a time."""

from __future__ import annotations

import numpy as np

from .._typing import Int64Array, UInt8Array, UInt32Array

__all__ = ["LONGEST", "decimal", "microseconds", "width"]


LONGEST = 10**15
"""Nanoseconds (11.5 days) below which `microseconds` can say a time, and a double holds it to the nanosecond."""

_POWERS = 10 ** np.arange(1, 19, dtype=np.int64)


def _table(count: int, form: str) -> UInt32Array:
    return np.frombuffer("".join(form % number for number in range(count)).encode(), "<u4")


# Four characters a word, so that a number is a handful of look-ups.
_FOUR = _table(10_000, "%04d")
_FRACTION = _table(1_000, ".%03d")


def width(numbers: Int64Array) -> Int64Array:
    """Return how many digits each number has, none of them negative."""
    return np.searchsorted(_POWERS, numbers, side="right") + 1


def decimal(numbers: Int64Array, digits: int) -> UInt8Array:
    """Return (n, digits) characters: the last `digits` digits of each number, which is not negative."""
    words = -(-digits // 4)
    out = np.empty((len(numbers), words), "<u4")
    _fill(out, numbers, words)
    return out.view(np.uint8)[:, 4 * words - digits :]


def microseconds(nanoseconds: Int64Array) -> UInt8Array:
    """Return (n, 16) characters: microseconds as twelve digits with leading zeros, a point and three decimals."""
    out = np.empty((len(nanoseconds), 4), "<u4")
    whole = nanoseconds // 1000
    out[:, 3] = _FRACTION[nanoseconds - whole * 1000]
    _fill(out, whole, 3)
    return out.view(np.uint8)


def _fill(out: UInt32Array, numbers: Int64Array, words: int) -> None:
    for word in range(words - 1, -1, -1):
        rest = numbers // 10_000
        out[:, word] = _FOUR[numbers - rest * 10_000]
        numbers = rest
