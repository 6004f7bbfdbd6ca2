"""Findings of trainings written by hand: exact figures, and no finding just below each threshold."""

from __future__ import annotations

import fnmatch
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from modtrace import Timeline, load
from modtrace.cli.group import group
from modtrace.ring import Kind
from modtrace.ring.event_text import RangeCategory, range_text
from modtrace.ring.slot_format import AUTOMATIC_BIT, COLLECTED_BITS, GENERATION_BITS, NO_NAME, REQUESTED_BIT
from modtrace.timeline.contents import STEP_NOTES
from modtrace.timeline.join import join, replace_processes
from modtrace.timeline.metadata import fit_metadata
from modtrace.timeline.summary import Finding, FlopSummary, StepFlops
from modtrace.timeline.summary.findings import only_option
from tests.support.event_script import EventScript
from tests.support.timelines import build_timeline, gpt2_timeline

MS = 1_000_000
STEPS, BLOCKS = 10, 4
STEP_MS = 2 * BLOCKS + 1
"""Duration of an unchanged step in ms: 1 ms of each block in forward and in backward, 1 ms of the optimizer."""
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).map(lambda text: text * 300) | st.text(min_size=1)
"""Short texts and long texts."""
OptionalRange = tuple[str, RangeCategory, float]
FETCH = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def training(
    *,
    steps: int = STEPS,
    forward: Callable[[int, int], float] = lambda step, block: 1,
    backward: Callable[[int, int], float] = lambda step, block: 1,
    calls: Callable[[int], int] = lambda block: 1,
    act: Callable[[int], str] = lambda block: "GELU",
    own: Callable[[int], float] = lambda block: 0,
    alone: Callable[[int], int] = lambda step: 0,
    evaluations: int = 0,
    passes: Callable[[int], int] = lambda step: 1,
    in_later_passes: int = BLOCKS,
    ranges: Callable[[int], Sequence[OptionalRange]] = lambda step: (),
    collection: Callable[[int], float] = lambda step: 0,
    trigger: Callable[[int], int] = lambda step: 0,
    before: float = 0,
    pause: Callable[[int], float] = lambda step: 0,
    wait: float = 0,
    again: Callable[[int], float] = lambda block: 0,
) -> Timeline:
    """Steps of `Net`, each of whose blocks calls an `act`; all times in ms.

    Args:
        steps: number of steps.
        forward: ms of each forward call of an `act`, by step and block.
        backward: ms of the backward of each call of an `act`, by step and block.
        calls: number of calls of its `act` by a block.
        act: class of the `act`, by block.
        own: ms that a block takes in forward outside its `act`, by block.
        alone: number of forwards without a backward before the step's forward.
        evaluations: number of forwards in an evaluation between two steps.
        passes: number of backward passes over the step's graph.
        in_later_passes: number of the graph's nodes that each pass after the first runs.
        ranges: name, category and ms of the ranges at the start of a step.
        collection: a garbage collection of generation 2 at the end of the step that frees 7 objects.
        trigger: the bit of the collection's trigger.
        before: ms without a name at the start of each step.
        pause: further ms without a name at the start of a step, by step.
        wait: ms from the last node of a backward pass to its end.
        again: ms for which an `act` runs again before its backward, by block.
    """
    script, now, number, called = EventScript(capacity=1 << 14), 1, 0, [0] * (1 + 2 * BLOCKS)
    names = [script.name("Net", "Net", "Net")]
    names += [script.name(f"Net.blocks.{block}", f"blocks.{block}: Block", "Block") for block in range(BLOCKS)]
    names += [script.name(f"Net.blocks.{block}.act", f"act: {act(block)}", act(block)) for block in range(BLOCKS)]

    def run(step: int, *, trains: bool) -> list[tuple[int, int]]:
        nonlocal now, number
        first, nodes = number, list[tuple[int, int]]()
        script.enter(now, names[0], called[0], number)
        for block in range(BLOCKS):
            outer, inner = 1 + block, 1 + BLOCKS + block
            script.enter(now, names[outer], called[outer], number)
            now += round(own(block) * MS)
            for _ in range(calls(block)):
                script.enter(now, names[inner], called[inner], number)
                now += round(forward(step, block) * MS)
                if trains:
                    nodes.append((number, block))
                    number += 1
                script.exit(now, names[inner], called[inner], number)
                called[inner] += 1
            script.exit(now, names[outer], called[outer], number)
            called[outer] += 1
        script.exit(now, names[0], called[0], number)
        called[0] += 1
        assert trains or number == first
        return nodes

    count = 0
    for step in range(steps):
        now += round((before + pause(step)) * MS)
        for name, category, ms in ranges(step):
            count += 1
            script.collective(now, Kind.RANGE_BEGIN, range_text(name, category), count)
            now += round(ms * MS)
            script.collective(now, Kind.RANGE_END, range_text(name, category), count)
        for _ in range(evaluations):
            count += 1
            script.collective(now, Kind.RANGE_BEGIN, range_text("evaluate", "evaluation"), count)
            run(step, trains=False)
            script.collective(now, Kind.RANGE_END, range_text("evaluate", "evaluation"), count)
        for _ in range(alone(step)):
            run(step, trains=False)
        nodes = run(step, trains=True)
        for nth in range(passes(step)):
            script.pass_begin(now, step + nth * steps)
            for sequence, block in reversed(nodes[:in_later_passes] if nth else nodes):
                if again(block):
                    call = names[1 + BLOCKS + block], called[1 + BLOCKS + block] - 1, number
                    script.enter(now, *call, recompute=True)
                    script.exit(now := now + round(again(block) * MS), *call, recompute=True)
                begin, now = now, now + round(backward(step, block) * MS)
                script.node(begin, now, sequence, graph_task=nth)
            now += round(wait * MS)
            script.pass_end(now, step + nth * steps)
        if collection(step):
            now += round(collection(step) * MS)
            value = (round(collection(step) * MS) << COLLECTED_BITS | 7) << GENERATION_BITS | 2
            script.event(now, Kind.COLLECTION, NO_NAME, value | trigger(step))
        count += 1
        script.collective(now, Kind.RANGE_BEGIN, range_text("Optimizer.step#SGD.step", "optimizer"), count)
        now += MS
        script.collective(now, Kind.RANGE_END, range_text("Optimizer.step#SGD.step", "optimizer"), count)
        script.step(now, step)
    return build_timeline(script.snapshot())


