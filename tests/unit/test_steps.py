"""Steps that nobody marks: which optimizer step ends one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from modtrace.track.optimizer_steps import OptimizerSteps


def make_optimizer(**options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, **options)


def told(train: Callable[[], object]) -> list[tuple[int, bool]]:
    steps: list[tuple[int, bool]] = []
    counter = OptimizerSteps(lambda step, complete: steps.append((step, complete)))
    counter.start()
    try:
        train()
    finally:
        counter.stop()
    return steps


def test_one_optimizer_each_of_its_steps_is_one() -> None:
    optimizer = make_optimizer()

    assert told(lambda: [optimizer.step() for _ in range(3)]) == [(0, True), (1, True), (2, True)]


def test_two_that_take_turns_share_a_step() -> None:
    critic, generator = make_optimizer(), make_optimizer()

    steps = told(lambda: [optimizer.step() for _ in range(3) for optimizer in (critic, generator)])

    assert steps == [(0, False), (0, True), (1, False), (1, True), (2, False), (2, True)]


def test_one_that_steps_more_often_makes_the_steps() -> None:
    critic, generator = make_optimizer(), make_optimizer()

    steps = told(lambda: [optimizer.step() for optimizer in (critic, critic, critic, generator, critic, critic)])

    assert [step for step, _ in steps] == [0, 1, 2, 3, 3, 4]


def test_an_optimizer_inside_another_one_does_not_count() -> None:
    class Outer(torch.optim.SGD):
        def __init__(self) -> None:
            super().__init__([nn.Parameter(torch.ones(1))], lr=0.1)
            self.inner = make_optimizer()

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    outer = Outer()

    assert [step for step, _ in told(lambda: [outer.step() for _ in range(2)])] == [0, 1]


def test_a_second_training_begins_steps_of_its_own() -> None:
    def train() -> None:
        first, second = make_optimizer(), make_optimizer()
        for optimizer in (first, first, second, second):
            optimizer.step()
        del first, second
        make_optimizer().step()

    assert [step for step, _ in told(train)] == [0, 1, 2, 3, 4]


def spans(recording: modtrace.Recording, fqn: str = "Linear") -> list[tuple[str, int]]:
    return [(span.phase, span.step) for span in recording.timeline().spans if span.fqn == fqn]


@pytest.mark.usefixtures("engine")
class TestRecording:
    def test_accumulated_gradients_are_one_step(self, engine: Any) -> None:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with modtrace.record(engine=engine) as recording:
            for batch in range(4):
                net(torch.ones(1, 2)).sum().backward()
                if batch % 2:
                    optimizer.step()
        assert recording.steps == 2
        assert spans(recording) == [(phase, step) for step in (0, 0, 1, 1) for phase in ("forward", "backward")]
        assert [mark.text for mark in recording.timeline().marks] == ["step 0", "step 1"]

    @pytest.mark.parametrize("marked_first", [True, False])
    def test_steps_that_are_marked_are_the_only_ones(self, engine: Any, marked_first: bool) -> None:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with modtrace.record(engine=engine) as recording:
            for _ in range(3):
                net(torch.ones(1, 2)).sum().backward()
                if marked_first:
                    recording.step()
                optimizer.step()
                if not marked_first:
                    recording.step()
        assert recording.steps == 3
        assert spans(recording) == [(phase, step) for step in range(3) for phase in ("forward", "backward")]
        assert [mark.text for mark in recording.timeline().marks] == ["step 0", "step 1", "step 2"]

    def test_max_steps_counts_optimizer_steps(self, engine: Any) -> None:
        net = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with modtrace.record(engine=engine, max_steps=2) as recording:
            for _ in range(3):
                net(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            assert not recording.running
        assert [step for _, step in spans(recording)] == [0, 0, 1, 1]
