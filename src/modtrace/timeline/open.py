"""What is open at the end of what a ring holds: where each thread is now, or was when the process died."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..ring import RingImage
from .attribute import attribute
from .brackets import find_brackets
from .build import Tables

__all__ = ["OpenCall", "ThreadStack", "open_stacks"]


class OpenCall(NamedTuple):
    """An open call: its fully qualified name, its phase, and since when (monotonic nanoseconds)."""

    fqn: str
    phase: str
    since_ns: int


class ThreadStack(NamedTuple):
    """What one thread is in, outermost first; empty where it is in no module.

    Attributes:
        thread: its name.
        tid: its id as the operating system has it.
        calls: the open calls.
        last_ns: its last event, monotonic nanoseconds.
    """

    thread: str
    tid: int
    calls: tuple[OpenCall, ...]
    last_ns: int


def open_stacks(image: RingImage) -> list[ThreadStack]:
    """Return the stack of each thread that has noted anything, in the order in which they came."""
    events = image.reading.events
    tables = Tables(image.records, events)
    brackets = find_brackets(events)
    call = attribute(brackets, events, tables.torch_threads)
    stacks = []
    for number in np.unique(events.thread).tolist():
        name, tid = tables.threads[number]
        open_calls: list[OpenCall] = []
        for at in np.flatnonzero((brackets.thread == number) & ~brackets.finished).tolist():
            since = int(brackets.start[at])
            if not brackets.node[at]:
                phase = "recompute" if brackets.recompute[at] else "forward"
                open_calls.append(OpenCall(tables.names[brackets.name[at]].fqn, phase, since))
                continue
            chain = []
            inner = int(call[at])
            while inner >= 0 and not brackets.node[inner]:
                chain.append(OpenCall(tables.names[brackets.name[inner]].fqn, "backward", since))
                inner = int(brackets.parent[inner])
            open_calls.extend(reversed(chain))
        last = int(events.time[events.thread == number].max())
        stacks.append(ThreadStack(name, tid, tuple(open_calls), last))
    return stacks
