"""Samples: shapes and memory at calls, on request; repeated calls; the time that a thread waited for a CPU.

Shapes and memory cost nothing unless they are requested. `RunDelay` and `ResidentMemory` keep their files in `/proc`
open; each belongs to one thread.
"""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.dropout import _DropoutNd

from .._errors import RecordingError
from .._interrupts import raised_by_handler, without_errors_of_users
from ..ring import Kind, NameTable
from .call_patch import Patch, Wrapper
from .event_sink import NO_GRAPH_TASK, EventSink, OnError, current_graph_task
from .unseen import attribute_of, skip_all, skip_frame, tensors_in, unseen_by_modes

_MAX_TENSORS = 16
_MAX_CALLS = 4_096
"""Maximum number of different calls that are kept for a step."""
_PLAIN = (type(None), bool, int, float, str)
"""Types of inputs that are compared by value; a call with others, whose content may change, is not compared."""


class Sampler:
    """Writes the shapes of inputs and memory counters at calls; raises RecordingError for a wrong interval."""

    def __init__(self, shapes: bool, memory_interval: float | None) -> None:
        if memory_interval is not None and not (isinstance(memory_interval, int | float) and memory_interval >= 0):
            raise RecordingError(f"memory_interval is {memory_interval!r}; it must be a number of seconds, 0 or more")
        self._shapes = shapes
        self._interval_ns = None if memory_interval is None else int(memory_interval * 1e9)
        self._next_ns = 0
        self._target: tuple[EventSink, NameTable, OnError] | None = None

    def start(self, events: EventSink, names: NameTable, on_error: OnError) -> None:
        """Start sampling; call it before the engine's patch is installed, so that samples follow a call's enter."""
        if not self._shapes and self._interval_ns is None:
            return
        self._next_ns = 0
        self._target = events, names, on_error
        _PATCH.install(self)

    def stop(self) -> None:
        """Stop sampling."""
        if self._target is not None:
            _PATCH.uninstall()
            self._target = None

    @skip_all
    def sample(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write the requested samples at the start of a call with these arguments."""
        if self._target is None:
            return
        events, names, on_error = self._target
        try:
            if self._shapes:
                with unseen_by_modes():
                    text = _format_shapes(args, kwargs)
                events.write_event(Kind.SHAPES, names.text(text), 0)
            if self._interval_ns is not None and time.monotonic_ns() >= self._next_ns:
                self._next_ns = time.monotonic_ns() + self._interval_ns
                for text, value in _memory_counters():
                    events.write_event(Kind.COUNTER, names.text(text), value)
        except Exception as error:
            on_error(error)


def _format_shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    parts: list[str] = []
    for name, value in [("", value) for value in args] + [(f"{key}=", value) for key, value in kwargs.items()]:
        for tensor in tensors_in(value):
            if len(parts) == _MAX_TENSORS:
                return ", ".join([*parts, "…"])
            parts.append(f"{name}{shape_text(tensor)}")
    return ", ".join(parts)


def shape_text(tensor: torch.Tensor) -> str:
    """Return the dtype and the shape of a tensor: `float32[2, 3]`; a nested tensor has no shape: `float32[nested]`."""
    shape = "[nested]" if type(tensor) is torch.Tensor and tensor.is_nested else list(tensor.shape)
    return f"{dtype_name(tensor.dtype)}{shape}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `float32`."""
    return str(dtype).removeprefix("torch.")


def _memory_counters() -> list[tuple[str, int]]:
    counters: list[tuple[str, int]] = []
    with contextlib.suppress(FileNotFoundError), open("/proc/self/statm", "rb") as statm:
        counters.append(("process RSS", int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")))
    # `is_available` would start CUDA's driver, and children that are forked after that cannot use CUDA.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device()
        # An allocator that replaces torch's counts nothing, and raises.
        with contextlib.suppress(RuntimeError):
            counters.append((f"cuda:{device} allocated", torch.cuda.memory_allocated(device)))
            counters.append((f"cuda:{device} reserved", torch.cuda.memory_reserved(device)))
    return counters


def _make_wrapper(wrapper: Wrapper) -> Callable[..., Any]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  # its name in torch
        __tracebackhide__ = __traceback_hide__ = True
        sampler = wrapper.observer
        if not is_dynamo_compiling() and sampler is not None:
            sampler.sample(args, kwargs)
        return wrapper.wrapped(self, *args, **kwargs)

    return skip_frame(__call__)


_PATCH = Patch(_make_wrapper)


class RepeatedCalls:
    """Counts calls with the inputs of an earlier one in a step, by module. It holds none of the inputs."""

    def __init__(self) -> None:
        self._seen: dict[tuple[object, ...], list[weakref.ref[torch.Tensor]]] = {}
        self._again: dict[int, int] = {}

    def begin(self) -> None:
        """Start a step."""
        self._seen.clear()
        self._again.clear()

    def forget_inputs(self) -> None:
        """Forget the calls so far: those after a backward pass belong to another loss, whose gradients are added."""
        self._seen.clear()

    def end(self) -> dict[int, int]:
        """Return the number of repeated calls by the id of the module."""
        again = self._again
        self._seen, self._again = {}, {}
        return again

    def note(self, module: Any, inputs: tuple[Any, ...]) -> None:
        """Note a call. It counts if an earlier one had its inputs, and no input or first weight was written since."""
        # Checkpoints run calls again.
        if not issubclass(type(module), nn.Module) or current_graph_task() != NO_GRAPH_TASK:
            return
        # Scripted modules lack these attributes, and weights made in inference mode have no version.
        with unseen_by_modes(), without_errors_of_users():
            tensors = list[torch.Tensor]()
            weights = (
                weight._version
                for part in _modules_inside(module)
                for weight in [*attribute_of(part, "_parameters").values()]
                if weight is not None
            )
            key: list[object] = [id(module), torch.is_grad_enabled(), next(weights, None)]
            for value in _flat(inputs):
                # Parameters are left out: torch does not swap tensors to which there are weak references.
                if type(value) is torch.Tensor and not value.is_inference():
                    tensors.append(value)
                    key += [id(value), value._version]
                elif type(value) in _PLAIN:
                    key += [type(value), value]
                else:
                    return
            if not tensors:
                return
            known = self._seen.get(call := tuple(key))
            if known is not None and all(ref() is tensor for ref, tensor in zip(known, tensors, strict=True)):
                self._again[id(module)] = self._again.get(id(module), 0) + (not _drops(module))
            elif len(self._seen) < _MAX_CALLS:
                self._seen[call] = [*map(weakref.ref, tensors)]


def _flat(inputs: tuple[Any, ...]) -> Iterator[Any]:
    for value in inputs:
        if type(value) is tuple:
            yield from _flat(value)
        else:
            yield value


def _modules_inside(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those inside it, without calling the user's code."""
    visited_ids, pending = set[int](), [module]
    while pending:
        current = pending.pop()
        if id(current) not in visited_ids:
            visited_ids.add(id(current))
            yield current
            pending += [inner for inner in [*attribute_of(current, "_modules").values()] if inner is not None]


def _drops(module: nn.Module) -> bool:
    return any(
        issubclass(type(part), _DropoutNd) and attribute_of(part, "training") and attribute_of(part, "p") > 0
        for part in _modules_inside(module)
    )


class _ThreadFile:
    """A file in `/proc/thread-self`, which stays open; a read costs about 5 µs."""

    def __init__(self, name: str) -> None:
        self._path = f"/proc/thread-self/{name}"
        self._file, self._inode, self._thread = -1, 0, 0

    def read(self) -> list[bytes]:
        """Return the words in the calling thread's file; an empty list if the system has no such file."""
        try:
            if (thread := threading.get_native_id()) != self._thread or not self._is_open():
                self.close()
                # Only Windows has this flag; it has no such file.
                self._file = os.open(self._path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
                self._thread = thread
                self._inode = os.fstat(self._file).st_ino
            return os.pread(self._file, 128, 0).split()
        except OSError as error:
            if raised_by_handler(error):  # such as the TimeoutError of a time limit
                raise
            self.close()
            return []

    def close(self) -> None:
        """Close the file."""
        if self._is_open():
            os.close(self._file)
        self._file, self._thread = -1, 0

    def _is_open(self) -> bool:
        """Return whether the file is open: a program may close all files and reuse the descriptor for its own."""
        try:
            return self._file >= 0 and os.fstat(self._file).st_ino == self._inode
        except OSError as error:
            if raised_by_handler(error):
                raise
            return False


class RunDelay:
    """Reads how long the calling thread has waited for a CPU: a delay caused by the machine, not by the program."""

    def __init__(self) -> None:
        self._file, self._thread, self._waited_ns = _ThreadFile("schedstat"), 0, 0

    def __call__(self) -> int:
        """Return the time that this thread waited since the last call, in ns; 0 if it is not known."""
        last_thread, self._thread, last_ns = self._thread, threading.get_native_id(), self._waited_ns
        words = self._file.read()
        self._waited_ns = int(words[1]) if len(words) > 1 else 0
        return max(0, self._waited_ns - last_ns) if last_thread == self._thread else 0

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._thread = 0


class ResidentMemory:
    """Reads the resident memory of the process, in bytes."""

    def __init__(self) -> None:
        self._file = _ThreadFile("statm")
        self.close = self._file.close

    def __call__(self) -> int:
        """Return the resident memory in bytes; 0 if it is not known."""
        words = self._file.read()
        return int(words[1]) * os.sysconf("SC_PAGESIZE") if len(words) > 1 else 0
