"""The calls that are open at the end of what a ring holds: where each thread is now, or was when the process died."""

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
    FORWARD_THREAD_MASK,
    KINDS_OF_OTHER_THREADS,
    SEQUENCE_MASK,
)
from .contents import Name
from .decode import Intervals, NameLookup, attribute_nodes, build_intervals, call_ids, module_events, segment_pass
from .open_passes import OpenPass, events_of_passes, nodes_of_pass, open_passes

__all__ = ["AFTER_BACKWARD", "OpenCall", "ThreadStack", "open_stacks"]

AFTER_BACKWARD = "after backward"
"""The phase of a thread that is in a backward pass in which no node runs."""


class OpenCall(NamedTuple):
    """A call that has not ended.

    Attributes:
        fqn: the module's fully qualified name (`GPT.transformer.h.0`).
        phase: "forward", "backward" or "recompute"; or "after backward", the innermost of a thread's, where the thread
            is in a backward pass in which no node runs: it waits, as DistributedDataParallel does for the other ranks.
            `fqn` is then the module whose node ran last, or empty where none of a module ran yet.
        since_ns: when it began, monotonic nanoseconds; for "backward" the autograd node that runs now, for "after
            backward" the end of the last one, or the begin of the pass.
        module_class: the name of the module's class (`Block`).
    """

    fqn: str
    phase: str
    since_ns: int
    module_class: str = ""


class ThreadStack(NamedTuple):
    """The open calls of one thread.

    Attributes:
        thread: its name.
        tid: its id as the operating system has it.
        calls: the open calls, outermost first; empty where it is in no module.
        last_ns: its last event, monotonic nanoseconds.
    """

    thread: str
    tid: int
    calls: tuple[OpenCall, ...]
    last_ns: int


def open_stacks(snapshot: RingSnapshot) -> list[ThreadStack]:
    """Return the stack of each thread that has written any event, in the order in which they came."""
    all_events = snapshot.slots.events
    lookup = NameLookup(snapshot.records, all_events)
    events = module_events(all_events)
    passes = open_passes(events)
    intervals, call, open_intervals, passes = _open_intervals(
        events, passes, lookup.torch_threads, snapshot.slots.torn > 0
    )
    stacks: dict[int, list[OpenCall]] = {}
    for index in open_intervals.tolist():
        stack = stacks.setdefault(int(intervals.thread[index]), [])
        since_ns = int(intervals.start[index])
        if not intervals.is_node[index]:
            phase = "recompute" if intervals.is_recompute[index] else "forward"
            stack.append(_open_call(lookup.names[intervals.name[index]], phase, since_ns))
            continue
        call_path = []
        inner = int(call[index])
        while inner >= 0 and not intervals.is_node[inner]:
            call_path.append(_open_call(lookup.names[intervals.name[inner]], "backward", since_ns))
            inner = int(intervals.parent[inner])
        stack.extend(reversed(call_path))
    for thread, since_ns, nodes in _waits(intervals, open_intervals, passes):
        of_module = nodes[call[nodes] >= 0]
        name = lookup.names[intervals.name[call[of_module[-1]]]] if len(of_module) else Name("", "", "")
        stacks.setdefault(thread, []).append(_open_call(name, AFTER_BACKWARD, since_ns))
    last_ns = np.full(len(lookup.threads), -1, np.int64)
    by_thread = ~np.isin(all_events.kind, KINDS_OF_OTHER_THREADS)
    np.maximum.at(last_ns, all_events.thread[by_thread], all_events.time[by_thread])
    threads = []
    for thread in np.flatnonzero(last_ns >= 0).tolist():
        name, tid = lookup.threads[thread]
        threads.append(ThreadStack(name, tid, tuple(stacks.get(thread, ())), int(last_ns[thread])))
    return threads


def _waits(
    intervals: Intervals, open_intervals: SignedIntArray, passes: list[OpenPass]
) -> Iterator[tuple[int, int, SignedIntArray]]:
    """Yield the threads whose pass runs no node: the thread, since when, and the nodes that ran, in order."""
    in_pass = [open_pass.thread for open_pass in passes]
    runs_elsewhere = np.any(intervals.is_node[open_intervals] & ~np.isin(intervals.thread[open_intervals], in_pass))
    for open_pass in passes:
        own = open_intervals[intervals.thread[open_intervals] == open_pass.thread]
        if not runs_elsewhere and not np.any(intervals.start_position[own] > open_pass.position):
            nodes = nodes_of_pass(intervals, open_pass)
            yield open_pass.thread, int(intervals.end[nodes].max(initial=open_pass.since_ns)), nodes


def _open_call(name: Name, phase: str, since_ns: int) -> OpenCall:
    return OpenCall(name.fqn, phase, since_ns, name.module_class)


