"""The calls that are open at the end of what a ring holds: where each thread is now, or was when the process died."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._typing import BoolArray, Int64Array, SignedIntArray
from ...ring import Events, Kind
from ...ring.range_text import CATEGORIES, RangeName, parse_range
from ...ring.slot_format import (
    ABANDONED_BIT,
    CALL_ENTER_KINDS,
    CALL_EXIT_KINDS,
    FORWARD_THREAD_MASK,
    KINDS_OF_OTHER_THREADS,
    SEQUENCE_MASK,
)
from ..contents import Name
from .attribution import attribute_nodes
from .intervals import Intervals, build_intervals, call_ids, segment_pass

if TYPE_CHECKING:
    from .analysis import NameLookup, PassColumns

AFTER_BACKWARD = "after backward"
"""The phase of a thread that is in a backward pass in which no node runs."""


_COMMUNICATION = "communication"
"""Ranges of this category do not say where a thread is: another thread can end them. Waits have events of their own."""

_OUTSIDE = Name("", "", "")
"""For what belongs to no module."""
_HUNG_FACTOR = 10
_MIN_HUNG_NS = 5_000_000_000
HUNG_WITHOUT_HISTORY_NS = 60_000_000_000
"""What takes longer than that seems hung if it is not known how long it usually takes."""
_VARYING = ("gc", "compile", "saving", "evaluation", "generate")
"""Categories of ranges one of which can take a thousand times as long as the one before."""


class OpenCall(NamedTuple):
    """A call that has not ended; or a range, on a thread that is in no module.

    Attributes:
        fqn: the module's fully qualified name (`GPT.transformer.h.0`), empty if the autograd node that runs is of none;
            the name of a range.
        phase: "forward", "backward" or "recompute"; or "after backward", the innermost of a thread's, where the thread
            is in a backward pass in which no node runs: it waits, as DistributedDataParallel does for the other ranks.
            `fqn` is then the module whose node ran last, or empty if none of a module ran yet. Of a range it is the
            category ("data loading").
        since_ns: when it began, monotonic nanoseconds; for "backward" the autograd node that runs now, for "after
            backward" the end of the last one, or the begin of the pass.
        module_class: the name of the module's class (`Block`).
    """

    fqn: str
    phase: str
    since_ns: int
    module_class: str = ""

    @property
    def place(self) -> str:
        """Where a thread is, in words: `forward GPT.h.0`, `data loading`."""
        if self.is_range:
            return RangeName(self.fqn, self.phase).place
        return f"{self.phase} {self.fqn}" if self.fqn and self.phase != AFTER_BACKWARD else "backward"

    @property
    def is_range(self) -> bool:
        """Whether it is a range, and no call of a module."""
        return self.phase in CATEGORIES


def lasts_too_long(call: OpenCall, lasted_ns: int, usual_ns: int | None) -> bool:
    """Return whether an open call or range has lasted much longer than it usually does.

    Args:
        call: which.
        lasted_ns: how long it has.
        usual_ns: how long it usually does; None: that is not known.
    """
    if call.phase in _VARYING or (usual_ns is None and call.phase == "user"):  # one can be around the whole program
        return False
    return lasted_ns > (HUNG_WITHOUT_HISTORY_NS if usual_ns is None else max(_HUNG_FACTOR * usual_ns, _MIN_HUNG_NS))


class ThreadStack(NamedTuple):
    """The open calls of one thread.

    Attributes:
        thread: its name.
        tid: its id as the operating system has it.
        calls: the open calls, outermost first. If it is in no module, the ranges that it is in; else these are left
            out.
        last_ns: its last event, monotonic nanoseconds.
    """

    thread: str
    tid: int
    calls: tuple[OpenCall, ...]
    last_ns: int


class _OpenPass(NamedTuple):
    """A backward pass that is not over.

    Attributes:
        thread: index of the thread that called it, in the name table.
        serial: of the event that begins it.
        since_ns: when it began, monotonic nanoseconds.
        others: int64, the threads that called no pass: its nodes may run there.
        position: of its begin among the events that `located` was given, as `Intervals` has positions.
    """

    thread: int
    serial: int
    since_ns: int
    others: Int64Array
    position: int = -1

    def located(self, events: Events) -> _OpenPass:
        """Return it with its position among some events, in which it begins."""
        return self._replace(position=2 * int(np.searchsorted(events.serial, self.serial)) + 1)


def open_stacks(
    all_events: Events, events: Events, passes: PassColumns, lookup: NameLookup, *, is_torn: bool
) -> list[ThreadStack]:
    """Return the stack of each thread that has written any event, in the order in which they came.

    Args:
        all_events: of the ring.
        events: those of modules and nodes.
        passes: the backward passes in `events`.
        lookup: the name table.
        is_torn: whether slots are torn, each of which can have held the end of anything.
    """
    intervals, call, open_intervals, in_passes = _open_intervals(
        events, _open_passes(events, passes), lookup.torch_threads, is_torn
    )
    stacks: dict[int, list[OpenCall]] = {}
    for index in open_intervals.tolist():
        stack = stacks.setdefault(int(intervals.thread[index]), [])
        since_ns = int(intervals.start[index])
        if not intervals.is_node[index]:
            phase = "recompute" if intervals.is_recompute[index] else "forward"
            stack.append(_open_call(lookup.names[intervals.name[index]], phase, since_ns))
            continue
        path = [lookup.names[intervals.name[inner]] for inner in intervals.call_path(int(call[index]))]
        path = path or [_OUTSIDE]
        stack.extend(_open_call(name, "backward", since_ns) for name in reversed(path))
    for thread, since_ns, nodes in _waits(intervals, open_intervals, in_passes):
        of_module = nodes[call[nodes] >= 0]
        name = lookup.names[intervals.name[call[of_module[-1]]]] if len(of_module) else _OUTSIDE
        stacks.setdefault(thread, []).append(_open_call(name, AFTER_BACKWARD, since_ns))
    in_model = {*stacks, *(open_pass.thread for open_pass in in_passes)}
    stacks |= {thread: calls for thread, calls in _open_ranges(all_events, lookup).items() if thread not in in_model}
    last_ns = np.full(len(lookup.threads), -1, np.int64)
    by_thread = ~np.isin(all_events.kind, KINDS_OF_OTHER_THREADS)
    np.maximum.at(last_ns, all_events.thread[by_thread], all_events.time[by_thread])
    threads = []
    for thread in np.flatnonzero(last_ns >= 0).tolist():
        name, tid = lookup.threads[thread]
        threads.append(ThreadStack(name, tid, tuple(stacks.get(thread, ())), int(last_ns[thread])))
    return threads


def _open_ranges(events: Events, lookup: NameLookup) -> dict[int, list[OpenCall]]:
    """Return the ranges that have not ended, by thread, outermost first.

    torch's own ones that fit no category are left out: they are around everything.
    """
    index = np.flatnonzero(events.kind == Kind.RANGE_BEGIN)
    ended = events.value[events.kind == Kind.RANGE_END]
    open_ranges: dict[int, list[OpenCall]] = {}
    for at in index[~np.isin(events.value[index], ended)].tolist():
        name, category = parse_range(lookup.texts[events.name[at]])
        if category not in (_COMMUNICATION, "torch"):
            open_ranges.setdefault(int(events.thread[at]), []).append(OpenCall(name, category, int(events.time[at])))
    return open_ranges


def _waits(
    intervals: Intervals, open_intervals: SignedIntArray, passes: list[_OpenPass]
) -> Iterator[tuple[int, int, SignedIntArray]]:
    """Yield the threads whose pass runs no node: the thread, since when, and the nodes that ran, in order."""
    in_pass = [open_pass.thread for open_pass in passes]
    runs_elsewhere = np.any(intervals.is_node[open_intervals] & ~np.isin(intervals.thread[open_intervals], in_pass))
    for open_pass in passes:
        own = open_intervals[intervals.thread[open_intervals] == open_pass.thread]
        if not runs_elsewhere and not np.any(intervals.start_position[own] > open_pass.position):
            nodes = _nodes_of_pass(intervals, open_pass)
            yield open_pass.thread, int(intervals.end[nodes].max(initial=open_pass.since_ns)), nodes


def _open_call(name: Name, phase: str, since_ns: int) -> OpenCall:
    return OpenCall(name.fqn, phase, since_ns, name.module_class)


def _open_intervals(
    events: Events, passes: list[_OpenPass], torch_threads: Int64Array, torn: bool
) -> tuple[Intervals, Int64Array, SignedIntArray, list[_OpenPass]]:
    """Return intervals, the call that each node belongs to, which intervals are open, and the open passes.

    The intervals hold all that are open, and the last nodes of the open passes. The passes have their positions there.
    """
    # A torn slot can have held the end of anything; then only all events together show what is open.
    for part, first_serial in [(events, 0)] if torn else _growing_parts(events, passes):
        passes = [open_pass.located(part) for open_pass in passes]
        intervals = build_intervals(part)
        call = attribute_nodes(intervals, part, torch_threads)
        # What was clipped has lost its end, but is not open.
        open_intervals = np.flatnonzero(intervals.end_position > 2 * len(part) + 2)
        nodes = np.concatenate(
            [
                open_intervals[intervals.is_node[open_intervals]],
                *(_nodes_of_pass(intervals, open_pass)[-1:] for open_pass in passes),
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


def _growing_parts(events: Events, passes: list[_OpenPass]) -> Iterator[tuple[Events, int]]:
    """Yield the events that show what is open, more each time, until all are there: most of a ring is over.

    Yields with them the serial number from which on they hold all calls.
    """
    is_enter, is_exit = np.isin(events.kind, CALL_ENTER_KINDS), np.isin(events.kind, CALL_EXIT_KINDS)
    needed = _without_end(events, is_enter, is_exit)
    unended = np.flatnonzero(needed)
    # An interrupted call has no exit. The calls around it then look unended; those with an exit of their own are not.
    enters, exits = np.flatnonzero(is_enter), np.flatnonzero(is_exit)
    enter_id, exit_id = call_ids(events, enters), call_ids(events, exits)
    wanted = call_ids(events, unended)
    needed[unended[np.isin(wanted, exit_id[np.isin(exit_id, wanted)])]] = False
    needed |= _events_of_passes(events, passes)
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
    # To find the call of a node, calls that have ended are needed too, mostly recent ones: take more of them each time.
    for divisor in (16, 4, 1):
        first = len(events) - max(1, len(events) // divisor)
        recent = exits >= first
        # If a call began before `first`, take its enter too: without it the call would seem older than all events.
        begun_before = np.setdiff1d(exit_id[recent], enter_id[enters >= first])
        needed[enters[(enters >= first) | np.isin(enter_id, begun_before)]] = True
        needed[exits[recent]] = True
        yield events.take(needed), int(events.serial[first])


def _without_end(events: Events, is_start: BoolArray, is_end: BoolArray) -> BoolArray:
    """Return which of the starts have no end on their thread, if what started last ends first."""
    is_open = np.zeros(len(events), np.bool_)
    index = np.flatnonzero(is_start | is_end)
    thread = events.thread[index]
    for number in np.flatnonzero(np.bincount(thread)).tolist():
        backwards = index[thread == number][::-1]
        # Read backwards, an end goes down and its start comes up again; one without an end rises above all before it.
        height = np.cumsum(np.where(is_start[backwards], 1, -1))
        before = np.maximum.accumulate(np.concatenate([[0], height]))[:-1]
        is_open[backwards[height > before]] = True
    return is_open


def _open_passes(events: Events, passes: PassColumns) -> list[_OpenPass]:
    """Return the innermost open pass of each thread that has any."""
    thread, begin, end = passes
    others = np.setdiff1d(events.thread, thread).astype(np.int64)
    innermost: dict[int, _OpenPass] = {}
    for index in np.flatnonzero(end < 0).tolist():
        # A pass inside of one that is over has lost its end.
        around = (thread == thread[index]) & (begin < begin[index]) & (end > begin[index])
        if not around.any():
            at = begin[index]
            innermost[int(thread[index])] = _OpenPass(
                int(thread[index]), int(events.serial[at]), int(events.time[at]), others
            )
    return list(innermost.values())


def _events_of_passes(events: Events, passes: list[_OpenPass]) -> BoolArray:
    """Return which events may belong to the nodes of open passes."""
    needed = np.zeros(len(events), np.bool_)
    for open_pass in passes:
        threads = np.append(open_pass.others, open_pass.thread)
        needed |= (events.serial >= open_pass.serial) & np.isin(events.thread, threads)
    return needed


def _nodes_of_pass(intervals: Intervals, open_pass: _OpenPass) -> Int64Array:
    """Return the nodes that ran in a pass, as indexes in order: on its thread, or where it has none there on others."""
    ran = intervals.is_node & (intervals.start_position > open_pass.position)
    own = np.flatnonzero(ran & (intervals.thread == open_pass.thread))
    nodes = own if len(own) else np.flatnonzero(ran & np.isin(intervals.thread, open_pass.others))
    return nodes[np.argsort(intervals.start_position[nodes], kind="stable")].astype(np.int64)
