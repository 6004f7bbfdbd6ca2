"""Bounds on the offset from operators: busy times of a thread, the shift that cuts fewest, the gap around each edge."""

from __future__ import annotations

import numpy as np
import pytest

from modtrace.profiler.alignment import (
    CallEdges,
    bounds_from_gaps,
    busy_intervals,
    cut_depth,
    most_likely_shift,
)
from modtrace.timeline.nesting import TimeIntervals


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


BUSY = TimeIntervals(array(1000, 3000, 8000), array(2000, 5000, 9000))


def test_nested_operators_count_as_the_outermost() -> None:
    busy = busy_intervals(array(0, 10, 50, 200), array(100, 40, 90, 300), array(), 5)
    assert (busy.start_ns.tolist(), busy.end_ns.tolist()) == ([0, 200], [100, 300])


def test_an_operator_that_calls_modules_counts_as_the_operators_in_it() -> None:
    start, end = array(0, 30, 60, 200), array(100, 40, 90, 300)
    # Edges 20 and 50 lie deep in the first; 250 lies deep in the last, which holds no operator, so it calls nothing.
    busy = busy_intervals(start, end, array(20, 50, 250), 5)
    assert (busy.start_ns.tolist(), busy.end_ns.tolist()) == ([30, 60, 200], [40, 90, 300])
    # 4 and 97 may be in it only by mistake.
    busy = busy_intervals(start, end, array(4, 97, 250), 5)
    assert (busy.start_ns.tolist(), busy.end_ns.tolist()) == ([0, 200], [100, 300])


def test_operators_of_zero_length_are_not_busy_time() -> None:
    busy = busy_intervals(array(5, 9), array(5, 9), array(), 5)
    assert len(busy.start_ns) == 0
    assert cut_depth(busy, array(5)).tolist() == [0]


def test_how_deep_moments_lie_in_operators() -> None:
    moments = array(0, 1000, 1300, 1900, 2000, 2600, 9500)
    assert cut_depth(BUSY, moments).tolist() == [0, 0, 300, 100, 0, 0, 0]


def test_the_gap_around_each_edge_bounds_its_offset() -> None:
    # Before all, between two, just inside the start and the end of one, deep inside, after all.
    edges = CallEdges(array(1, 2, 3, 4, 5, 6), array(500, 2400, 3100, 4950, 4000, 9100))
    bounds = bounds_from_gaps(edges, np.zeros(6), BUSY, 200.0)
    assert bounds.time_ns.tolist() == [1, 2, 3, 4, 5, 6]
    assert bounds.low_ns.tolist() == [-np.inf, -400, -1100, 50, -np.inf, -100]
    assert bounds.high_ns.tolist() == [500, 600, -100, 3050, np.inf, np.inf]
    # By the guess the second lies between the first two operators; 3 µs later it lies after the second.
    later = bounds_from_gaps(edges, np.full(6, 3000.0), BUSY, 200.0)
    assert (later.low_ns[1], later.high_ns[1]) == (2600, 5600)


@pytest.mark.parametrize("late", [-9000, -2500, 0, 6000, 30_000])
def test_the_shift_that_cuts_no_operator_is_found(late: int) -> None:
    random = np.random.default_rng(1)
    edges = np.cumsum(random.integers(10_000, 60_000, 400))
    busy = TimeIntervals(edges[:-1] + 2000, edges[1:] - 2000)
    unknown = np.full(400, np.inf)
    shift = most_likely_shift(CallEdges(edges, edges + late), busy, -unknown, unknown)
    # Any shift within 2 µs cuts none, so the middle one is chosen.
    assert shift.tolist() == pytest.approx([-late] * 400, abs=250)


def test_a_shift_that_marks_rule_out_is_not_chosen() -> None:
    edges = np.arange(100) * 20_000
    busy = TimeIntervals(edges[:-1] + 2000, edges[1:] - 2000)
    guess = edges + 9000
    # Operators of one length repeat: 9 µs too late looks like 11 µs too early.
    nearest = most_likely_shift(CallEdges(edges, guess), busy, np.full(100, -15_000.0), np.full(100, 15_000.0))
    assert nearest.tolist() == pytest.approx([-9000] * 100, abs=250)
    forced = most_likely_shift(CallEdges(edges, guess), busy, np.full(100, 1000.0), np.full(100, 15_000.0))
    assert forced.tolist() == pytest.approx([11_000] * 100, abs=250)
