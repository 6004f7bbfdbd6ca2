"""Clocks that are milliseconds apart, where no sync mark says so, are brought together by calls and operators."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from modtrace.profiler.alignment import Alignment
from modtrace.profiler.coarse_shift import CoarseShift, find_coarse_shift
from modtrace.profiler.event_collector import EventCollector
from modtrace.profiler.overlay import overlay
from modtrace.timeline import Timeline
from modtrace.timeline.time_intervals import TimeIntervals
from tests.support.drifting_trace import DriftingClock, call_edges, make_trace
from tests.support.kineto import BASE, TID
from tests.unit.test_profiler_true_offset import MS, steps


def aligned(timeline: Timeline, clock: DriftingClock, seed: int = 0) -> Alignment:
    collector = EventCollector()
    collector.add(make_trace(timeline, clock, BASE, seed))
    found = overlay(timeline, collector.events(), {"baseTimeNanoseconds": BASE}, "trace.json").alignment
    assert found is not None
    return found


def unmarked(count: int, seed: int) -> Timeline:
    return replace(steps(count, seed), marks=[])


@pytest.mark.parametrize("count", [6, 100])
@pytest.mark.parametrize("ahead", [0, 60_000, -500_000, 4 * MS, -4 * MS])
@pytest.mark.parametrize(
    ("drift", "wander"), [(0.0, 0.0), (100e-6, 0.0), (-30e-6, 2500.0)], ids=["even", "drifting", "wandering"]
)
def test_the_true_error_is_as_small_as_with_sync_marks(count: int, ahead: int, drift: float, wander: float) -> None:
    for seed in range(2):
        timeline = unmarked(count, seed)
        clock = DriftingClock(BASE, ahead=ahead, drift=drift, wander=wander, period=150e6)
        found = aligned(timeline, clock, seed)
        edges = call_edges(timeline, TID)
        error = np.abs(found.to_trace(edges) + BASE - clock(edges))
        assert found.operators is not None
        assert np.median(error) <= 500
        assert error.max() <= found.operators.bound_ns + 1
        apart = int(np.median(np.abs(clock(edges) - edges)))
        assert "calls and operators tell that the clocks are" in found.note
        assert ("less than 40 µs" in found.note) == (apart < 40_000)


@pytest.mark.parametrize("ahead", [9 * MS, -12 * MS, 40 * MS])
def test_clocks_that_are_too_far_apart_are_left_as_they_are_and_it_is_said(ahead: int) -> None:
    found = aligned(unmarked(100, 0), DriftingClock(BASE, ahead=ahead))
    assert "calls and operators do not tell" in found.note
    assert found.line.offset_ns == 0
    assert "this is not proven" in str(found)


def test_a_few_calls_tell_nothing() -> None:
    timeline = unmarked(1, 0)
    found = aligned(timeline, DriftingClock(BASE, ahead=500_000))
    assert "calls and operators do not tell" in found.note


def test_a_call_of_an_hour_costs_no_memory() -> None:
    """What is looked at is a moment every µs around the calls that count."""
    start = np.cumsum(np.random.default_rng(0).integers(25_000, 60_000, 100))
    calls = TimeIntervals(np.append(start, 7 * MS), np.append(start + 20_000, 3_600_000 * MS))
    busy = TimeIntervals(np.append(start + 2000, 8 * MS) + 777_000, np.append(start + 18_000, 3_590_000 * MS) + 777_000)
    tracemalloc.start()
    found = find_coarse_shift([(calls, busy)])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found is not None
    assert found.is_clear
    assert abs(found.shift_ns - 777_000) < 10_000
    assert most < 50 << 20


def test_calls_in_a_regular_beat_tell_nothing() -> None:
    """Each call could be the one before it just as well, or the next."""
    start = np.arange(100) * 30_000
    found = find_coarse_shift([(TimeIntervals(start, start + 20_000), TimeIntervals(start + 2000, start + 18_000))])
    assert found is not None
    assert (found.wrong, found.next_wrong, found.is_clear) == (0.0, 0.0, False)


@pytest.mark.parametrize(
    ("wrong", "elsewhere", "calls", "is_clear"),
    [
        (0.0, 0.06, 50, False),  # three calls more
        (0.0, 0.08, 50, True),
        (0.05, 0.2, 100, True),
        (0.06, 0.2, 100, False),  # less than four times as many
        (0.9, 0.95, 1000, False),
    ],
)
def test_a_shift_counts_where_elsewhere_four_times_and_four_more_calls_are_wrong(
    wrong: float, elsewhere: float, calls: int, is_clear: bool
) -> None:
    assert CoarseShift(0, 500_000, 0.0, wrong, elsewhere, calls).is_clear == is_clear


def test_with_sync_marks_they_are_not_asked() -> None:
    """Marks that say another time than the operators do are believed."""
    found = aligned(steps(20), DriftingClock(BASE, ahead=500_000))
    assert found.method == "sync marks"
    assert "calls and operators" not in found.note