def found(timeline: Timeline) -> list[tuple[str, str | None, str | None, float, float]]:
    """Return `what`, `where`, `part`, ms per step and % of each finding."""
    return [
        (finding.what, finding.where, finding.part, finding.ns_per_step / MS, round(100 * finding.share, 1))
        for finding in timeline.summary().findings
    ]


def test_nothing_stands_out_in_an_even_training() -> None:
    summary = training().summary()

    assert [step.duration_ns for step in summary.steps] == [STEP_MS * MS] * STEPS
    assert summary.findings == []
    assert summary.findings_text().splitlines()[1] == (
        "nothing stands out; looked at: 10 steps in their parts, 9 modules and their siblings, 1 kind of ranges"
    )


@pytest.mark.parametrize(("slow_ms", "where"), [(1, []), (5, ["Net.blocks.2"])])
def test_forward_is_not_a_large_part_if_nothing_is_trained(slow_ms: int, where: list[str]) -> None:
    script, now = EventScript(capacity=1 << 10), 1
    names = [script.name("Net", "Net", "Net")]
    names += [script.name(f"Net.blocks.{block}", f"blocks.{block}: Block", "Block") for block in range(BLOCKS)]
    for step in range(STEPS):
        script.enter(now, names[0], step)
        for block in range(BLOCKS):
            script.enter(now, names[1 + block], step)
            now += (slow_ms if block == 2 else 1) * MS
            script.exit(now, names[1 + block], step)
        script.exit(now, names[0], step)
        now += 1

    summary = build_timeline(script.snapshot()).summary()

    assert [step.duration_ns for step in summary.steps] == [(3 + slow_ms) * MS] * STEPS
    assert [(finding.where, finding.ns_per_step) for finding in summary.findings] == [(name, 4 * MS) for name in where]


@pytest.mark.parametrize(("usual", "where"), [(2, ["Net.blocks.2.act"]), (3, []), (4, [])])
def test_a_module_is_slower_only_if_its_usual_steps_are_too(usual: float, where: list[str]) -> None:
    # Its siblings last 1 ms in three of 10 steps; it lasts 4 ms in forward and 1 ms in backward in all steps.
    summary = training(forward=lambda step, block: 4 if block == 2 else 1 if step < 3 else usual).summary()

    assert [finding.where for finding in summary.findings] == where


def test_a_module_that_a_busy_machine_stops_in_most_steps_is_not_slower_itself() -> None:
    is_stopped = iter([False] * 3 + [True] * (STEPS - 3))

    assert found(training(own=lambda block: 12 if block == 2 and next(is_stopped) else 0.1)) == []


def test_a_module_that_is_slower_than_its_siblings() -> None:
    summary = training(forward=lambda step, block: 5 if block == 2 else 1).summary()

    # Forward and backward: 6 ms, 2 ms for each sibling; the difference is 4 of the 13 ms of a step.
    assert summary.findings == [
        Finding(
            "is slower than its siblings",
            "Net.blocks.2.act",
            "forward",
            4 * MS,
            4 / 13,
            "6 ms a step, its siblings 2 ms (medians), mostly forward",
            "modtrace summary TRACE --only 'Net.blocks.*.act'",
        )
    ]
    assert summary.findings_text().splitlines()[1:] == [
        "1. Net.blocks.2.act · is slower than its siblings: 4 ms a step, 30.8%",
        "   6 ms a step, its siblings 2 ms (medians), mostly forward; "
        "next: modtrace summary TRACE --only 'Net.blocks.*.act'",
        "nothing else stands out",
    ]


def test_findings_are_of_modules_for_any_rows() -> None:
    timeline = training(forward=lambda step, block: 4 if block == 2 else 1)

    by_class = timeline.summary(by="class")

    assert by_class.findings == timeline.summary().findings
    assert by_class.findings[0].where == "Net.blocks.2.act"
    assert by_class.looked_at == timeline.summary().looked_at


def test_a_block_that_is_slower_by_code_of_its_own() -> None:
    (finding,) = training(own=lambda block: 4 if block == 1 else 0.1).summary().findings

    # 4 ms in forward besides the 2 ms of its `act`, 0.1 ms for its siblings; steps of 9 + 4.3 ms.
    assert finding[:4] == ("is slower than its siblings", "Net.blocks.1", "forward", 3.9 * MS)
    assert finding.evidence == (
        "6 ms a step, its siblings 2.1 ms (medians), mostly its own forward, outside of inner modules"
    )


@pytest.mark.parametrize(("more_ms", "is_named"), [(1.02, True), (1.01, False)])
def test_a_block_with_little_code_of_its_own_whose_siblings_have_none(more_ms: float, is_named: bool) -> None:
    def times(step: int, block: int) -> int:
        return 3 if block < 3 else 1

    slow = training(own=lambda block: more_ms if block == 2 else 0.01, forward=times, backward=times)

    findings = slow.summary().findings
    assert [row[:3] for row in findings] == [("is slower than its siblings", "Net.blocks.2", "forward")] * is_named
    assert [finding.ns_per_step for finding in findings] == [1_010_000] * is_named
    said = (
        "1 ms a step, its siblings 0.01 ms in their own code, without inner modules (medians), mostly its own forward, "
    )
    assert [finding.evidence for finding in findings] == [f"{said}outside of inner modules"] * is_named


