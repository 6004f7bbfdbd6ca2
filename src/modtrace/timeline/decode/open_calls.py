"""The calls that are open at the end of what a ring holds: where each thread is now, or was when the process died."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._arrays import Int64Array, SignedIntArray, is_any
from ..._tables import counted
from ...ring import Events, Kind
from ...ring.event_text import CATEGORIES, RangeName, parse_range
from ...ring.slot_format import KINDS_OF_OTHER_THREADS, NO_NAME, RANGE_KINDS
from .attribution import attribute_nodes
from .cuts import count_open, find_cuts
from .intervals import Intervals, build_intervals, pair_by_value

if TYPE_CHECKING:
    from .analysis import PassColumns, RingAnalysis
    from .name_lookup import NameLookup

AFTER_BACKWARD = "after backward"
"""The phase of a thread that is in a backward pass in which no node runs."""

_COMMUNICATION = "communication"
"""Ranges of this category do not say where a thread is: another thread can end them. Waits have events of their own."""

_LAST_STEPS = 8
"""Number of a ring's last steps among which a cut is looked for first."""
_HUNG_FACTOR = 10
_MIN_HUNG_NS = 5_000_000_000
HUNG_WITHOUT_HISTORY_NS = 60_000_000_000
"""A call that takes longer seems hung if its usual duration is not known."""
_VARYING = ("gc", "compile", "saving", "evaluation", "generate")
"""Categories of ranges one of which can take a thousand times as long as the one before."""


class OpenCall(NamedTuple):
    """A call that has not ended; or a range, on a thread that is in no module."""

    # The module's fully qualified name (`GPT.transformer.h.0`), empty if the autograd node that runs is of none; the
    # name of a range
    fqn: str
    # "forward", "backward" or "recompute"; or "after backward", the innermost of a thread's, where the thread is in a
    # backward pass in which no node runs: it waits, as DistributedDataParallel does for the other ranks. `fqn` is then
    # the module whose node ran last, or empty if none of a module ran yet. Of a range it is the category ("data
    # loading").
    phase: str
    # When it began, monotonic nanoseconds; for "backward" the autograd node that runs now, for "after backward" the end
    # of the last one, or the begin of the pass
    since_ns: int
    module_class: str = ""  # the name of the module's class (`Block`)
    compiled_modules: int = 0  # how many modules inside torch.compile compiled with it; 0 if none is known
    compiled_unknown: str = ""  # if it was compiled, why the modules inside are not known, and what helps

    @property
    def described_class(self) -> str:
        """Class, and how many modules it was compiled with: `Block, 12 compiled modules inside`, or why unknown."""
        if self.compiled_unknown:
            return f"{self.module_class}, modules inside unknown: {self.compiled_unknown}"
        inside = f", {counted(self.compiled_modules, 'compiled module')} inside" if self.compiled_modules else ""
        return f"{self.module_class}{inside}"

    @property
    def place(self) -> str:
        """The place of a thread, in words: `forward GPT.h.0`, `data loading`."""
        if self.is_range:
            return RangeName(self.fqn, self.phase).place
        return f"{self.phase} {self.fqn}" if self.fqn and self.phase != AFTER_BACKWARD else "backward"

    @property
    def is_range(self) -> bool:
        """Whether it is a range, and no call of a module."""
        return self.phase in CATEGORIES


def lasts_too_long(call: OpenCall, lasted_ns: int, usual_ns: int | None) -> bool:
    """Return whether an open call or range has lasted much longer than it usually does, if that is known."""
    if call.phase in _VARYING or (usual_ns is None and call.phase == "user"):  # one can be around the whole program
        return False
    return lasted_ns > (HUNG_WITHOUT_HISTORY_NS if usual_ns is None else max(_HUNG_FACTOR * usual_ns, _MIN_HUNG_NS))


class ThreadStack(NamedTuple):
    """The open calls of one thread."""

    thread: str  # its name
    tid: int  # its id as the operating system has it
    # The open calls, outermost first; around those of a model that is evaluated, `evaluation`. If it is in no module,
    # the ranges that it is in; else these are left out.
    calls: tuple[OpenCall, ...]
    last_ns: int  # its last event, monotonic nanoseconds


class _OpenPass(NamedTuple):
    """A backward pass that is not over."""

    thread: int  # index of the thread that called it, in the name table
    position: int  # of its begin, as `Intervals` has positions
    since_ns: int  # when it began, monotonic nanoseconds
    others: Int64Array  # the threads that called no pass: its nodes may run there


