"""The offset between two clocks from bounds on it: what every clock of limited drift allows, and its middle."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..._typing import Float64Array, Int64Array

__all__ = ["LEAST_DRIFT_LIMIT", "OffsetBand", "OffsetBounds", "intersect"]

DRIFTS = (50e-6, 100e-6, 150e-6, 200e-6, 300e-6, 400e-6, 500e-6, 700e-6, 1e-3)
"""Drifts that are tried, nanoseconds per nanosecond, until one agrees with the bounds."""
LEAST_DRIFT_LIMIT = 500e-6
"""By so much a wall clock is slewed."""
_DRIFT_MARGIN = 2
"""The drift that the bounds show may be less than there is: so many times as much counts as possible."""
_TOLERANCE_NS = 20.0


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


def _band(time: Int64Array, low: Float64Array, high: Float64Array, since: Float64Array, limit: float) -> OffsetBand:
    return OffsetBand(time, _greatest(low, limit * since), -_greatest(-high, limit * since), limit)


def _greatest(low: Float64Array, drift: Float64Array) -> Float64Array:
    """Return the greatest of all bounds at each moment; each falls to both sides as fast as `drift` grows."""
    before: Float64Array = np.maximum.accumulate(low + drift) - drift
    after: Float64Array = np.maximum.accumulate((low - drift)[::-1])[::-1] + drift
    return np.maximum(before, after)
