"""The native engine: calls and backward passes are seen, and written, in C++."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from ...ring import Kind, Ring
from ...ring.slot_format import KIND_SHIFT
from ..call_patch import RUN_BACKWARD, Patch
from ..event_sink import OnError
from ..module_names import ModuleNames
from ..sync_marks import SyncMarks
from ..threads import describe_thread
from .library import load

__all__ = ["NativeEngine"]


class NativeEngine:
    """Records forward by a patch of `nn.Module.__call__`, and backward by one of what runs a backward pass.

    Args:
        ring: where events and names go.
        model: where names start, see `ModuleNames`.
        on_error: called with what went wrong inside.

    Raises:
        EngineError: it is not built for this torch.
    """

    kind = "native"

    def __init__(self, ring: Ring, model: nn.Module | str | None, on_error: OnError) -> None:
        self._native: ModuleType = load()
        self._ring = ring
        self._on_error = on_error
        self._sync = SyncMarks(self, ring.names)
        self._module_names = ModuleNames(ring.names, model, self._native.forget_module)

    def start(self) -> None:
        """Start recording: wrap `nn.Module.__call__` and what runs a backward pass."""
        ring = self._ring
        self._native.start(
            ring.buffer,
            ring.offset,
            ring.capacity,
            self._module_names.resolve,
            self._add_thread,
            self._sync,
            self._on_error,
        )
        for patch in _patches(self._native):
            patch.install()

    def stop(self) -> None:
        """Stop recording and restore what of torch was wrapped. Thread-safe."""
        for patch in _patches(self._native):
            patch.uninstall()
        self._native.stop()

    def after_fork(self) -> None:
        """Stop in a forked child, whose ring is its parent's."""
        for patch in _patches(self._native):
            patch.uninstall()
        self._native.after_fork()

    def write_event(self, kind: Kind, name: int, value: int) -> None:
        """Write one event of this thread."""
        self._native.write_event(kind << KIND_SHIFT | name, value)

    def _add_thread(self, torch_thread_id: int) -> int:
        return self._ring.names.thread(*describe_thread(), torch_thread_id)


_WRAPPED = nn.Module.__call__


def _make_wrapper(patch: Patch) -> Callable[..., Any]:
    # A copy of what it wraps, with the same code object: torch.compile and torch.profiler (with_stack) know a module's
    # call by that, and the latter remembers for good the first that it saw. A call of the copy runs natively.
    if not isinstance(_WRAPPED, FunctionType):
        return lambda module, *args, **kwargs: patch.wrapped(module, *args, **kwargs)
    return FunctionType(
        _WRAPPED.__code__, _WRAPPED.__globals__, _WRAPPED.__name__, _WRAPPED.__defaults__, _WRAPPED.__closure__
    )


class _CallPatch(Patch):
    def __init__(self, native: ModuleType) -> None:
        self._native = native
        super().__init__(_make_wrapper)

    def set_wrapped(self, wrapped: Callable[..., Any]) -> None:
        super().set_wrapped(wrapped)
        self._native.set_vectorcall(self.wrapper, wrapped)


class _BackwardPatch(Patch):
    def __init__(self, native: ModuleType) -> None:
        self._native = native
        super().__init__(lambda _patch: native.run_backward, RUN_BACKWARD)

    def set_wrapped(self, wrapped: Callable[..., Any]) -> None:
        super().set_wrapped(wrapped)
        self._native.set_wrapped_backward(wrapped)


@cache
def _patches(native: ModuleType) -> tuple[Patch, Patch]:
    return _CallPatch(native), _BackwardPatch(native)
