"""Confidence intervals of a difference of medians, by bootstrap."""

from __future__ import annotations

from collections.abc import Collection

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


def independent_steps(modules: Collection[Int64Array]) -> float:
    """Return how many independent steps tell as much as these: fewer where the machine drifts during the run.

    Of n values that resemble their neighbours with correlation r, the median is as sure as that of n (1 - r) / (1 + r),
    where r is that of lying above the median or below it: so a few steps that took very long do not matter.

    Args:
        modules: of each module what it took in each step; r is the mean of all.
    """
    count, alike = 0, [0.0]
    for times in modules:
        count = len(times)
        side = np.sign(times - np.median(times))
        spread = float(side @ side)
        if spread:
            alike.append(float(side[1:] @ side[:-1]) / spread)
    correlation = max(sum(alike) / max(len(alike) - 1, 1), 0.0)
    return count * (1 - correlation) / (1 + correlation)
