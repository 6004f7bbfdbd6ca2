"""Arrivals → per step the rank that made it late, by how much, and whether that can be told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..._typing import Float64Array, Int64Array
from .arrivals import Arrivals
from .runs import median_of_runs, run_lengths, run_starts
from .step_finding import StepFinding, Verdict

__all__ = ["COUNTED_NOISES", "MAD_TO_SIGMA", "MIN_NOISES", "Bounds", "LateStep", "late_steps", "noise_limit"]

MIN_NOISES = 6.0
"""A step is told to be late from this many times the spread on."""
COUNTED_NOISES = 3.0
"""An excess counts from this many times the spread on."""
_MIN_STEPS = 4
"""Steps from which on what a rank always takes more can be told from what varies."""
MAD_TO_SIGMA = 1.4826


class Bounds:
    """How far the times of ranks are off at most.

    Args:
        ranks: ascending.
        bound_ns: of each rank.
        clocks: of each rank: those with one clock are compared without error.
    """

    def __init__(self, ranks: Sequence[int], bound_ns: Sequence[int], clocks: Sequence[str]) -> None:
        self._ranks = np.array(ranks, np.int64)
        self._bound = np.array(bound_ns, np.int64)
        self._clock = np.unique(np.array(clocks, object), return_inverse=True)[1] if len(clocks) else self._ranks

    def largest(self, rank: int, others: Int64Array) -> int:
        """Return how far the difference of a rank's times and those of any of the others is off at most, ns."""
        own, index = np.searchsorted(self._ranks, rank), np.searchsorted(self._ranks, others)
        apart = self._clock[index] != self._clock[own]
        return int(np.max((self._bound[index] + self._bound[own])[apart], initial=0))

    def of_arrivals(self, found: Arrivals) -> Int64Array:
        """Return for each arrival how far it is off at most against the others at its collective, ns."""
        if not len(found.rank):
            return found.rank
        index = np.searchsorted(self._ranks, found.rank)
        bound, clock = self._bound[index], self._clock[index]
        begins = run_starts(found.collective)
        apart = np.minimum.reduceat(clock, begins) != np.maximum.reduceat(clock, begins)
        largest = np.maximum.reduceat(bound, begins)
        apart, largest = (np.repeat(values, found.size[begins]) for values in (apart, largest))
        return np.where(apart, bound + largest, 0)


class LateStep(NamedTuple):
    """A step, and what made it late.

    Attributes:
        finding: what it says, without modules, duration, and what it saved.
        arrivals: int64, those of its rank that cost something, as indices of `Arrivals`.
        slower: int64, those before which its rank took more than all vary by, whether somebody waited or not.
    """

    finding: StepFinding
    arrivals: Int64Array
    slower: Int64Array


def late_steps(found: Arrivals, bounds: Bounds) -> list[LateStep]:
    """Return what each step says, in order.

    Args:
        found: all arrivals.
        bounds: how far times are off.
    """
    noise = _noise(found)
    # Only the last one keeps others waiting, and by no more than it is late at most.
    latest = found.lateness + bounds.of_arrivals(found)
    cost = np.where(found.is_last, np.clip(found.excess, 0, np.maximum(latest, 0)), 0)
    # What varies anyway is nobody's, and would add up over many collectives.
    cost = np.where(cost > COUNTED_NOISES * noise, cost, 0)
    order = np.argsort(found.step, kind="stable")
    steps, first = np.unique(found.step[order], return_index=True)
    parts = np.split(order, first[1:]) if len(steps) else []
    return [_late_step(found, rows, cost, noise, bounds) for rows in parts]


def _late_step(found: Arrivals, rows: Int64Array, cost: Int64Array, noise: Float64Array, bounds: Bounds) -> LateStep:
    lasts = rows[found.is_last[rows]]
    ranks, index = np.unique(found.rank[lasts], return_inverse=True)
    by_rank = np.bincount(index, cost[lasts], len(ranks))
    rank = int(ranks[np.argmax(by_rank)])
    own = lasts[found.rank[lasts] == rank]
    costly = own[cost[own] > 0]
    counted = costly if len(costly) else own
    limit = noise_limit(noise[counted], len(rows))
    total = int(cost[own].sum())
    worst = int(counted[np.argmax(found.lateness[counted])])
    lateness = int(found.lateness[worst])
    # The last but one and those around the median can be any rank: the largest bound of those that came.
    bound = bounds.largest(
        rank, found.rank[slice(*np.searchsorted(found.collective, found.collective[worst] + np.arange(2)))]
    )
    verdict: Verdict = "late"
    if total <= limit:
        verdict = "even"
    elif lateness <= bound:
        verdict = "cannot tell"
    finding = StepFinding(int(found.step[rows[0]]), verdict, rank, total, 0, lateness, bound, round(limit))
    slower = rows[(found.rank[rows] == rank) & (found.excess[rows] > COUNTED_NOISES * noise[rows])]
    return LateStep(finding, costly, slower)


def _noise(found: Arrivals) -> Float64Array:
    """Return for each arrival how much excesses at its place in the step vary from step to step, as a deviation, ns.

    A rank that is slower in each step does not vary: what it always has more is taken out first. Of two ranks one that
    varies makes the excess of both vary. So no more counts than what the own time of the median rank lets expect.
    """
    place = found.position
    excess_varies = _from_usual(found, found.excess)
    order = np.lexsort((excess_varies, place))
    begins = run_starts(place[order])
    of_place = median_of_runs(excess_varies[order], begins)
    own_varies = _from_usual(found, found.own)
    by_rank = np.lexsort((own_varies, found.rank, place))
    ranks = run_starts(place[by_rank], found.rank[by_rank])
    of_rank, place_of_rank = median_of_runs(own_varies[by_rank], ranks), place[by_rank][ranks]
    in_order = np.lexsort((of_rank, place_of_rank))
    first = run_starts(place_of_rank[in_order])
    middle = first + (run_lengths(first, len(in_order)) - 1) // 2
    spread = np.minimum(of_place, math.sqrt(2) * of_rank[in_order][middle])
    noise = np.empty(len(place))
    noise[order] = MAD_TO_SIGMA * np.repeat(spread, run_lengths(begins, len(order)))
    return noise


def _from_usual(found: Arrivals, values: Int64Array) -> Float64Array:
    """Return how far each value is from what its rank has at its place of the step as a rule."""
    order = np.lexsort((values, found.rank, found.position))
    begins = run_starts(found.position[order], found.rank[order])
    steps = run_lengths(begins, len(order))
    # Of few steps nothing tells what is always so: then ranks are compared alone.
    always = np.where(steps < _MIN_STEPS, 0, median_of_runs(values[order], begins))
    rest = np.empty(len(values))
    rest[order] = np.abs(values[order] - np.repeat(always, steps))
    return rest


def noise_limit(noise: Float64Array, count: int) -> float:
    """Return what the sum of some excesses must exceed, where the largest of `count` is looked at."""
    factor = max(MIN_NOISES, 1 + math.sqrt(2 * math.log(max(count, 2))))
    return factor * float(np.sqrt(np.sum(noise**2)))
