"""Differences between recordings of one program: the speed of the machine, and the noise of each module.

Times are logarithms, as in `verdicts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from .._arrays import Float64Array

MIN_MODULES = 6
"""With fewer modules and phases, a change of the machine looks like one of the modules."""
OUTLIER = 0.1
"""Modules that differ from most by more than that, and three times as much as half of them do, are not the machine."""
SIZE_RATIO = 4.0
"""Modules are of one size if their times differ by at most this factor."""
NEIGHBOURS = 32
"""Number of modules nearest in size that are looked at."""
ENOUGH_ALIKE = 8
"""With one recording a side, modules of other sizes count too if fewer than these are of one size."""
SIZE_FREEDOM = 5.0
"""Degrees of freedom with which the noise of modules of its size counts beside a module's own: on three architectures
and a busy machine, modules differed in their noise as variances of 5 to 12 degrees of freedom do."""
SINGLE_SPREAD = 0.05
"""With one recording a side, a module without others differs by this."""
SINGLE_STEP_SPREAD = 0.1
"""With one recording a side, whole steps differ by this."""
MEDIAN_OF_SQUARE = 0.455
"""Median of the square of a normal number with variance 1."""
_CUT = 0.125
"""Share of eight or more recordings that is left out at each end."""
MAX_LOG = 40.0
"""Logarithms are cut here, so that each interval is a number."""


class Estimate(NamedTuple):
    """A difference of logarithms, and what recordings of one side differ by."""

    base: float  # the mean before
    difference: float  # the mean after less that before
    squares: float  # the sum of squared deviations of the recordings from the mean of their side
    freedom: int  # the degrees of freedom of `squares`; 0 for one recording a side
    recordings: float  # 1 / recordings before + 1 / recordings after


def estimate(before: Float64Array, after: Float64Array) -> Estimate:
    """Estimate the difference of two sides; NaN is a recording that lacks the module."""
    (base, base_squares, base_kept), (new, new_squares, new_kept) = map(trimmed_mean, (before, after))
    freedom = base_kept + new_kept - 2
    return Estimate(base, new - base, base_squares + new_squares, freedom, 1 / base_kept + 1 / new_kept)


def trimmed_mean(logs: Float64Array) -> tuple[float, float, int]:
    """Return the mean of recordings, of eight or more without an eighth at each end (Yuen 1974).

    Something else may have run all the time of an extreme recording. With the mean come the sum of squared deviations,
    extreme recordings moved to the nearest kept, and how many are kept.
    """
    ordered = np.sort(logs[~np.isnan(logs)])
    cut = int(_CUT * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    moved = np.clip(ordered, kept[0], kept[-1])
    return float(kept.mean()), float(((moved - moved.mean()) ** 2).sum()), len(kept)


def student_quantile(outside: float, freedom: float) -> float:
    """Return t so that Student's distribution has a part `outside` beyond -t and t (Wallace 1959).

    It is up to 4 % too large, the more the fewer degrees of freedom there are. scipy would be exact, but
    nothing else needs it.
    """
    normal = NormalDist().inv_cdf(1 - outside / 2) * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(min(normal**2 / freedom, 2 * MAX_LOG)))


def machine_speeds(logs: Float64Array) -> Float64Array:
    """Return by how much each recording is slower than usual, as far as most modules and most of the time agree.

    That is the median over modules or the one weighted by their times, whichever is nearer to 0; 0 if they disagree. So
    neither a large module alone, nor many small ones, are taken for the machine.
    """
    if len(logs) < MIN_MODULES:
        return np.zeros(logs.shape[1])
    usual = np.nanmedian(logs, axis=1)
    weights = np.ones(len(usual)), np.exp(usual - usual.max())
    return np.array([_machine_speed(run - usual, *weights) for run in logs.T])


def _machine_speed(slower: Float64Array, alike: Float64Array, time: Float64Array) -> float:
    """Return by how much one recording is slower, without modules that differ from most by far more than others."""
    apart = np.abs(slower - weighted_median(slower, alike))
    slower = np.where(apart <= max(OUTLIER, 3 * weighted_median(apart, alike)), slower, np.nan)
    by_count, by_time = weighted_median(slower, alike), weighted_median(slower, time)
    return min(by_count, by_time, key=abs) if by_count * by_time > 0 else 0.0


def weighted_median(values: Float64Array, weight: Float64Array) -> float:
    """Return the value that half of the weight does not exceed, NaN left out; 0 without values."""
    rows = np.flatnonzero(~np.isnan(values))
    if not len(rows):
        return 0.0
    order = rows[np.argsort(values[rows], kind="stable")]
    above = np.cumsum(weight[order])
    return float(values[order[np.searchsorted(above, above[-1] / 2)]])


def noise_of(
    size: Float64Array, within: Float64Array, estimates: Sequence[Estimate]
) -> tuple[Float64Array, Float64Array]:
    """Return the variance of each module between recordings, and its degrees of freedom.

    It is what the module's own recordings say, drawn towards modules of its size: the median of what these differ by,
    as a multiple of what their steps make expect. With one recording a side it is that alone.
    """
    freedom = np.array([measured.freedom for measured in estimates], np.float64)
    squares = np.array([measured.squares if measured.freedom else measured.difference**2 / 2 for measured in estimates])
    between = squares / np.maximum(freedom, 1)
    # The median of a variance with few degrees of freedom is below its mean.
    scaled = between / np.where(freedom > 0, (1 - 2 / (9 * np.maximum(freedom, 1))) ** 3, MEDIAN_OF_SQUARE)
    expected = (within + np.median(within)) / 2 if len(within) else within
    order = np.argsort(size, kind="stable")
    variance, total = between.copy(), freedom.copy()
    for place, module in enumerate(order.tolist()):
        first = max(place - NEIGHBOURS // 2, 0)
        near = np.delete(order[first : place + NEIGHBOURS // 2 + 1], place - first)
        alike = near[np.abs(size[near] - size[module]) <= math.log(SIZE_RATIO)]
        near = alike if freedom[module] or len(alike) >= ENOUGH_ALIKE else near
        usual = float(np.median(scaled[near] / expected[near])) * expected[module] if len(near) else SINGLE_SPREAD**2
        if freedom[module]:
            count = min(SIZE_FREEDOM, len(near))
            total[module] += count
            variance[module] = (count * usual + squares[module]) / total[module]
        else:
            variance[module], total[module] = usual, SIZE_FREEDOM
    return np.maximum(variance, within), total
