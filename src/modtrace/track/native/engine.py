"""The Python side of the native engine: starts and stops the C++ engine, and passes it its Python callbacks."""

import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, Final

import torch

from ..._after_import import call_after_import
from ...ring import Kind, NameTable, Ring
from ...ring.slot_format import ALLOCATED, CUDA_ALLOCATED, KIND_SHIFT, REFUSED
from ..call_patch import MAKE_GRADIENTS, MODULE_CALL, RUN_BACKWARD, Patch, Wrapper, as_method
from ..checkpoint_reruns import CheckpointReruns
from ..collectives import NativeCollectives
from ..event_sink import EngineOptions, OnError, SyncMarks, call_at_collections, warn_without
from ..greenlets import ThreadNumbers
from ..naming.module_names import ModuleNames
from ..torch_ranges import TorchRanges
from .device_times import NativeDeviceTimes
from .flops import NativeFlops
from .library import load


class NativeEngine:
    """Records by patches of `nn.Module.__call__` and `_engine_run_backward`; raises EngineError if it is not built."""

    kind: Final = "native"

    def __init__(self, ring: Ring, on_error: OnError, options: EngineOptions) -> None:
        self.native: ModuleType = load()
        self._ring, self._on_error = ring, on_error
        self.on_boundary: Callable[..., object] | None = None
        self.on_end: Callable[[int, str], object] | None = None
        self._memory = options.memory
        self._sync = SyncMarks(self, ring.names)
        self._ranges = None
        if options.ranges:
            self._ranges = TorchRanges(self, ring.names, on_error, expect=self.native.expect_range)
        self.module_names = ModuleNames(
            ring.names,
            options.model,
            self.native.forget_module,
            strip_wrappers=options.strip_wrappers,
            on_outermost=None if self._ranges is None else self._ranges.find_classes,
        )
        self.reruns = CheckpointReruns()
        self._collectives = NativeCollectives(self.native, ring.names)
        self._flops = NativeFlops(self.native, ring.names) if options.flops else None
        self._device_times = None
        if options.device is not None:
            self._device_times = NativeDeviceTimes(self.native, self.module_names, ring.names, options.device)

    def start(self) -> None:
        """Start recording: wrap `nn.Module.__call__` and `_engine_run_backward`."""
        ring = self._ring
        # Stop a session that was not stopped because of an interrupt.
        self.native.stop_device_times()
        self.native.stop()
        if self._ranges is not None:
            call_at_collections(self.native.on_collection)  # does nothing if no session runs
        self.native.start(
            ring.buffer,
            ring.offset,
            ring.capacity,
            self.module_names.resolve if self._device_times is None else self._device_times.resolve,
            self.module_names.dead,
            self.module_names.forget_dead,
            ThreadNumbers(ring.names).number,
            self._sync,
            self._on_error,
            self.reruns.note,
            self.reruns.runs_again,
            None if self._ranges is None else self._ranges.name_id,
        )
        call_after_import("greenlet", _follow_greenlets)
        if self._memory:
            self._start_memory(ring.names)
        for patch in _patches(self.native):
            patch.install(self)
        if self.on_end is not None:
            self.native.tell_ends(self.on_end)
        for part in (self._collectives, self._ranges, self._device_times, self._flops):
            if part is not None:
                part.start()

    def _start_memory(self, names: NameTable) -> None:
        if not self.native.start_memory(*map(names.text, (ALLOCATED, CUDA_ALLOCATED, REFUSED))):
            warn_without("memory", "another CPU allocator has replaced torch's")
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            _watch_cuda_memory(self.native)
        elif torch.version.cuda is not None:
            _watch_cuda_memory_later(self.native)

    def stop(self) -> None:
        """Stop recording and restore torch's functions. Thread-safe."""
        if self._device_times is not None:
            self._device_times.stop()
        self.native.stop()
        self.finish_notes()
        # Another thread may have started them meanwhile.
        self.native.stop_device_times()
        self._restore()

    def finish_notes(self) -> None:
        """Write the costs of operators whose formulas have not run yet, before the ring is read."""
        if self._flops is not None:
            self._flops.answer()

    def after_fork(self) -> None:
        """Stop in a forked child, whose ring belongs to its parent."""
        self.native.after_fork()
        self._restore()
        if self._device_times is not None:
            self._device_times.after_fork()

    def _restore(self) -> None:
        """Restore torch's functions, and switch off the wrappers that stay."""
        for part in (self._ranges, self._flops, self._collectives):
            if part is not None:
                part.stop()
        for patch in _patches(self.native):
            patch.uninstall()

    def write_event(self, kind: Kind, name: int, value: int) -> None:
        """Write one event of this thread."""
        self.native.write_event(kind << KIND_SHIFT | name, value)


def _watch_cuda_memory(native: ModuleType) -> None:
    if (reason := native.watch_cuda_memory()) is not None:
        warn_without("memory of CUDA", reason)


def _follow_greenlets() -> None:
    greenlet: Any = sys.modules["greenlet"]
    load().follow_greenlets(greenlet.getcurrent, greenlet.settrace)


@cache
def _watch_cuda_memory_later(native: ModuleType) -> None:
    """Watch CUDA's memory once the process uses CUDA; registered once, for the recording that runs then."""
    torch.cuda._lazy_call(lambda: _watch_cuda_memory(native))  # type: ignore[no-untyped-call]


@cache
def _patches(native: ModuleType) -> tuple[Patch, ...]:
    def wrap_call(wrapper: Wrapper) -> Callable[..., Any]:
        call = _copy(MODULE_CALL[0].below_ours(wrapper.replaced))
        native.wrap_call(call, wrapper.wrapped)
        return call

    return (
        Patch(wrap_call, activate=lambda function, active: native.set_call_wrapper(function if active else None)),
        Patch(lambda wrapper: native.wrap_backward(wrapper.wrapped), RUN_BACKWARD, native.set_active),
        Patch(lambda wrapper: native.wrap_make_gradients(wrapper.wrapped), MAKE_GRADIENTS, native.set_active),
    )


def _copy(function: Any) -> Callable[..., Any]:
    """Return a copy of `function` whose calls can run natively, and that torch takes for the original.

    torch.compile and torch.profiler recognize a module's call by its code object, and the profiler (with_stack) keeps
    the first that it saw. A callable that is not a function is not copied, but called, at the cost of one or two guards
    more. So is a function with a closure or defaults on Python 3.11, whose copy torch's guards refuse.
    """
    is_function = isinstance(function, FunctionType)
    if not is_function or (sys.version_info < (3, 12) and any(getattr(function, name) for name in _CLOSURE_NAMES)):
        return FunctionType(_pass_on.__code__, {"__builtins__": __builtins__, "wrapped": as_method(function)})
    copy = FunctionType(function.__code__, function.__globals__, closure=function.__closure__)
    copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    vars(copy).update(vars(function))  # marks for torch.compile among them
    return copy


_CLOSURE_NAMES = "__closure__", "__defaults__", "__kwdefaults__"


def _pass_on(*args: Any, **kwargs: Any) -> Any:
    return wrapped(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821
