"""Whole backward passes: in the timeline once they have ended; until then, as the place where a thread waits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import modtrace
from modtrace import Timeline
from modtrace.checking import check
from modtrace.record_options import EngineName
from modtrace.ring import Kind
from modtrace.ring.slot_format import NO_NAME
from modtrace.timeline import BackwardPass, OpenCall, Process, RingAnalysis
from modtrace.timeline import Timeline as TimelineData
from modtrace.timeline.select import select_steps
from modtrace.write.slices import all_as_modules
from tests.support.event_script import WALL, EventScript
from tests.support.small_modules import Failing
from tests.support.timelines import build_timeline

PROCESS = Process(0)


def passes(script: EventScript) -> list[tuple[int, int, bool]]:
    """Start, end and completeness of each pass."""
    recorded = build_timeline(script.snapshot()).backward_passes
    return [(span.start_ns - WALL, span.end_ns - WALL, span.complete) for span in recorded]


def calls(script: EventScript) -> list[list[OpenCall]]:
    return [list(thread.calls) for thread in RingAnalysis(script.snapshot()).open_stacks]


def with_forward(capacity: int = 64) -> tuple[EventScript, int]:
    """A call of `Net` from 1 to 2, which makes the nodes 10 and 11."""
    script = EventScript(capacity)
    net = script.name("Net")
    script.enter(1, net, sequence=10)
    script.exit(2, net, sequence=12)
    return script, net


def test_the_longest_of_passes_with_lost_starts_comes_first() -> None:
    script = EventScript()
    other = script.add_thread("other", tid=2)
    script.pass_end(5, 1)
    script.on_thread(other)
    script.pass_end(7, 2)
    script.on_thread(0)
    script.pass_end(9, 3)
    script.pass_begin(10, 4)
    found = RingAnalysis(script.snapshot()).passes

    assert [*zip(found.thread.tolist(), found.start_event.tolist(), found.end_event.tolist(), strict=True)] == [
        (0, -1, 2),
        (other, -1, 1),
        (0, -1, 0),
        (0, 3, -1),
    ]


def test_a_pass_is_as_long_as_the_call_that_ran_it() -> None:
    script, net = with_forward()
    script.pass_begin(3)
    script.call_backward(4, net)
    script.backward_over(6)
    script.pass_end(9)

    assert build_timeline(script.snapshot()).backward_passes == [
        BackwardPass(WALL + 3, WALL + 9, "MainThread", 1, PROCESS)
    ]
    assert build_timeline(script.snapshot()).backward_passes[0].duration_ns == 6


def test_a_pass_inside_another_is_its_own_pass() -> None:
    script = EventScript()
    script.pass_begin(1, 1)
    script.pass_begin(2, 2)
    script.pass_end(3, 2)
    script.pass_end(4, 1)

    assert passes(script) == [(1, 4, True), (2, 3, True)]


def test_the_first_of_two_ends_of_a_pass_counts() -> None:
    script = EventScript()
    script.pass_begin(1)
    script.pass_end(2)
    script.pass_end(3)

    assert passes(script) == [(1, 2, True)]


def test_a_pass_without_an_end_is_not_complete() -> None:
    script = EventScript()
    script.pass_begin(1)
    script.mark(5, "last")

    assert passes(script) == [(1, 5, False)]


def test_a_pass_with_an_overwritten_start_is_not_complete() -> None:
    script = EventScript(capacity=16)
    script.pass_begin(1)
    for time in range(2, 17):
        script.mark(time, "overwrites")
    script.pass_end(17)

    assert passes(script) == [(2, 17, False)]


def test_passes_with_overwritten_starts_nest() -> None:
    script = EventScript(capacity=16)
    script.pass_begin(1, 1)
    script.pass_begin(2, 2)
    for time in range(3, 17):
        script.mark(time, "overwrites")
    script.pass_end(17, 2)
    script.pass_end(18, 1)

    # The pass that ends later is the outer one.
    assert passes(script) == [(3, 18, False), (3, 17, False)]


def test_a_pass_that_lost_its_end_does_not_outlast_the_one_around_it(tmp_path: Path) -> None:
    script, _ = with_forward()
    script.pass_begin(3, 1)
    script.pass_begin(4, 2)
    script.pass_end(9, 1)
    script.pass_begin(11, 3)
    script.pass_end(12, 3)
    script.on_thread(script.add_thread("worker", tid=2))
    script.mark(20, "last")

    assert passes(script) == [(3, 9, True), (4, 9, False), (11, 12, True)]
    saved = build_timeline(script.snapshot())
    for suffix in (".json", ".pftrace"):
        saved.save(tmp_path / f"t{suffix}")
        assert check(tmp_path / f"t{suffix}").faults == []
        assert modtrace.load(tmp_path / f"t{suffix}").backward_passes == saved.backward_passes


@pytest.mark.parametrize("suffix", [".json", ".pftrace", ".html"])
def test_passes_and_collectives_without_any_module_are_saved(suffix: str, tmp_path: Path) -> None:
    script = EventScript()
    script.pass_begin(1)
    script.collective(2, Kind.COLLECTIVE_ENTER, '["all_reduce", "0"]', 0)
    script.collective(3, Kind.COLLECTIVE_EXIT, '["all_reduce", "0"]', 8)
    script.pass_end(4)
    saved = build_timeline(script.snapshot())

    saved.save(tmp_path / f"t{suffix}")

    if suffix != ".html":
        loaded = modtrace.load(tmp_path / f"t{suffix}")
        assert loaded.backward_passes == saved.backward_passes
        assert list(loaded.collectives) == list(saved.collectives)


def test_parts_of_a_timeline_have_their_own_passes() -> None:
    script, net = with_forward()
    for number in range(3):
        script.enter(10 * number + 10, net, number + 1)
        script.exit(10 * number + 11, net, number + 1)
        script.pass_begin(10 * number + 12, number)
        script.pass_end(10 * number + 15, number)
        script.step(10 * number + 16, number)
    timeline = build_timeline(script.snapshot())

    def edges(part: TimelineData) -> list[tuple[int, int, bool]]:
        return [(run.start_ns - WALL, run.end_ns - WALL, run.complete) for run in part.backward_passes]

    assert edges(timeline.steps(1, 2)) == [(22, 25, True)]
    assert edges(timeline.window(WALL + 14, WALL + 24)) == [(14, 15, False), (22, 24, False)]
    assert edges(timeline.window(WALL + 15, WALL + 22)) == []
    assert edges(select_steps(timeline, np.array([0, 2]))) == [(12, 15, True), (32, 35, True)]


def two_threads() -> Timeline:
    """A pass inside a pass; on another thread a pass whose end is lost; and a step that ends between them."""
    script, net = with_forward()
    script.pass_begin(3, 1)
    script.call_backward(4, net)
    script.pass_begin(5, 2)
    script.pass_end(6, 2)
    script.backward_over(7)
    script.pass_end(9, 1)
    script.step(10, 0)
    script.on_thread(script.add_thread("worker", tid=2))
    script.pass_begin(11, 3)
    script.enter(12, net, 1)
    script.exit(13, net, 1)
    return build_timeline(script.snapshot())


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".pftrace", ".pftrace.gz"])
def test_passes_are_saved_on_rows_of_their_own_and_loaded_again(suffix: str, tmp_path: Path) -> None:
    saved = two_threads()
    assert [(run.start_ns - WALL, run.end_ns - WALL, run.tid, run.complete) for run in saved.backward_passes] == [
        *((3, 9, 1, True), (5, 6, 1, True), (11, 13, 2, False))
    ]

    saved.save(tmp_path / f"t{suffix}")
    loaded = modtrace.load(tmp_path / f"t{suffix}")

    assert loaded.backward_passes == saved.backward_passes
    assert list(loaded.spans) == list(saved.spans)
    assert loaded.tracks == saved.tracks
    assert loaded.summary().steps == saved.summary().steps
    assert check(tmp_path / f"t{suffix}").faults == []


def test_a_pass_is_a_slice_between_backward_and_communication(tmp_path: Path) -> None:
    two_threads().save(tmp_path / "t.json")

    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]

    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = [
        (rows[event["tid"]], event["name"], event["ts"], event["dur"], event["args"])
        for event in events
        if event.get("cat") == "backward pass"
    ]
    assert slices == [
        ("backward pass · MainThread", "backward", 0.002, 0.006, {}),
        ("backward pass · MainThread", "backward", 0.004, 0.001, {}),
        ("backward pass · worker", "backward", 0.010, 0.002, {"complete": False}),
    ]
    order = [name for name in rows.values() if "MainThread" in name]
    assert order == ["forward · MainThread", "backward · MainThread", "backward pass · MainThread"]


def test_the_page_has_a_row_of_passes() -> None:
    as_modules = all_as_modules(two_threads())

    pass_tracks = [index for index, track in enumerate(as_modules.tracks) if track.kind == "backward pass"]
    rows = [
        (span.name, span.start_ns - WALL, span.end_ns - WALL, span.depth, span.step, span.complete)
        for span, track in zip(as_modules.spans, as_modules.columns.track.tolist(), strict=True)
        if track in pass_tracks
    ]
    assert rows == [
        ("backward", 3, 9, 0, 0, True),
        ("backward", 5, 6, 1, 0, True),
        ("backward", 11, 13, 0, 1, False),
    ]


def test_a_step_has_the_duration_of_its_whole_passes() -> None:
    first, second = two_threads().summary().steps

    assert (first.duration_ns, first.forward_ns, first.backward_ns, first.backward_pass_ns) == (9, 1, 3, 6)
    assert (second.backward_pass_ns, second.whole) == (2, False)
    # The time of whole passes is not in the sum.
    assert first.forward_ns + first.backward_ns + first.before_ns + first.between_ns + first.after_ns == 9


def test_the_table_of_steps_has_whole_passes_and_their_part_without_collectives() -> None:
    as_long_as_the_part = two_threads().summary()
    assert [step.parts["backward"] for step in as_long_as_the_part.step_parts] == [6, 2]
    assert "backward()" not in as_long_as_the_part.tables["steps"].to("text")

    script, net = with_forward()
    script.pass_begin(3)
    script.call_backward(4, net)
    script.collective(5, Kind.COLLECTIVE_ENTER, '["all_reduce", "0"]', 0)
    script.collective(6, Kind.COLLECTIVE_EXIT, '["all_reduce", "0"]', 8)
    script.backward_over(7)
    script.pass_end(9)
    script.step(10, 0)
    summary = build_timeline(script.snapshot()).summary()
    lines = summary.tables["steps"].to("text").splitlines()
    assert (summary.step_parts[0].parts["backward"], summary.steps[0].backward_pass_ns) == (5, 6)
    assert lines[0].split()[-1] == "backward()"
    assert lines[-1] == "backward(): from its call to its return, with waiting for other ranks"


def test_a_pass_whose_nodes_have_ended_waits_after_the_last() -> None:
    script, net = with_forward()
    script.pass_begin(3)
    script.call_backward(4, net)
    script.backward_over(6)

    assert calls(script) == [[OpenCall("Net", "after backward", 6, "M")]]


def test_a_pass_between_two_nodes_of_the_native_engine_waits_after_the_first() -> None:
    script, _ = with_forward()
    script.pass_begin(3)
    script.node(4, 5, 12)
    script.node(6, 7, 11)
    script.accumulate_end(8)

    assert calls(script) == [[OpenCall("Net", "after backward", 8, "M")]]


def test_a_pass_that_ran_no_node_of_a_module_has_no_name() -> None:
    script, _ = with_forward()
    script.pass_begin(3)
    assert calls(script) == [[OpenCall("", "after backward", 3)]]

    script.call_backward(4, NO_NAME)
    script.backward_over(5)
    assert calls(script) == [[OpenCall("", "after backward", 5)]]


def test_a_node_outside_all_modules_runs_in_backward_too() -> None:
    script, _ = with_forward()
    script.pass_begin(3)
    script.node_begin(4, 13)
    assert calls(script) == [[OpenCall("", "backward", 4)]]
    assert calls(script)[0][0].place == "backward"

    script.node_end(5, 13)
    assert calls(script) == [[OpenCall("", "after backward", 5)]]


def test_a_pass_is_in_its_running_node() -> None:
    script, net = with_forward()
    script.pass_begin(3)
    script.call_backward(4, net)

    assert calls(script) == [[OpenCall("Net", "backward", 4, "M")]]


def test_a_pass_whose_node_runs_on_a_thread_of_autograd_does_not_wait() -> None:
    script, net = with_forward()
    worker = script.add_thread("pt_autograd_0", tid=2, torch_thread_id=2)
    script.pass_begin(3)
    script.on_thread(worker)
    script.call_backward(4, net)

    assert calls(script) == [[], [OpenCall("Net", "backward", 4, "M")]]
    script.backward_over(5)
    assert calls(script) == [[OpenCall("Net", "after backward", 5, "M")], []]


def test_a_range_around_a_pass_on_a_thread_of_autograd_does_not_hide_it() -> None:
    script, net = with_forward()
    worker = script.add_thread("pt_autograd_0", tid=2, torch_thread_id=2)
    script.collective(3, Kind.RANGE_BEGIN, '["user", "step"]', 1)
    assert calls(script) == [[OpenCall("step", "user", 3)]]
    script.pass_begin(4)
    script.on_thread(worker)
    script.call_backward(5, net)

    assert calls(script) == [[], [OpenCall("Net", "backward", 5, "M")]]


def test_a_pass_inside_a_call_follows_it() -> None:
    script = EventScript()
    net = script.name("Net")
    script.enter(1, net, sequence=10)
    script.pass_begin(3)

    assert calls(script) == [[OpenCall("Net", "forward", 1, "M"), OpenCall("", "after backward", 3)]]


def test_a_pass_that_lost_its_end_inside_another_that_is_over_is_not_open() -> None:
    script = EventScript()
    script.pass_begin(1, 1)
    script.pass_begin(2, 2)
    script.pass_end(4, 1)

    assert calls(script) == [[]]


def test_recorded_passes_are_complete_also_those_that_fail(engine: EngineName) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with modtrace.record(engine=engine) as recording:
        model(x).sum().backward()
        torch.autograd.grad(model(x).sum(), model.weight)
        with pytest.raises(ValueError, match="on purpose"):
            Failing.apply(model(x)).sum().backward()
    timeline = recording.timeline()

    assert [backward.complete for backward in timeline.backward_passes] == [True] * 3
    for span in timeline.spans:
        if span.phase == "backward":
            assert any(p.start_ns <= span.start_ns and span.end_ns <= p.end_ns for p in timeline.backward_passes)


@pytest.mark.parametrize("lost", [0, 5])
def test_a_call_around_all_steps_is_open(lost: int) -> None:
    script = EventScript(capacity=256)
    trainer, net = script.name("Trainer"), script.name("Net")
    for call in range(lost):  # their starts were overwritten
        script.exit(0, net, 100 + call)
    script.enter(1, trainer)
    for step in range(20):
        script.enter(10 * step + 2, net, step)
        script.exit(10 * step + 3, net, step)
        script.step(10 * step + 4, step)
    script.enter(300, net, 20)

    assert calls(script) == [[OpenCall("Trainer", "forward", 1, "M"), OpenCall("Net", "forward", 300, "M")]]
