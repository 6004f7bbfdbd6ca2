"""When a clock was set, between the two sync marks that tell by how much: what the edges of calls say of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .._typing import BoolArray, Int64Array
from .alignment import Alignment, ClockSegment
from .coarse_shift import InnermostCalls
from .operator_gaps import REACH_NS, busy_intervals, cut_depth, distance_to_end

__all__ = ["SharedThread", "move_clock_steps", "step_uncertainty_ns"]


class SharedThread(NamedTuple):
    """One thread, as both files know it.

    Attributes:
        edges: int64[n], ns of the recording's clock, ascending: where calls begin and end.
        start: int64[m], ns from the trace's base, of its operators; ascending, an outer one first.
        end: int64[m].
        calls: those in which no other ran, of the recording's clock.
    """

    edges: Int64Array
    start: Int64Array
    end: Int64Array
    calls: InnermostCalls


def move_clock_steps(found: Alignment, shared: Sequence[SharedThread]) -> Sequence[ClockSegment]:
    """Return the segments, each from where on its offset suits the operators better than the one before.

    Marks say between which two of them a clock was set; the edges of calls in between say when: by the right offset
    they lie near an end of an operator.
    """
    segments = list(found.segments)
    for index, (first, last) in enumerate(found.brackets):
        moments = [np.array([first, last], np.int64)]
        gained = [np.zeros(2, np.int64)]
        for thread in shared:
            edges = thread.edges[(thread.edges > first) & (thread.edges < last)]
            if len(edges):
                before, after = (
                    distance_to_end(busy_intervals(thread.start, thread.end, guess, REACH_NS), guess)
                    for guess in _on_both_sides(found, index, edges)
                )
                moments.append(edges)
                gained.append(before - after)
        time = np.concatenate(moments)
        order = np.argsort(time, kind="stable")
        # What is lost by giving the edges up to each moment the first offset and not the second.
        lost = np.cumsum(np.concatenate(gained)[order])[:-1]
        at = int(np.argmin(lost))
        left, right = time[order[at]], time[order[at + 1]]
        segments[index + 1] = replace(segments[index + 1], begin_ns=int(left + (right - left) // 2 + 1))
    return segments


def step_uncertainty_ns(found: Alignment, shared: Sequence[SharedThread], bound_ns: float) -> float | None:
    """Return by how much more than the bound an edge is off that may lie on the other side of a clock's step.

    Args:
        found: the alignment, with the offsets of each segment.
        shared: the threads.
        bound_ns: how far off the offset of each segment can be.

    Returns:
        The most of all such edges, 0 without any; None where the clock can have been set at no moment, as then the
        offsets are wrong.
    """
    worst = 0.0
    for index, (first, last) in enumerate(found.brackets):
        moments: list[Int64Array] = []
        apart: list[Int64Array] = []
        cut_before: list[BoolArray] = []
        cut_after: list[BoolArray] = []
        for thread in shared:
            edges = thread.edges[(thread.edges > first) & (thread.edges < last)]
            if len(edges):
                sides = _on_both_sides(found, index, edges)
                for place, cut in zip(sides, (cut_before, cut_after), strict=True):
                    busy = busy_intervals(thread.start, thread.end, np.sort(place), REACH_NS)
                    cut.append(cut_depth(busy, place) > bound_ns)
                moments.append(edges)
                apart.append(np.abs(sides[0] - sides[1]))
        if not moments:
            continue
        order = np.argsort(np.concatenate(moments), kind="stable")
        early, late = (np.concatenate(cut)[order] for cut in (cut_before, cut_after))
        # The clock can have been set before the n-th edge if no edge before it is cut, nor any from it on.
        cuts = np.concatenate([[0], np.cumsum(early)]) + np.concatenate([np.cumsum(late[::-1])[::-1], [0]])
        possible = np.flatnonzero(cuts == 0)
        if not len(possible):
            return None
        doubtful = np.concatenate(apart)[order][possible[0] : possible[-1]]
        worst = max(worst, float(doubtful.max(initial=0)))
    return worst


def _on_both_sides(found: Alignment, index: int, edges: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return where edges lie in the trace by the offset before a step of the clock, and by that after it."""
    return found.of_segment(index).to_trace(edges), found.of_segment(index + 1).to_trace(edges)
