"""Bounds on the offset between two clocks, from operators: no call begins or ends while an operator runs.

Both files know when a thread was busy: the trace has the times of operators, the recording those of calls. An operator
runs inside a call or outside of it, so each edge of a call is in a gap between operators. That gap bounds the offset
from both sides. Which gap it is shows when many edges agree: `most_likely_shift` finds the shift that cuts the fewest
operators. Around long operators more than one gap may suit an edge.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .._typing import Float64Array, Int64Array
from ..ring.clock_map import ClockMap
from ..timeline.time_intervals import TimeIntervals, union_of

REACH_NS = 40_000
"""How far off the first guess may be."""
SHIFT_STEP_NS = 250
SHIFTS = np.arange(-REACH_NS, REACH_NS + 1, SHIFT_STEP_NS, dtype=np.int64)
"""Corrections of the guess that are tried, ns."""
_WINDOW_EDGES, _MIN_WINDOW_EDGES = 64, 8
_WINDOW_NS = 20_000_000
"""A window holds the edges of so long a time, but at least and at most so many."""
_WINDOWS_AT_ONCE = 256
"""Windows whose cuts are counted together: that bounds the memory."""


class OffsetBounds(NamedTuple):
    """Bounds on an offset, each at one moment; columns of equal length."""

    time: Int64Array  # ns, of the recording's clock
    low: Float64Array  # ns, the least offset; -inf where unknown
    high: Float64Array  # ns, the greatest; inf where unknown; less than `low` where bounds contradict each other

    @classmethod
    def joined(cls, parts: Sequence["OffsetBounds"]) -> "OffsetBounds":
        """Put bounds one after the other."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    @property
    def middle(self) -> Float64Array:
        """Between `low` and `high`; of bounds from `alignment.intersect` it drifts no faster than they may."""
        return (self.low + self.high) / 2

    @property
    def clock(self) -> ClockMap:
        """The trace's clock by the middle; the bound holds at the moments of the bounds."""
        return ClockMap.of_columns(self.time, self.middle, np.abs(self.high - self.low) / 2, "no rate")


class CallEdges(NamedTuple):
    """Moments at which calls of one thread begin or end; columns of equal length, in time order."""

    time: Int64Array  # ns, of the recording's clock
    guess: Int64Array  # ns from the trace's base, their supposed places in the trace


def busy_intervals(start: Int64Array, end: Int64Array, edges: Int64Array, margin: int) -> TimeIntervals:
    """Return when a thread ran operators that call no module.

    An operator that calls modules, as a checkpoint's does, has edges of calls deep inside it: only those in it count.
    Operators are in order, an outer one first, and edges off by at most `margin` ns.
    """
    has_inner = np.append(start[1:] < end[:-1], False)
    calls = np.searchsorted(edges, start + margin) < np.searchsorted(edges, end - margin)
    kept = (end > start) & ~(has_inner & calls)
    return union_of(start[kept], end[kept])


def cut_depth(busy: TimeIntervals, time: Int64Array) -> Int64Array:
    """Return how far each moment is from the nearer edge of the operator it is in, ns; 0 if it is in none."""
    if not len(busy.start):
        return np.zeros(len(time), np.int64)
    at = np.searchsorted(busy.start, time, side="right") - 1
    depth = np.minimum(time - busy.start[at], busy.end[at] - time)
    depth[at < 0] = 0
    inside: Int64Array = np.maximum(depth, 0)
    return inside


