"""Layers around `nn.Module.__call__`: put on, taken off, in any order, and nothing left behind.

Each layer is one function for the life of the process. torch.compile guards on the identity of what it traced, so a
function made anew for each recording would make every recording a recompilation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Layer"]

_TORCH_CALL = getattr(nn.Module, "_wrapped_call_impl", None)

_lock = threading.RLock()
_worn: list[Layer] = []


class Layer:
    """One wrapper of `nn.Module.__call__`.

    Args:
        make: given the layer, returns the wrapper; it calls `layer.inner` for what it wraps.
    """

    inner: Callable[..., Any]
    wraps_torch = False
    """Whether `inner` is torch's own, and as it was when this was written: it calls `_compiled_call_impl`, or
    `_call_impl` where that is None. A wrapper in Python can then choose itself, and be a frame shorter."""

    def __init__(self, make: Callable[[Layer], Callable[..., Any]]) -> None:
        self.inner = nn.Module.__call__
        self.call = make(self)

    def put_on(self) -> None:
        """Wrap `nn.Module.__call__`, outside of whatever wraps it now; nothing where it is on already."""
        with _lock:
            if self in _worn:
                return
            self.wrap(nn.Module.__call__)
            _set_call(self.call)
            _worn.append(self)

    def take_off(self) -> None:
        """Unwrap it; layers put on later stay.

        Where code outside modtrace has wrapped it since, the layer stays on below that wrapper and only passes
        through: taking it out would take the other wrapper with it.
        """
        with _lock:
            if self not in _worn:
                return
            at = _worn.index(self)
            if nn.Module.__call__ is _worn[-1].call:
                if at == len(_worn) - 1:
                    _set_call(self.inner)
                else:
                    above = _worn[at + 1]
                    if above.inner is not self.call:
                        return
                    above.wrap(self.inner)
                _worn.remove(self)

    def wrap(self, inner: Callable[..., Any]) -> None:
        """Take `inner` as what the wrapper wraps."""
        self.inner = inner
        names = getattr(getattr(inner, "__code__", None), "co_names", None)
        self.wraps_torch = inner is _TORCH_CALL and names == ("_compiled_call_impl", "_call_impl")


def _set_call(call: Callable[..., Any]) -> None:
    nn.Module.__call__ = call  # type: ignore[method-assign]
