"""An optimizer of the user with momentum, whose class is not derived from torch's."""

from __future__ import annotations

from collections.abc import Iterable

import stopwatch
import torch
from stopwatch import part, turn_to
from torch import Tensor, nn


class Momentum:
    def __init__(self, parameters: Iterable[Tensor], rate: float) -> None:
        self.parameters = list(parameters)
        self.averages = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.rate = rate

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        for parameter, average in zip(self.parameters, self.averages, strict=True):
            if parameter.grad is not None:
                average.mul_(0.9).add_(parameter.grad)
                parameter.sub_(self.rate * average)


model, criterion = stopwatch.Net(), nn.MSELoss()
optimizer = Momentum(model.parameters(), rate=0.01)
batch, target = torch.randn(128, stopwatch.WIDTH), torch.randn(128, 10)
for _ in range(16):
    with part("forward"):
        output = model(batch)
        turn_to("loss")
        loss = criterion(output, target)
        turn_to("backward")
        loss.backward()
    with part("optimizer"):
        optimizer.step()
    stopwatch.step()
    with part("optimizer"):
        optimizer.zero_grad()
    del output, loss
stopwatch.report()
