"""Solves an ODE whose right side is a module; backward solves it in reverse by calls of it."""

from __future__ import annotations

from typing import Any

import torch
import truth
from torch import Tensor, nn

STEPS, STEP = 4, 0.25


class Derivative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, y: Tensor) -> Tensor:
        result: Tensor = self.net(y)
        return result


class Adjoint(torch.autograd.Function):
    """Euler's method, `STEPS` calls in forward and as many in backward."""

    @staticmethod
    def forward(ctx: Any, derivative: Derivative, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.derivative = derivative
        with torch.no_grad():
            for _ in range(STEPS):
                y = y + STEP * derivative(y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, adjoint: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        parameters = list(ctx.derivative.parameters())
        totals = [torch.zeros_like(parameter) for parameter in parameters]
        for _ in range(STEPS):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                slope = ctx.derivative(y)
            of_y, *gradients = torch.autograd.grad(slope, [y, *parameters], adjoint)
            y = y - STEP * slope
            adjoint = adjoint + STEP * of_y
            totals = [total + STEP * gradient for total, gradient in zip(totals, gradients, strict=True)]
        return None, adjoint, *totals


torch.manual_seed(0)
torch.set_num_threads(1)
model = Derivative()
truth.watch(model)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    end = Adjoint.apply(model, torch.randn(2, 4), *model.parameters())
    loss = end.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    truth.step()
    truth.loss(loss)
truth.report()
