"""Stackable wrappers for torch functions. Install and remove in any order; removing all restores the original.

Each patch is one function for the life of the process: torch.compile guards on the identity of what it traced, so a
function made anew for each recording would make every recording a recompilation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["MODULE_CALL", "RUN_BACKWARD", "Patch", "PatchTarget"]

_TORCH_CALL = getattr(nn.Module, "_wrapped_call_impl", None)

_lock = threading.RLock()


class PatchTarget:
    """A function that patches wrap.

    Args:
        name: its name.
        owners: the classes or modules that hold it under that name.

    Attributes:
        active: the installed patches, innermost first.
    """

    def __init__(self, name: str, *owners: object) -> None:
        self._name = name
        self._owners = owners
        self.active: list[Patch] = []

    @property
    def function(self) -> Callable[..., Any]:
        """What is called under the name now."""
        function: Callable[..., Any] = getattr(self._owners[0], self._name)
        return function

    @function.setter
    def function(self, function: Callable[..., Any]) -> None:
        for owner in self._owners:
            setattr(owner, self._name, function)


MODULE_CALL = PatchTarget("__call__", nn.Module)
RUN_BACKWARD = PatchTarget("_engine_run_backward", torch.autograd.graph, torch.autograd)
"""What `torch.autograd.backward` and `grad` run a backward pass by."""


class Patch:
    """One wrapper of a function of torch.

    Args:
        make: given the patch, returns the wrapper; that calls `patch.wrapped` for what it wraps.
        target: what it wraps.

    Attributes:
        wrapper: the wrapper.
        wrapped: what it wraps: torch's own function, the wrapper of another patch, or a wrapper of other code.
        wraps_torch: whether `wrapped` is torch's own, and as it was when this was written: it calls
            `_compiled_call_impl`, or `_call_impl` where that is None. A wrapper in Python can then choose itself, and
            be a frame shorter.
    """

    wrapped: Callable[..., Any]
    wraps_torch = False

    def __init__(self, make: Callable[[Patch], Callable[..., Any]], target: PatchTarget = MODULE_CALL) -> None:
        self._target = target
        self.wrapped = target.function
        self.wrapper = make(self)

    def install(self) -> None:
        """Wrap the function, outside of whatever wraps it now; does nothing where it is installed."""
        with _lock:
            if self in self._target.active:
                return
            self.set_wrapped(self._target.function)
            self._target.function = self.wrapper
            self._target.active.append(self)

    def uninstall(self) -> None:
        """Unwrap the function; patches installed later stay.

        Where code outside modtrace has wrapped it since, the patch stays below that wrapper and only passes through:
        taking it out would take the other wrapper with it.
        """
        with _lock:
            target, active = self._target, self._target.active
            if self not in active:
                return
            index = active.index(self)
            if target.function is active[-1].wrapper:
                if index == len(active) - 1:
                    target.function = self.wrapped
                else:
                    outer = active[index + 1]
                    if outer.wrapped is not self.wrapper:
                        return
                    outer.set_wrapped(self.wrapped)
                active.remove(self)

    def set_wrapped(self, wrapped: Callable[..., Any]) -> None:
        """Set what the wrapper wraps."""
        self.wrapped = wrapped
        names = getattr(getattr(wrapped, "__code__", None), "co_names", None)
        self.wraps_torch = wrapped is _TORCH_CALL and names == ("_compiled_call_impl", "_call_impl")
