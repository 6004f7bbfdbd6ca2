"""By how much a module differs between recordings of one program: the noise that a change must exceed."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from .._typing import Float64Array

__all__ = ["Spread", "measure_spread", "student_quantile", "trimmed_mean"]

SINGLE_FREEDOM = 6.0
"""Degrees of freedom where each side is one recording: how unequally modules differ between recordings cannot be seen
there; over three architectures on a busy machine it was as of 5 to 12."""
MAX_SINGLE_SPREAD = 0.05
"""Where each side is one recording, modules differ by this part at most unless their steps tell of more: what is beyond
are changes of the modules."""
_CUT = 0.125
"""Of fewer than eight recordings none can be spared."""
_UNSEEN = 1.645
"""Standard errors: 95 % on one side."""
_MANY = 1e6
_MEDIAN_OF_SQUARE = 0.455
"""Of the square of a normal number with variance 1."""
_MEDIAN_WEIGHT = 0.37
"""How much a median tells of a variance, against a mean."""


class Spread(NamedTuple):
    """Differences between the sides, and the noise between recordings; beside what all modules changed alike.

    Attributes:
        difference: float64[modules], of the logarithms of times.
        error: float64[modules], the standard error of the difference.
        freedom: degrees of freedom of the error.
        spread: float64[modules], by what part a module differs from one recording to the next.
        factor: how many times larger that is than what the steps of a recording tell of it.
    """

    difference: Float64Array
    error: Float64Array
    freedom: float
    spread: Float64Array
    factor: float


class Trimmed(NamedTuple):
    """The mean over recordings without the extreme ones, in which something else ran all the time.

    Attributes:
        mean: float64[modules].
        squares: float64[modules], the sum of squared deviations with the extreme recordings moved to the nearest kept.
        kept: how many recordings the mean is of.
    """

    mean: Float64Array
    squares: Float64Array
    kept: int


def trimmed_mean(logs: Float64Array) -> Trimmed:
    """Return the mean over recordings, of eight or more without an eighth at each end (Yuen 1974).

    Args:
        logs: float64[modules, recordings].
    """
    runs = logs.shape[1]
    cut = int(_CUT * runs)
    ordered = np.sort(logs, axis=1)
    kept = ordered[:, cut : runs - cut]
    moved = np.clip(ordered, kept[:, :1], kept[:, -1:])
    squares = ((moved - moved.mean(axis=1, keepdims=True)) ** 2).sum(axis=1)
    return Trimmed(kept.mean(axis=1), squares, kept.shape[1])


def measure_spread(logs: Float64Array, within: Float64Array, freedom: float, base_runs: int) -> Spread:
    """Estimate how each module differs between the sides, and how sure that is.

    Few recordings say little about the noise of one module, but all modules together say how much recordings differ.
    Each module's variance is drawn towards what is expected of it, the more the less modules differ in that (empirical
    Bayes; Smyth 2004). Expected is a multiple of what its steps tell, half of it its own and half that of the middle
    module.

    Args:
        logs: float64[modules, recordings], logarithms of times, without what all modules changed alike.
        within: float64[modules], relative variances as the steps of a recording tell them.
        freedom: their degrees of freedom.
        base_runs: how many of the recordings are those before.
    """
    base, new = trimmed_mean(logs[:, :base_runs]), trimmed_mean(logs[:, base_runs:])
    difference = new.mean - base.mean
    per_recording = math.sqrt(1 / base.kept + 1 / new.kept)
    expected = (within + np.median(within)) / 2
    own_freedom = base.kept + new.kept - 2
    if not own_freedom:
        factor = float(np.median(difference**2 / (2 * expected))) / _MEDIAN_OF_SQUARE
        limit = max(8.0, MAX_SINGLE_SPREAD**2 / float(np.median(expected)))
        factor = min(max(factor, 1.0), limit)
        beyond_steps = 1 - 1 / factor
        unsure = 0.25 / max(freedom, 1.0) + beyond_steps**2 / (_MEDIAN_WEIGHT * len(within)) + 1 / SINGLE_FREEDOM
        spread = np.sqrt(factor * expected)
        return Spread(difference, spread * per_recording, 1 / unsure, spread, math.sqrt(factor))
    own = (base.squares + new.squares) / own_freedom
    factor = float(np.median(own / expected)) / (1 - 2 / (9 * own_freedom)) ** 3
    expected_freedom = _freedom_of_expected(own, factor * expected, own_freedom)
    variance = (expected_freedom * factor * expected + own_freedom * own) / (expected_freedom + own_freedom)
    spread = np.sqrt(np.maximum(variance, 1e-12))
    return Spread(difference, spread * per_recording, expected_freedom + own_freedom, spread, math.sqrt(factor))


def _freedom_of_expected(own: Float64Array, expected: Float64Array, own_freedom: int) -> float:
    """Return as how many recordings the expected variance counts: few where modules differ much in their variance."""
    if len(own) < 4 or not expected.all():
        return 0.0
    logs = np.log(np.maximum(own, 1e-16) / expected)
    squares = (logs - logs.mean()) ** 2
    # What chance alone may have hidden is added: too many degrees of freedom would make noise look sure.
    unseen = _UNSEEN * float(squares.std()) / math.sqrt(len(squares))
    beyond_chance = float(squares.mean()) + unseen - _trigamma(own_freedom / 2)
    if beyond_chance <= _trigamma(_MANY / 2):
        return _MANY
    low, high = 1e-3, _MANY
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _trigamma(middle / 2) > beyond_chance else (low, middle)
    return high


def _trigamma(x: float) -> float:
    """Return the second derivative of log Γ: the variance of the logarithm of a Gamma distributed number."""
    below = 0.0
    while x < 6:
        below += 1 / x**2
        x += 1
    return below + 1 / x + 1 / (2 * x**2) + 1 / (6 * x**3) - 1 / (30 * x**5)


def student_quantile(outside: float, freedom: float) -> float:
    """Return t so that Student's distribution has a part `outside` beyond -t and t."""
    if freedom >= _MANY:
        return NormalDist().inv_cdf(1 - outside / 2)
    # With t = √freedom tan(angle), the density is a power of the cosine.
    angle = np.linspace(0, math.pi / 2, 100_001)
    density = np.cos(angle) ** (freedom - 1)
    density[-1] = min(density[-1], density[-2])
    inside = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(1 - outside, inside / inside[-1], angle)))
