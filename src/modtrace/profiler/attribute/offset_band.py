"""The offset between two clocks from bounds on it: what every clock of limited drift allows, and its middle."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..._typing import Float64Array, Int64Array

__all__ = ["OffsetBand", "OffsetBounds", "intersect"]

DRIFT_LIMITS = (2e-4, 5e-4, 1e-3)
"""How fast the offset may change, nanoseconds per nanosecond: the first that agrees with the bounds."""
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
        The band at the moments of the bounds, each once and in order; of the smallest limit under which the bounds
        agree, or of the greatest.

    Example:
        >>> band = intersect(OffsetBounds(np.array([0, 1000]), np.array([2.0, -np.inf]), np.array([np.inf, 4.0])))
        >>> [round(offset, 1) for offset in band.middle.tolist()]
        [3.1, 2.9]
    """
    if not np.isfinite(bounds.low).any() or not np.isfinite(bounds.high).any():
        return None
    time, place = np.unique(bounds.time, return_inverse=True)
    low, high = np.full(len(time), -np.inf), np.full(len(time), np.inf)
    np.maximum.at(low, place, bounds.low)
    np.minimum.at(high, place, bounds.high)
    since = (time - time[0]).astype(np.float64)
    for limit in DRIFT_LIMITS:
        drift = limit * since
        band = OffsetBand(time, _greatest(low, drift), -_greatest(-high, drift), limit)
        if not (band.low > band.high + _TOLERANCE_NS).any():
            break
    return band


def _greatest(low: Float64Array, drift: Float64Array) -> Float64Array:
    """Return the greatest of all bounds at each moment; each falls to both sides as fast as `drift` grows."""
    before: Float64Array = np.maximum.accumulate(low + drift) - drift
    after: Float64Array = np.maximum.accumulate((low - drift)[::-1])[::-1] + drift
    return np.maximum(before, after)