def _open_intervals(
    events: Events, passes: list[OpenPass], torch_threads: Int64Array, torn: bool
) -> tuple[Intervals, Int64Array, SignedIntArray, list[OpenPass]]:
    """Return intervals with all that are open among them, the call that each node belongs to, and which are open.

    The last nodes of the open passes are among them too, and the passes are returned with their positions there.
    """
    # A torn slot can have held the end of anything; then only all events together tell what is open.
    for part, first_serial in [(events, 0)] if torn else _growing_parts(events, passes):
        passes = [open_pass.located(part) for open_pass in passes]
        intervals = build_intervals(part)
        call = attribute_nodes(intervals, part, torch_threads)
        # What was clipped has lost its end, but is not open.
        open_intervals = np.flatnonzero(intervals.end_position > 2 * len(part) + 2)
        nodes = np.concatenate(
            [
                open_intervals[intervals.is_node[open_intervals]],
                *(nodes_of_pass(intervals, open_pass)[-1:] for open_pass in passes),
            ]
        )
        oldest = _oldest_sequence(part, first_serial, torch_threads)
        known = [
            sequence >= oldest.get(forward_thread, sequence + 1)
            for forward_thread, sequence in _native_nodes(intervals, nodes)
        ]
        if np.all(call[nodes] >= 0) and all(known):
            break
    return intervals, call, open_intervals, passes


def _native_nodes(intervals: Intervals, nodes: SignedIntArray) -> list[tuple[int, int]]:
    """Return (forward thread as torch numbers it, sequence number) of the nodes that are known by these."""
    native = nodes[intervals.forward_thread[nodes] >= 0]
    return list(zip(intervals.forward_thread[native].tolist(), intervals.sequence[native].tolist(), strict=True))


def _oldest_sequence(events: Events, first_serial: int, torch_threads: Int64Array) -> dict[int, int]:
    """Return for each thread, by torch's number of it, the sequence number from which on no call is left out.

    Args:
        events: what was taken.
        first_serial: the serial number from which on all calls were taken.
        torch_threads: int64, torch's number of each thread.
    """
    is_call = np.isin(events.kind, (*CALL_ENTER_KINDS, *CALL_EXIT_KINDS)) & (events.serial >= first_serial)
    sequence, thread = events.value[is_call] & SEQUENCE_MASK, events.thread[is_call]
    oldest: dict[int, int] = {}
    for number in np.flatnonzero(np.bincount(thread)).tolist():
        torch_thread = int(torch_threads[number]) & FORWARD_THREAD_MASK
        oldest[torch_thread] = max(oldest.get(torch_thread, 0), int(sequence[thread == number].min()))
    return oldest


def _growing_parts(events: Events, passes: list[OpenPass]) -> Iterator[tuple[Events, int]]:
    """Yield the events that tell what is open, more each time, until all are there: most of a ring is over.

    Beside each stands the serial number from which on all calls are among them.
    """
    is_enter, is_exit = np.isin(events.kind, CALL_ENTER_KINDS), np.isin(events.kind, CALL_EXIT_KINDS)
    needed = _without_end(events, is_enter, is_exit)
    unended = np.flatnonzero(needed)
    # One that was interrupted has no exit, and then looks as if those around it had none.
    enters, exits = np.flatnonzero(is_enter), np.flatnonzero(is_exit)
    enter_id, exit_id = call_ids(events, enters), call_ids(events, exits)
    wanted = call_ids(events, unended)
    needed[unended[np.isin(wanted, exit_id[np.isin(exit_id, wanted)])]] = False
    needed |= events_of_passes(events, passes)
    cut = np.setdiff1d(exit_id[needed[exits]], enter_id[needed[enters]])
    needed[enters[np.isin(enter_id, cut)]] = True
    needed |= _without_end(events, events.kind == Kind.NODE_BEGIN, events.kind == Kind.NODE_END)
    segments = np.flatnonzero((events.kind == Kind.CALL_BACKWARD) | (events.kind == Kind.SEGMENT_BEGIN))
    ended = np.sort(events.value[events.kind == Kind.BACKWARD_OVER] & ~ABANDONED_BIT)
    pass_id = segment_pass(events.take(segments))
    needed[segments[np.searchsorted(ended, pass_id, "left") == np.searchsorted(ended, pass_id, "right")]] = True
    if not np.any(needed & ~is_enter):
        yield events.take(needed), 0
        return
    if np.any(events.kind == Kind.GRAPH_BUILT):
        yield events, 0
        return
    # Whose backward runs follows from calls that are over, mostly from some of the last.
    for divisor in (16, 4, 1):
        first = len(events) - max(1, len(events) // divisor)
        recent = exits >= first
        # A call that began before them is there with its enter, or it would seem to have begun before all.
        begun_before = np.setdiff1d(exit_id[recent], enter_id[enters >= first])
        needed[enters[(enters >= first) | np.isin(enter_id, begun_before)]] = True
        needed[exits[recent]] = True
        yield events.take(needed), int(events.serial[first])


def _without_end(events: Events, is_start: BoolArray, is_end: BoolArray) -> BoolArray:
    """Return which of the starts have no end on their thread, if what started last ends first."""
    found = np.zeros(len(events), np.bool_)
    index = np.flatnonzero(is_start | is_end)
    thread = events.thread[index]
    for number in np.flatnonzero(np.bincount(thread)).tolist():
        backwards = index[thread == number][::-1]
        # Read backwards, an end goes down and its start comes up again; one without an end rises above all before it.
        height = np.cumsum(np.where(is_start[backwards], 1, -1))
        before = np.maximum.accumulate(np.concatenate([[0], height]))[:-1]
        found[backwards[height > before]] = True
    return found
