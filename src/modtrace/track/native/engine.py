"""The native engine: calls and backward passes are seen, and written, in C++."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from ...ring import Kind, Ring
from ...ring.slot_format import ALLOCATED, BACKWARD_PASS_BITS, CALL_KEY_BITS, KIND_SHIFT, NO_NAME, REFUSED
from ..call_patch import RUN_BACKWARD, NativePatch, Patch, WrappedFunction
from ..checkpoint_reruns import CheckpointReruns
from ..collectives import NativeCollectives
from ..event_sink import EngineOptions, OnError, SyncMarks, describe_thread
from ..naming.module_names import ModuleNames
from ..ranges import RangeRecorder
from .device_times import NativeDeviceTimes
from .flops import NativeFlops
from .library import load


class NativeEngine:
    """Records forward by a patch of `nn.Module.__call__`, and backward by one of what runs a backward pass.

    Args:
        ring: where events and names go.
        on_error: called with what went wrong inside.
        options: what it records.

    Raises:
        EngineError: it is not built for this torch.
    """

    kind = "native"

    def __init__(self, ring: Ring, on_error: OnError, options: EngineOptions) -> None:
        self._native: ModuleType = load()
        self._ring = ring
        self._on_error = on_error
        self._memory = options.memory
        self._sync = SyncMarks(self, ring.names)
        self._module_names = ModuleNames(
            ring.names, options.model, self._native.forget_module, strip_wrappers=options.strip_wrappers
        )
        self._reruns = CheckpointReruns()
        self._ranges = RangeRecorder(self, ring.names, on_error, by_class=False) if options.ranges else None
        self._collectives = NativeCollectives(self._native, ring.names)
        self._flops = NativeFlops(self._native, ring.names) if options.flops else None
        self._device_times = (
            None
            if options.device is None
            else NativeDeviceTimes(self._native, self._module_names, ring.names, options.device)
        )

    def start(self) -> None:
        """Start recording: wrap `nn.Module.__call__` and what runs a backward pass."""
        ring = self._ring
        # One that an interrupt kept from being stopped.
        self._native.stop_device_times()
        self._native.stop()
        if self._ranges is not None and self._native.on_collection not in gc.callbacks:
            gc.callbacks.append(self._native.on_collection)  # it stays, and does nothing if nothing records
        self._native.start(
            ring.buffer,
            ring.offset,
            ring.capacity,
            self._module_names.resolve if self._device_times is None else self._device_times.resolve,
            self._module_names.dead,
            self._module_names.forget_dead,
            self._add_thread,
            self._sync,
            self._on_error,
            self._reruns.note,
            self._reruns.runs_again,
            None if self._ranges is None else self._ranges.name_id,
        )
        if self._memory and not self._native.start_memory(ring.names.text(ALLOCATED), ring.names.text(REFUSED)):
            say_no_memory("another allocator than torch's has taken its place on the CPU")
        for patch in _patches(self._native):
            patch.install(self)
        self._collectives.start()
        if self._ranges is not None:
            self._ranges.start()
        if self._device_times is not None:
            self._device_times.start()
        if self._flops is not None:
            self._flops.start()

    def stop(self) -> None:
        """Stop recording and restore what of torch was wrapped. Thread-safe."""
        if self._device_times is not None:
            self._device_times.stop()
        self._native.stop()
        self.finish_notes()
        if self._ranges is not None:
            self._ranges.stop()
        # Begun by another thread meanwhile.
        self._native.stop_device_times()
        for patch in _patches(self._native):
            patch.uninstall()
        self._collectives.stop()

    def finish_notes(self) -> None:
        """Note what is known of events that were written and not noted with them, before the ring is read."""
        if self._flops is not None:
            self._flops.answer()

    def unmatched_model(self) -> str | None:
        """Return the class given as `model=` if names started at no module of it; else None."""
        return self._module_names.unmatched_model()

    def after_fork(self) -> None:
        """Stop in a forked child, whose ring is its parent's."""
        self._native.after_fork()
        if self._ranges is not None:
            self._ranges.stop()
        for patch in _patches(self._native):
            patch.uninstall()
        self._collectives.stop()
        if self._device_times is not None:
            self._device_times.after_fork()

    def write_event(self, kind: Kind, name: int, value: int) -> None:
        """Write one event of this thread."""
        self._native.write_event(kind << KIND_SHIFT | name, value)

    def begin_compiled_backward(self) -> None:
        """Write that compiled autograd runs the backward of the outermost call that this thread made last."""
        call = self._native.last_call()
        if call is not None:
            name, index = call
            self.write_event(Kind.CALL_BACKWARD, name, _compiled_pass() << CALL_KEY_BITS | index)

    def end_compiled_backward(self) -> None:
        """Write that it ended."""
        if self._native.last_call() is not None:
            self.write_event(Kind.BACKWARD_OVER, NO_NAME, _compiled_pass())

    def _add_thread(self, torch_thread_id: int) -> int:
        return self._ring.names.thread(*describe_thread(), torch_thread_id)


def say_no_memory(reason: str) -> None:
    """Log why a recording does not count memory; it goes on without."""
    logging.getLogger("modtrace").warning("memory: %s; the recording goes on without", reason)


def _compiled_pass() -> int:
    """Return the number of the pass that compiled autograd runs: no pass with hooks has such a high one."""
    return torch._C._current_graph_task_id() | _COMPILED


_COMPILED = 1 << BACKWARD_PASS_BITS
_CALL: Any = nn.Module._wrapped_call_impl


class _CallPatch(Patch):
    def __init__(self, native: ModuleType) -> None:
        super().__init__(self._make_wrapper)
        self._native = native

    def _make_wrapper(self, patched: WrappedFunction) -> Callable[..., Any]:
        # A copy of torch's own, with the same code object: torch.compile and torch.profiler (with_stack) know a
        # module's call by that, and the latter remembers for good the first that it saw. A call of the copy runs
        # natively.
        wrapper = FunctionType(_CALL.__code__, _CALL.__globals__, _CALL.__name__, _CALL.__defaults__, _CALL.__closure__)
        self._native.wrap_call(wrapper, patched.wrapped)
        return wrapper

    def set_observer(self, patched: WrappedFunction, observer: object) -> None:
        self._native.set_call_wrapper(None if observer is None else patched.wrapper)
        super().set_observer(patched, observer)


@cache
def _patches(native: ModuleType) -> tuple[Patch, Patch]:
    return _CallPatch(native), NativePatch(native, native.wrap_backward, RUN_BACKWARD)
