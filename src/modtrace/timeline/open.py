"""What is open at the end of what a ring holds: where each thread is now, or was when the process died."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..ring import Events, Kind, RingImage
from ..ring.event import ABANDONED, SEQUENCE_BITS
from .attribute import attribute
from .brackets import find_brackets, stretch_task
from .build import Tables

__all__ = ["OpenCall", "ThreadStack", "open_stacks"]

_CALLS_IN = (Kind.FORWARD_ENTER, Kind.RECOMPUTE_ENTER)
_CALLS_OUT = (Kind.FORWARD_EXIT, Kind.RECOMPUTE_EXIT)


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
    everything = image.reading.events
    # A torn slot can have held the end of anything; then only the whole story tells what is open.
    events = everything if image.reading.torn else everything.take(_still_needed(everything))
    tables = Tables(image.records, everything)
    brackets = find_brackets(events)
    call = attribute(brackets, events, tables.torch_threads)
    stacks: dict[int, list[OpenCall]] = {}
    # What was clipped has lost its end, but is not open.
    for at in np.flatnonzero(brackets.closed > 2 * len(events) + 2).tolist():
        open_calls = stacks.setdefault(int(brackets.thread[at]), [])
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
    last = np.full(len(tables.threads), -1, np.int64)
    np.maximum.at(last, everything.thread, everything.time)
    found = []
    for number in np.flatnonzero(last >= 0).tolist():
        name, tid = tables.threads[number]
        found.append(ThreadStack(name, tid, tuple(stacks.get(number, ())), int(last[number])))
    return found


def _still_needed(events: Events) -> npt.NDArray[np.bool_]:
    """Say which events tell what is open: most of a ring is over, and finding that out is cheap."""
    enters, exits = np.isin(events.kind, _CALLS_IN), np.isin(events.kind, _CALLS_OUT)
    again = (events.kind == Kind.RECOMPUTE_ENTER) | (events.kind == Kind.RECOMPUTE_EXIT)
    number = events.value >> SEQUENCE_BITS
    identity = (events.name.astype(np.int64) << 32 | number & (1 << 31) - 1) * 2 + again
    needed = np.zeros(len(events), np.bool_)
    needed[enters] = ~np.isin(identity[enters], identity[exits])
    running = _open_nodes(events)
    over = events.value[events.kind == Kind.BACKWARD_OVER] & ~ABANDONED
    stretches = (events.kind == Kind.BACKWARD) | (events.kind == Kind.STRETCH)
    running |= stretches & ~np.isin(stretch_task(events), over)
    if not running.any():
        return needed
    if np.any(events.kind == Kind.NODE_SEQUENCE):
        return np.ones(len(events), np.bool_)
    # Whose backward runs follows from the calls that are over.
    return needed | running | enters | exits


def _open_nodes(events: Events) -> npt.NDArray[np.bool_]:
    """Say which node begins have no end."""
    found = np.zeros(len(events), np.bool_)
    index = np.flatnonzero((events.kind == Kind.NODE_BEGIN) | (events.kind == Kind.NODE_END))
    thread = events.thread[index]
    for number in np.unique(thread).tolist():
        own = index[thread == number][::-1]
        # Read backwards, an end goes down and its begin comes up again; one without an end rises above all before it.
        height = np.cumsum(np.where(events.kind[own] == Kind.NODE_BEGIN, 1, -1))
        before = np.maximum.accumulate(np.concatenate([[0], height]))[:-1]
        found[own[height > before]] = True
    return found