@pytest.mark.parametrize(("block", "more_ms", "where"), [(0, 0.4, []), (0, 2, [0]), (1, 0.4, [1])])
def test_the_first_of_siblings_may_run_with_cold_caches(block: int, more_ms: float, where: list[int]) -> None:
    timeline = training(forward=lambda step, one: 0.1 + more_ms * (one == block), backward=lambda step, block: 0.1)

    outliers = [place for what, place, *_ in found(timeline) if what == "is slower than its siblings"]
    assert outliers == [f"Net.blocks.{one}.act" for one in where]


def test_a_module_whose_backward_is_slower_than_its_siblings() -> None:
    assert found(training(backward=lambda step, block: 4 if block == 1 else 1)) == [
        ("is slower than its siblings", "Net.blocks.1.act", "backward", 3, 25)
    ]


@pytest.mark.parametrize(
    ("forward", "backward", "is_said"),
    [(5, 5, True), (5, 15, True), (15, 5, True), (5, 16, False), (16, 5, False), (5, 2, False), (2, 5, False)],
)
def test_a_module_with_a_longer_forward_and_backward_may_have_larger_inputs(
    forward: float, backward: float, is_said: bool
) -> None:
    (finding,) = (
        training(
            forward=lambda step, block: forward if block == 2 else 1,
            backward=lambda step, block: backward if block == 2 else 1,
        )
        .summary()
        .findings
    )

    assert finding.evidence.endswith(", forward and backward alike, as with larger inputs") == is_said
    assert (", mostly " in finding.evidence) != is_said


@pytest.mark.parametrize(("more", "again", "is_named"), [(1.9, 2, False), (2.1, 2, True), (2.1, 0, True)])
def test_a_module_that_runs_again_has_a_longer_backward(more: float, again: float, is_named: bool) -> None:
    timeline = training(backward=lambda step, block: 1 + more * (block == 1), again=lambda block: again * (block == 1))

    whats = [finding.what for finding in timeline.summary().findings]

    assert ("runs again in backward (recompute)" in whats) == (again > 0)
    assert ("is slower than its siblings" in whats) == is_named


def test_stalls_of_one_step_do_not_make_a_module_slower_than_its_siblings() -> None:
    # Its total, but not its median, is three times a sibling's.
    assert found(training(forward=lambda step, block: 41 if (step, block) == (7, 2) else 1)) == [
        ("makes step 7 slow (forward)", "Net.blocks.2.act", "forward", 4, 30.8)
    ]
    assert found(training(forward=lambda step, block: 20 if (step, block) == (7, 2) else 1)) == []


def test_a_module_less_than_twice_as_slow_is_like_its_siblings() -> None:
    assert found(training(forward=lambda step, block: 2.9 if block == 2 else 1)) == []


def test_modules_of_different_sizes_have_no_usual_time() -> None:
    assert found(training(forward=lambda step, block: 2.0**block, backward=lambda step, block: 2.0**block)) == []


def test_a_module_of_another_class_than_its_siblings() -> None:
    timeline = training(
        forward=lambda step, block: 5 if block == 3 else 1, act=lambda block: "GELU" if block < 3 else "A"
    )

    assert found(timeline) == [("is A, its siblings GELU, and slower", "Net.blocks.3.act", "forward", 4, 30.8)]
    assert found(training(act=lambda block: "GELU" if block < 3 else "A")) == []


def test_a_module_that_is_called_more_often_than_its_siblings() -> None:
    (finding,) = training(calls=lambda block: 3 if block == 0 else 1).summary().findings

    assert finding[:4] == ("is called more often than its siblings", "Net.blocks.0.act", "forward", 4 * MS)
    assert finding.evidence == "6 ms a step, its siblings 2 ms (medians), called 3 times a step, they once"


def test_a_forward_that_runs_more_often_than_its_backward() -> None:
    (finding,) = training(alone=lambda step: 1).summary().findings

    # The first step starts with the forward that is trained: 9 of 10 steps have both forwards.
    assert finding[:5] == ("runs forward more often than backward", "Net", "forward", 3.6 * MS, 36 / 126)
    assert finding.evidence == "forward twice a step, backward once; forwards without a backward take 4 ms each"
    assert found(training(alone=lambda step: 1, forward=lambda step, block: 0.02)) == []


@pytest.mark.parametrize(
    "alone",
    [
        pytest.param(lambda step: 2, id="more often than what trains, as a policy that plays"),
        pytest.param(lambda step: 2 if step % 5 == 4 else 0, id="now and then"),
    ],
)
def test_forwards_without_a_graph_with_other_work_are_not_a_finding(alone: Callable[[int], int]) -> None:
    assert [what for what, *_ in found(training(alone=alone)) if "more often" in what] == []


@pytest.mark.parametrize(("steps", "expected"), [(4, []), (5, ["optimizer takes a large share"])])
def test_few_steps_have_no_usual_time(steps: int, expected: list[str]) -> None:
    timeline = training(steps=steps, forward=lambda step, block: 0.2, backward=lambda step, block: 0.2)

    assert [what for what, *_ in found(timeline)] == expected


@pytest.mark.parametrize(
    ("category", "name", "label"),
    [("saving", "torch.save", "saving comes now and then"), ("user", "sample", "comes now and then")],
)
def test_ranges_in_some_steps_have_their_period(category: RangeCategory, name: str, label: str) -> None:
    (finding,) = training(ranges=lambda step: [(name, category, 6)] if step % 4 == 1 else []).summary().findings

    part = "saving" if category == "saving" else name
    assert finding[:4] == (label, name, part, round(1.8 * MS))
    assert finding.share == pytest.approx(1.8 / 10.8)
    assert finding.evidence == "in 3 of 10 steps, every 4th step, 6 ms each, 1.8 ms a step on average"
    irregular = training(ranges=lambda step: [(name, category, 6)] if step in (1, 2, 8) else []).summary().findings
    assert irregular[0].evidence == "in 3 of 10 steps, 6 ms each, 1.8 ms a step on average"
    uneven = training(ranges=lambda step: [(name, category, 30 if step == 9 else 6)] if step % 4 == 1 else [])
    assert uneven.summary().findings[0].evidence == (
        "in 3 of 10 steps, every 4th step, 6 ms each (median, 30 ms the longest), 4.2 ms a step on average"
    )
    assert found(training(ranges=lambda step: [(name, category, 0.5)] if step % 4 == 1 else [])) == []


