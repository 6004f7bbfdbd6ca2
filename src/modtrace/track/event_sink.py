"""Shared by both engines: options, where events go, the state of autograd, the names of threads, and sync marks.

A sync mark is a moment that both the ring and a running torch.profiler record; by these the two are aligned later.
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
"""Called with what went wrong inside modtrace; the recording stops, the user's call goes on."""


sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Returns the sequence number that this thread's next autograd node gets."""
current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Returns the autograd node that runs on this thread, or None."""
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the id of the backward pass that runs on this thread, or `NO_GRAPH_TASK`."""
NO_GRAPH_TASK = -1


class DeviceChoice(NamedTuple):
    """Which calls of modules get events of the device; a call has to fit both."""

    pattern: str  # those whose fully qualified name matches this, like a shell's
    levels: int | None  # those with fewer calls around them than this; None: any

    def fits(self, fqn: str, depth: int) -> bool:
        """Return whether a call is chosen: of a module of this name, with so many calls around it."""
        return (self.levels is None or depth < self.levels) and fnmatch.fnmatchcase(fqn, self.pattern)


class EngineOptions(NamedTuple):
    """The choice of what an engine records beside the calls of modules."""

    model: "nn.Module | str | None" = None  # where names start, see `ModuleNames`
    strip_wrappers: bool = True  # see `ModuleNames`
    device: DeviceChoice | None = None  # which calls get device times; None: none do
    ranges: bool = False  # note ranges and garbage collections
    memory: bool = False  # count what tensors hold
    flops: bool = False  # count operators

    @property
    def native_only(self) -> list[str]:
        """The chosen options that the native engine alone has, by the names of `record`'s arguments."""
        wanted = {"flops": self.flops, "device_times": self.device is not None, "memory": self.memory}
        return [name for name, is_wanted in wanted.items() if is_wanted]


def call_at_collections(*callbacks: Callable[[str, dict[str, int]], object]) -> None:
    """Register callbacks of the garbage collector until the process ends; one that is registered is not added again."""
    # By identity: a user's callback may refuse to be compared.
    registered = set(map(id, gc.callbacks))
    gc.callbacks.extend(callback for callback in callbacks if id(callback) not in registered)


class EventSink(Protocol):
    """Takes single events; both engines do.

    Attributes:
        on_boundary: called while a step is looked at: with its kind where an outermost call of a module, a backward
            pass or a range begins, with None where it ends. Else it is None; another thread may set it at any time.
        on_end: called while no training step has ended: after 1, 2, 3, 4, 5, 8, 9, 16 … outermost calls of modules, and
            after as many passes that give gradients, with their number and kind. None before the recording begins.
    """

    on_boundary: Callable[[str | None], object] | None
    on_end: Callable[[int, str], object] | None

    def write_event(self, kind: Kind, name: int, value: int) -> None:
        """Write one event of the thread that calls."""


@cache
def warn_once(text: str) -> None:
    """Log a warning, once in a process."""
    logging.getLogger("modtrace").warning(text)


def warn_without(option: str, reason: str) -> None:
    """Log why a recording has nothing of an option that was chosen; it goes on."""
    logging.getLogger("modtrace").warning("%s: %s; the recording has none", option, reason)


def describe_thread() -> tuple[str, int]:
    """Return this thread's name and its id (tid) of the operating system.

    A thread that Python did not start (autograd's workers) has the name that the kernel knows.
    """
    tid = threading.get_native_id()
    # gevent has `current_thread` return its greenlets.
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
    """Writes some marks when called while a profiler runs: often at first, then less and less."""

    def __init__(self, events: EventSink, names: NameTable) -> None:
        self._events, self._names = events, names
        self._count = 0
        self._next_ns = 0
        self._interval_ns = _MIN_INTERVAL_NS

    def __call__(self) -> None:
        """Write marks where they are due."""
        now_ns = time.monotonic_ns()
        if now_ns < self._next_ns or not torch._C._autograd._profiler_enabled():
            return
        self._interval_ns = min(self._interval_ns * 5 // 4, _MAX_INTERVAL_NS)
        self._next_ns = now_ns + self._interval_ns
        # The first slice of a burst is long, with cold caches; the last ones are short and tell the offset sharply.
        for _ in range(_BURST):
            text = f"{SYNC_PREFIX}{self._count}"
            self._count += 1
            text_id = self._names.text(text)
            slice_ = _RecordFunctionFast(text)
            # An iterator calls them, and no statement of Python: a profiler of stacks would show the call that ends the
            # slice as one that begins in it and ends after it.
            begin, end = starmap(slice_.__enter__, ((),)), starmap(slice_.__exit__, ((None, None, None),))
            try:
                for _ in begin:
                    self._events.write_event(Kind.MARK, text_id, 0)
            finally:
                for _ in end:
                    pass
