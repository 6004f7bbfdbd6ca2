"""Alignment against the truth: traces made from a recording on a clock of which all is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modtrace.profiler.alignment import OffsetBounds, OperatorFit, intersect
from modtrace.profiler.event_collector import EventCollector
from modtrace.profiler.operator_gaps import CallEdges, certain_offsets
from modtrace.profiler.overlay import overlay
from modtrace.timeline import Mark, Timeline
from modtrace.timeline.time_intervals import TimeIntervals
from tests.support.drifting_trace import DriftingClock, call_edges, make_trace, with_marks
from tests.support.kineto import BASE, TID, Span, recording, x

MS = 1_000_000


def steps(count: int, seed: int = 0, longest_us: int = 60) -> Timeline:
    """Steps of 6 blocks of a norm and a layer, with a backward pass between; some 1.3 ms each.

    Args:
        count: how many.
        seed: of what is random in them.
        longest_us: how long the last layer of a step takes; all others take up to 60 µs.
    """
    random = np.random.default_rng(seed)
    spans: list[Span] = []
    time = MS
    for _ in range(count):
        rows: list[tuple[str, int, int]] = []
        begin = time
        for number in range(6):
            time += int(random.integers(3000, 20_000))
            block = time
            for label in ("a: Linear", "c: ReLU"):
                time += int(random.integers(3000, 12_000))
                call = time
                time += int(random.integers(8000, 60_000))
                rows.append((label, call, time))
                if (number, label) == (5, "c: ReLU") and longest_us > 60:
                    time += longest_us * 1000
                    rows[-1] = (label, call, time)
            time += int(random.integers(3000, 12_000))
            rows.append(("b: Linear", block, time))
        time += int(random.integers(3000, 20_000))
        spans.append(("Net", begin, time, 0))
        inner = sorted(rows, key=lambda row: row[1])
        spans += [(label, start, end, 1 if label[0] == "b" else 2) for label, start, end in inner]
        time += int(random.integers(300_000, 900_000))
    return with_marks(recording(*spans), 5 * MS)


def errors(timeline: Timeline, clock: DriftingClock, seed: int = 0) -> tuple[np.ndarray, float]:
    """Return the true error at each edge of a call, ns, and the bound that was told; infinite where not as proven."""
    collector = EventCollector()
    collector.add(make_trace(timeline, clock, BASE, seed))
    found = overlay(timeline, collector.events(), {"baseTimeNanoseconds": BASE}, "trace.json")
    assert found.alignment is not None
    assert found.alignment.operators is not None
    edges = call_edges(timeline, TID)
    bound = found.alignment.operators.bound_ns if found.alignment.operators.is_certain else np.inf
    return np.abs(found.alignment.to_trace(edges) + BASE - clock(edges)), bound


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
def test_the_true_error_is_half_a_microsecond_and_never_beyond_the_bound(count: int, clock: DriftingClock) -> None:
    for seed in range(3):
        error, bound = errors(steps(count, seed), clock, seed)
        assert np.median(error) <= 500
        assert error.max() <= bound + 1
        assert bound < 5000


@pytest.mark.parametrize(("wander", "period_ms"), [(2000, 80), (3000, 60), (3000, 45), (5000, 80)])
def test_the_bound_holds_around_long_operators_where_more_than_one_gap_is_possible(wander: int, period_ms: int) -> None:
    clock = DriftingClock(BASE, ahead=6000, wander=wander, period=period_ms * 1e6)
    proven = 0
    for seed in range(8):
        error, bound = errors(steps(20, seed, longest_us=30_000 + 3_000 * seed), clock, seed)
        proven += np.isfinite(bound)
        assert error.max() <= bound + 1
    assert proven >= 4


@pytest.mark.parametrize("step", [-2 * MS, 50_000, 3 * MS])
@pytest.mark.parametrize("at", [100, 400, 501, 777, 905])
def test_a_clock_that_was_set_proves_nothing(step: int, at: int) -> None:
    timeline = steps(60)
    edges = call_edges(timeline, TID)
    clock = DriftingClock(BASE, ahead=3000, drift=20e-6, step_at=int(edges[at]) + 1500, step=step)
    _, bound = errors(timeline, clock)
    assert np.isinf(bound)


@pytest.mark.parametrize("step", [-2 * MS, 60_000, 3 * MS])
@pytest.mark.parametrize("before_mark", [1000, -100])
def test_a_clock_that_was_set_while_a_mark_was_taken_proves_nothing(step: int, before_mark: int) -> None:
    timeline = steps(60)
    mark = timeline.marks[len(timeline.marks) // 2]
    clock = DriftingClock(BASE, ahead=3000, step_at=mark.time_ns - before_mark, step=step)
    _, bound = errors(timeline, clock)
    assert np.isinf(bound)


def told_of(timeline: Timeline, clock: DriftingClock, *operators: tuple[int, int]) -> tuple[int, OperatorFit]:
    """Return the greatest true error and what was told, of operators at times from the base and marks of 2 µs."""
    marks = [(mark.text, mark.time_ns - BASE - 1500, mark.time_ns - BASE + 500) for mark in timeline.marks]
    collector = EventCollector()
    for name, begin, end in [*marks, *(("aten::op", begin, end) for begin, end in operators)]:
        start, stop = (clock(BASE + np.array([begin, end])) - BASE).tolist()
        collector.add([x("cpu_op", name, start, stop)])
    found = overlay(timeline, collector.events(), {"baseTimeNanoseconds": BASE}, "trace.json").alignment
    assert found is not None
    assert found.operators is not None
    edges = call_edges(timeline, TID)
    return int(np.abs(found.to_trace(edges) + BASE - clock(edges)).max()), found.operators


def test_an_offset_beyond_what_is_tried_is_possible_where_no_mark_is_near() -> None:
    late = 2000 * MS
    calls = recording(("Net", MS, MS + 100_000, 0), ("Net", late, late + 260_000, 0))
    timeline = replace(calls, marks=[Mark(BASE + MS + 50_000, "sync", "modtrace.sync#0")])
    # 540 µs too early, where the mark leaves the second call, it begins between two operators: 10 µs to either side.
    before = [(late - 750_000, late - 550_000), (late - 530_000, late - 330_000)]
    clock = DriftingClock(BASE + MS, drift=270e-6)
    error, told = told_of(timeline, clock, (MS + 20_000, MS + 80_000), *before, (late + 25_000, late + 235_000))
    assert error > 500_000
    assert not told.is_certain


def test_without_operators_edges_say_nothing() -> None:
    time = np.array([0, 1000, 5 * MS])
    unknown = np.full(3, 500.0)
    bounds = certain_offsets(CallEdges(time, time), TimeIntervals(time[:0], time[:0]), -unknown, unknown, 1e-3)
    assert bounds is not None
    assert bounds.low.tolist() == [-np.inf] * 3
    assert bounds.high.tolist() == [np.inf] * 3


def test_where_no_operator_is_near_the_bound_grows_as_a_clock_may_drift() -> None:
    timeline = steps(100)
    edges = call_edges(timeline, TID)
    clock = DriftingClock(BASE, ahead=2000, drift=100e-6)
    last = int(clock(edges[-1:])[0]) - BASE
    # The thread's operators were traced in the first half of the window only, and another thread's to its end.
    slices = [event for event in make_trace(timeline, clock, BASE, 0) if event["ts"] < last / 2000]
    marked = replace(timeline, marks=[mark for mark in timeline.marks if mark.time_ns < edges[0] + last // 2])
    collector = EventCollector()
    collector.add([*slices, x("cpu_op", "aten::op", last - MS, last, tid=TID + 1)])
    found = overlay(marked, collector.events(), {"baseTimeNanoseconds": BASE}, "trace.json").alignment
    assert found is not None
    assert found.operators is not None
    error = np.abs(found.to_trace(edges) + BASE - clock(edges))
    assert found.operators.is_certain
    assert 2000 < error.max() <= found.operators.bound_ns
    # By at most 0.5 per mille, so much as a wall clock is slewed, beside what is not known at the last operator.
    assert found.operators.bound_ns < 5000 + 500e-6 * last / 2


@pytest.mark.parametrize("step", [-300_000, -100_000, -30_000, 10_000, 30_000, 100_000, 300_000])
@pytest.mark.parametrize("marks", [slice(1), slice(-1, None), slice(0, None, 1000)], ids=["first", "last", "two"])
@pytest.mark.parametrize("longest_us", [60, 10_000])
def test_a_clock_that_was_set_with_no_mark_near_is_within_the_bound_or_not_proven(
    step: int, marks: slice, longest_us: int
) -> None:
    for seed in range(3):
        timeline = steps(10, seed, longest_us)
        edges = call_edges(timeline, TID)
        place = len(edges) // 2 + 3 * seed
        clock = DriftingClock(BASE, ahead=3000, drift=20e-6, step_at=int(edges[place]) + 1500, step=step)
        kept = [*timeline.marks[marks], *timeline.marks[-1:]] if marks.step else timeline.marks[marks]
        error, bound = errors(replace(timeline, marks=kept), clock, seed)
        told_once = np.abs(edges - clock.step_at) > max(0, -step * 1.05)
        assert (error[told_once] <= bound + 1).all()


@pytest.mark.parametrize("step", [3000, 10_000])
def test_a_clock_that_seems_to_drift_faster_than_any_clock_does_proves_nothing(step: int) -> None:
    timeline = steps(60, longest_us=10_000)
    edges = call_edges(timeline, TID)
    clock = DriftingClock(BASE, ahead=3000, step_at=int(edges[len(edges) // 2]) + 1500, step=step)
    _, bound = errors(timeline, clock)
    assert np.isinf(bound)


def test_a_band_is_what_a_clock_of_limited_drift_may_be() -> None:
    # Known: 2 µs or more at 0, 4 or less at 10 ms, 0 to 9 at 20 ms.
    bounds = OffsetBounds(
        np.array([0, 10 * MS, 20 * MS]), np.array([2000.0, -np.inf, 0.0]), np.array([np.inf, 4000.0, 9000.0])
    )
    band = intersect(bounds)
    assert band is not None
    assert band.drift_limit == 500e-6
    # 10 ms away a bound is 5 µs less sharp.
    assert band.low.tolist() == pytest.approx([2000, -3000, 0])
    assert band.high.tolist() == pytest.approx([9000, 4000, 9000])
    assert band.middle.tolist() == pytest.approx([5500, 500, 4500])


def test_bounds_that_contradict_a_slow_clock_allow_a_faster_one() -> None:
    # 4 µs more within 10 ms: 400 ppm.
    band = intersect(OffsetBounds(np.array([0, 10 * MS]), np.array([-10.0, 3990.0]), np.array([10.0, 4010.0])))
    assert band is not None
    # The least that agrees is 398 ppm, of those tried 400; twice as much counts as possible.
    assert band.drift_limit == 800e-6
    assert band.middle.tolist() == pytest.approx([0, 4000])


def test_without_bounds_on_both_sides_there_is_no_band() -> None:
    time, value, none = np.array([5]), np.array([1.0]), np.array([np.inf])
    assert intersect(OffsetBounds(time, -none, value)) is None
    assert intersect(OffsetBounds(time, value, none)) is None


moments = st.lists(st.tuples(st.integers(0, 50 * MS), st.floats(0, 5000), st.floats(0, 5000)), min_size=1, max_size=40)


@given(st.floats(-1e5, 1e5), st.floats(-150e-6, 150e-6), moments)
def test_the_band_holds_the_truth_and_its_middle_every_bound(
    offset: float, drift: float, found: list[tuple[int, float, float]]
) -> None:
    time = np.array([moment for moment, _, _ in found])
    truth = offset + drift * time
    bounds = OffsetBounds(time, truth - [below for _, below, _ in found], truth + [above for _, _, above in found])
    band = intersect(bounds)
    assert band is not None
    assert band.drift_limit == 500e-6
    assert (band.low <= offset + drift * band.time + 1e-3).all()
    assert (band.high >= offset + drift * band.time - 1e-3).all()
    middle = np.interp(time, band.time, band.middle)
    assert (bounds.low <= middle + 1e-3).all()
    assert (middle <= bounds.high + 1e-3).all()
    assert (np.abs(np.diff(band.middle)) <= band.drift_limit * np.diff(band.time) + 1e-3).all()