def with_teacher(nodes: int, steps: Sequence[int], *, compiled_autograd: bool = False) -> Timeline:
    """Steps of `Net`; in `steps`, `Teacher` runs first and makes nodes that never run (compiled: no node is seen)."""
    script, number, now = EventScript(capacity=1 << 10), 0, 0
    teacher, net = script.name("Teacher"), script.name("Net")
    for step in range(steps[-1] + 1):
        if step in steps:
            script.enter(now, teacher, step, number)
            now, number = now + 30 * MS, number + nodes
            script.exit(now, teacher, step, number)
        script.enter(now, net, step, number)
        script.exit(now + 20 * MS, net, step, number + 1)
        script.pass_begin(now + 20 * MS, step)
        if not compiled_autograd:
            script.node(now + 20 * MS, now + 60 * MS, number)
        now, number = now + 60 * MS, number + 1
        script.pass_end(now, step)
        script.step(now, step)
    return build_timeline(script.snapshot())


def test_a_backward_by_compiled_autograd_may_use_any_graph() -> None:
    assert found(with_teacher(3, range(4), compiled_autograd=True)) == []


@pytest.mark.parametrize("nodes", [0, 3])
@pytest.mark.parametrize("suffix", ["", ".json", ".pftrace"])
def test_a_model_that_never_has_a_backward_should_make_no_nodes(nodes: int, suffix: str, tmp_path: Path) -> None:
    timeline = with_teacher(nodes, range(4))
    if suffix:
        timeline.save(tmp_path / f"trace{suffix}")
        timeline = load(tmp_path / f"trace{suffix}")

    assert [args["unused_nodes"] for args in timeline.span_args.values()] == [3] * (4 if nodes else 0)
    what = "builds a graph that no backward pass uses"
    assert found(timeline) == ([(what, "Teacher", "forward", 0, 0)] if nodes else [])
    for finding in timeline.summary().findings:
        assert finding.evidence.startswith("forward once a step, 30 ms each, and never a backward: ")
    assert found(timeline.steps(0, 2)) == []


def test_a_model_that_runs_in_some_steps_makes_them_slow() -> None:
    (finding,) = with_teacher(0, [1, 5, 9]).summary().findings

    assert finding[:4] == ("makes some steps slow (forward)", "Teacher", "forward", 9 * MS)
    assert finding.evidence == (
        "in 3 of 10 steps, every 4th step; step 1: 90 ms, of which 50 ms forward; usually 20 ms; "
        "Teacher 30 ms, usually 0 ms"
    )


@pytest.mark.parametrize(
    ("trigger", "evidence"),
    [
        (lambda step: 0, "3 of generation 2, each freed 7 objects"),  # from an older version
        (lambda step: REQUESTED_BIT, "3 of generation 2 by gc.collect(), each freed 7 objects"),
        (
            lambda step: REQUESTED_BIT if step == 4 else AUTOMATIC_BIT,
            "1 of generation 2 by gc.collect(), each freed 7 objects, "
            "2 of generation 2, automatic, each freed 7 objects",
        ),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".json", ".pftrace"])
def test_garbage_collections_have_their_generation_trigger_and_freed_objects(
    trigger: Callable[[int], int], evidence: str, suffix: str, tmp_path: Path
) -> None:
    timeline = training(collection=lambda step: 20 if step % 3 == 1 else 0, trigger=trigger)
    if suffix:
        timeline.save(tmp_path / f"trace{suffix}")
        timeline = load(tmp_path / f"trace{suffix}")

    (finding,) = timeline.summary().findings
    assert finding[:4] == ("garbage collection comes now and then", None, "gc", 6 * MS)
    assert finding.evidence == f"in 3 of 10 steps, every 3rd step, 20 ms each, 6 ms a step on average; {evidence}"
    assert found(training(collection=lambda step: 0.15)) == []


def test_long_collections_are_found_among_short_ones_in_each_step() -> None:
    (finding,) = training(collection=lambda step: 20 if step % 3 == 1 else 1).summary().findings

    assert finding[:4] == ("garbage collection comes now and then", None, "gc", round(5.7 * MS))
    assert finding.evidence.startswith("in 3 of 10 steps, every 3rd step, 20 ms each, 5.7 ms a step on average; ")


def test_a_region_that_is_compiled_again() -> None:
    again = "torch.compile 0/1: tensor 'x' size mismatch at index 0. expected 2, actual 3"
    compiles = {0: "torch.compile 0/0", 4: again, 8: again}
    timeline = training(ranges=lambda step: [(compiles[step], "compile", 30)] if step in compiles else [])

    (finding,) = timeline.summary().findings
    assert finding[:3] == ("is compiled again", again, "compile")
    assert finding.evidence.endswith("; compiled again twice, 60 ms in all")
    assert found(training(ranges=lambda step: [("torch.compile 0/0", "compile", 30)] if not step else [])) == []


def test_a_recompiled_region_has_its_reason_and_no_finding_for_its_backward() -> None:
    again = "torch.compile 0/1: tensor 'x' size mismatch at index 0. expected 2, actual 3"
    compiles: Sequence[OptionalRange] = [(again, "compile", 10), ("torch.compile 0/1: lazy backward", "compile", 50)]
    timeline = training(ranges=lambda step: compiles if step in (4, 8) else [])

    (finding,) = timeline.summary().findings

    assert finding[:3] == ("is compiled again", again, "compile")
    assert finding.evidence.endswith("; compiled again twice, 120 ms in all")


