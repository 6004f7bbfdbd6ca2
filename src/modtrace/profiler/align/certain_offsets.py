"""Which offsets are possible at all: where no edge of a call would lie inside an operator.

Around long operators more than one gap can suit an edge, and the likely one is not the only one. What is possible in a
short stretch of time is a set of shifts. It lies within what marks allow, and a clock of limited drift comes to it from
what is possible just before and just after.
"""

from __future__ import annotations

import math

import numpy as np

from ..._typing import BoolArray, Float64Array, Int64Array
from .offset_band import OffsetBounds
from .operator_bounds import REACH_NS, SHIFT_STEP_NS, SHIFTS, Busy, CallEdges, count_cuts

__all__ = ["certain_offsets"]

_STRETCH_NS = 2_000_000
_STRETCHES_AT_ONCE = 256
_FAR_SHIFTS = np.arange(-5 * REACH_NS, 5 * REACH_NS + 1, SHIFT_STEP_NS, dtype=np.int64)
"""Tried instead of `SHIFTS` where marks are so far apart that they allow more, as over a pause."""
_TOLERANCE_NS = 20.0


def certain_offsets(
    edges: CallEdges, busy: Busy, least: Float64Array, most: Float64Array, limit: float
) -> OffsetBounds | None:
    """Return bounds that hold whichever of the possible gaps each edge lies in.

    Args:
        edges: where they are thought to lie.
        busy: the thread's operators.
        least: float64[n], ns, the least correction of the guess that marks allow.
        most: float64[n], ns, the greatest.
        limit: how fast the right correction may change, nanoseconds per nanosecond.

    Returns:
        Of each edge the least and the greatest correction of its guess; None where in some stretch nothing is possible,
        or something at the end of what is tried.
    """
    if not len(busy.start):
        nothing = np.full(len(edges.time), np.inf)
        return OffsetBounds(edges.time, -nothing, nothing)
    stretch, of_edge = np.unique((edges.time - edges.time[0]) // _STRETCH_NS, return_inverse=True)
    center = edges.time[0] + stretch * _STRETCH_NS + _STRETCH_NS // 2
    slack = limit * _STRETCH_NS / 2 + SHIFT_STEP_NS / 2
    starts = np.searchsorted(of_edge, np.arange(len(stretch)))
    lowest_known = np.minimum.reduceat(least, starts)[:, None] - slack
    highest_known = np.maximum.reduceat(most, starts)[:, None] + slack
    near = lowest_known.min() >= SHIFTS[0] and highest_known.max() <= SHIFTS[-1]
    shifts = SHIFTS if near else _FAR_SHIFTS
    possible = _uncut(edges, busy, of_edge, limit, shifts)
    possible &= (lowest_known <= shifts) & (highest_known >= shifts)
    # What lies beyond those that are tried is possible too, where neither marks nor the stretches around exclude it.
    possible = np.hstack([lowest_known < shifts[0], possible, highest_known > shifts[-1]])
    steps = np.ceil(limit * np.diff(center) / SHIFT_STEP_NS).astype(np.int64) + 1
    for index in range(1, len(stretch)):
        possible[index] &= _within(possible[index - 1], int(steps[index - 1]))
    for index in range(len(stretch) - 2, -1, -1):
        possible[index] &= _within(possible[index + 1], int(steps[index]))
    if possible[:, [0, -1]].any() or not possible.any(axis=1).all():
        return None
    possible = possible[:, 1:-1]
    lowest = shifts[possible.argmax(axis=1)] - SHIFT_STEP_NS / 2
    highest = shifts[len(shifts) - 1 - possible[:, ::-1].argmax(axis=1)] + SHIFT_STEP_NS / 2
    drifted = limit * np.abs(edges.time - center[of_edge])
    return _outside_operators(edges, busy, lowest[of_edge] - drifted, highest[of_edge] + drifted)


def _uncut(edges: CallEdges, busy: Busy, of_edge: Int64Array, limit: float, shifts: Int64Array) -> BoolArray:
    """Return bool[stretches, shifts]: whether each edge of a stretch can lie outside of all operators."""
    # At the right shift of the stretch's middle an edge is off by what the clock drifts until then, and by half a step.
    margin = math.ceil(limit * _STRETCH_NS / 2 + SHIFT_STEP_NS / 2 + _TOLERANCE_NS)
    long = busy.end - busy.start > 2 * margin
    inner = Busy(busy.start[long] + margin, busy.end[long] - margin)
    found = []
    for first in range(0, int(of_edge[-1]) + 1, _STRETCHES_AT_ONCE):
        begin, end = np.searchsorted(of_edge, (first, first + _STRETCHES_AT_ONCE))
        found.append(count_cuts(edges.guess[begin:end], of_edge[begin:end] - first, inner, shifts) == 0)
    return np.concatenate(found)


def _within(possible: BoolArray, steps: int) -> BoolArray:
    """Return which shifts are at most so many steps from a possible one."""
    before = np.concatenate([[0], np.cumsum(possible)])
    place = np.arange(len(possible))
    near: BoolArray = before[np.minimum(place + steps + 1, len(possible))] > before[np.maximum(place - steps, 0)]
    return near


def _outside_operators(edges: CallEdges, busy: Busy, low: Float64Array, high: Float64Array) -> OffsetBounds:
    """Narrow the bounds of each edge to where it lies outside of operators."""
    for bound, is_low in ((low, True), (high, False)):
        place = edges.guess + bound
        at = np.maximum(np.searchsorted(busy.start, place, side="right") - 1, 0)
        inside = (place > busy.start[at]) & (place < busy.end[at])
        nearest = (busy.end[at] if is_low else busy.start[at]) - edges.guess
        bound[inside] = nearest[inside]
    # An edge inside one operator wherever it may lie says nothing.
    silent = low > high
    low[silent], high[silent] = -np.inf, np.inf
    return OffsetBounds(edges.time, low, high)
