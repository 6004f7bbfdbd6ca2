"""What a module typically takes in a step, and how sure that is, on a machine that does other work too."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from .._typing import Int64Array

__all__ = ["Typical", "likeness", "typical"]

_FIRST, _LAST = 0.05, 0.5
"""Which part of the steps, in order of their times, the mean is of."""
_CLOCK_VARIANCE = 1e-8
"""No time is surer than by one part in 10,000."""


class Typical(NamedTuple):
    """The mean of the faster half of some times.

    What else runs on the machine makes single steps slower and none faster: here it changes the faster half less than
    half as much as the median. Where nothing disturbs, it is as sure as the median.

    Attributes:
        time_ns: the mean.
        variance: its relative variance: 0.0001 where it is sure by 1 %.
        freedom: degrees of freedom of the variance.
    """

    time_ns: float
    variance: float
    freedom: float


def typical(times: Int64Array, alike: float = 0.0) -> Typical:
    """Return the mean of the faster half, but for the fastest twentieth.

    The variance is that of a trimmed mean (Tukey and McLaughlin): of the times with all outside the kept ones moved to
    the nearest kept one.

    Args:
        times: int64[n], at least one.
        alike: how much neighbours resemble each other, as `likeness` says it.
    """
    count = len(times)
    ordered = np.sort(np.maximum(times, 1)).astype(np.float64)
    first = int(_FIRST * count)
    last = max(math.ceil(_LAST * count), first + 1)
    mean = float(ordered[first:last].mean())
    kept = last - first
    moved = np.clip(ordered, ordered[first], ordered[last - 1])
    variance = float(moved.var(ddof=1)) * count / kept**2 if count > 1 else 0.0
    fewer = (1 - alike) / (1 + alike)
    return Typical(mean, variance / mean**2 / fewer + _CLOCK_VARIANCE, max(kept - 1, 0) * fewer)


def likeness(modules: Collection[Int64Array]) -> float:
    """Return how much steps resemble their neighbours, from 0 to 1: what a drift of the machine does.

    Of n such values a mean is as sure as that of n (1 - r) / (1 + r). It is the correlation of lying above the median
    or below it, so that a few steps that took very long do not matter.

    Args:
        modules: of each module what it took in each step; the mean over all is returned.
    """
    found = []
    for times in modules:
        side = np.sign(times - np.median(times))
        spread = float(side @ side)
        if spread:
            found.append(float(side[1:] @ side[:-1]) / spread)
    return min(max(sum(found) / len(found), 0.0), 0.95) if found else 0.0