@pytest.mark.parametrize(
    ("name", "evidence", "small", "large"),
    [
        # 1.2 of 10.2 ms are 11.8 %, 1.3 of 10.3 ms 12.6 %; 2.2 of 11.2 ms 19.6 %, 2.3 of 11.3 ms 20.4 %.
        (FETCH, "4 ms of 13 ms (medians), work of the training process: no workers", 1.2, 1.3),
        (
            FETCH.replace("Single", "Multi").replace("ProcessData", "ProcessingData"),
            "4 ms of 13 ms (medians), waiting for the loader's workers",
            2.2,
            2.3,
        ),
    ],
)
def test_data_loading_that_takes_a_large_share(name: str, evidence: str, small: float, large: float) -> None:
    (finding,) = training(ranges=lambda step: [(name, "data loading", 4)]).summary().findings

    assert finding[:5] == ("data loading takes a large share", name, "data loading", 4 * MS, 4 / 13)
    assert finding.evidence == evidence
    assert found(training(ranges=lambda step: [(name, "data loading", small)])) == []
    assert len(found(training(ranges=lambda step: [(name, "data loading", large)]))) == 1


def test_stops_of_the_machine_in_each_step_hide_no_loader() -> None:
    def stops(step: int, at: int) -> int:
        return 5 if step % 8 == at else 1

    busy = training(
        steps=32,
        forward=stops,
        backward=lambda step, block: stops(step, 4 + block),
        ranges=lambda step: [(FETCH, "data loading", 2.5)],
    )

    # Each step lasts 15.5 ms with 4 ms of stops: 2.5 ms are 22 % of 11.5 ms and 16 % of 15.5 ms.
    assert [finding.part for finding in busy.summary().findings] == ["data loading"]


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_loader_that_is_restarted_in_each_step(period: int) -> None:
    begin = "enumerate(DataLoader)#DataLoader.__iter__"

    def ranges(step: int) -> list[OptionalRange]:
        begins: list[OptionalRange] = [(begin, "data loading", 0)]
        return [*(begins if step % period == 0 else []), (FETCH, "data loading", 4)]

    (finding,) = training(steps=12, ranges=ranges).summary().findings

    often = {1: "once", 2: "0.5 times"}.get(period)
    anew = f"; the loader starts again {often} a step: it shuffles again, and starts new workers" if often else ""
    assert finding.evidence == f"4 ms of 13 ms (medians), work of the training process: no workers{anew}"


@pytest.mark.parametrize(
    "name", ["LRScheduler.step#LambdaLR.step", "clip_grad_norm_", "Optimizer.zero_grad#SGD.zero_grad"]
)
def test_ranges_of_the_optimizers_part_outside_its_steps_are_findings(name: str) -> None:
    (finding,) = training(ranges=lambda step: [(name, "optimizer", 1)] * 2).summary().findings

    assert finding[:5] == ("takes a large share", name, "optimizer", 2 * MS, 2 / 11)
    assert finding.evidence == "twice a step, 1 ms each (median)"
    assert found(training(ranges=lambda step: [(name, "optimizer", 1.5)])) == []


def test_an_optimizer_and_its_scheduler_are_two_findings() -> None:
    ranges: list[OptionalRange] = [
        ("Optimizer.step#SGD.step", "optimizer", 8),
        ("LRScheduler.step#A.step", "optimizer", 4),
    ]
    findings = training(ranges=lambda step: ranges).summary().findings

    # Steps of 9 + 12 ms; 1 of the 9 ms is the optimizer's too.
    assert [(finding.what, finding.where, finding.ns_per_step) for finding in findings] == [
        ("optimizer takes a large share", "Optimizer.step#SGD.step", 9 * MS),
        ("takes a large share", "LRScheduler.step#A.step", 4 * MS),
    ]


def test_time_without_a_name_follows_what_came_before() -> None:
    (finding,) = training(before=9).summary().findings

    # The first step starts with the first call.
    assert finding[:4] == ("time outside of modules and ranges (other) takes a large share", None, "other", 9 * MS)
    assert finding.evidence == "9 ms of 18 ms (medians); 100% of it follows optimizer"
    assert found(training(before=2)) == []


def test_modules_that_spend_host_time_in_their_own_forward() -> None:
    (finding,) = training(own=lambda block: 1).summary().findings

    assert finding[1:4] == ("Net.blocks.0", "forward", 4 * MS)
    assert finding.evidence == (
        "own forward 4 ms a step in 4 modules Net.blocks.* (Block), own backward 0 ms: Python or waiting"
    )
    assert found(training(own=lambda block: 0.2)) == []


@pytest.mark.parametrize("inner", ["Net", "Wrapper.module"])
@pytest.mark.parametrize(("waits", "parts"), [(0, []), (3, ["communication"])])
def test_host_time_excludes_a_wrapper_in_some_steps_and_waiting_for_ranks(
    inner: str, waits: float, parts: list[str]
) -> None:
    script, now = EventScript(capacity=1 << 10), 0
    wrapper, net = script.name("Wrapper"), script.name(inner)
    for step in range(STEPS):
        script.enter(now, wrapper, step, step)
        script.collective(now, Kind.RANGE_BEGIN, range_text("gloo:all_gather", "communication"), step)
        now += round(waits * MS)
        script.collective(now, Kind.RANGE_END, range_text("gloo:all_gather", "communication"), step)
        now += 12 * MS if step in (1, 3, 4) and not waits else MS // 5
        script.enter(now, net, step, step)
        script.exit(now + 2 * MS, net, step, step + 1)
        script.exit(now + 2 * MS, wrapper, step, step + 1)
        script.pass_begin(now + 2 * MS, step)
        script.node(now + 2 * MS, now + 5 * MS, step)
        script.pass_end(now + 5 * MS, step)
        now += 5 * MS
        script.step(now, step)

    timeline = build_timeline(script.snapshot())
    assert [finding.part for finding in timeline.summary().findings] == parts
    if inner != "Net":
        return
    # The same if the operators of the wrapper are known.
    notes = {"steps": 2, "inside": {"Wrapper": [["", 2, 1_000]], "Net": [["", 2, 2 * MS]]}, "loops_ns": 3_300}
    known = {**timeline.metadata, STEP_NOTES: notes}
    with_notes = replace(timeline, metadata=fit_metadata(known))
    assert [finding.part for finding in with_notes.summary().findings] == parts


