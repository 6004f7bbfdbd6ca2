"""A method of a module, seen as a call of its own: a framework calls it in the place of the module."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["MethodCall"]


class MethodCall(nn.Module):
    """A method of a module, which the engines see as the call of a module. No hooks of modules run around it.

    Args:
        owner: the module.
        name: the method's name.

    Attributes:
        owner: a weak reference to the module.
        method: the method's name.
    """

    owner: weakref.ref[nn.Module]

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.owner = weakref.ref(owner)
        self.method = name
        self._function = getattr(owner, name)
        # `nn.Module.__call__` calls this instead of the forward and its hooks.
        object.__setattr__(self, "_compiled_call_impl", self._function)

    def as_function(self) -> Callable[..., Any]:
        """Return a function that stands for the method, with its name and signature."""

        @functools.wraps(self._function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return call
