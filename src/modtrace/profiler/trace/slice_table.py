"""Slices of one kind of a profiler trace, as they are gathered: rows first, columns once there are many."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from .event_columns import MAX_TIME_US, SliceColumns, microseconds_to_ns

__all__ = ["SliceTable"]

_Row = tuple[int, float, float, int, int]
"""Track, start and duration in µs, value and other."""


class SliceTable:
    """Slices of one kind; columns of equal length, times in µs.

    Attributes:
        pending: rows that are not in the columns yet.
    """

    __slots__ = ("duration", "other", "pending", "start", "track", "value")

    def __init__(self) -> None:
        self.pending: list[_Row] = []
        self.track, self.value, self.other = array("q"), array("q"), array("q")
        self.start, self.duration = array("d"), array("d")

    def take_pending(self) -> tuple[float, float, int, int]:
        """Move what is pending to the columns; return its first and last moment, µs, how many are up to 0, and broken.

        Rows that are not at a time, or not of numbers, are left out.
        """
        rows, self.pending[:] = self.pending[:], []
        broken = 0
        try:
            track, start, duration, value, other = (
                array(kind, column) for kind, column in zip("qddqq", zip(*rows, strict=True), strict=True)
            )
        except (TypeError, OverflowError, ValueError):
            numbers = [row for row in map(_numbers, rows) if row is not None]
            broken = len(rows) - len(numbers)
            if not numbers:
                return float("inf"), float("-inf"), 0, broken
            track, start, duration, value, other = (
                array(kind, column) for kind, column in zip("qddqq", zip(*numbers, strict=True), strict=True)
            )
        first, length = np.frombuffer(start, np.float64), np.frombuffer(duration, np.float64)
        last = first + length
        valid = (first > 0) & (length >= 0) & (last < MAX_TIME_US)
        zeros = 0
        if not valid.all():
            zeros = int(np.count_nonzero(first <= 0))
            first, last = first[valid], last[valid]
            kept = np.flatnonzero(valid).tolist()
            track, start, duration, value, other = (
                array(column.typecode, [column[row] for row in kept])
                for column in (track, start, duration, value, other)
            )
        self.track += track
        self.start += start
        self.duration += duration
        self.value += value
        self.other += other
        return float(first.min(initial=np.inf)), float(last.max(initial=-np.inf)), zeros, broken

    def take_rows(self) -> SliceColumns:
        """Return the columns, with times in nanoseconds, and empty the table: nothing is in memory twice."""
        start, duration = (microseconds_to_ns(_array(column, np.float64)) for column in (self.start, self.duration))
        track, value, other = (_array(column, np.int64) for column in (self.track, self.value, self.other))
        self.track, self.value, self.other = array("q"), array("q"), array("q")
        self.start, self.duration = array("d"), array("d")
        return SliceColumns(track, start, duration, value, other)


def _array(column: array[Any], dtype: type[np.generic]) -> Any:
    """Return a column as an array, without copying it."""
    return np.frombuffer(column, dtype) if column else np.empty(0, dtype)


def _numbers(row: tuple[Any, ...]) -> _Row | None:
    """Return a row with times that are numbers, of text as readers take it; None where there are none."""
    track, start, duration, value, other = row
    try:
        array("q", (value, other))
        return track, float(start), float(duration), value, other
    except (TypeError, OverflowError, ValueError):
        return None
