"""Unmarked steps, with compiled optimizers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import modtrace

X = torch.ones(2, 4)
Train = Callable[[], object]

# Warnings of torch.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")


class Whole(torch.optim.Optimizer):
    """Its step has no break: it is compiled together with its caller."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.1)


class InParts(torch.optim.Optimizer):
    """Its step is compiled in two parts."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        weight, bias = self.param_groups[0]["params"]
        weight.add_(weight.grad, alpha=-0.1)
        torch._dynamo.graph_break()
        bias.add_(bias.grad, alpha=-0.1)


class Uncompiled(torch.optim.Optimizer):
    """No part of its step can be compiled."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with open(os.devnull):
            torch._dynamo.graph_break()


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled_step(optimizer: torch.optim.Optimizer, net: nn.Module) -> Train:
    step = torch.compile(optimizer.step, backend="eager")

    def train() -> None:
        net(X).sum().backward()
        step()
        optimizer.zero_grad()

    return train


def compiled_training(optimizer: torch.optim.Optimizer, net: nn.Module) -> Train:
    def train() -> None:
        net(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return torch.compile(train, backend="eager")


def compiled_part(optimizer: torch.optim.Optimizer, net: nn.Module) -> Train:
    """The optimizer's step itself is not compiled; a function that it calls twice is."""
    parameters = list(net.parameters())

    @torch.compile(backend="eager")
    def double(gradient: Tensor) -> Tensor:
        return gradient * 2

    def double_all(*_: object) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            double(parameter.grad)

    optimizer.register_step_pre_hook(double_all)

    def train() -> None:
        net(X).sum().backward()
        optimizer.step()

    return train


@pytest.mark.parametrize("compiled_first", [True, False])
@pytest.mark.parametrize(
    ("make_optimizer", "make_training"),
    [
        (make_sgd, compiled_step),
        (make_sgd, compiled_training),
        (make_sgd, compiled_part),
        (Whole, compiled_step),
        (InParts, compiled_step),
        (InParts, compiled_training),
        (Uncompiled, compiled_step),
        (Uncompiled, compiled_training),
    ],
)
def test_a_compiled_step_of_an_optimizer_counts_once(
    engine: Any,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    make_training: Callable[[torch.optim.Optimizer, nn.Module], Train],
    compiled_first: bool,
) -> None:
    net = nn.Linear(4, 4)
    train = make_training(make_optimizer(net.parameters()), net)
    if compiled_first:
        train()

    with modtrace.record(engine=engine) as recording:
        for _ in range(3):
            train()

    assert recording.steps == 3
    timeline = recording.timeline()
    assert [mark.text for mark in timeline.marks] == ["step 0", "step 1", "step 2"]
    forward = [span.step for span in timeline.spans if span.phase == "forward" and span.depth == 0]
    assert forward == sorted(forward)
    assert [forward.count(step) for step in range(3)] == [len(forward) // 3] * 3


def test_a_step_compiled_into_a_larger_graph_is_recognized_by_its_backward_pass(engine: Any) -> None:
    net = nn.Linear(4, 4)
    train = compiled_training(Whole(net.parameters()), net)

    with modtrace.record(engine=engine) as recording:
        for _ in range(3):
            train()

    assert recording.steps == 0
    timeline = recording.timeline()
    assert [mark.text for mark in timeline.marks] == ["step 0", "step 1", "step 2"]
    # The second region of each training has the optimizer in it, after the pass.
    assert [span.step for span in timeline.spans if span.phase == "forward" and span.depth == 0] == [0, 1, 1, 2, 2, 3]


def test_a_schedule_goes_on_by_compiled_steps(engine: Any) -> None:
    net = nn.Linear(4, 4)
    train = compiled_training(make_sgd(net.parameters()), net)
    schedule = torch.profiler.schedule(wait=2, warmup=1, active=1, repeat=1)

    with modtrace.record(engine=engine, schedule=schedule) as recording:
        for _ in range(5):
            train()

    assert recording.steps == 5
    assert {span.step for span in recording.timeline().spans} == {3}


@pytest.mark.parametrize("make_optimizer", [make_sgd, Whole])
def test_recordings_have_nothing_compiled_again(
    engine: Any, make_optimizer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    net = nn.Linear(4, 4)
    train = compiled_training(make_optimizer(net.parameters()), net)
    train()
    captured = [counters["stats"]["unique_graphs"]]

    for _ in range(10):  # torch gives up on a function after compiling it 8 times
        with modtrace.record(engine=engine) as recording:
            train()
            train()
        assert recording.steps == (0 if make_optimizer is Whole else 2)
        captured.append(counters["stats"]["unique_graphs"])
        train()

    assert captured == captured[:1] * 11
