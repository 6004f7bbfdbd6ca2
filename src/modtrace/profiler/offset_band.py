"""The offset between two clocks from bounds on it: what every clock of limited drift allows, and its middle."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._typing import Float64Array, Int64Array

__all__ = ["DRIFT_LIMIT", "LEAST_DRIFT_LIMIT", "OffsetBand", "OffsetBounds", "find_clock_steps", "intersect"]

DRIFTS = (50e-6, 100e-6, 150e-6, 200e-6, 300e-6, 400e-6, 500e-6, 700e-6, 1e-3)
"""Drifts that are tried, nanoseconds per nanosecond, until one agrees with the bounds."""
LEAST_DRIFT_LIMIT = 500e-6
"""By so much a wall clock is slewed."""
_DRIFT_MARGIN = 2
"""The drift that the bounds show may be less than there is: so many times as much counts as possible."""
_TOLERANCE_NS = 20.0
_STEP_NS = 20_000
DRIFT_LIMIT = DRIFTS[-1]
"""Offsets that change faster than this, and by more than `_STEP_NS`, are a clock that was set, not one that drifts."""


class OffsetBounds(NamedTuple):
    """Bounds on an offset, each at one moment; columns of equal length.

    Attributes:
        time: int64[n], ns, of the recording's clock.
        low: float64[n], ns, the least offset; -inf where unknown.
        high: float64[n], ns, the greatest; inf where unknown.
    """

    time: Int64Array
    low: Float64Array
    high: Float64Array


class OffsetBand(NamedTuple):
    """The offsets that a clock may have; columns of equal length.

    Attributes:
        time: int64[n], ns, ascending.
        low: float64[n], ns, the least offset.
        high: float64[n], ns, the greatest; less than `low` where the bounds contradict each other.
        drift_limit: how fast the offset may change, nanoseconds per nanosecond.
    """

    time: Int64Array
    low: Float64Array
    high: Float64Array
    drift_limit: float

    @property
    def middle(self) -> Float64Array:
        """The middle of the band; changes no faster than the limit, as its edges do."""
        return (self.low + self.high) / 2


def intersect(bounds: OffsetBounds) -> OffsetBand | None:
    """Return the offsets that all bounds allow a clock of limited drift; None without bounds on both sides.

    A bound at one moment holds at every other, widened by what the clock may drift until then. So the greatest of all
    such lower bounds and the least of all such upper bounds are exactly the edges of what is possible.

    Args:
        bounds: in any order.

    Returns:
        The band at the moments of the bounds, each once and in order; for twice the least drift under which the
        bounds agree, and `LEAST_DRIFT_LIMIT` or more.

    Example:
        >>> band = intersect(OffsetBounds(np.array([0, 1000]), np.array([2.0, -np.inf]), np.array([np.inf, 4.0])))
        >>> [round(offset, 2) for offset in band.middle.tolist()]
        [3.25, 2.75]
    """
    if not np.isfinite(bounds.low).any() or not np.isfinite(bounds.high).any():
        return None
    time, place = np.unique(bounds.time, return_inverse=True)
    low, high = np.full(len(time), -np.inf), np.full(len(time), np.inf)
    np.maximum.at(low, place, bounds.low)
    np.minimum.at(high, place, bounds.high)
    since = (time - time[0]).astype(np.float64)
    for drift in DRIFTS:
        band = _band(time, low, high, since, drift)
        if not (band.low > band.high + _TOLERANCE_NS).any():
            break
    return _band(time, low, high, since, max(_DRIFT_MARGIN * band.drift_limit, LEAST_DRIFT_LIMIT))


def find_clock_steps(bounds: OffsetBounds) -> list[tuple[int, int]]:
    """Return the two bounds between which a clock was set, each time: the last from before and the first from after it.

    Bounds between the two hold before and after, as those of a mark do in which the clock was set.

    Args:
        bounds: in time order, each on both sides.

    Example:
        >>> low, high = np.array([0.0, 0.0, 3e6]), np.array([500.0, 3e6, 3e6 + 500])
        >>> find_clock_steps(OffsetBounds(np.array([0, 1000, 2000]), low, high))
        [(0, 2)]
    """
    time, low, high = (column.tolist() for column in bounds)
    steps: list[tuple[int, int]] = []
    least = most = 0
    for at in range(1, len(time)):
        if _is_step(time[at] - time[least], low[least] - high[at]) or _is_step(
            time[at] - time[most], low[at] - high[most]
        ):
            before = at - 1
            while not (
                _is_step(time[at] - time[before], low[before] - high[at])
                or _is_step(time[at] - time[before], low[at] - high[before])
            ):
                before -= 1
            steps.append((before, at))
            least = most = at
            continue
        # Each bound widens by what a clock may drift: which of two is the closer one now stays the closer one.
        if low[at] >= low[least] - DRIFT_LIMIT * (time[at] - time[least]):
            least = at
        if high[at] <= high[most] + DRIFT_LIMIT * (time[at] - time[most]):
            most = at
    return steps


def _is_step(apart: int, gap: float) -> bool:
    """Whether an offset that changed by so much within so many ns is that of a clock that was set."""
    return gap > max(_STEP_NS, DRIFT_LIMIT * apart)


def _band(time: Int64Array, low: Float64Array, high: Float64Array, since: Float64Array, limit: float) -> OffsetBand:
    return OffsetBand(time, _greatest(low, limit * since), -_greatest(-high, limit * since), limit)


def _greatest(low: Float64Array, drift: Float64Array) -> Float64Array:
    """Return the greatest of all bounds at each moment; each falls to both sides as fast as `drift` grows."""
    before: Float64Array = np.maximum.accumulate(low + drift) - drift
    after: Float64Array = np.maximum.accumulate((low - drift)[::-1])[::-1] + drift
    return np.maximum(before, after)
