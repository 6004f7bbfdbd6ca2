"""Steps of programs that use no optimizer of torch: their own end them, else backward passes that reach parameters."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import modtrace
from modtrace.ring import Kind

Train = Callable[[nn.Linear], int]
"""Trains for a while and returns how often it changed the parameters, which it counts itself."""

X = torch.ones(2, 2)


class OwnSgd:
    """An optimizer whose class is not derived from torch's."""

    def __init__(self, parameters: Any) -> None:
        self.parameters, self.steps = list(parameters), 0

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.data.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None
        self.steps += 1


def own_optimizer(net: nn.Linear) -> int:
    optimizer = OwnSgd(net.parameters())
    for _ in range(3):
        net(X).square().sum().backward()
        optimizer.step()
    return optimizer.steps


def sgd_by_hand(net: nn.Linear) -> int:
    updates = 0
    for _ in range(4):
        net(X).square().sum().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad = None
        updates += 1
    return updates


def returned_gradients(net: nn.Linear) -> int:
    updates = 0
    parameters = list(net.parameters())
    for _ in range(3):
        gradients = torch.autograd.grad(net(X).square().sum(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(0.1 * gradient)
        updates += 1
    return updates


def gradient_penalty(net: nn.Linear) -> int:
    """Two passes are inside of each step: one with respect to the input, whose graph the other one goes on with."""
    optimizer = OwnSgd(net.parameters())
    for _ in range(3):
        x = X.clone().requires_grad_()
        out = net(x).square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        (out + slope.square().sum()).backward()
        optimizer.step()
    return optimizer.steps


def first_order_meta_learning(net: nn.Linear) -> int:
    """Two inner updates of a copy, whose gradients are returned, before each of the parameters."""
    optimizer = OwnSgd(net.parameters())
    for _ in range(3):
        weight, bias = net.weight.detach().requires_grad_(), net.bias
        for _ in range(2):
            loss = torch.func.functional_call(net, {"weight": weight, "bias": bias}, X).square().sum()
            (gradient,) = torch.autograd.grad(loss, weight)
            weight = (weight - 0.1 * gradient).detach().requires_grad_()
        net(X).square().sum().backward()
        optimizer.step()
    return optimizer.steps


def second_order_meta_learning(net: nn.Linear) -> int:
    updates = 0
    for _ in range(3):
        out = net(X).square().sum()
        inner = torch.autograd.grad(out, net.weight, create_graph=True)[0]
        fast = {"weight": net.weight - 0.1 * inner, "bias": net.bias}
        outer = torch.autograd.grad(torch.func.functional_call(net, fast, X).square().sum(), list(net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(net.parameters(), outer, strict=True):
                parameter.sub_(0.1 * gradient)
        updates += 1
    return updates


def transformed_functions(net: nn.Linear) -> int:
    updates = 0
    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}
    for _ in range(3):
        gradients = torch.func.grad(lambda own: torch.func.functional_call(net, own, X).square().sum())(parameters)
        parameters = {name: parameter - 0.1 * gradients[name] for name, parameter in parameters.items()}
        updates += 1
    return updates


def langevin_sampling(net: nn.Linear) -> int:
    updates = 0
    for _ in range(5):
        net.zero_grad()
        net(X).square().sum().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(parameter.grad, alpha=-0.01)  # type: ignore[arg-type]
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        updates += 1
    return updates


def a_pass_that_fails(net: nn.Linear) -> int:
    out = net(X).square().sum()
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()
    return 1


def a_pass_within_a_pass(net: nn.Linear) -> int:
    """Run a backward pass inside another one, as reentrant checkpoints do."""
    out = torch.utils.checkpoint.checkpoint(net, X.clone().requires_grad_(), use_reentrant=True)
    out.sum().backward()
    return 1


def inference(net: nn.Linear) -> int:
    with torch.no_grad():
        for _ in range(3):
            net(X)
    return 0


def forward_alone(net: nn.Linear) -> int:
    net(X)
    return 0


TRAININGS: list[Train] = [
    *(own_optimizer, sgd_by_hand, returned_gradients, gradient_penalty, first_order_meta_learning),
    *(second_order_meta_learning, transformed_functions, langevin_sampling, a_pass_that_fails, a_pass_within_a_pass),
    *(inference, forward_alone),
]
SAID = "steps end with backward passes that reach parameters: no optimizer of torch stepped"


@pytest.mark.parametrize("train", TRAININGS, ids=lambda train: train.__name__)
def test_a_step_ends_where_the_program_gets_the_gradients_for_an_update(engine: Any, train: Train) -> None:
    with modtrace.record(engine=engine) as recording:
        updates = train(nn.Linear(2, 2))

    timeline = recording.timeline()
    assert [mark.text for mark in timeline.marks] == [f"step {step}" for step in range(updates)]
    summary = timeline.summary()
    assert summary.overview is not None
    assert (SAID in summary.to_text()) == (updates > 0)
    assert summary.overview.steps_end_with == ("backward passes" if updates else "")
    # What a live recording counts are steps that optimizers or `step` end.
    assert recording.steps == 0


def test_spans_have_the_step_of_the_pass_that_ends_it(engine: Any) -> None:
    net = nn.Linear(2, 2)
    with modtrace.record(engine=engine) as recording:
        for _ in range(3):
            net(X).sum().backward()
        net(X)

    spans = [(span.phase, span.step) for span in recording.timeline().spans]
    assert spans == [*((phase, step) for step in range(3) for phase in ("forward", "backward")), ("forward", 3)]


@pytest.mark.parametrize("marks", [True, False])
def test_once_a_step_is_marked_or_an_optimizer_steps_passes_end_none(engine: Any, marks: bool) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with modtrace.record(engine=engine) as recording:
        for batch in range(6):
            net(X).sum().backward()
            if batch % 3 == 2:
                recording.step() if marks else optimizer.step()
        net(X).sum().backward()
        # Before the first step they are written; behind it there are none in the ring.
        kinds = recording._capture.ring.read().slots.events.kind.tolist()  # type: ignore[union-attr]

    timeline = recording.timeline()
    assert kinds.count(Kind.GRADIENTS) == 3
    assert [span.step for span in timeline.spans] == [0] * 6 + [1] * 6 + [2] * 2
    overview = timeline.summary().overview
    assert overview is not None
    assert overview.steps_end_with == ""


@pytest.mark.parametrize("suffix", [".json", ".pftrace"])
def test_a_file_says_what_ends_its_steps(engine: Any, suffix: str, tmp_path: Any) -> None:
    with modtrace.record(tmp_path / f"trace{suffix}", engine=engine):
        own_optimizer(nn.Linear(2, 2))

    timeline = modtrace.load(tmp_path / f"trace{suffix}")
    assert timeline.metadata["steps_end_with"] == "backward passes"
    assert SAID in timeline.summary().to_text()


class OwnOptimizer(OwnSgd):
    """A whole optimizer, by which a training step ends."""

    def step(self) -> None:
        super().step()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class Derived(OwnOptimizer):
    def step(self) -> None:
        super().step()


class Outer(OwnOptimizer):
    """One that another one steps for."""

    def step(self) -> None:
        Derived(self.parameters).step()


@pytest.mark.parametrize("kind", [OwnOptimizer, Derived, Outer])
def test_a_step_ends_with_that_of_an_optimizer_of_ones_own(engine: Any, kind: type[OwnOptimizer]) -> None:
    gc.collect()  # torch's optimizers of other tests
    net = nn.Linear(2, 2)
    with modtrace.record(engine=engine, max_steps=3) as recording:
        optimizer = kind(net.parameters())
        for batch in range(12):
            net(X).square().sum().backward()
            if batch % 3 == 2:
                optimizer.step()

    timeline = recording.timeline()
    assert [mark.text for mark in timeline.marks] == ["step 0", "step 1", "step 2"]
    assert [span.step for span in timeline.spans] == [0] * 6 + [1] * 6 + [2] * 6
    overview = timeline.summary().overview
    assert overview is not None
    assert overview.steps_end_with == ""
    assert recording.steps == 3


def test_a_possible_wrapper_of_a_torch_optimizer_ends_no_step(engine: Any) -> None:
    class Wrapper:
        """Steps in each third call."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.calls = inner, 0

        def step(self) -> None:
            self.calls += 1
            if self.calls % 3 == 0:
                self.inner.step()

        def zero_grad(self) -> None:
            if self.calls % 3 == 0:
                self.inner.zero_grad()

    net = nn.Linear(2, 2)
    optimizer = Wrapper(torch.optim.SGD(net.parameters(), lr=0.1))
    with modtrace.record(engine=engine) as recording:
        for _ in range(6):
            net(X).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert [mark.text for mark in recording.timeline().marks] == ["step 0", "step 1"]
    assert recording.steps == 2
