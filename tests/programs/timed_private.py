"""Differential privacy: an optimizer around another one, which clips, adds noise, and steps the inner one."""

from __future__ import annotations

from typing import Any

import stopwatch
import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class PrivateOptimizer(Optimizer):
    """An optimizer like opacus' `DPOptimizer`: its class derives from torch's, whose `__init__` never ran for it."""

    def __init__(self, original: Optimizer) -> None:
        self.original = original

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.original.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sample = None
        self.original.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.clamp_(-1, 1)
                parameter.grad += 0.01 * torch.randn_like(parameter.grad)
        return self.original.step(closure)


def loss_of(output: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, torch.zeros_like(output))


model = stopwatch.Net()
optimizer = PrivateOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
batch = torch.randn(128, stopwatch.WIDTH)
for _ in range(16):
    stopwatch.learn(optimizer, lambda: model(batch), loss_of)
stopwatch.report()
