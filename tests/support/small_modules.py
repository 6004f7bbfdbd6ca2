"""Small modules whose nodes are known."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

__all__ = ["Failing", "Scale", "made_in_place_of"]

_Module = TypeVar("_Module", bound=nn.Module)


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


def made_in_place_of(dying: list[nn.Module], kind: type[_Module], *args: Any) -> _Module:
    """Return a new module that has the id of another one, which dies here: the last in a list, which alone holds it."""
    # Nothing but modules is allocated from its death on, which could take its place.
    others: list[_Module | None] = [None] * 20_000
    dead = id(dying.pop())
    for index in range(len(others)):
        module = others[index] = kind.__new__(kind)
        if id(module) == dead:
            kind.__init__(module, *args)
            return module
    pytest.skip("the allocator gave the place to something else, or keeps it for long, as a sanitizer's does")
