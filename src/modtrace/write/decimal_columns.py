"""Slices of integers as columns of decimal digits, many at a time in NumPy."""

from __future__ import annotations

import numpy as np

from .._typing import Int64Array, UInt8Array, UInt32Array

_POWERS = 10 ** np.arange(1, 19, dtype=np.int64)


def _table(count: int, form: str) -> UInt32Array:
    return np.frombuffer("".join(form % number for number in range(count)).encode(), "<u4")


# Four characters in one word of 32 bits, so that a number is a handful of look-ups.
_FOUR_DIGITS = _table(10_000, "%04d")
_FRACTION = _table(1_000, ".%03d")


def digit_count(numbers: Int64Array) -> Int64Array:
    """Return how many decimal digits each number has; none is negative."""
    return np.searchsorted(_POWERS, numbers, side="right") + 1


def format_decimal(numbers: Int64Array, digits: int) -> UInt8Array:
    """Return uint8[n, digits]: the last `digits` digits of each number, which is not negative."""
    groups = -(-digits // 4)
    out = np.empty((len(numbers), groups), "<u4")
    _fill_groups(out, numbers, groups)
    return out.view(np.uint8)[:, 4 * groups - digits :]


def format_microseconds(nanoseconds: Int64Array, digits: int) -> UInt8Array:
    """Return uint8[n, digits + 4]: microseconds with leading zeros, a point and three decimals; none is negative."""
    groups = -(-digits // 4)
    out = np.empty((len(nanoseconds), groups + 1), "<u4")
    whole = nanoseconds // 1000
    out[:, groups] = _FRACTION[nanoseconds - whole * 1000]
    _fill_groups(out, whole, groups)
    return out.view(np.uint8)[:, 4 * groups - digits :]


def _fill_groups(out: UInt32Array, numbers: Int64Array, groups: int) -> None:
    """Write the last `groups` groups of four digits of each number."""
    for group in range(groups - 1, -1, -1):
        rest = numbers // 10_000
        out[:, group] = _FOUR_DIGITS[numbers - rest * 10_000]
        numbers = rest