def test_findings_are_ranked_and_shown_in_every_form() -> None:
    def ranges(step: int) -> list[OptionalRange]:
        return [(FETCH, "data loading", 20)]

    summary = training(ranges=ranges, forward=lambda step, block: 5 if block == 2 else 1).summary()

    assert [finding.where for finding in summary.findings] == [FETCH, "Net.blocks.2.act"]
    assert json.loads(summary.to_json())["findings"] == [finding._asdict() for finding in summary.findings]
    assert json.loads(summary.to_json(1))["findings"] == [summary.findings[0]._asdict()]
    assert summary.sort_by(limit=1).only("Net").findings == summary.findings
    assert summary.tables["findings"].to("csv").splitlines()[0] == "what,where,part,ns_per_step,share,evidence,next"
    markdown = summary.to_markdown().splitlines()
    assert markdown[:4] == ["Net · python", "", "| finding | where | ms a step | % | evidence | next |", markdown[3]]
    assert markdown[5].startswith("| `is slower than its siblings` | `Net.blocks.2.act` | 4.000 | 12.1 |")


def test_on_the_command_line_the_next_command_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a TRACE of mine.pftrace"
    training(forward=lambda step, block: 5 if block == 2 else 1).save(path)

    printed = CliRunner().invoke(group, ["summary", str(path), "--format", "json"])

    [finding] = json.loads(printed.stdout)["findings"]
    assert shlex.split(finding["next"]) == ["modtrace", "summary", str(path), "--only", "Net.blocks.*.act"]
    again = CliRunner().invoke(group, shlex.split(finding["next"])[1:])
    assert again.exit_code == 0
    assert sum("act" in line for line in again.stdout.splitlines()) == BLOCKS


