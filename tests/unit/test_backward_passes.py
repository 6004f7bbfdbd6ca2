"""Whole backward passes: those that are over in the timeline, those that are not as what a thread waits in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import modtrace
from modtrace.ring.slot_format import NO_NAME
from modtrace.timeline import BackwardPass, OpenCall, Process, Timeline, build_timeline, open_stacks
from modtrace.timeline.select import chosen_steps
from modtrace.track.engine import EngineName
from tests.support.event_script import WALL, EventScript

PROCESS = Process(0)


def passes(script: EventScript) -> list[tuple[int, int, bool]]:
    """Begin, end and whether it is complete, of each pass."""
    found = build_timeline(script.snapshot()).backward_passes
    return [(found_.start_ns - WALL, found_.end_ns - WALL, found_.complete) for found_ in found]


def calls(script: EventScript) -> list[list[OpenCall]]:
    return [list(thread.calls) for thread in open_stacks(script.snapshot())]


def with_forward(capacity: int = 64) -> tuple[EventScript, int]:
    """A call of `Net`, which made the nodes 10 and 11, from 1 to 2."""
    script = EventScript(capacity)
    net = script.name("Net")
    script.enter(1, net, sequence=10)
    script.exit(2, net, sequence=12)
    return script, net


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


def test_a_pass_inside_another_one_is_one_of_its_own() -> None:
    script = EventScript()
    script.pass_begin(1, 1)
    script.pass_begin(2, 2)
    script.pass_end(3, 2)
    script.pass_end(4, 1)

    assert passes(script) == [(1, 4, True), (2, 3, True)]


def test_of_two_ends_of_a_pass_the_first_one_counts() -> None:
    script = EventScript()
    script.pass_begin(1)
    script.pass_end(2)
    script.pass_end(3)

    assert passes(script) == [(1, 2, True)]


def test_a_pass_whose_end_has_not_come_is_not_complete() -> None:
    script = EventScript()
    script.pass_begin(1)
    script.mark(5, "last")

    assert passes(script) == [(1, 5, False)]


def test_a_pass_whose_begin_was_overwritten_is_not_complete() -> None:
    script = EventScript(capacity=16)
    script.pass_begin(1)
    for time in range(2, 17):
        script.mark(time, "overwrites")
    script.pass_end(17)

    assert passes(script) == [(2, 17, False)]


def test_parts_of_a_timeline_have_the_passes_of_these() -> None:
    script, net = with_forward()
    for number in range(3):
        script.enter(10 * number + 10, net, number + 1)
        script.exit(10 * number + 11, net, number + 1)
        script.pass_begin(10 * number + 12, number)
        script.pass_end(10 * number + 15, number)
        script.step(10 * number + 16, number)
    timeline = build_timeline(script.snapshot())

    def edges(part: Timeline) -> list[tuple[int, int, bool]]:
        return [(run.start_ns - WALL, run.end_ns - WALL, run.complete) for run in part.backward_passes]

    assert edges(timeline.steps(1, 2)) == [(22, 25, True)]
    assert edges(timeline.window(WALL + 14, WALL + 24)) == [(14, 15, False), (22, 24, False)]
    assert edges(timeline.window(WALL + 15, WALL + 22)) == []
    assert edges(chosen_steps(timeline, np.array([0, 2]))) == [(12, 15, True), (32, 35, True)]


def test_a_pass_whose_nodes_are_over_waits_behind_the_last_one() -> None:
    script, net = with_forward()
    script.pass_begin(3)
    script.call_backward(4, net)
    script.backward_over(6)

    assert calls(script) == [[OpenCall("Net", "after backward", 6, "M")]]


def test_a_pass_between_two_nodes_of_the_native_engine_waits_behind_the_one_before() -> None:
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


def test_a_pass_whose_node_runs_is_told_by_that() -> None:
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


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        raise KeyError("in backward")


def test_recorded_passes_are_complete_also_those_that_fail(engine: EngineName) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    with modtrace.record(engine=engine) as recording:
        model(x).sum().backward()
        torch.autograd.grad(model(x).sum(), model.weight)
        with pytest.raises(KeyError, match="in backward"):
            Fails.apply(model(x)).sum().backward()
    timeline = recording.timeline()

    assert [found.complete for found in timeline.backward_passes] == [True] * 3
    for span in timeline.spans:
        if span.phase == "backward":
            assert any(p.start_ns <= span.start_ns and span.end_ns <= p.end_ns for p in timeline.backward_passes)
