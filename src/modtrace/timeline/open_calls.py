"""What is open at the end of what a ring holds: where each thread is now, or was when the process died."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .._typing import BoolArray, Int64Array, SignedIntArray
from ..ring import Events, Kind, RingSnapshot
from ..ring.slot_format import (
    ABANDONED_BIT,
    CALL_ENTER_KINDS,
    CALL_EXIT_KINDS,
    CALL_INDEX_MASK,
    FORWARD_THREAD_MASK,
    SEQUENCE_BITS,
    SEQUENCE_MASK,
)
from .build import Tables
from .build.attribution import attribute
from .build.call_tree import Brackets, find_brackets
from .build.pairing import stretch_task

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


def open_stacks(snapshot: RingSnapshot) -> list[ThreadStack]:
    """Return the stack of each thread that has noted anything, in the order in which they came."""
    everything = snapshot.slots.events
    tables = Tables(snapshot.records, everything)
    # A torn slot can have held the end of anything; then only the whole story tells what is open.
    for events, first in [(everything, 0)] if snapshot.slots.torn else _enough(everything):
        brackets = find_brackets(events)
        call = attribute(brackets, events, tables.torch_threads)
        # What was clipped has lost its end, but is not open.
        opened = np.flatnonzero(brackets.closed > 2 * len(events) + 2)
        nodes = opened[brackets.node[opened]]
        oldest = _oldest_sequence(events, first, tables.torch_threads)
        known = [number >= oldest.get(origin, number + 1) for origin, number in _native(brackets, nodes)]
        if np.all(call[nodes] >= 0) and all(known):
            break
    stacks: dict[int, list[OpenCall]] = {}
    for at in opened.tolist():
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


def _native(brackets: Brackets, nodes: SignedIntArray) -> list[tuple[int, int]]:
    """Return the forward thread, as torch numbers it, and the sequence number of those that are known by these."""
    own = nodes[brackets.origin[nodes] >= 0]
    return list(zip(brackets.origin[own].tolist(), brackets.sequence[own].tolist(), strict=True))


def _oldest_sequence(events: Events, first: int, torch_threads: Int64Array) -> dict[int, int]:
    """Return for each thread, by torch's number of it, the sequence number from which on no call is left out.

    Args:
        events: what was taken.
        first: the serial number from which on all calls were taken.
        torch_threads: torch's number of each thread.
    """
    call = np.isin(events.kind, (*CALL_ENTER_KINDS, *CALL_EXIT_KINDS)) & (events.serial >= first)
    sequence, thread = events.value[call] & SEQUENCE_MASK, events.thread[call]
    oldest: dict[int, int] = {}
    for number in np.flatnonzero(np.bincount(thread)).tolist():
        torch = int(torch_threads[number]) & FORWARD_THREAD_MASK
        oldest[torch] = max(oldest.get(torch, 0), int(sequence[thread == number].min()))
    return oldest


def _enough(events: Events) -> Iterator[tuple[Events, int]]:
    """Yield the events that tell what is open, more each time, until all are there: most of a ring is over.

    Beside each stands the serial number from which on all calls are among them.
    """
    enters, exits = np.isin(events.kind, CALL_ENTER_KINDS), np.isin(events.kind, CALL_EXIT_KINDS)
    needed = _unclosed(events, enters, exits)
    unclosed = np.flatnonzero(needed)
    # One that was interrupted has no exit, and then looks as if those around it had none.
    enter, leave = np.flatnonzero(enters), np.flatnonzero(exits)
    entered, left = _identity(events, enter), _identity(events, leave)
    wanted = _identity(events, unclosed)
    needed[unclosed[np.isin(wanted, left[np.isin(left, wanted)])]] = False
    needed |= _unclosed(events, events.kind == Kind.NODE_BEGIN, events.kind == Kind.NODE_END)
    stretches = np.flatnonzero((events.kind == Kind.CALL_BACKWARD) | (events.kind == Kind.SEGMENT_BEGIN))
    ended = np.sort(events.value[events.kind == Kind.BACKWARD_OVER] & ~ABANDONED_BIT)
    task = stretch_task(events.take(stretches))
    needed[stretches[np.searchsorted(ended, task, "left") == np.searchsorted(ended, task, "right")]] = True
    if not np.any(needed & ~enters):
        yield events.take(needed), 0
        return
    if np.any(events.kind == Kind.GRAPH_BUILT):
        yield events, 0
        return
    # Whose backward runs follows from calls that are over, mostly from some of the last.
    for part in (16, 4, 1):
        first = len(events) - max(1, len(events) // part)
        recent = leave >= first
        # A call that began before them is there with its enter, or it would seem to have begun before all.
        begun = np.setdiff1d(left[recent], entered[enter >= first])
        needed[enter[(enter >= first) | np.isin(entered, begun)]] = True
        needed[leave[recent]] = True
        yield events.take(needed), int(events.serial[first])


def _identity(events: Events, index: SignedIntArray) -> Int64Array:
    """Return a number for the call that each enter or exit belongs to."""
    again = np.isin(events.kind[index], (Kind.RECOMPUTE_ENTER, Kind.RECOMPUTE_EXIT))
    number = events.value[index] >> SEQUENCE_BITS & CALL_INDEX_MASK
    return np.asarray((events.name[index].astype(np.int64) << 32 | number) * 2 + again, np.int64)


def _unclosed(events: Events, opens: BoolArray, closes: BoolArray) -> BoolArray:
    """Say which of the openings have no closing on their thread, if what opened last closes first."""
    found = np.zeros(len(events), np.bool_)
    index = np.flatnonzero(opens | closes)
    thread = events.thread[index]
    for number in np.flatnonzero(np.bincount(thread)).tolist():
        own = index[thread == number][::-1]
        # Read backwards, an end goes down and its begin comes up again; one without an end rises above all before it.
        height = np.cumsum(np.where(opens[own], 1, -1))
        before = np.maximum.accumulate(np.concatenate([[0], height]))[:-1]
        found[own[height > before]] = True
    return found
