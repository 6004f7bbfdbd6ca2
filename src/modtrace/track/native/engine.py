"""The native engine: calls and backward passes are seen, and written, in C++."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from ...ring import Kind, Ring
from ...ring.slot_format import KIND_SHIFT
from ..call_patch import RUN_PASS, Layer
from ..module_names import ModuleNames
from ..sync_marks import SyncMarks
from ..threads import describe_thread
from .library import load

__all__ = ["NativeEngine"]


class NativeEngine:
    """Notes forward by a layer around `nn.Module.__call__`, and backward by one around what runs a pass.

    Args:
        ring: where events and names go.
        model: where names start, see `ModuleNames`.
        fail: called with what went wrong inside; the recording stops, the user's call goes on.

    Raises:
        EngineError: it is not built for this torch.
    """

    kind = "native"

    def __init__(self, ring: Ring, model: nn.Module | str | None, fail: Callable[[BaseException], None]) -> None:
        self._native: ModuleType = load()
        self._ring = ring
        self._fail = fail
        self._sync = SyncMarks(self, ring.names)
        self.module_names = ModuleNames(ring.names, model, self._native.forget)

    def start(self) -> None:
        """Begin to note."""
        ring = self._ring
        self._native.start(
            ring.buffer, ring.offset, ring.capacity, self.module_names.resolve, self._add_thread, self._sync, self._fail
        )
        for layer in _layers(self._native):
            layer.put_on()

    def stop(self) -> None:
        """End it and restore what of torch was wrapped."""
        for layer in _layers(self._native):
            layer.take_off()
        self._native.stop()

    def after_fork(self) -> None:
        """End it in a forked child."""
        for layer in _layers(self._native):
            layer.take_off()
        self._native.after_fork()

    def event(self, kind: Kind, name: int, value: int) -> None:
        """Write one event of this thread."""
        self._native.event(kind << KIND_SHIFT | name, value)

    def _add_thread(self, torch_thread: int) -> int:
        return self._ring.names.thread(*describe_thread(), torch_thread)


_WRAPPED = nn.Module.__call__


def _make_call(layer: Layer) -> Callable[..., Any]:
    # A copy of what it wraps, with the same code object: torch.compile and torch.profiler (with_stack) know a module's
    # call by that, and the latter remembers for good the first that it saw. A call of the copy runs natively.
    if not isinstance(_WRAPPED, FunctionType):
        return lambda module, *args, **kwargs: layer.inner(module, *args, **kwargs)
    return FunctionType(
        _WRAPPED.__code__, _WRAPPED.__globals__, _WRAPPED.__name__, _WRAPPED.__defaults__, _WRAPPED.__closure__
    )


class _CallLayer(Layer):
    def __init__(self, native: ModuleType) -> None:
        self._native = native
        super().__init__(_make_call)

    def wrap(self, inner: Callable[..., Any]) -> None:
        super().wrap(inner)
        self._native.short_cut(self.call, inner)


class _PassLayer(Layer):
    def __init__(self, native: ModuleType) -> None:
        self._native = native
        super().__init__(lambda _layer: native.run_pass, RUN_PASS)

    def wrap(self, inner: Callable[..., Any]) -> None:
        super().wrap(inner)
        self._native.wrap_pass(inner)


@cache
def _layers(native: ModuleType) -> tuple[Layer, Layer]:
    return _CallLayer(native), _PassLayer(native)