def open_stacks(analysis: RingAnalysis) -> list[ThreadStack]:
    """Return the stack of each thread that has written any event, in the order in which they came."""
    all_events, lookup, first = analysis.all_events, analysis.lookup, _last_cut(analysis)
    events, passes = analysis.events.take(slice(first, None)), _open_passes(analysis.events, analysis.passes, first)
    intervals = build_intervals(events)
    call = attribute_nodes(intervals, events, lookup.torch_threads)
    # What was clipped has lost its end, but is not open.
    open_intervals = np.flatnonzero(intervals.end_position > 2 * len(events) + 2)
    is_recompute = intervals.is_recompute
    entered = np.clip((intervals.start_position - 1) // 2, 0, max(len(events) - 1, 0))
    trained = np.unique(all_events.name[all_events.kind == Kind.FORWARD_ENTER])
    stacks: dict[int, list[OpenCall]] = {}
    for index in open_intervals.tolist():
        stack = stacks.setdefault(int(intervals.thread[index]), [])
        since_ns = int(intervals.start[index])
        if not intervals.is_node[index]:
            phase = "recompute" if is_recompute[index] else "forward"
            # The outermost call of a model that is called in training mode as well.
            if not stack and events.kind[entered[index]] == Kind.EVAL_ENTER and intervals.name[index] in trained:
                stack.append(OpenCall("evaluation", "evaluation", since_ns))
            stack.append(_open_call(lookup, int(intervals.name[index]), phase, since_ns))
            continue
        path = [int(intervals.name[inner]) for inner in intervals.call_path(int(call[index]))] or [NO_NAME]
        stack.extend(_open_call(lookup, name, "backward", since_ns) for name in reversed(path))
    for thread, since_ns, nodes in _waits(intervals, open_intervals, passes):
        of_module = nodes[call[nodes] >= 0]
        name = int(intervals.name[call[of_module[-1]]]) if len(of_module) else NO_NAME
        stacks.setdefault(thread, []).append(_open_call(lookup, name, AFTER_BACKWARD, since_ns))
    in_model = {*stacks, *(open_pass.thread for open_pass in passes)}
    stacks |= {thread: calls for thread, calls in _open_ranges(all_events, lookup).items() if thread not in in_model}
    last_ns = np.full(len(lookup.threads), -1, np.int64)
    by_thread = ~is_any(all_events.kind, KINDS_OF_OTHER_THREADS)
    np.maximum.at(last_ns, all_events.thread[by_thread], all_events.time[by_thread])
    threads = []
    for thread in np.flatnonzero(last_ns >= 0).tolist():
        name, tid = lookup.threads[thread]
        threads.append(ThreadStack(name, tid, tuple(stacks.get(thread, ())), int(last_ns[thread])))
    return threads


def _last_cut(analysis: RingAnalysis) -> int:
    """Return the index of the last event of modules and nodes before which nothing is open or used later."""
    events, serial = analysis.all_events, analysis.events.serial
    ends = serial[analysis.step_ends.event]
    firsts = [*np.searchsorted(events.serial, ends[-_LAST_STEPS:][:1]).tolist(), 0] if len(ends) else []
    for first in firsts:
        open_before = count_open(events.take(slice(first)))
        if open_before[-1:].sum() > open_before.min(initial=0):
            continue  # a call around these steps
        last = events.take(slice(first, None))
        if cuts := find_cuts([last], analysis.lookup, ends, is_part=first > 0):
            return int(np.searchsorted(serial, cuts[-1]))
    return 0


def _open_ranges(events: Events, lookup: NameLookup) -> dict[int, list[OpenCall]]:
    """Return the ranges that have not ended, by thread, outermost first.

    torch's own ones that fit no category are left out: they are around everything.
    """
    begin, end = pair_by_value(events, *RANGE_KINDS)
    open_ranges: dict[int, list[OpenCall]] = {}
    for index in begin[end < 0].tolist():
        name, category = parse_range(lookup.texts[events.name[index]])
        if category not in (_COMMUNICATION, "torch"):
            call = OpenCall(name, category, int(events.time[index]))
            open_ranges.setdefault(int(events.thread[index]), []).append(call)
    return open_ranges


def _waits(
    intervals: Intervals, open_intervals: SignedIntArray, passes: list[_OpenPass]
) -> Iterator[tuple[int, int, SignedIntArray]]:
    """Yield the threads whose pass runs no node: the thread, since when, and the nodes that ran, in order."""
    in_pass = [open_pass.thread for open_pass in passes]
    runs_elsewhere = np.any(intervals.is_node[open_intervals] & ~np.isin(intervals.thread[open_intervals], in_pass))
    for open_pass in passes:
        on_thread = open_intervals[intervals.thread[open_intervals] == open_pass.thread]
        if not runs_elsewhere and not np.any(intervals.start_position[on_thread] > open_pass.position):
            nodes = _nodes_of_pass(intervals, open_pass)
            yield open_pass.thread, int(intervals.end[nodes].max(initial=open_pass.since_ns)), nodes


def _open_call(lookup: NameLookup, name_id: int, phase: str, since_ns: int) -> OpenCall:
    """Return a call of the module of a name; `NO_NAME`: outside of all."""
    if name_id == NO_NAME:
        return OpenCall("", phase, since_ns)
    name, compiled = lookup.names[name_id], lookup.compiled.get(name_id, "")
    reason = "" if compiled else lookup.unknown.get(name_id, "")
    return OpenCall(name.fqn, phase, since_ns, name.module_class, len(compiled.split(", ")) if compiled else 0, reason)


def _open_passes(events: Events, passes: PassColumns, first: int) -> list[_OpenPass]:
    """Return the innermost open pass of each thread that has any; positions count from the event at `first`."""
    thread, begin, end = passes
    others = np.setdiff1d(events.thread, thread).astype(np.int64)
    innermost: dict[int, _OpenPass] = {}
    for index in np.flatnonzero(end < 0).tolist():
        # A pass inside of one that is over has lost its end.
        holds = (thread == thread[index]) & (begin < begin[index]) & (end > begin[index])
        if not holds.any():
            caller, first_event = int(thread[index]), int(begin[index])
            innermost[caller] = _OpenPass(caller, 2 * (first_event - first) + 1, int(events.time[first_event]), others)
    return list(innermost.values())


def _nodes_of_pass(intervals: Intervals, open_pass: _OpenPass) -> Int64Array:
    """Return the nodes that ran in a pass, as indexes in order: on its thread, or where it has none there on others."""
    ran = intervals.is_node & (intervals.start_position > open_pass.position)
    on_thread = np.flatnonzero(ran & (intervals.thread == open_pass.thread))
    nodes = on_thread if len(on_thread) else np.flatnonzero(ran & np.isin(intervals.thread, open_pass.others))
    return nodes[np.argsort(intervals.start_position[nodes], kind="stable")].astype(np.int64)
