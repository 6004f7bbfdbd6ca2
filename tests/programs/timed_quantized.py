"""An optimizer that keeps its state in 8 bits: a class derived from torch's, with a step of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import stopwatch
import torch
from torch import Tensor
from torch.optim import Optimizer


class Quantized(Optimizer):
    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                average = 0.9 * state["codes"] * state["scale"] + parameter.grad if state else parameter.grad
                state["scale"] = average.abs().max() / 127 + 1e-12
                state["codes"] = (average / state["scale"]).round().to(torch.int8)
                parameter.sub_(group["lr"] * average)


model = stopwatch.Net()
optimizer = Quantized(model.parameters())
batch = torch.randn(128, stopwatch.WIDTH)
for _ in range(16):
    stopwatch.learn(optimizer, lambda: model(batch))
stopwatch.report()
