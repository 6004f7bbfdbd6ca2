"""By how much a module differs between recordings of one program: the noise that a change must exceed."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from .._typing import Float64Array

__all__ = ["Spread", "measure_spread", "student_quantile"]

SINGLE_FREEDOM = 6.0
"""Degrees of freedom where each side is one recording: how unequally modules differ between recordings cannot be seen
there; over three architectures on a busy machine it was as of 5 to 12."""
MAX_SINGLE_SPREAD = 0.05
"""Where each side is one recording, modules differ by this part at most unless their steps tell of more: what is beyond
are changes of the modules."""
_UNSEEN = 1.645
_MANY = 1e6
_MEDIAN_OF_SQUARE = 0.455
"""Of the square of a normal number with variance 1."""
_MEDIAN_WEIGHT = 0.37
"""How much a median tells of a variance, against a mean."""


class Spread(NamedTuple):
    """The noise between recordings, after what all modules changed alike.

    Attributes:
        variance: float64[modules], relative variance of what a module takes in one recording.
        freedom: degrees of freedom.
        factor: how much larger it is than what the steps of a recording tell of it.
    """

    variance: Float64Array
    freedom: float
    factor: float


def measure_spread(logs: Float64Array, within: Float64Array, freedom: float, base_runs: int) -> Spread:
    """Estimate the noise of each module from its recordings, and from what all modules have in common.

    Few recordings say little about one module, but all modules together say how much recordings differ. Each module's
    variance is drawn towards what is expected of it, the more the less modules differ in that (empirical Bayes; Smyth
    2004). Expected is a multiple of what its steps tell, half of it its own and half that of the middle module.

    Args:
        logs: float64[modules, recordings], logarithms of times, without what all modules changed alike.
        within: float64[modules], relative variances as the steps of a recording tell them.
        freedom: their degrees of freedom.
        base_runs: how many of the recordings are those before.
    """
    modules, runs = logs.shape
    base, new = logs[:, :base_runs], logs[:, base_runs:]
    expected = (within + np.median(within)) / 2
    own_freedom = runs - 2
    if not own_freedom:
        difference = (new - base)[:, 0]
        factor = float(np.median(difference**2 / (2 * expected))) / _MEDIAN_OF_SQUARE
        limit = max(8.0, MAX_SINGLE_SPREAD**2 / float(np.median(expected)))
        factor = min(max(factor, 1.0), limit)
        beyond_steps = 1 - 1 / factor
        unsure = 0.25 / max(freedom, 1.0) + beyond_steps**2 / (_MEDIAN_WEIGHT * modules) + 1 / SINGLE_FREEDOM
        return Spread(factor * expected, 1 / unsure, math.sqrt(factor))
    residuals = [side - side.mean(axis=1, keepdims=True) for side in (base, new)]
    own = sum((side**2).sum(axis=1) for side in residuals) / own_freedom
    factor = float(np.median(own / expected)) / (1 - 2 / (9 * own_freedom)) ** 3
    expected_freedom = _freedom_of_expected(own, factor * expected, own_freedom)
    variance = (expected_freedom * factor * expected + own_freedom * own) / (expected_freedom + own_freedom)
    return Spread(np.maximum(variance, 1e-12), expected_freedom + own_freedom, math.sqrt(factor))


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
