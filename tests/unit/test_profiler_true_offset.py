"""Alignment against the truth: traces made from a recording on a clock of which all is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modtrace import Timeline
from modtrace.profiler.alignment import OffsetBounds, intersect
from modtrace.profiler.event_collector import EventCollector
from modtrace.profiler.overlay import overlay
from tests.support.drifting_trace import DriftingClock, call_edges, make_trace, with_marks
from tests.support.kineto import BASE, TID, Span, recording

MS = 1_000_000


def steps(count: int, seed: int = 0) -> Timeline:
    """Steps of 6 blocks of a norm and a layer, with a backward pass between; some 1.3 ms each.

    Args:
        count: how many.
        seed: of what is random in them.
    """
    random = np.random.default_rng(seed)
    spans: list[Span] = []
    time = MS
    for _ in range(count):
        rows: list[tuple[str, int, int]] = []
        begin = time
        for _ in range(6):
            time += int(random.integers(3000, 20_000))
            block = time
            for label in ("a: Linear", "c: ReLU"):
                time += int(random.integers(3000, 12_000))
                call = time
                time += int(random.integers(8000, 60_000))
                rows.append((label, call, time))
            time += int(random.integers(3000, 12_000))
            rows.append(("b: Linear", block, time))
        time += int(random.integers(3000, 20_000))
        spans.append(("Net", begin, time, 0))
        inner = sorted(rows, key=lambda row: row[1])
        spans += [(label, start, end, 1 if label[0] == "b" else 2) for label, start, end in inner]
        time += int(random.integers(300_000, 900_000))
    return with_marks(recording(*spans), 5 * MS)


def errors(timeline: Timeline, clock: DriftingClock, seed: int = 0) -> np.ndarray:
    """Return the true error at each edge of a call, ns."""
    collector = EventCollector()
    collector.add(make_trace(timeline, clock, BASE, seed))
    laid_over = overlay(timeline, collector.events(), {"baseTimeNanoseconds": BASE}, "trace.json")
    assert laid_over.alignment is not None
    assert laid_over.alignment.operators is not None
    edges = call_edges(timeline, TID)
    error: np.ndarray = np.abs(laid_over.alignment.to_trace(edges) + BASE - clock(edges))
    return error


@pytest.mark.parametrize("count", [1, 3, 100])
@pytest.mark.parametrize(
    "clock",
    [
        DriftingClock(BASE, ahead=6000),
        DriftingClock(BASE, ahead=-4000, drift=100e-6),
        DriftingClock(BASE, ahead=2000, drift=-30e-6, wander=2500, period=150e6),
        DriftingClock(BASE, ahead=2000, wander=7000, period=150e6),
        DriftingClock(BASE, ahead=2000, wander=10_000, period=150e6),
    ],
    ids=["offset", "drift", "wandering", "wandering by 290 ppm", "wandering by 420 ppm"],
)
def test_the_true_error_is_half_a_microsecond_and_nowhere_five(count: int, clock: DriftingClock) -> None:
    for seed in range(3):
        error = errors(steps(count, seed), clock, seed)
        assert np.median(error) <= 500
        assert error.max() < 5000


def test_a_band_is_what_a_clock_of_limited_drift_may_be() -> None:
    # Known: 2 µs or more at 0, 4 or less at 10 ms, 0 to 9 at 20 ms.
    bounds = OffsetBounds(
        np.array([0, 10 * MS, 20 * MS]), np.array([2000.0, -np.inf, 0.0]), np.array([np.inf, 4000.0, 9000.0])
    )
    band = intersect(bounds)
    assert band is not None
    # 10 ms away a bound is 5 µs less sharp.
    assert band.low_ns.tolist() == pytest.approx([2000, -3000, 0])
    assert band.high_ns.tolist() == pytest.approx([9000, 4000, 9000])
    assert band.middle_ns.tolist() == pytest.approx([5500, 500, 4500])


def test_a_clock_that_is_slewed_as_fast_as_can_be_is_followed_and_a_faster_one_contradicts_itself() -> None:
    for ahead, contradicts in ((4000, False), (5030, True)):
        low, high = np.array([-10.0, ahead - 10.0]), np.array([10.0, ahead + 10.0])
        band = intersect(OffsetBounds(np.array([0, 10 * MS]), low, high))
        assert band is not None
        assert band.middle_ns.tolist() == pytest.approx([0, ahead], abs=15)
        assert bool((band.high_ns < band.low_ns).any()) is contradicts


def test_without_bounds_on_both_sides_there_is_no_band() -> None:
    time, value, none = np.array([5]), np.array([1.0]), np.array([np.inf])
    assert intersect(OffsetBounds(time, -none, value)) is None
    assert intersect(OffsetBounds(time, value, none)) is None


moments = st.lists(st.tuples(st.integers(0, 50 * MS), st.floats(0, 5000), st.floats(0, 5000)), min_size=1, max_size=40)


@given(st.floats(-1e5, 1e5), st.floats(-150e-6, 150e-6), moments)
def test_the_band_holds_the_truth_and_its_middle_every_bound(
    offset: float, drift: float, gaps: list[tuple[int, float, float]]
) -> None:
    time = np.array([moment for moment, _, _ in gaps])
    truth = offset + drift * time
    bounds = OffsetBounds(time, truth - [below for _, below, _ in gaps], truth + [above for _, _, above in gaps])
    band = intersect(bounds)
    assert band is not None
    assert (band.low_ns <= offset + drift * band.time_ns + 1e-3).all()
    assert (band.high_ns >= offset + drift * band.time_ns - 1e-3).all()
    middle = np.interp(time, band.time_ns, band.middle_ns)
    assert (bounds.low_ns <= middle + 1e-3).all()
    assert (middle <= bounds.high_ns + 1e-3).all()
    assert (np.abs(np.diff(band.middle_ns)) <= 500e-6 * np.diff(band.time_ns) + 1e-3).all()
