"""The calls open at the end of a ring: the place of each thread now, or when the process died."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._arrays import Int64Array, SignedIntArray, is_any
from ..._tables import counted
from ...ring import Events, Kind
from ...ring.event_text import CATEGORIES, RangeName, parse_range
from ...ring.slot_format import KINDS_OF_OTHER_THREADS, NO_NAME, RANGE_KINDS
from ..slices import COMMUNICATION
from .attribution import attribute_nodes
from .cuts import count_open, find_cuts
from .intervals import Intervals, build_intervals, pair_by_value

if TYPE_CHECKING:
    from .analysis import PassColumns, RingAnalysis
    from .name_lookup import NameLookup

AFTER_BACKWARD = "after backward"
"""The phase of a thread in a backward pass in which no node runs."""

_LAST_STEPS = 8
"""Number of a ring's last steps that are searched for a cut first."""
_HUNG_FACTOR = 10
_MIN_HUNG_NS = 5_000_000_000
HUNG_WITHOUT_HISTORY_NS = 60_000_000_000
"""Minimum duration of a call that counts as hung, if its usual duration is unknown."""
_VARYING_CATEGORIES = ("gc", "compile", "saving", "evaluation", "generate")
"""Categories of ranges whose durations vary by a factor of up to a thousand."""


class OpenCall(NamedTuple):
    """A call that has not ended; or a range, on a thread that is in no module.

    Attributes:
        fqn: the module's fully qualified name (`GPT.transformer.h.0`), or the range's name; empty if the running
            autograd node belongs to no module.
        phase: "forward", "backward", "recompute" or "after backward"; for a range its category ("data loading"). "After
            backward" is the innermost call of a thread in a backward pass that runs no node: it waits, such as
            DistributedDataParallel for other ranks. `fqn` is then the module whose node ran last, empty if none ran
            yet.
        since_ns: start in monotonic nanoseconds; for "backward" of the running autograd node, for "after backward" the
            end of the last node, or the start of the pass.
        module_class: the name of the module's class (`Block`).
        compiled_modules: number of inner modules that torch.compile compiled with it; 0 if unknown.
        compiled_unknown: the reason, with remedy, why the modules inside a compiled call are unknown.
    """

    fqn: str
    phase: str
    since_ns: int
    module_class: str = ""
    compiled_modules: int = 0
    compiled_unknown: str = ""

    @property
    def described_class(self) -> str:
        """The class with its compiled modules, or why these are unknown: `Block, 12 compiled modules inside`."""
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
        """Whether it is a range, not a call of a module."""
        return self.phase in CATEGORIES


def lasts_too_long(call: OpenCall, duration_ns: int, usual_ns: int | None) -> bool:
    """Return whether an open call lasts much longer than its usual duration, or a minute if that is unknown."""
    if call.phase in _VARYING_CATEGORIES or (usual_ns is None and call.phase == "user"):  # perhaps the whole program
        return False
    return duration_ns > (HUNG_WITHOUT_HISTORY_NS if usual_ns is None else max(_HUNG_FACTOR * usual_ns, _MIN_HUNG_NS))


class ThreadStack(NamedTuple):
    """The open calls of one thread.

    Attributes:
        thread: the thread's name.
        tid: the operating system's id of the thread.
        calls: the open calls, outermost first, inside an `evaluation` if the model is being evaluated. Open ranges are
            listed only if the thread is in no module.
        last_ns: time of its last event, monotonic nanoseconds.
    """

    thread: str
    tid: int
    calls: tuple[OpenCall, ...]
    last_ns: int


class _OpenPass(NamedTuple):
    """A backward pass that has not ended."""

    thread: int  # index of the calling thread in the name table
    position: int  # position of its start, see `Intervals`
    since_ns: int  # its start, monotonic nanoseconds
    worker_threads: Int64Array  # threads that called no pass, on which its nodes may run


