"""The native engine: one small C++ file sees calls and autograd nodes, and writes them itself."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from ..ring import Kind, Ring
from ..ring.event import KIND_SHIFT
from .build import load
from .names import ModuleNames
from .patch import Layer
from .sync import SyncMarks
from .threads import describe_thread

__all__ = ["NativeEngine"]


class NativeEngine:
    """Notes forward by a layer around `nn.Module.__call__` and backward by an observer of autograd nodes.

    Args:
        ring: where events and names go.
        model: where names start, see `ModuleNames`.
        fail: called with what went wrong inside; the recording stops, the user's call goes on.

    Raises:
        EngineError: it is not built for this torch.
    """

    kind = "native"

    def __init__(self, ring: Ring, model: nn.Module | None, fail: Callable[[BaseException], None]) -> None:
        self._native: ModuleType = load()
        self._ring = ring
        self._fail = fail
        self._sync = SyncMarks(self, ring.names)
        self.module_names = ModuleNames(ring.names, model, self._native.forget)

    def start(self) -> None:
        """Begin to note."""
        ring = self._ring
        self._native.start(
            ring.buffer, ring.offset, ring.capacity, self.module_names.find, self._add_thread, self._sync, self._fail
        )
        _LAYER.native = self._native
        _LAYER.put_on()

    def stop(self) -> None:
        """End it and restore `nn.Module.__call__`."""
        _LAYER.take_off()
        self._native.stop()

    def after_fork(self) -> None:
        """End it in a forked child."""
        _LAYER.take_off()
        self._native.after_fork()

    def event(self, kind: Kind, name: int, value: int) -> None:
        """Write one event of this thread."""
        self._native.event(kind << KIND_SHIFT | name, value)

    def _add_thread(self, torch_thread: int) -> int:
        return self._ring.names.thread(*describe_thread(), torch_thread)


def _make_call(layer: Layer) -> Callable[..., Any]:
    # A copy of what it wraps, with the same code object: torch.compile and torch.profiler (with_stack) know a module's
    # call by that, and the latter remembers for good the first that it saw. A call of the copy runs natively.
    original = layer.inner
    if not isinstance(original, FunctionType):
        return lambda module, *args, **kwargs: layer.inner(module, *args, **kwargs)
    return FunctionType(
        original.__code__, original.__globals__, original.__name__, original.__defaults__, original.__closure__
    )


class _NativeLayer(Layer):
    native: ModuleType

    def wrap(self, inner: Callable[..., Any]) -> None:
        super().wrap(inner)
        if hasattr(self, "native"):
            self.native.short_cut(self.call, inner)


_LAYER = _NativeLayer(_make_call)
