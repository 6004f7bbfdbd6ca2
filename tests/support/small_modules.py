"""Small modules whose nodes are known."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Failing", "Scale"]


class Scale(nn.Module):
    """Multiplies by its weight: one node of its own per call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Failing(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("on purpose")
