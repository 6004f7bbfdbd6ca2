"""Modules that many cases use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

__all__ = ["Exp", "Net", "Scale", "leaf"]


def leaf() -> Tensor:
    """A leaf that requires grad."""
    return torch.full((2, 2), 0.5, requires_grad=True)


class Scale(nn.Module):
    """One node, with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 2), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Exp(nn.Module):
    """One node, without a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Net(nn.Module):
    """A module with the given inner modules and the given forward.

    Args:
        body: called with the module and its inputs.
        inner: the inner modules by name.
    """

    def __init__(self, body: Callable[..., Any], **inner: nn.Module) -> None:
        super().__init__()
        # In a list, so that a module is not registered as a submodule and a function is not bound.
        self._body = [body]
        for name, module in inner.items():
            self.add_module(name, module)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._body[0](self, *args, **kwargs)
