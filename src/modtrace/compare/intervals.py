"""Confidence intervals of a difference of medians, by bootstrap."""

from __future__ import annotations

import numpy as np

from .._typing import Float64Array, Int64Array

__all__ = ["MedianDraws", "independent_steps"]


class MedianDraws:
    """Medians of resampled steps, for any number of modules.

    A resample of n steps, drawn with replacement, has as its median the k-th of its values in order. That is the value
    at the k-th of n random ranks, and the k-th of n uniform numbers is Beta distributed: so one number is drawn for
    each resample instead of n, with the same result.

    Args:
        size: how many resamples.
        base: how many independent steps there are before.
        new: how many there are after.
        seed: of the random numbers.
    """

    def __init__(self, size: int, base: float, new: float, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self._base, self._new = (random.beta((steps + 1) / 2, (steps + 1) / 2, size) for steps in (base, new))

    def interval(self, base: Int64Array, new: Int64Array, confidence: float, scale: float = 1.0) -> tuple[float, float]:
        """Return the ends of the interval of (median of `new`) - `scale` * (median of `base`)."""
        difference = _at_ranks(np.sort(new), self._new) - scale * _at_ranks(np.sort(base), self._base)
        low, high = np.quantile(difference, [(1 - confidence) / 2, (1 + confidence) / 2])
        return float(low), float(high)


def _at_ranks(values: Int64Array, ranks: Float64Array) -> Float64Array:
    # One step has no spread that could be known.
    index = np.minimum((ranks * len(values)).astype(np.int64), len(values) - 1)
    return values[index].astype(np.float64)


def independent_steps(duration_ns: Int64Array) -> float:
    """Return how many independent steps tell as much as these: fewer where the machine drifts during the run.

    Of n values that resemble their neighbours with correlation r, the mean is as sure as that of n (1 - r) / (1 + r).
    """
    # A single slow step would hide a drift.
    values = np.minimum(duration_ns.astype(np.float64), 2 * np.median(duration_ns))
    offset = values - values.mean()
    spread = float(offset @ offset)
    alike = max(float(offset[1:] @ offset[:-1]) / spread, 0.0) if spread else 0.0
    return len(values) * (1 - alike) / (1 + alike)
