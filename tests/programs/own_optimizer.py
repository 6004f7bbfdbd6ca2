"""Trains with an optimizer that is none of torch.optim's: a class of its own with steppers, as fastai's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import truth
from small_training import Net
from torch import Tensor

Stepper = Callable[[Tensor, dict[str, Tensor], float], None]


def average_gradient(parameter: Tensor, state: dict[str, Tensor], rate: float) -> None:
    assert parameter.grad is not None
    state["average"] = 0.9 * state.get("average", torch.zeros_like(parameter)) + parameter.grad


def momentum_step(parameter: Tensor, state: dict[str, Tensor], rate: float) -> None:
    parameter.sub_(rate * state["average"])


class Optimizer:
    def __init__(self, parameters: Iterable[Tensor], steppers: list[Stepper], rate: float) -> None:
        self.parameters = list(parameters)
        self.steppers = steppers
        self.rate = rate
        self.states: list[dict[str, Tensor]] = [{} for _ in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        for parameter, state in zip(self.parameters, self.states, strict=True):
            for stepper in self.steppers:
                stepper(parameter, state, self.rate)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


torch.manual_seed(0)
torch.set_num_threads(1)
model = Net()
truth.watch(model)
optimizer = Optimizer(model.parameters(), [average_gradient, momentum_step], rate=0.1)
for _ in range(4):
    loss = model(torch.randn(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    truth.step()
    truth.loss(loss)
with torch.no_grad():
    truth.loss(model(torch.ones(1, 4)).sum())
truth.report()