def most_likely_shift(edges: CallEdges, busy: TimeIntervals, least: Float64Array, most: Float64Array) -> Float64Array:
    """Return by how much each edge's guess has to be shifted so that fewest operators are cut around it, ns.

    It is the middle of the best possible shifts; among equal ones those nearest to what was found just before.
    """
    since = (edges.time - edges.time[0]).astype(np.float64)
    starts = _windows(edges.time)
    center = np.add.reduceat(since, starts) / np.diff(np.append(starts, len(since)))
    shift = np.zeros(len(starts))
    low = np.minimum.reduceat(least, starts) - SHIFT_STEP_NS
    high = np.maximum.reduceat(most, starts) + SHIFT_STEP_NS
    before = 0.0
    for block in range(0, len(starts), _WINDOWS_AT_ONCE):
        some = np.append(starts, len(since))[block : block + _WINDOWS_AT_ONCE + 1]
        cuts = _count_cuts(edges.guess[some[0] : some[-1]], np.repeat(np.arange(len(some) - 1), np.diff(some)), busy)
        for index, count in enumerate(cuts):
            possible = (low[block + index] <= SHIFTS) & (high[block + index] >= SHIFTS)
            if possible.any():
                count = np.where(possible, count, len(edges.time) + 1)
            fewest = np.flatnonzero(count == count.min())
            if len(fewest) < len(SHIFTS):
                run = fewest - np.arange(len(fewest))
                same = fewest[run == run[np.argmin(np.abs(SHIFTS[fewest] - before))]]
                before = float(SHIFTS[same[0]] + SHIFTS[same[-1]]) / 2
            shift[block + index] = before
    edge_shift: Float64Array = np.interp(since, center, shift)
    return edge_shift


def bounds_from_gaps(edges: CallEdges, shift: Float64Array, busy: TimeIntervals, tolerance: float) -> OffsetBounds:
    """Return what the gap around each edge says about its offset, as corrections of the guess, in order.

    An edge that is deeper than `tolerance` ns in an operator bounds nothing; any other counts as beyond its nearer end.
    """
    place = edges.guess + np.rint(shift).astype(np.int64)
    after = np.searchsorted(busy.start, place, side="right")
    # An operator with the edge inside is before it or after it, whichever is nearer.
    last = np.maximum(after - 1, 0)
    inside = (after > 0) & (place < busy.end[last])
    nearer_start = place - busy.start[last] < busy.end[last] - place
    after = np.where(inside & nearer_start, last, after)
    low, high = np.full(len(place), -np.inf), np.full(len(place), np.inf)
    follows, precedes = np.flatnonzero(after > 0), np.flatnonzero(after < len(busy.start))
    low[follows] = busy.end[after[follows] - 1] - edges.guess[follows]
    high[precedes] = busy.start[after[precedes]] - edges.guess[precedes]
    deep = cut_depth(busy, place) > tolerance
    low[deep], high[deep] = -np.inf, np.inf
    return OffsetBounds(edges.time, low, high)


def _windows(time: Int64Array) -> Int64Array:
    """Return where the stretches begin in which edges are counted together: long enough for many, and short."""
    starts = [0]
    while True:
        begin = starts[-1]
        soon = int(np.searchsorted(time, time[begin] + _WINDOW_NS))
        begin = min(begin + _WINDOW_EDGES, max(begin + _MIN_WINDOW_EDGES, soon))
        if begin + _MIN_WINDOW_EDGES > len(time):
            return np.array(starts, np.int64)
        starts.append(begin)


def _count_cuts(guess: Int64Array, window: Int64Array, busy: TimeIntervals) -> Int64Array:
    """Return int64[windows, shifts]: how many edges are inside an operator at each of `SHIFTS`."""
    width = len(SHIFTS) + 1
    count = int(window[-1]) + 1
    change = np.zeros(count * width, np.int64)
    # The operators within reach of each edge, one after another.
    near = np.searchsorted(busy.end, guess - REACH_NS, side="right")
    rows = np.flatnonzero(near < len(busy.start))
    near = near[rows]
    while len(rows):
        distance = busy.start[near] - guess[rows]
        within = distance < REACH_NS
        rows, near, distance = rows[within], near[within], distance[within]
        if not len(rows):
            break
        # A moment at which an operator begins or ends is not inside.
        first = np.maximum((distance + REACH_NS) // SHIFT_STEP_NS + 1, 0)
        end = -(-(busy.end[near] - guess[rows] + REACH_NS) // SHIFT_STEP_NS)
        end = np.maximum(first, np.minimum(end, len(SHIFTS)))
        np.add.at(change, window[rows] * width + first, 1)
        np.subtract.at(change, window[rows] * width + end, 1)
        near = near + 1
        more = near < len(busy.start)
        rows, near = rows[more], near[more]
    cuts: Int64Array = np.cumsum(change.reshape(count, width), axis=1)[:, :-1]
    return cuts