@pytest.mark.parametrize("step_by", [None, "call", "range r"])
@pytest.mark.parametrize(
    "planted",
    [
        {"forward": lambda step, block: 5 if block == 2 else 1, "act": lambda block: "A" if block == 2 else "GELU"},
        {"forward": lambda step, block: 90 if (step, block) == (7, 2) else 1},
        {"alone": lambda step: 1, "own": lambda block: 2},
        {"ranges": lambda step: [(FETCH, "data loading", 9), ("r", "user", 20 * (step % 3 == 1) + 1)], "before": 9},
        {"collection": lambda step: 20 if step % 3 == 1 else 0},
    ],
)
def test_each_command_that_findings_advise_runs_unchanged(
    planted: dict[str, Any], step_by: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "it's [a] TRACE?.pftrace"
    timeline = training(**planted)
    grows = {"grows": 4 << 20, "grows_by": {"Net.blocks.1": 3 << 20}}
    replace(timeline, metadata={**timeline.metadata, "memory": grows}).save(path)
    options = ["--step-by", step_by] if step_by is not None else []

    printed = CliRunner().invoke(group, ["summary", str(path), *options, "--format", "json"])

    if step_by == "range r" and "ranges" not in planted:
        assert printed.exit_code
        return
    advised = [finding["next"] for finding in json.loads(printed.stdout)["findings"]]
    assert advised
    for command in advised:
        program, *arguments = shlex.split(command)
        again = CliRunner().invoke(group, arguments)
        assert (program, again.exit_code) == ("modtrace", 0), (command, again.output)
        assert again.stdout.count("\n") > 1


@pytest.mark.parametrize("name", ["it's", "a[b]", "?*", "$(rm x)"])
def test_an_advised_pattern_matches_only_the_module(name: str) -> None:
    (pattern,) = shlex.split(only_option(f"Net.{name}"))[1:]

    assert fnmatch.fnmatchcase(f"Net.{name}", pattern)
    assert not fnmatch.fnmatchcase("Net.b", pattern)


@pytest.mark.parametrize("slow", [[7], [2, 5, 8], [1, 3, 5, 9]])
def test_the_next_command_of_slow_steps_shows_the_slowest(slow: list[int], tmp_path: Path) -> None:
    def ms(step: int, block: int) -> float:
        return 40 + step if block == 2 and step in slow else 1

    path = tmp_path / "steps.json"
    training(forward=ms).save(path)
    (one,) = load(path).summary().findings

    printed = CliRunner().invoke(group, [*shlex.split(one.next.replace("TRACE", str(path)))[1:], "--format", "json"])

    assert printed.exit_code == 0, printed.output
    assert [step["duration_ns"] for step in json.loads(printed.stdout)["steps"]] == [(STEP_MS + 39 + max(slow)) * MS]


def test_a_first_screen_has_at_most_3_kb_and_brief_json_6() -> None:
    summary = gpt2_timeline(2_000, layers=6).summary()
    found = Finding("is slower than its siblings", "GPT2LMHeadModel.h.3.attn", "forward", MS, 0.1, "e" * 300, "n" * 60)
    many = replace(summary, findings=[found] * 7).sort_by()

    screen = summary.sort_by().first_screen()
    assert len(screen.encode()) <= 2_900
    assert screen.count("\n") < 30
    assert f"{summary.modules - 8} more modules" in screen
    assert len(many.first_screen().encode()) <= 2_900
    assert many.first_screen().count("is slower than its siblings") == 7
    for limit in (1, 2, 5, 10):
        text = many.to_json(limit)
        assert len(text) <= 6_000
        assert len(json.loads(text)["findings"]) == min(limit, 7)
    assert len(json.loads(many.to_json(11))["rows"]) == 11


def test_a_first_screen_has_a_column_for_backward_only_if_something_ran_backward() -> None:
    trained = training().summary().sort_by()
    inference = replace(trained, rows=[row._replace(backward_ns=0) for row in trained.rows])

    for summary, has_backward in ((trained, True), (inference, False)):
        (headings,) = (line for line in summary.first_screen().splitlines() if line.startswith("module (in Net)"))
        assert ("backward" in headings.split()) == has_backward
        assert "backward" in str(summary)


@pytest.mark.parametrize(("name", "act"), [("r" * 4_000, "GELU"), ("short", "A" * 3_000), ("r" * 900, "A" * 900)])
def test_long_names_make_no_first_screen_longer(name: str, act: str) -> None:
    summary = training(ranges=lambda step: [(name, "user", 1)], act=lambda block: act).summary().sort_by()

    assert summary.findings == []
    screen = summary.first_screen()
    assert screen == summary.first_screen(1_000_000)
    assert len(screen.encode()) <= 2_900
    assert max(map(len, screen.splitlines())) <= 120


@settings(max_examples=40, deadline=None)
@given(texts, texts, texts, st.integers(1, 60), st.integers(1, 10))
def test_answers_are_within_their_limits_for_any_recording(
    name: str, act: str, path: str, count: int, limit: int
) -> None:
    def ranges(step: int) -> list[OptionalRange]:
        return [(f"{name}{number}", "user", 8 + number) for number in range(count) if step % 3 == number % 3]

    timeline = training(ranges=ranges, act=lambda block: f"{act}{block}", forward=lambda _, block: 1 + 9 * (block == 2))
    summary = timeline.summary().of_file(path).sort_by()

    assert summary.findings
    assert len(summary.first_screen().encode()) <= 2_900
    assert len(summary.to_json(limit)) <= 6_000
    assert json.loads(summary.to_json(limit)).keys() == json.loads(summary.to_json()).keys()


def test_growing_memory_has_its_holders() -> None:
    def grown(**facts: object) -> list[Finding]:
        timeline = training()
        known = fit_metadata({**timeline.metadata, "memory": facts})
        return list(replace(timeline, metadata=known).summary().findings)

    (finding,) = grown(grows=4 << 20, grows_by={"Net.blocks.1": 3 << 20, "no module": 1 << 20})
    assert finding[:5] == ("memory grows from step to step", "Net.blocks.1", None, 0, 0)
    assert finding.evidence == (
        "4.00 MiB more at the end of each step: Net.blocks.1 3.00 MiB, outside of modules 1.00 MiB"
    )
    assert grown(grows=4 << 20, grows_by={"no module": 4 << 20})[0].where is None
    assert grown(grows=0) == grown(grows="much") == []


@pytest.mark.parametrize(("ms", "where"), [(14.9, []), (15, ["Net.blocks.2.act"])])
def test_a_tiny_step_is_slow_by_more_than_threads_wait_for_each_other(ms: float, where: list[str]) -> None:
    slow = training(
        forward=lambda step, block: 0.1 + ms * (step == 5 and block == 2), backward=lambda step, block: 0.1
    ).summary()

    assert [finding.where for finding in slow.findings if finding.what == "makes step 5 slow (forward)"] == where


@pytest.mark.parametrize(("ms", "count"), [(1.9, 0), (2, 1)])
def test_rare_ranges_have_a_share_of_all_time(ms: float, count: int) -> None:
    # Two of ten steps of 9 ms save; another four are 26.5 ms longer: 200 ms in all if a save lasts 2 ms.
    timeline = training(
        ranges=lambda step: [("torch.save", "saving", ms)] if step in (4, 7) else [],
        pause=lambda step: 26.5 if step in (1, 3, 5, 9) else 0,
    )

    assert [row[0] for row in found(timeline) if "now and then" in row[0]] == ["saving comes now and then"] * count


def test_waiting_for_other_ranks_takes_a_large_share() -> None:
    def wait(ms: float) -> Callable[[int], list[OptionalRange]]:
        return lambda step: [("gloo:all_reduce", "communication", ms)]

    (finding,) = training(ranges=wait(3)).summary().findings

    assert finding[:4] == ("communication takes a large share", "gloo:all_reduce", "communication", 3 * MS)
    assert finding.evidence == "3 ms of 12 ms (medians)"
    assert found(training(ranges=wait(0.9))) == []


@pytest.mark.parametrize(
    ("operator", "runs", "again", "text"),
    [
        ("all_reduce", 1, 1, "a step has 1 × all_reduce"),
        # The model runs twice, its gradients are sent once: `no_sync` skips the first time.
        ("all_reduce", 2, 1, "a step has 1 × all_reduce"),
        (
            "broadcast",
            1,
            1,
            "a step has 1 × broadcast; DistributedDataParallel broadcasts buffers in each forward, "
            "unless it has broadcast_buffers=False",
        ),
        (
            "all_reduce",
            2,
            2,
            "a step has 2 × all_reduce; the model runs twice a step: "
            "if gradients are accumulated, no_sync() communicates only in the last pass",
        ),
    ],
)
def test_communication_has_the_number_of_collectives_per_step(operator: str, runs: int, again: int, text: str) -> None:
    script, now = EventScript(capacity=1 << 10), 1
    name = script.name("DistributedDataParallel", "DistributedDataParallel", "DistributedDataParallel")
    for step in range(STEPS):
        for run in range(runs):
            call = runs * step + run
            script.enter(now, name, call, call)
            script.exit(now + MS, name, call, call + 1)
            script.node(now + MS, now + 2 * MS, call)
            now += 2 * MS
        for _ in range(again):
            script.collective(now, Kind.COLLECTIVE_ENTER, f'["{operator}", "0"]', 0)
            script.collective(now + MS, Kind.COLLECTIVE_EXIT, f'["{operator}", "0"]', 8)
            now += MS
        script.step(now, step)

    rank_0, rank_1 = (as_rank(build_timeline(script.snapshot()), rank) for rank in range(2))
    evidence = f"{again} ms of {2 * runs + again} ms (medians), to send data or wait for other ranks; {text}"

    assert [finding.evidence for finding in rank_0.summary().findings] == [evidence]
    # The steps of a job are those of its first rank, so only its collectives and calls are in them.
    job = Timeline.of(join([rank_0, rank_1]))
    assert [finding.evidence for finding in job.summary().findings] == [evidence]


def as_rank(timeline: Timeline, rank: int) -> Timeline:
    return Timeline.of(replace_processes(timeline, lambda process: process._replace(rank=rank)))


def test_backward_that_waits_for_other_ranks() -> None:
    def reduce(step: int) -> list[OptionalRange]:
        return [("gloo:all_reduce", "communication", 0.1)]

    (finding,) = training(ranges=reduce, wait=3).summary().findings

    # 0.1 of the 3.1 ms are in the collective.
    assert finding[:3] == ("communication takes a large share", "gloo:all_reduce", "communication")
    assert finding.ns_per_step == 3_100_000
    assert finding.evidence == ("3.1 ms of 12 ms (medians); 3 ms of it in backward passes, in no module's backward")
    assert finding.next == "modtrace ranks slow DIR"
    # Here 0.8 of 9.8 ms.
    assert found(training(ranges=reduce, wait=0.7)) == []
    # Without other ranks, the wait may be in the loss.
    assert found(training(wait=9)) == []


def test_few_flops_of_a_known_peak() -> None:
    flops = FlopSummary([], [StepFlops(step, 10**6, 0) for step in range(STEPS)], [0], 0, 0, [], [], {"cpu float32": 1})
    summary = replace(training().summary(), flops=flops)

    # 10⁶ FLOPs in 9 ms are 1.1 % of 10¹⁰ FLOP/s, and 22.2 % of 5·10⁸.
    (finding,) = summary.with_peak(0.01).findings
    assert finding[:5] == ("few of the device's FLOPs are used", None, None, 0, 0)
    assert finding.evidence == "MFU 1.1% of 0.01 TFLOP/s (median of the steps)"
    assert summary.findings == summary.with_peak(0.01).with_peak(0.0005).findings == []
    assert training().summary().with_peak(0.01).findings == []


@pytest.mark.parametrize("name", ["a\n1. b", "\x1b[2Jred", "a | b <img>"])
def test_a_range_in_a_heading_of_steps_starts_no_line_and_no_cell(name: str) -> None:
    table = training(ranges=lambda step: [(name, "user", 1)]).summary().tables["steps"]

    text, markdown = table.to("text"), table.to("md").splitlines()

    assert len(text.splitlines()) == 1 + STEPS
    assert ascii(name)[1:-1] in text.splitlines()[0]
    start = next(at for at, line in enumerate(markdown) if line.startswith("|"))
    assert markdown[start].count("|") == markdown[start + 1].count("|") == markdown[start + 2].count("|")
    assert "<img" not in markdown[start]


@pytest.mark.parametrize(
    ("passes", "expected"),
    [
        (lambda step: 1, []),
        # One or two more passes of 4 ms in every step, one more in every second step, one more in every fourth.
        (lambda step: 2, [(4.0, 4 / 13, "once a step, backward twice", "4 ms")]),
        (lambda step: 3, [(8.0, 8 / 17, "once a step, backward 3 times", "4 ms")]),
        (lambda step: 2 - (step % 2), [(2.0, 20 / 110, "once a step, backward 1.5 times", "4 ms")]),
        (lambda step: 1 + (step % 4 == 0), []),
    ],
)
def test_a_graph_that_is_kept_for_more_passes(
    passes: Callable[[int], int], expected: list[tuple[float, float, str, str]]
) -> None:
    again = [
        finding
        for finding in training(passes=passes).summary().findings
        if finding.what == "runs backward more often than forward"
    ]

    assert [(one.where, one.part, one.ns_per_step) for one in again] == [
        ("Net", "backward", ms * MS) for ms, *_ in expected
    ]
    for one, (_, share, often, ms_text) in zip(again, expected, strict=True):
        assert one.share == pytest.approx(share)
        reason = f"its graph is kept (retain_graph, create_graph) for more, of {ms_text} each"
        assert one.evidence == (
            f"forward {often}: {reason}; add the losses and call backward once, "
            "or detach() what a loss should not train"
        )


@pytest.mark.parametrize(("modules", "count"), [(BLOCKS // 2, 0), (BLOCKS // 2 + 1, 1)])
def test_passes_for_some_of_the_weights_are_not_further_passes(modules: int, count: int) -> None:
    again = found(training(passes=lambda step: 2, in_later_passes=modules))

    assert [finding[0] for finding in again] == ["runs backward more often than forward"] * count


def test_a_call_that_one_pass_runs_in_two_spans_ran_backward_once_more() -> None:
    script, now = EventScript(capacity=1 << 10), 1
    name = script.name("Net", "Net", "Net")
    for step in range(STEPS):
        for call in range(2):
            script.enter(now, name, 2 * step + call, 4 * step + 2 * call)
            now += MS
            script.exit(now, name, 2 * step + call, 4 * step + 2 * call + 2)
        # Each call by itself, the later call first; then both in turns, as if gradients are differentiated.
        for number, nodes in enumerate(((3, 2), (1, 0), (3, 1, 2, 0))):
            script.pass_begin(now, 3 * step + number)
            for node in nodes:
                begin, now = now, now + MS
                script.node(begin, now, 4 * step + node, graph_task=3 * step + number)
            script.pass_end(now, 3 * step + number)
        script.step(now, step)

    (finding,) = build_timeline(script.snapshot()).summary().findings

    # Four nodes of 1 ms in a step of 10 ms.
    assert (finding.ns_per_step, finding.share) == (4 * MS, 0.4)
    assert finding.evidence.startswith("forward twice a step, backward 4 times: ")
