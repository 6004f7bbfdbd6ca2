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
"""Minimum number of modules and phases for a change of the machine to differ from one of the modules."""
OUTLIER = 0.1
"""Minimum deviation from most modules, if it is also three times the median deviation, to ignore a module."""
SIZE_RATIO = 4.0
"""Maximum ratio of the times of modules of one size."""
NEIGHBOURS = 32
"""Number of modules nearest in size whose noise is compared."""
ENOUGH_ALIKE = 8
"""Minimum number of modules of one size, with one recording on a side, to exclude modules of other sizes."""
SIZE_FREEDOM = 5.0
"""Degrees of freedom of the noise of modules of one size, relative to a module's own. On three architectures and a busy
machine, the noise of modules differed like variances of 5 to 12 degrees of freedom."""
SINGLE_SPREAD = 0.05
"""Noise of a module without neighbours, with one recording on a side."""
SINGLE_STEP_SPREAD = 0.1
"""Noise of whole steps, with one recording on a side."""
MEDIAN_OF_SQUARE = 0.455
"""Median of the square of a normal number with variance 1."""
_TRIMMED_SHARE = 0.125
"""Share of eight or more recordings that is left out at each end."""
MAX_LOG = 40.0
"""Maximum of logarithms, so that each interval is a number."""


class Estimate(NamedTuple):
    """The difference of the sides' logarithms, and the deviations within the sides."""

    base: float  # mean before
    difference: float  # mean after less mean before
    squares: float  # sum of squared deviations of the recordings from the mean of their side
    freedom: int  # degrees of freedom of `squares`; 0 for one recording on each side
    recordings: float  # 1 / recordings before + 1 / recordings after


def estimate(base_logs: Float64Array, new_logs: Float64Array) -> Estimate:
    """Estimate the difference of two sides; NaN is a recording that lacks the module."""
    (base, base_squares, base_count), (new, new_squares, new_count) = map(trimmed_mean, (base_logs, new_logs))
    freedom = base_count + new_count - 2
    return Estimate(base, new - base, base_squares + new_squares, freedom, 1 / base_count + 1 / new_count)


def trimmed_mean(logs: Float64Array) -> tuple[float, float, int]:
    """Return the mean, the sum of squared deviations and the number of recordings (Yuen 1974).

    Of eight or more recordings, an eighth at each end is left out: another program may have run during all of an
    extreme recording. For the squares, extreme values are moved to the nearest one that counts.
    """
    ordered = np.sort(logs[~np.isnan(logs)])
    count = int(_TRIMMED_SHARE * len(ordered))
    middle = ordered[count : len(ordered) - count]
    moved = np.clip(ordered, middle[0], middle[-1])
    return float(middle.mean()), float(((moved - moved.mean()) ** 2).sum()), len(middle)


def student_quantile(tail_share: float, freedom: float) -> float:
    """Return t so that Student's distribution has a share `tail_share` beyond -t and t (Wallace 1959).

    The result is up to 4 % too large, most for few degrees of freedom. scipy would be exact, but nothing else needs it.
    """
    normal = NormalDist().inv_cdf(1 - tail_share / 2) * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(min(normal**2 / freedom, 2 * MAX_LOG)))


def machine_speeds(logs: Float64Array) -> Float64Array:
    """Return the slowness of each recording relative to the median one, as agreed on by most modules and most time.

    It is the median over modules or the one weighted by their times, whichever is nearer to 0; 0 if they disagree. So
    neither one large module nor many small ones look like the machine.
    """
    if len(logs) < MIN_MODULES:
        return np.zeros(logs.shape[1])
    medians = np.nanmedian(logs, axis=1)
    weights = np.ones(len(medians)), np.exp(medians - medians.max())
    return np.array([_machine_speed(run - medians, *weights) for run in logs.T])


def _machine_speed(slowness: Float64Array, equal_weight: Float64Array, time: Float64Array) -> float:
    """Return the slowness of one recording, without modules that deviate from most far more than others."""
    deviation = np.abs(slowness - weighted_median(slowness, equal_weight))
    limit = max(OUTLIER, 3 * weighted_median(deviation, equal_weight))
    slowness = np.where(deviation <= limit, slowness, np.nan)
    by_count, by_time = weighted_median(slowness, equal_weight), weighted_median(slowness, time)
    return min(by_count, by_time, key=abs) if by_count * by_time > 0 else 0.0


def weighted_median(values: Float64Array, weight: Float64Array) -> float:
    """Return the value that half of the weight does not exceed, NaN left out; 0 without values."""
    rows = np.flatnonzero(~np.isnan(values))
    if not len(rows):
        return 0.0
    order = rows[np.argsort(values[rows], kind="stable")]
    cumulative = np.cumsum(weight[order])
    return float(values[order[np.searchsorted(cumulative, cumulative[-1] / 2)]])


def noise_of(
    log_time: Float64Array, within: Float64Array, estimates: Sequence[Estimate]
) -> tuple[Float64Array, Float64Array]:
    """Return the variance of each module between recordings, and its degrees of freedom.

    The variance comes from the module's own recordings, drawn towards modules of its size: their median ratio of the
    variance between recordings to the variance expected from their steps. With one recording on a side, only this
    median counts.
    """
    freedom = np.array([estimate.freedom for estimate in estimates], np.float64)
    squares = np.array([estimate.squares if estimate.freedom else estimate.difference**2 / 2 for estimate in estimates])
    between = squares / np.maximum(freedom, 1)
    # The median of a variance with few degrees of freedom is below its mean.
    scaled = between / np.where(freedom > 0, (1 - 2 / (9 * np.maximum(freedom, 1))) ** 3, MEDIAN_OF_SQUARE)
    expected = (within + np.median(within)) / 2 if len(within) else within
    order = np.argsort(log_time, kind="stable")
    variance, total = between.copy(), freedom.copy()
    for position, module in enumerate(order.tolist()):
        first = max(position - NEIGHBOURS // 2, 0)
        near = np.delete(order[first : position + NEIGHBOURS // 2 + 1], position - first)
        same_size = near[np.abs(log_time[near] - log_time[module]) <= math.log(SIZE_RATIO)]
        near = same_size if freedom[module] or len(same_size) >= ENOUGH_ALIKE else near
        size_variance = (
            float(np.median(scaled[near] / expected[near])) * expected[module] if len(near) else SINGLE_SPREAD**2
        )
        if freedom[module]:
            count = min(SIZE_FREEDOM, len(near))
            total[module] += count
            variance[module] = (count * size_variance + squares[module]) / total[module]
        else:
            variance[module], total[module] = size_variance, SIZE_FREEDOM
    return np.maximum(variance, within), total
