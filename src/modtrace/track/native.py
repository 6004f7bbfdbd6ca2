"""The native engine: one small C++ file sees calls and autograd nodes, and writes them itself."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

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
    assert isinstance(layer, _NativeLayer)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  # what it stands for
        if is_dynamo_compiling():
            return layer.inner(self, *args, **kwargs)
        native = layer.native
        try:
            # Inside the try: an interrupt between the two would leave the call open.
            native.enter(self)
            return layer.inner(self, *args, **kwargs)
        finally:
            native.leave(self)

    return __call__


class _NativeLayer(Layer):
    """Its wrapper is bytecode for torch.compile to read; in eager mode a call of it runs natively."""

    native: ModuleType

    def wrap(self, inner: Callable[..., Any]) -> None:
        super().wrap(inner)
        if hasattr(self, "native"):
            self.native.short_cut(self.call, inner)


_LAYER = _NativeLayer(_make_call)
