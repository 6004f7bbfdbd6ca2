"""Steps, percentiles, classes and trees of a summary, worked out by hand and checked by a second implementation."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from modtrace import Timeline, load
from modtrace.timeline import FORWARD, Mark, Name, Process, Slices, StepTimes, Track
from modtrace.timeline.join import move_times
from modtrace.timeline.slices import join_columns, sort_by_start
from modtrace.timeline.summary import ModuleTimes, find_step_bounds, find_typical_step, take_steps
from modtrace.timeline.summary.units import median, nearest_rank
from tests.support.timelines import timelines
from tests.support.training_timeline import MAIN, MS, NAMES, NET, training


def in_ms(step: StepTimes) -> list[int]:
    return [ns // MS for ns in step[1:-3]]


def test_steps_reach_from_mark_to_mark_and_their_parts_add_up() -> None:
    first, second = training().summary().steps

    # The first step begins with its first span: where it began is not known.
    assert in_ms(first) == [90, 30, 30, 10, 0, 10, 10]
    assert in_ms(second) == [200, 10, 0, 0, 10, 0, 180]
    assert [step.duration_ns for step in (first, second)] == [sum(step[2:-2]) for step in (first, second)]
    assert (first.step, second.step, first.whole, second.whole) == (0, 1, True, True)


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_the_first_of_some_steps_begins_where_the_one_before_ended(tmp_path: Path, suffix: str) -> None:
    whole = training()
    wrapped = replace(whole, stats=replace(whole.stats, overwritten=7))
    for timeline in (whole, wrapped):
        (step,) = timeline.steps(1).summary().steps
        assert step == timeline.summary().steps[1]
        assert (step.before_ns // MS, step.whole) == (10, True)
        timeline.steps(1).save(tmp_path / f"part{suffix}")
        assert load(tmp_path / f"part{suffix}").summary().steps == [step]
    late = take_steps(move_times(whole, lambda times: times + 5), 1)
    assert late.begin_ns == whole.steps(1).begin_ns + 5  # type: ignore[operator]


def test_a_table_of_steps_counts_those_that_may_have_been_longer() -> None:
    whole = training()
    notes = [
        replace(whole, stats=replace(whole.stats, overwritten=lost)).summary().tables["steps"].notes for lost in (0, 7)
    ]

    assert [note for note in notes[0] if note.startswith("+")] == []
    assert [note for note in notes[1] if note.startswith("+")] == [
        "+: its beginning or end is not marked, so it may have been longer (1 step)"
    ]


def test_recompute_counts_to_the_module_that_runs_again_and_not_where_it_lies() -> None:
    net, block, fc = training().summary().rows

    assert (net.backward_ns // MS, net.recompute_ns // MS, net.total_ns // MS) == (30, 10, 80)
    assert (block.backward_ns // MS, block.recompute_ns // MS, block.total_ns // MS) == (20, 10, 50)
    assert (fc.backward_ns // MS, fc.recompute_ns // MS, fc.total_ns // MS) == (10, 4, 24)
    assert [row.self_ns // MS for row in (net, block, fc)] == [30, 26, 24]


def test_percentiles_are_over_the_steps_in_which_a_module_ran() -> None:
    net, block, _ = training().summary().rows

    assert (net.step_p50_ns // MS, net.step_p95_ns // MS) == (40, 70)
    assert (block.step_p50_ns // MS, block.step_p95_ns // MS) == (50, 50)


def test_a_step_without_its_mark_counts_for_no_percentile() -> None:
    summary = training(marks=(100,)).summary()

    assert [(step.duration_ns // MS, step.whole) for step in summary.steps] == [(90, True), (20, False)]
    assert (summary.rows[0].step_p50_ns // MS, summary.rows[0].step_p95_ns // MS) == (70, 70)
    assert "1,20000000,10000000,0,0,10000000,0,0,0,False,0" in summary.steps_csv()


def test_the_first_step_is_not_whole_where_its_beginning_was_overwritten() -> None:
    timeline = training()
    lossy = replace(timeline, stats=replace(timeline.stats, overwritten=3))

    assert [step.whole for step in lossy.summary().steps] == [False, True]
    assert lossy.summary().rows[0].step_p95_ns == 10 * MS


def test_a_timeline_without_marks_is_one_step() -> None:
    assert [in_ms(step) for step in training(marks=()).summary().steps] == [[110, 40, 30, 10, 0, 30, 0]]


def test_time_of_two_threads_at_once_counts_once_in_a_step() -> None:
    columns = training().columns
    forward = columns.take(np.array([0, 8]))
    both = replace(forward, start=np.array([0, 5]) * MS, end=np.array([10, 20]) * MS, track=np.array([0, 1], np.int32))
    threads = [Track("forward", name, tid, MAIN) for tid, name in enumerate(("a", "b"))]
    timeline = Timeline(both, NAMES, threads, marks=[Mark(30 * MS, "step", "step 0")])

    assert [in_ms(step) for step in timeline.summary().steps] == [[30, 20, 0, 0, 0, 0, 10]]
    assert timeline.summary().rows[0].forward_ns == 25 * MS


def test_by_class_a_module_inside_one_of_its_class_counts_once() -> None:
    net, block = training().summary("class").rows

    assert (net.fqn, net.module_class, net.calls, net.total_ns // MS) == ("", "Net", 2, 80)
    assert block == ModuleTimes(
        "",
        "Block",
        2,
        *(ms * MS for ms in (20, 20, 20, 20, 10, 10, 50, 50)),
    )._replace(in_steps_ns=50 * MS)
    table = training().summary("class").sort_by().to_text().splitlines()[6:8]
    assert [line.split()[:4] for line in table] == [["Block", "2", "17.2", "50.000"], ["Net", "2", "27.6", "80.000"]]


def test_to_depth_adds_self_times_to_the_module_around() -> None:
    net, block = training().summary().only(max_depth=2).rows

    assert (net.self_ns // MS, block.self_ns // MS, block.total_ns // MS) == (30, 50, 50)
    (net,) = training().summary().only(max_depth=1).rows
    assert (net.self_ns // MS, net.total_ns // MS) == (80, 80)


def test_matching_keeps_times_as_they_are() -> None:
    summary = training().summary()

    assert summary.only("Net.b*").rows == summary.rows[1:]
    assert summary.only("Net.b*").note == ""
    assert summary.only("Net.b*").sort_by(limit=1).note == "1 more module"


def test_columns_are_arrays_of_nanoseconds() -> None:
    columns = training().summary().columns()

    assert columns["fqn"].tolist() == ["Net", "Net.b", "Net.b.fc"]
    assert columns["total_ns"].dtype == np.int64
    assert (columns["total_ns"] // MS).tolist() == [80, 50, 24]
    assert [step.after_ns for step in training().summary().steps] == [10 * MS, 180 * MS]


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [([], 0.5, 0), ([7], 0.5, 7), ([3, 1, 2], 0.5, 2), ([4, 1, 2, 3], 0.5, 2), ([*range(1, 21)], 0.95, 19)],
)
def test_nearest_rank(values: list[int], fraction: float, expected: int) -> None:
    assert nearest_rank(values, fraction) == expected


@pytest.mark.parametrize(("values", "expected"), [([], 0), ([7], 7), ([3, 1, 2], 2), ([4, 1, 9, 2], 3), ([1, 2], 1)])
def test_median(values: list[int], expected: int) -> None:
    assert median(values) == expected


def test_the_median_of_two_steps_is_their_mean() -> None:
    assert str(training().summary()).splitlines()[1] == (
        "2 whole steps, median 145.000 ms, p95 200.000 ms, slowest 200.000 ms (step 1)"
    )


def test_a_step_in_which_no_call_begins_is_none() -> None:
    summary = training(marks=(5, 6, 100, 100, 101, 300)).summary()

    # The first span is of step 0: the two marks before it end steps of before.
    assert [(step.step, step.duration_ns // MS) for step in summary.steps] == [(0, 90), (3, 199)]
    assert "2 whole steps, median 144.500 ms" in str(summary)
    assert [line.split(",")[0] for line in summary.steps_csv().splitlines()[1:]] == ["0", "3"]


def two_ranks(*, ranks: tuple[int | None, int | None] = (0, 1)) -> Timeline:
    """`training()` as of rank 0, and beside it rank 1, which is behind and in `Net` from 60 to 95 and 210 to 350."""
    timeline = training()
    first, second = (Process(1 + index, rank) for index, rank in enumerate(ranks))
    added = Slices.of(
        start=np.array([60, 210, 310]) * MS,
        end=np.array([95, 250, 350]) * MS,
        name=[NET] * 3,
        phase=[FORWARD] * 3,
        track=[2] * 3,
        depth=[0] * 3,
        parent=[-1] * 3,
        call=[0, 1, 2],
        step=[0, 1, 2],
        link=[-1] * 3,
        complete=[True] * 3,
    )
    columns = sort_by_start(join_columns([timeline.columns, added]))
    tracks = [*(track._replace(process=first) for track in timeline.tracks), Track("forward", "MainThread", 2, second)]
    return replace(timeline, slices=columns, tracks=tracks)


def test_steps_and_percentiles_cover_the_first_rank_and_totals_all_ranks() -> None:
    alone, summary = training().summary(), two_ranks().summary()

    assert summary.steps == alone.steps
    assert [row[9:11] for row in summary.rows] == [row[9:11] for row in alone.rows]
    assert [row.total_ns // MS for row in summary.rows] == [80 + 115, 50, 24]
    # The steps of rank 0 take 290, and rank 1 ran from 60 to 350.
    assert (alone.steps_ns // MS, summary.steps_ns // MS, summary.others_ns // MS) == (290, 580, 290)
    text, tree = summary.to_text().splitlines(), summary.to_tree().splitlines()
    assert [line.split()[3] for line in text[6:9]] == ["33.6", "8.6", "4.1"]
    assert [line.split()[0] for line in tree[6:9]] == ["33.6", "8.6", "4.1"]
    assert text[9:] == tree[9:] == ["% step: of the time of all processes, each from its first span to its last"]
    assert str(summary).splitlines()[1].startswith("2 whole steps of rank 0, median 145.000 ms")
    note = "steps of rank 0; modtrace ranks slow compares ranks"
    assert note in summary.tables["steps"].to("text").splitlines()
    assert note in summary.tables["steps"].to("md")
    assert note in summary.to_markdown()
    assert note in summary.to_html()
    assert summary.steps_csv() == alone.steps_csv()
    assert json.loads(summary.to_json())["overview"]["steps_of"] == "rank 0"
    assert find_typical_step(two_ranks()) == alone.steps[0]


def test_the_first_process_without_a_rank_is_named_by_its_program() -> None:
    assert "steps of python" in two_ranks(ranks=(None, None)).summary().tables["steps"].to("text").splitlines()


def test_steps_are_selected_by_the_marks_of_the_first_rank() -> None:
    timeline = two_ranks()
    # The first span is another rank's, which is a step behind.
    columns = replace(timeline.columns, start=timeline.columns.start.copy(), step=timeline.columns.step.copy())
    late = int(np.flatnonzero(columns.track == 2)[0])
    columns.start[late], columns.step[late] = 1 * MS, 4
    columns = sort_by_start(columns)

    chosen = replace(timeline, slices=columns).steps(1, 2)
    assert [mark.text for mark in chosen.marks] == ["step 1"]


def added_up(timeline: Timeline) -> dict[str, tuple[int, ...]]:
    """Per module calls, total and self time of each phase, p50 and p95: another way, span by span."""
    whole = {step.step for step in timeline.summary(step_by="optimizer").steps if step.whole}
    # What prepares a training comes before its first step.
    begin_ns = min(find_step_bounds(timeline, "optimizer").start_ns.tolist(), default=0)
    spans, open_on, self_ns = list(timeline.spans), defaultdict[int, list[int]](list), dict[int, int]()
    counts: dict[str, int] = defaultdict(int)
    times: dict[tuple[str, str, str], int] = defaultdict(int)
    per_step: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    around: list[list[int]] = []
    known = {name.fqn for name in timeline.names}
    is_first = [timeline.tracks[track].process == timeline.tracks[0].process for track in timeline.columns.track]
    for index, (span, track) in enumerate(zip(spans, timeline.columns.track.tolist(), strict=True)):
        stack = open_on[track]
        del stack[span.depth :]
        around.append([*stack, index])
        self_ns[index] = span.duration_ns
        if stack:
            self_ns[stack[-1]] -= span.duration_ns
        stack.append(index)
        counts[span.fqn] += span.phase == "forward"
    for index, span in enumerate(spans):
        # A total counts in the step in which the outermost span began, a call inside backward in its own.
        step_of = {span.fqn: (span.step, span.start_ns)}
        for outer in reversed(around[index]):
            if spans[outer].phase != span.phase:
                break
            step_of[spans[outer].fqn] = spans[outer].step, spans[outer].start_ns
        on_backward = timeline.tracks[timeline.columns.track[index]].kind == "backward"
        if span.phase == "recompute" or (span.phase == "forward" and on_backward):
            parts = span.fqn.split(".")
            step_of = {
                fqn: (span.step, span.start_ns) for n in range(len(parts)) if (fqn := ".".join(parts[: n + 1])) in known
            }
        times[span.fqn, span.phase, "self"] += self_ns[index]
        for fqn, (step, start_ns) in step_of.items():
            times[fqn, span.phase, "total"] += self_ns[index]
            if (not whole or (step in whole and start_ns >= begin_ns)) and is_first[index]:
                per_step[fqn][step] += self_ns[index]

    def percentiles(fqn: str) -> tuple[int, int]:
        values = sorted(per_step[fqn].values())
        return (math.floor(statistics.median(values)), values[math.ceil(len(values) * 0.95) - 1]) if values else (0, 0)

    return {
        fqn: (
            counts[fqn],
            *(times[fqn, phase, kind] for phase in ("forward", "backward", "recompute") for kind in ("total", "self")),
            *percentiles(fqn),
        )
        for fqn in dict.fromkeys([span.fqn for span in spans])
    }


def nested_names(timeline: Timeline) -> Timeline:
    """The timeline with names that contain each other."""
    fqns = ["N", "N.a", "N.a.b", "N.c"]
    names = [Name(name.label, fqns[index % 4], name.module_class) for index, name in enumerate(timeline.names)]
    return replace(timeline, names=names)


@given(timelines())
def test_rows_are_those_of_a_second_implementation(drawn: Timeline) -> None:
    for timeline in (drawn, nested_names(drawn)):
        assert {row.fqn: row[2:11] for row in timeline.summary(step_by="optimizer").rows} == added_up(timeline)


@given(timelines())
def test_the_parts_of_each_step_of_any_timeline_add_up(timeline: Timeline) -> None:
    for step in timeline.summary().steps:
        assert step.duration_ns == sum(step[2:-2]) + step.evaluation_ns
        assert min(step[1:]) >= 0
    for by in ("module", "class"):
        summary = timeline.summary("class" if by == "class" else "module")
        assert len(summary.to_text(60)) > 0
        assert "<table>" in summary.to_html()
