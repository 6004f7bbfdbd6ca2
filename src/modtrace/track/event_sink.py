"""Code of both engines: options, the sink of events, the state of autograd, the names of threads, and sync marks.

A sync mark is a moment that both the ring and a running torch.profiler record, to align the two later.
"""

import fnmatch
import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch._C._profiler import _RecordFunctionFast

from ..ring import Kind, NameTable
from ..ring.slot_format import SYNC_PREFIX

if TYPE_CHECKING:
    from torch import nn

OnError = Callable[[BaseException], None]
"""Called with an exception inside modtrace; the recording stops, and the user's call goes on."""


sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Returns the sequence number that this thread's next autograd node will get."""
current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Returns the autograd node that runs on this thread, or None."""
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the backward pass that runs on this thread, or `NO_GRAPH_TASK`."""
NO_GRAPH_TASK = -1


class DeviceChoice(NamedTuple):
    """The calls of modules that get device events; a call has to match both fields."""

    pattern: str  # shell pattern of the module's fully qualified name
    levels: int | None  # maximum number of nested calls, this one included; None: any

    def fits(self, fqn: str, depth: int) -> bool:
        """Return whether a call of the module `fqn` inside `depth` other calls gets device events."""
        return (self.levels is None or depth < self.levels) and fnmatch.fnmatchcase(fqn, self.pattern)


class EngineOptions(NamedTuple):
    """Options of an engine: the data that it records in addition to the calls of modules."""

    model: "nn.Module | str | None" = None  # root of the names, see `ModuleNames`
    strip_wrappers: bool = True  # see `ModuleNames`
    device: DeviceChoice | None = None  # the calls that get device times; None: no calls
    ranges: bool = False  # record ranges and garbage collections
    memory: bool = False  # count the bytes of tensors
    flops: bool = False  # count operators

    @property
    def native_only(self) -> list[str]:
        """The chosen options that only the native engine has, by the names of `record`'s arguments."""
        options = {"flops": self.flops, "device_times": self.device is not None, "memory": self.memory}
        return [name for name, is_chosen in options.items() if is_chosen]


def call_at_collections(*callbacks: Callable[[str, dict[str, int]], object]) -> None:
    """Register callbacks of the garbage collector until the process ends, each only once."""
    # Compare identities: a user's callback may raise if it is compared.
    registered = set(map(id, gc.callbacks))
    gc.callbacks.extend(callback for callback in callbacks if id(callback) not in registered)


class EventSink(Protocol):
    """Writes single events; both engines are event sinks.

    Attributes:
        on_boundary: called in a sampled step at the start of an outermost call of a module, a backward pass or a range
            with its kind, at the end with None. None in other steps; another thread may set it at any time.
        on_end: called while no training step has ended: after 1, 2, 3, 4, 5, 8, 9, 16 … outermost calls of modules, and
            after the same numbers of passes that give gradients, with number and kind. None before the recording.
    """

    on_boundary: Callable[[str | None], object] | None
    on_end: Callable[[int, str], object] | None

    def write_event(self, kind: Kind, name: int, value: int) -> None:
        """Write one event of the calling thread."""


@cache
def warn_once(text: str) -> None:
    """Log a warning, once per process."""
    logging.getLogger("modtrace").warning(text)


def warn_without(option: str, reason: str) -> None:
    """Log the reason why a chosen option records nothing; the recording goes on."""
    logging.getLogger("modtrace").warning("%s: %s; the recording goes on without it", option, reason)


def describe_thread() -> tuple[str, int]:
    """Return this thread's name and its id (tid) in the operating system.

    A thread that Python did not start, such as a worker of autograd, has its name in the kernel.
    """
    tid = threading.get_native_id()
    # gevent makes `current_thread` return its greenlets.
    thread = threading.main_thread() if tid == os.getpid() else threading.current_thread()
    if isinstance(thread, threading._DummyThread):
        try:
            with open(f"/proc/self/task/{tid}/comm", encoding="utf-8", errors="replace") as comm:
                return comm.read().strip(), tid
        except OSError:
            return f"thread {tid}", tid
    return thread.name, tid


_MIN_INTERVAL_NS, _MAX_INTERVAL_NS = 2_000_000, 100_000_000
_BURST = 3


class SyncMarks:
    """Writes sync marks while a profiler runs, at intervals that grow."""

    def __init__(self, events: EventSink, names: NameTable) -> None:
        self._events, self._names = events, names
        self._count = 0
        self._next_ns = 0
        self._interval_ns = _MIN_INTERVAL_NS

    def __call__(self) -> None:
        """Write marks if they are due and a profiler runs."""
        now_ns = time.monotonic_ns()
        if now_ns < self._next_ns or not torch._C._autograd._profiler_enabled():
            return
        self._interval_ns = min(self._interval_ns * 5 // 4, _MAX_INTERVAL_NS)
        self._next_ns = now_ns + self._interval_ns
        # The first slice of a burst is long, because caches are cold; the last ones are short, and bound the offset.
        for _ in range(_BURST):
            text = f"{SYNC_PREFIX}{self._count}"
            self._count += 1
            text_id = self._names.text(text)
            slice_ = _RecordFunctionFast(text)
            # Iterators call these instead of Python code: a profiler that records stacks would show the call of
            # `__exit__` as one that starts inside the slice and ends after it.
            start, end = starmap(slice_.__enter__, ((),)), starmap(slice_.__exit__, ((None, None, None),))
            try:
                for _ in start:
                    self._events.write_event(Kind.MARK, text_id, 0)
            finally:
                for _ in end:
                    pass