def open_stacks(analysis: RingAnalysis) -> list[ThreadStack]:
    """Return the stack of each thread that has written an event, in the order of their first events."""
    all_events, lookup, first = analysis.all_events, analysis.lookup, _last_cut(analysis)
    events, passes = analysis.events.take(slice(first, None)), _open_passes(analysis.events, analysis.passes, first)
    intervals = build_intervals(events)
    call = attribute_nodes(intervals, events, lookup.torch_threads)
    # A clipped interval has lost its end, but is not open.
    open_intervals = np.flatnonzero(intervals.end_position > 2 * len(events) + 2)
    is_recompute = intervals.is_recompute
    enter = np.clip((intervals.start_position - 1) // 2, 0, max(len(events) - 1, 0))
    trained_names = np.unique(all_events.name[all_events.kind == Kind.FORWARD_ENTER])
    stacks: dict[int, list[OpenCall]] = {}
    for index in open_intervals.tolist():
        stack = stacks.setdefault(int(intervals.thread[index]), [])
        since_ns = int(intervals.start_ns[index])
        if not intervals.is_node[index]:
            phase = "recompute" if is_recompute[index] else "forward"
            # The outermost call, in eval mode, of a model that was also called in training mode.
            if not stack and events.kind[enter[index]] == Kind.EVAL_ENTER and intervals.name[index] in trained_names:
                stack.append(OpenCall("evaluation", "evaluation", since_ns))
            stack.append(_open_call(lookup, int(intervals.name[index]), phase, since_ns))
            continue
        path = [int(intervals.name[inner]) for inner in intervals.call_path(int(call[index]))] or [NO_NAME]
        stack.extend(_open_call(lookup, name, "backward", since_ns) for name in reversed(path))
    for thread, since_ns, nodes in _waits(intervals, open_intervals, passes):
        module_nodes = nodes[call[nodes] >= 0]
        name = int(intervals.name[call[module_nodes[-1]]]) if len(module_nodes) else NO_NAME
        stacks.setdefault(thread, []).append(_open_call(lookup, name, AFTER_BACKWARD, since_ns))
    in_model = {*stacks, *(open_pass.thread for open_pass in passes)}
    stacks |= {thread: calls for thread, calls in _open_ranges(all_events, lookup).items() if thread not in in_model}
    last_ns = np.full(len(lookup.threads), -1, np.int64)
    by_thread = ~is_any(all_events.kind, KINDS_OF_OTHER_THREADS)
    np.maximum.at(last_ns, all_events.thread[by_thread], all_events.time_ns[by_thread])
    threads = []
    for thread in np.flatnonzero(last_ns >= 0).tolist():
        name, tid = lookup.threads[thread]
        threads.append(ThreadStack(name, tid, tuple(stacks.get(thread, ())), int(last_ns[thread])))
    return threads


def _last_cut(analysis: RingAnalysis) -> int:
    """Return the index of the first event of modules and nodes after the last cut; earlier ones are not needed."""
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

    Torch's own ranges without a category are left out, because they are around everything.
    """
    start, end = pair_by_value(events, *RANGE_KINDS)
    open_ranges: dict[int, list[OpenCall]] = {}
    for index in start[end < 0].tolist():
        name, category = parse_range(lookup.texts[events.name[index]])
        # Another thread can end a communication range, so it does not show this thread's place; waits have own events.
        if category not in (COMMUNICATION, "torch"):
            call = OpenCall(name, category, int(events.time_ns[index]))
            open_ranges.setdefault(int(events.thread[index]), []).append(call)
    return open_ranges


def _waits(
    intervals: Intervals, open_intervals: SignedIntArray, passes: list[_OpenPass]
) -> Iterator[tuple[int, int, SignedIntArray]]:
    """Yield (thread, start, nodes) for each pass that runs no node: start of the wait, and nodes that ran, in order."""
    in_pass = [open_pass.thread for open_pass in passes]
    runs_elsewhere = np.any(intervals.is_node[open_intervals] & ~np.isin(intervals.thread[open_intervals], in_pass))
    for open_pass in passes:
        on_thread = open_intervals[intervals.thread[open_intervals] == open_pass.thread]
        if not runs_elsewhere and not np.any(intervals.start_position[on_thread] > open_pass.position):
            nodes = _nodes_of_pass(intervals, open_pass)
            yield open_pass.thread, int(intervals.end_ns[nodes].max(initial=open_pass.since_ns)), nodes


def _open_call(lookup: NameLookup, name_id: int, phase: str, since_ns: int) -> OpenCall:
    """Return the open call of a module; `NO_NAME` for a call outside all modules."""
    if name_id == NO_NAME:
        return OpenCall("", phase, since_ns)
    name, compiled = lookup.names[name_id], lookup.compiled.get(name_id, "")
    reason = "" if compiled else lookup.unknown.get(name_id, "")
    return OpenCall(name.fqn, phase, since_ns, name.module_class, len(compiled.split(", ")) if compiled else 0, reason)


def _open_passes(events: Events, passes: PassColumns, first: int) -> list[_OpenPass]:
    """Return the innermost open pass of each thread that has one; positions count from the event at `first`."""
    thread, start, end = passes
    workers = np.setdiff1d(events.thread, thread).astype(np.int64)
    innermost: dict[int, _OpenPass] = {}
    for index in np.flatnonzero(end < 0).tolist():
        # A pass inside a finished pass is not open: its end is lost.
        contains_pass = (thread == thread[index]) & (start < start[index]) & (end > start[index])
        if not contains_pass.any():
            caller, first_event = int(thread[index]), int(start[index])
            innermost[caller] = _OpenPass(
                caller, 2 * (first_event - first) + 1, int(events.time_ns[first_event]), workers
            )
    return list(innermost.values())


def _nodes_of_pass(intervals: Intervals, open_pass: _OpenPass) -> Int64Array:
    """Return the nodes of a pass as indexes in order: those on its thread, or without any, on worker threads."""
    is_later = intervals.is_node & (intervals.start_position > open_pass.position)
    nodes = np.flatnonzero(is_later & (intervals.thread == open_pass.thread))
    if not len(nodes):
        nodes = np.flatnonzero(is_later & np.isin(intervals.thread, open_pass.worker_threads))
    return nodes[np.argsort(intervals.start_position[nodes], kind="stable")].astype(np.int64)
