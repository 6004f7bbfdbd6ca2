"""What both engines share: where events go, the names of threads, and sync marks.

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
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch._C._profiler import _RecordFunctionFast

from ..ring import Kind, NameTable
from ..ring.slot_format import SYNC_PREFIX

if TYPE_CHECKING:
    from torch import nn

OnError = Callable[[BaseException], None]
"""Called with what went wrong inside modtrace; the recording stops, the user's call goes on."""


class DeviceChoice(NamedTuple):
    """Which calls of modules get events of the device; a call has to fit both."""

    pattern: str  # those whose fully qualified name matches this, like a shell's
    levels: int | None  # those with fewer calls around them than this; None: any

    def fits(self, fqn: str, depth: int) -> bool:
        """Return whether a call is chosen: of a module of this name, with so many calls around it."""
        return (self.levels is None or depth < self.levels) and fnmatch.fnmatchcase(fqn, self.pattern)


class EngineOptions(NamedTuple):
    """What an engine records beside the calls of modules."""

    model: "nn.Module | str | None" = None  # where names start, see `ModuleNames`
    strip_wrappers: bool = True  # see `ModuleNames`
    device: DeviceChoice | None = None  # which calls get device times; None: none do
    ranges: bool = False  # note ranges and garbage collections
    memory: bool = False  # count what tensors hold
    flops: bool = False  # count operators

    @property
    def native_only(self) -> list[str]:
        """What of it the native engine alone records, by the names of `record`'s arguments."""
        wanted = {"flops": self.flops, "device_times": self.device is not None, "memory": self.memory}
        return [name for name, is_wanted in wanted.items() if is_wanted]


def call_at_collections(*callbacks: Callable[[str, dict[str, int]], object]) -> None:
    """Register callbacks of the garbage collector until the process ends; one that is registered is not added again."""
    # By identity: a user's callback may refuse to be compared.
    known = set(map(id, gc.callbacks))
    gc.callbacks.extend(callback for callback in callbacks if id(callback) not in known)


class EventSink(Protocol):
    """Takes single events; both engines do.

    Attributes:
        on_boundary: called where an outermost call of a module, a backward pass or a range begins, with its kind, or
            ends, with None, while a step is looked at; else None, which another thread may make it at any time.
        on_end: called after 1, 2, 4, 8 … outermost calls of modules or passes that give gradients, and one more each,
            with their number and kind, where no training step has ended; None before the recording begins.
    """

    on_boundary: Callable[[str | None], object] | None
    on_end: Callable[[int, str], object] | None

    def write_event(self, kind: Kind, name: int, value: int) -> None:
        """Write one event of the thread that calls."""


@cache
def warn_once(text: str) -> None:
    """Log a warning, once in a process."""
    logging.getLogger("modtrace").warning(text)


def warn_without(what: str, reason: str) -> None:
    """Log why a recording has nothing of what was asked for; it goes on."""
    logging.getLogger("modtrace").warning("%s: %s; the recording has none", what, reason)


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
        now = time.monotonic_ns()
        if now < self._next_ns or not torch._C._autograd._profiler_enabled():
            return
        self._interval_ns = min(self._interval_ns * 5 // 4, _MAX_INTERVAL_NS)
        self._next_ns = now + self._interval_ns
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
