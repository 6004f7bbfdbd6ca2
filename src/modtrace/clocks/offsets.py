"""Readings of another clock over a run → its offset, and the bound of that, at any time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .._typing import Int64Array
from .estimate import MAX_RATE, Reading

__all__ = ["ClockOffsets", "Offset"]

_MIN_RATE_CHANGE = 1e-6
"""How much the rate of two clocks against each other changes at least within an interval, as the machines warm up."""


class Offset(NamedTuple):
    """Offsets at some times.

    Attributes:
        offset_ns: int64[n], the other clock less the own one.
        bound_ns: int64[n], how far that is off at most.
    """

    offset_ns: Int64Array
    bound_ns: Int64Array


class ClockOffsets:
    """The offset of another clock as a line from each reading to the next.

    Between readings the bound grows with the distance to the nearer one, by twice the largest change of rate that was
    seen between neighbouring intervals (at least 1 ppm). Outside of them, as after a process was killed, the last rate
    goes on, and the bound grows by how well that is known as well.

    Args:
        readings: at least one, in any order.

    Raises:
        ValueError: there is no reading.

    Example:
        >>> offsets = ClockOffsets([Reading(0, 1_000, 10, 20), Reading(10**9, 2_000, 10, 20)])
        >>> offsets.at([500_000_000]).offset_ns.tolist()
        [1500]
    """

    def __init__(self, readings: Iterable[Reading]) -> None:
        by_time = {reading.time_ns: reading for reading in sorted(readings, key=lambda r: (r.time_ns, -r.bound_ns))}
        if not by_time:
            raise ValueError("offsets need at least one reading")
        rows = np.array([(r.time_ns, r.offset_ns, r.bound_ns) for r in by_time.values()], np.int64)
        self._time, self._offset, self._bound = rows.T
        length = np.diff(self._time).astype(np.float64)
        self._rate = np.diff(self._offset) / length
        # A rate is known as well as the two readings are that it comes from.
        self._rate_bound = (self._bound[1:] + self._bound[:-1]) / length
        changes = np.abs(np.diff(self._rate)) if len(self._rate) > 1 else np.zeros(1)
        self._rate_change = min(max(2 * float(changes.max()), _MIN_RATE_CHANGE), 2 * MAX_RATE)

    def at(self, time_ns: npt.ArrayLike) -> Offset:
        """Return the offset, and its bound, at some own monotonic nanoseconds."""
        time = np.atleast_1d(np.asarray(time_ns, np.int64))
        if len(self._time) == 1:
            distance = np.abs(time - self._time[0])
            bound = self._bound[0] + np.ceil(distance * MAX_RATE).astype(np.int64)
            return Offset(np.full(len(time), self._offset[0]), bound)
        interval = np.clip(np.searchsorted(self._time, time, side="right") - 1, 0, len(self._rate) - 1)
        from_start, to_end = time - self._time[interval], self._time[interval + 1] - time
        rate = self._rate[interval]
        # From the nearer reading, so that no long product is rounded.
        offset = np.where(
            from_start <= to_end,
            self._offset[interval] + np.rint(from_start * rate).astype(np.int64),
            self._offset[interval + 1] - np.rint(to_end * rate).astype(np.int64),
        )
        inside = (from_start >= 0) & (to_end >= 0)
        near_start = np.abs(from_start) <= np.abs(to_end)
        distance = np.minimum(np.abs(from_start), np.abs(to_end)).astype(np.float64)
        reading_bound = np.where(near_start, self._bound[interval], self._bound[interval + 1]).astype(np.float64)
        # On a line both ends are off by at most their own bounds.
        between = np.maximum(self._bound[interval], self._bound[interval + 1])
        growth = distance * self._rate_change
        outside_growth = distance * np.minimum(self._rate_bound[interval] + self._rate_change, MAX_RATE + np.abs(rate))
        bound = np.where(inside, between + growth, reading_bound + outside_growth)
        return Offset(offset, np.ceil(bound).astype(np.int64) + 1)

    def largest_bound(self, first_ns: int, last_ns: int) -> int:
        """Return how far the offset is off at most in a range of own monotonic nanoseconds."""
        # Between two readings the bound is largest halfway, and outside of all at the end that is farther away.
        halfway = (self._time[1:] + self._time[:-1]) // 2
        inside = halfway[(first_ns < halfway) & (halfway < last_ns)]
        return int(self.at(np.concatenate([[first_ns, last_ns], inside])).bound_ns.max())
