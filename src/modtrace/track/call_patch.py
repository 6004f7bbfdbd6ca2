"""Layers around functions of torch: put on, taken off, in any order, and nothing left behind.

Each layer is one function for the life of the process. torch.compile guards on the identity of what it traced, so a
function made anew for each recording would make every recording a recompilation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["CALL", "RUN_PASS", "Layer", "Place"]

_TORCH_CALL = getattr(nn.Module, "_wrapped_call_impl", None)

_lock = threading.RLock()


class Place:
    """A function that layers go around.

    Args:
        name: its name.
        homes: the classes or modules that hold it under that name.

    Attributes:
        worn: the layers that are on, innermost first.
    """

    def __init__(self, name: str, *homes: object) -> None:
        self._name = name
        self._homes = homes
        self.worn: list[Layer] = []

    @property
    def function(self) -> Callable[..., Any]:
        """What is called there now."""
        function: Callable[..., Any] = getattr(self._homes[0], self._name)
        return function

    @function.setter
    def function(self, function: Callable[..., Any]) -> None:
        for home in self._homes:
            setattr(home, self._name, function)


CALL = Place("__call__", nn.Module)
RUN_PASS = Place("_engine_run_backward", torch.autograd.graph, torch.autograd)
"""What `torch.autograd.backward` and `grad` run a backward pass by."""


class Layer:
    """One wrapper of a function of torch.

    Args:
        make: given the layer, returns the wrapper; it calls `layer.inner` for what it wraps.
        place: what it goes around.
    """

    inner: Callable[..., Any]
    wraps_torch = False
    """Whether `inner` is torch's own, and as it was when this was written: it calls `_compiled_call_impl`, or
    `_call_impl` where that is None. A wrapper in Python can then choose itself, and be a frame shorter."""

    def __init__(self, make: Callable[[Layer], Callable[..., Any]], place: Place = CALL) -> None:
        self._place = place
        self.inner = place.function
        self.call = make(self)

    def put_on(self) -> None:
        """Go around the function, outside of whatever wraps it now; nothing where it is on already."""
        with _lock:
            if self in self._place.worn:
                return
            self.wrap(self._place.function)
            self._place.function = self.call
            self._place.worn.append(self)

    def take_off(self) -> None:
        """Unwrap it; layers put on later stay.

        Where code outside modtrace has wrapped it since, the layer stays on below that wrapper and only passes
        through: taking it out would take the other wrapper with it.
        """
        with _lock:
            place, worn = self._place, self._place.worn
            if self not in worn:
                return
            at = worn.index(self)
            if place.function is worn[-1].call:
                if at == len(worn) - 1:
                    place.function = self.inner
                else:
                    above = worn[at + 1]
                    if above.inner is not self.call:
                        return
                    above.wrap(self.inner)
                worn.remove(self)

    def wrap(self, inner: Callable[..., Any]) -> None:
        """Take `inner` as what the wrapper wraps."""
        self.inner = inner
        names = getattr(getattr(inner, "__code__", None), "co_names", None)
        self.wraps_torch = inner is _TORCH_CALL and names == ("_compiled_call_impl", "_call_impl")
