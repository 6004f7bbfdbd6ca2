"""Cutting a timeline by time, by steps and by modules."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modtrace import ArgumentError, Timeline
from modtrace.timeline import BACKWARD, FORWARD, CounterSeries, Mark, Name, Process, Slices, Track
from modtrace.timeline import Timeline as TimelineData
from modtrace.timeline.nesting import nest_by_time
from modtrace.timeline.select import modules, steps, window
from tests.support.test_scale import scaled
from tests.support.timelines import EPOCH, timelines, with_args

PROCESS = Process(1)


def small() -> Timeline:
    """Two steps of a net with two layers:

    step 0: net 0-100 { a 10-40, b 50-90 }; backward net 110-160 { b 110-130, a 130-150 }; ends at 200
    step 1: net 210-300 { a 220-240, b 250-290 }; ends at 400
    """
    names = [Name("Net", "Net", "Net"), Name("a: Layer", "Net.a", "Layer"), Name("b: Layer", "Net.b", "Layer")]
    rows = [
        # start, end, name, phase, depth, parent, call, step, link
        (0, 100, 0, FORWARD, 0, -1, 0, 0, 0),
        (10, 40, 1, FORWARD, 1, 0, 0, 0, 1),
        (50, 90, 2, FORWARD, 1, 0, 0, 0, 2),
        (110, 160, 0, BACKWARD, 0, -1, 0, 0, 0),
        (110, 130, 2, BACKWARD, 1, 3, 0, 0, 2),
        (130, 150, 1, BACKWARD, 1, 3, 0, 0, 1),
        (210, 300, 0, FORWARD, 0, -1, 1, 1, -1),
        (220, 240, 1, FORWARD, 1, 6, 1, 1, -1),
        (250, 290, 2, FORWARD, 1, 6, 1, 1, -1),
    ]
    start, end, name, phase, depth, parent, call, step, link = np.array(rows).T
    return with_args(Timeline(
        slices=Slices.of(
            start=start, end=end, name=name, phase=phase, track=phase, depth=depth, parent=parent,
            call=call, step=step, link=link, complete=np.ones(len(rows)),
        ),
        names=names,
        tracks=[Track(kind, "MainThread", 1, PROCESS) for kind in ("forward", "backward")],
        marks=[Mark(200, "step", "0"), Mark(250, "mark", "here"), Mark(400, "step", "1")],
        counters=[CounterSeries("RSS", "bytes", PROCESS, np.array([5, 105, 205, 305]), np.array([1, 2, 3, 4]))],
    ), {1: {"shapes": "x"}, 8: {"shapes": "y"}})  # fmt: skip


def brief(timeline: TimelineData) -> list[tuple[str, int, int, int, bool]]:
    return [(span.fqn, span.start_ns, span.end_ns, span.depth, span.complete) for span in timeline.spans]


def samples(timeline: TimelineData) -> list[tuple[int, int]]:
    (counter,) = timeline.counters
    return list(zip(counter.time.tolist(), counter.value.tolist(), strict=True))


def test_a_window_cuts_what_reaches_out_of_it() -> None:
    cut = window(small(), 35, 120)
    assert brief(cut) == [
        ("Net", 35, 100, 0, False),
        ("Net.a", 35, 40, 1, False),
        ("Net.b", 50, 90, 1, True),
        ("Net", 110, 120, 0, False),
        ("Net.b", 110, 120, 1, False),
    ]
    assert cut.columns.parent.tolist() == [-1, 0, 0, -1, 3]
    assert cut.columns.link.tolist() == [0, -1, 2, 0, 2]  # the other half of a is gone
    assert dict(cut.span_args) == {1: {"shapes": "x"}}
    assert samples(cut) == [(35, 1), (105, 2)]
    assert cut.marks == []


def test_a_span_that_only_touches_a_window_is_out_and_marks_belong_to_its_start() -> None:
    assert brief(window(small(), 100, 110)) == []
    assert [mark.text for mark in window(small(), 200, 250).marks] == ["0"]
    assert [mark.text for mark in window(small(), 200, 251).marks] == ["0", "here"]


def test_an_empty_span_is_in_a_window_that_holds_its_moment() -> None:
    timeline = small()
    columns = dataclasses.replace(timeline.columns, start=timeline.columns.start.copy())
    columns.start[8] = 290
    timeline = dataclasses.replace(timeline, slices=columns)
    for low, high, is_inside in ((290, 295, True), (280, 291, True), (280, 290, False), (291, 295, False)):
        assert ("Net.b" in {span.fqn for span in window(timeline, low, high).spans}) is is_inside


def test_an_open_window_is_everything() -> None:
    assert brief(window(small())) == brief(small())
    assert samples(window(small())) == samples(small())
    assert brief(window(small(), start_ns=300)) == []
    assert len(window(small(), end_ns=200).spans) == 6


def test_a_window_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ArgumentError, match="ends 5 ns before it starts"):
        window(small(), 10, 5)
    with pytest.raises(ArgumentError, match="step 1 is before step 2"):
        steps(small(), 2, 1)


def test_steps_keep_whole_spans_and_their_marks() -> None:
    assert brief(steps(small(), 1, 2)) == [
        ("Net", 210, 300, 0, True),
        ("Net.a", 220, 240, 1, True),
        ("Net.b", 250, 290, 1, True),
    ]
    assert steps(small(), 1, 2).columns.parent.tolist() == [-1, 0, 0]
    assert [mark.text for mark in steps(small(), 1, 2).marks] == ["here", "1"]
    assert samples(steps(small(), 1, 2)) == [(200, 2), (205, 3), (305, 4)]
    assert [mark.text for mark in steps(small(), 0, 1).marks] == ["0"]
    assert samples(steps(small(), 0, 1)) == [(5, 1), (105, 2)]
    assert brief(steps(small())) == brief(small())
    assert brief(steps(small(), 2)) == []


def test_steps_of_a_recording_that_lost_its_beginning() -> None:
    """Steps are counted from the start of the training, and the marks of the first ones may be overwritten."""
    timeline = small()
    later = dataclasses.replace(timeline, slices=dataclasses.replace(timeline.columns, step=timeline.columns.step + 7))
    assert brief(steps(later, 8)) == brief(steps(timeline, 1))
    assert [mark.text for mark in steps(later, 8, 9).marks] == ["here", "1"]


def test_modules_by_pattern_move_up() -> None:
    chosen = modules(small(), "Net.*")
    assert {span.fqn for span in chosen.spans} == {"Net.a", "Net.b"}
    assert chosen.columns.depth.tolist() == [0] * 6
    assert chosen.columns.parent.tolist() == [-1] * 6
    assert dict(chosen.span_args) == {0: {"shapes": "x"}, 5: {"shapes": "y"}}
    assert brief(modules(small(), "net.*")) == []
    assert brief(modules(small(), "Net.[a]")) == [
        ("Net.a", 10, 40, 0, True),
        ("Net.a", 130, 150, 0, True),
        ("Net.a", 220, 240, 0, True),
    ]


def test_modules_by_depth_keep_the_outer_levels() -> None:
    assert {span.fqn for span in modules(small(), max_depth=1).spans} == {"Net"}
    assert brief(modules(small(), max_depth=2)) == brief(small())
    assert {span.fqn for span in modules(small(), "Net.*", max_depth=1).spans} == {"Net.a", "Net.b"}


Cut = st.integers(0, 12_000_000)


@settings(max_examples=scaled(40, 150, 1000))
@given(timeline=timelines(), first=Cut, length=Cut, epoch=st.sampled_from([0, EPOCH]))
def test_any_window_is_nested_and_within(timeline: Timeline, first: int, length: int, epoch: int) -> None:
    low, high = epoch + first, epoch + first + length
    cut = window(timeline, low, high)
    columns = cut.columns
    assert all(low <= span.start_ns <= span.end_ns <= high for span in cut.spans)
    assert [(s.start_ns, s.depth) for s in cut.spans] == sorted((s.start_ns, s.depth) for s in cut.spans)
    solid = columns.start != columns.end
    if np.all(solid):
        again = nest_by_time(columns)
        assert np.array_equal(again.depth, columns.depth)
    inner = np.flatnonzero(columns.parent >= 0)
    outer = columns.parent[inner]
    assert np.all(columns.depth[outer] + 1 == columns.depth[inner])
    assert np.all((columns.start[outer] <= columns.start[inner]) & (columns.end[inner] <= columns.end[outer]))
    # No span is lost that has an inside in the window, and no time within it.
    inside = [s for s in timeline.spans if s.start_ns < high and s.end_ns > low and s.start_ns < s.end_ns]
    kept = [s for s in cut.spans if s.start_ns < s.end_ns]
    assert sum(min(s.end_ns, high) - max(s.start_ns, low) for s in inside) == sum(s.duration_ns for s in kept)


@settings(max_examples=scaled(25, 100, 1000))
@given(timeline=timelines(), depth=st.integers(0, 5))
def test_any_choice_of_modules_keeps_the_order_around_it(timeline: Timeline, depth: int) -> None:
    for chosen in (modules(timeline, max_depth=depth), modules(timeline, f"{timeline.names[0].fqn[:1]}*")):
        columns = chosen.columns
        inner = np.flatnonzero(columns.parent >= 0)
        outer = columns.parent[inner]
        assert np.all(outer < inner)
        assert np.all(columns.depth[outer] + 1 == columns.depth[inner])
        assert np.all(columns.track[outer] == columns.track[inner])
        assert np.all((columns.start[outer] <= columns.start[inner]) & (columns.end[inner] <= columns.end[outer]))
        assert np.all(columns.depth[columns.parent < 0] == 0)


def test_negative_steps_count_from_the_end() -> None:
    assert brief(steps(small(), -1)) == brief(steps(small(), 1))
    assert brief(steps(small(), None, -1)) == brief(steps(small(), 0, 1))
    assert brief(steps(small(), -5)) == brief(small())
    assert brief(steps(small(), 1, -1)) == []
    assert brief(steps(small(), -1, 1)) == []
