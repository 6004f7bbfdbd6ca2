"""Sets of times, as intervals in order that do not touch: when any of several things ran."""

from typing import NamedTuple

import numpy as np

from .._typing import BoolArray, Int64Array


class TimeIntervals(NamedTuple):
    """Intervals of time in order, none of which touches another; columns of equal length."""

    start: Int64Array  # int64[n], ns
    end: Int64Array  # int64[n], ns

    def hold(self, moment: Int64Array) -> BoolArray:
        """Return for each moment whether it is in one of the intervals, from its start to before its end."""
        index = np.searchsorted(self.start, moment, side="right") - 1
        return np.asarray((index >= 0) & (moment < np.append(self.end, 0)[index]), np.bool_)

    def time_until(self, moment: Int64Array) -> Int64Array:
        """Return for each moment how much of the time before it is in these intervals."""
        before = np.concatenate([[0], np.cumsum(self.end - self.start)])
        index = np.searchsorted(self.start, moment)
        over = np.zeros(len(moment), np.int64)
        inside = index > 0
        over[inside] = np.maximum(self.end[index[inside] - 1] - moment[inside], 0)
        until: Int64Array = before[index] - over
        return until

    def time_within(self, start: Int64Array, end: Int64Array) -> Int64Array:
        """Return for each given interval how much of it is in these intervals."""
        return self.time_until(end) - self.time_until(start)


def union_of(start: Int64Array, end: Int64Array) -> TimeIntervals:
    """Return the time that any of the intervals covers; none ends before its start."""
    if not len(start):
        return TimeIntervals(start, end)
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    covered_until = np.maximum.accumulate(end)
    first = np.flatnonzero(np.append(True, start[1:] > covered_until[:-1]))
    return TimeIntervals(start[first], covered_until[np.append(first[1:], len(start)) - 1])


def extents(group: Int64Array, start: Int64Array, end: Int64Array, groups: int) -> tuple[Int64Array, Int64Array]:
    """Return the first start and the last end of the intervals of each group; of one without, the end is before."""
    limits = np.iinfo(np.int64)
    first, last = np.full(groups, limits.max), np.full(groups, limits.min)
    np.minimum.at(first, group, start)
    np.maximum.at(last, group, end)
    return first, last


def shift_apart(group: Int64Array, start: Int64Array, end: Int64Array, groups: int) -> tuple[Int64Array, Int64Array]:
    """Move the intervals of each group so that groups follow each other in time and none touches another.

    So what many threads did can be looked at as if one had. It returns what to add to the times of each group, and
    where that begins then.
    """
    first, last = extents(group, start, end, groups)
    length = np.where(first <= last, last - first + 1, 0)
    begin = np.cumsum(length) - length
    return np.where(first <= last, begin - first, 0), begin
