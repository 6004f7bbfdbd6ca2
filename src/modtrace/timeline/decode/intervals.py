"""Events → intervals: what was open, from when to when, on which thread, inside what; and which call made each node.

Module calls and autograd nodes are intervals on their thread's stack. If the order of the nodes is known, an engine
writes only "from now on the nodes of this call run"; each such segment is taken as one node, so that both engines'
events end in the same shape. A node belongs to the innermost call whose range of sequence numbers holds the node's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..._interrupts import cached_property
from ..._typing import BoolArray, Int64Array
from ...ring.slot_format import FORWARD_THREAD_MASK, NO_NAME, RECOMPUTE_BIT, SEQUENCE_MASK, Events, Kind
from .pairing import IntervalColumns, find_key, pair_calls, pair_nodes, pair_segments


@dataclass(frozen=True)
class Intervals:
    """Calls and nodes in order of (thread, start position); arrays of equal length.

    A position orders all starts and ends of a recording: twice the index of its event, plus one; an even
    position is between two events.

    Attributes:
        thread: int64, index into the name table's threads.
        start_position: int64; negative if the start was overwritten.
        end_position: int64; beyond all events where the end never came.
        start: int64, monotonic nanoseconds.
        end: int64, monotonic nanoseconds.
        is_node: bool, True for autograd nodes and segments of them, False for calls.
        name: int64, number of the module's name; for a node of the portable engine that of its call, else `NO_NAME`.
        call_key: int64, which call of that name; -1 for nodes of the native engine.
        sequence: int64, of a node its own sequence number, of a call the thread's at enter; -1 if it is not known.
        exit_sequence: int64, of a call the thread's sequence number at exit; -1 if it is not known.
        forward_thread: int64, of a native node the thread that made it, as torch numbers threads; else -1.
        backward_pass: int64, of a node torch's graph task, or below -1 our own number of the pass; -1 for calls.
        has_start: bool, False if the start was overwritten.
        has_end: bool, False if the end never came.
        depth: int64, how many intervals are around it on its thread.
        parent: int64, index of the interval around it, or -1.
    """

    thread: Int64Array
    start_position: Int64Array
    end_position: Int64Array
    start: Int64Array
    end: Int64Array
    is_node: BoolArray
    name: Int64Array
    call_key: Int64Array
    sequence: Int64Array
    exit_sequence: Int64Array
    forward_thread: Int64Array
    backward_pass: Int64Array
    has_start: BoolArray
    has_end: BoolArray
    depth: Int64Array
    parent: Int64Array

    def __len__(self) -> int:
        return len(self.thread)

    def call_path(self, call: int) -> Iterator[int]:
        """Yield a call and the calls around it, innermost first, up to the next node; nothing for -1."""
        while call >= 0 and not self.is_node[call]:
            yield call
            call = int(self.parent[call])

    @property
    def is_recompute(self) -> BoolArray:
        """True for calls that a checkpoint runs again."""
        recompute: BoolArray = ~self.is_node & (self.call_key & RECOMPUTE_BIT != 0)
        return recompute

    @cached_property
    def in_backward(self) -> BoolArray:
        """True for calls that are recomputed or inside a node, or inside such a call."""
        inside: BoolArray = self.is_recompute.copy()
        for depth in range(1, int(self.depth.max()) + 1 if len(self) else 0):
            level = np.flatnonzero((self.depth == depth) & ~self.is_node)
            outer = self.parent[level]
            inside[level] |= self.is_node[outer] | inside[outer]
        return inside


def build_intervals(events: Events) -> Intervals:
    """Pair the starts and ends in `events` and nest them."""
    parts = pair_calls(events), pair_nodes(events), pair_segments(events)
    columns = {field: np.concatenate([part[field] for part in parts]) for field in parts[0]}
    _bound_by_own_thread(events, columns)
    last = 2 * len(events) + 2
    start_position, end_position = columns["start_position"], columns["end_position"]
    # In a damaged file an end can come before its start.
    has_start, has_end = start_position >= 0, end_position > start_position
    end_unknown = columns.pop("end_unknown")
    # What the ring cut off has one end only. Of two such intervals the one that ended later counts as started earlier.
    end_position = np.where(has_end, end_position, 2 * last - start_position)
    start_position = np.where(has_start, start_position, -end_position)
    order = np.lexsort((start_position, columns["thread"]))
    columns = {field: column[order] for field, column in columns.items()}
    columns["start_position"], columns["end_position"] = start_position[order], end_position[order]
    columns["has_start"], columns["has_end"] = has_start[order], (has_end & ~end_unknown)[order]
    columns["start"] = np.where(columns["has_start"], columns["start"], events.time.min(initial=_FOREVER))
    columns["end"] = np.where(has_end[order], columns["end"], events.time.max(initial=0))
    # A clock read by two threads can run back by a little where a pass ends on another thread.
    columns["end"] = np.maximum(columns["end"], columns["start"])
    depth, parent = _nest(columns)
    return Intervals(**columns, depth=depth, parent=parent)


def _bound_by_own_thread(events: Events, columns: IntervalColumns) -> None:
    """Move ends that another thread wrote between the two events of the own thread around them.

    Within a thread, times follow positions. The clocks of two threads differ by a little, in a damaged file by much.
    """
    end_position, thread, end = columns["end_position"], columns["thread"], columns["end"]
    # An even position is between two events of the interval's own thread.
    elsewhere = np.flatnonzero((end_position >= 0) & (end_position & 1 == 1))
    elsewhere = elsewhere[events.thread[end_position[elsewhere] >> 1] != thread[elsewhere]]
    for number in np.unique(thread[elsewhere]).tolist():
        rows = elsewhere[thread[elsewhere] == number]
        rows = rows[np.argsort(end_position[rows], kind="stable")]
        own = np.flatnonzero(events.thread == number)
        time = np.concatenate([events.time[own[:1]], events.time[own], [np.iinfo(np.int64).max]])
        following = np.searchsorted(own, end_position[rows] >> 1)
        end[rows] = np.maximum.accumulate(np.clip(end[rows], time[following], time[following + 1]))


def _nest(columns: IntervalColumns) -> tuple[Int64Array, Int64Array]:
    """Return depth and parent of intervals in (thread, start) order; those that overlap are clipped first."""
    thread, start_position = columns["thread"], columns["start_position"]
    depth = _depths(thread, start_position, columns["end_position"])
    if depth is None:
        _clip(columns)
        depth = _depths(thread, start_position, columns["end_position"])
        assert depth is not None
    return depth, find_parents(thread, depth)


def find_parents(track: Int64Array, depth: Int64Array) -> Int64Array:
    """Return each row's parent, rows in start order: the last row before it on its track, one level up; else -1."""
    count = len(track)
    stride = np.int64(depth.max(initial=0) + 2)
    rank = np.arange(count, dtype=np.int64)
    sort_key = (track * stride + depth) * count + rank
    order = np.argsort(sort_key, kind="stable")
    outer = np.searchsorted(sort_key[order], (track * stride + depth - 1) * count + rank) - 1
    return np.where(depth > 0, order[np.maximum(outer, 0)], -1) if count else rank


def _depths(thread: Int64Array, start_position: Int64Array, end_position: Int64Array) -> Int64Array | None:
    """Return each interval's depth on its thread; None if they do not nest."""
    count = len(thread)
    interval = np.concatenate([np.arange(count), np.arange(count)])
    sign = np.repeat(np.array([1, -1]), count)
    # Clipped intervals end together with the one around them: the inner one, which started later, first.
    tie = np.concatenate([start_position, -start_position])
    position = np.concatenate([start_position, end_position])
    order = np.lexsort((tie, position, np.concatenate([thread, thread])))
    total = np.cumsum(sign[order])
    position_depth = np.where(sign[order] > 0, total - 1, total)
    at_start = np.empty(count, np.int64)
    at_end = np.empty(count, np.int64)
    starts = sign[order] > 0
    at_start[interval[order][starts]] = position_depth[starts]
    at_end[interval[order][~starts]] = position_depth[~starts]
    # Equal depths at both ends are not enough: two that overlap swap their ends at the same depth.
    by_depth = np.lexsort((start_position, at_start, thread))
    neighbours = (np.diff(thread[by_depth]) == 0) & (np.diff(at_start[by_depth]) == 0)
    apart = end_position[by_depth][:-1] < start_position[by_depth][1:]
    return at_start if np.array_equal(at_start, at_end) and bool(np.all(apart | ~neighbours)) else None


def _clip(columns: IntervalColumns) -> None:
    """End what would outlive the interval around it together with that one, and mark it as without an end."""
    thread, start_position = columns["thread"], columns["start_position"]
    end_position, end, has_end = columns["end_position"].copy(), columns["end"].copy(), columns["has_end"].copy()
    stack: list[int] = []
    for index in range(len(thread)):
        while stack and (thread[stack[-1]] != thread[index] or end_position[stack[-1]] < start_position[index]):
            stack.pop()
        if stack and end_position[index] > end_position[stack[-1]]:
            outer = stack[-1]
            end_position[index] = end_position[outer]
            end[index] = min(end[index], end[outer])
            has_end[index] = False
        stack.append(index)
    columns["end_position"] = end_position
    columns["end"], columns["has_end"] = np.maximum(end, columns["start"]), has_end


_FOREVER = np.iinfo(np.int64).max
_MAX_ROUNDS = 4
"""How many backward passes are followed that each run the graph which the one before it made."""


def enclosing_call(intervals: Intervals) -> Int64Array:
    """Return for each interval the index of the innermost call around it, through nodes, or -1."""
    call: Int64Array = intervals.parent.copy()
    while True:
        through = (call >= 0) & intervals.is_node[call]
        if not through.any():
            return call
        call[through] = intervals.parent[call[through]]


def attribute_nodes(intervals: Intervals, events: Events, torch_threads: Int64Array) -> Int64Array:
    """Return for each node the index of the call it belongs to; -1 for calls, and for nodes of no known call.

    Args:
        intervals: calls and nodes.
        events: where they came from.
        torch_threads: int64, torch's number of each thread of the name table, -1 if it is not known.
    """
    call = np.full(len(intervals), -1, np.int64)
    _attribute_by_key(intervals, call)
    native = intervals.is_node & (intervals.forward_thread >= 0)
    if native.any():
        _attribute_by_sequence(intervals, events, torch_threads, native, call)
    return call


def count_outside_runs(intervals: Intervals, call: Int64Array) -> int:
    """Return how many runs of nodes of no known call there are, each in one pass on one thread.

    Runs, as engines that write only where the nodes of another call begin do not see each node.

    Args:
        intervals: calls and nodes.
        call: what `attribute_nodes` returned.
    """
    nodes = np.flatnonzero(intervals.is_node)
    thread, backward_pass = intervals.thread[nodes], intervals.backward_pass[nodes]
    order = np.lexsort((intervals.start_position[nodes], backward_pass, thread))
    outside = call[nodes[order]] < 0
    goes_on = (np.diff(thread[order]) == 0) & (np.diff(backward_pass[order]) == 0) & outside[:-1]
    return int(np.count_nonzero(outside)) - int(np.count_nonzero(outside[1:] & goes_on))


def _attribute_by_key(intervals: Intervals, call: Int64Array) -> None:
    """Fill in `call` for the nodes of the portable engine, which notes the call itself."""
    nodes = np.flatnonzero(intervals.is_node & (intervals.forward_thread < 0) & (intervals.name != NO_NAME))
    calls = np.flatnonzero(~intervals.is_node)
    # Pairs of (name, key) are compared as one number.
    shift = np.int64(1 << 32)
    call_id = intervals.name[calls] * shift + intervals.call_key[calls]
    position = find_key(call_id, intervals.name[nodes] * shift + intervals.call_key[nodes])
    call[nodes] = np.where(position >= 0, calls[position] if len(calls) else -1, -1)


def _attribute_by_sequence(
    intervals: Intervals, events: Events, torch_threads: Int64Array, native: BoolArray, call: Int64Array
) -> None:
    """Fill in `call` for the nodes of the native engine, by their sequence numbers."""
    enclosing = enclosing_call(intervals)
    ranges = _create_graph_nodes(intervals, events)
    nodes = np.flatnonzero(native)
    forward_thread = intervals.forward_thread[nodes]
    threads = [
        (nodes[forward_thread == torch_thread & FORWARD_THREAD_MASK], _boundaries(intervals, enclosing, thread, ranges))
        for thread, torch_thread in enumerate(torch_threads.tolist())
        if torch_thread >= 0
    ]
    for _ in range(_MAX_ROUNDS if ranges else 1):
        before = call.copy()
        for own, boundaries in threads:
            if len(own) and len(boundaries.sequence):
                position = np.searchsorted(boundaries.sequence, intervals.sequence[own], side="right") - 1
                index = np.maximum(position, 0)
                builder = boundaries.builder[index]
                innermost = np.where(builder >= 0, before[builder], boundaries.innermost[index])
                call[own] = np.where(position >= 0, innermost, -1)
        if np.array_equal(before, call):
            break


class _Boundaries(NamedTuple):
    """What makes the nodes of one thread, from each sequence number on.

    Attributes:
        sequence: int64[n], ascending.
        innermost: int64[n], the innermost call from there on, or -1.
        builder: int64[n], the node that makes nodes while it runs (`create_graph=True`) from there on, or -1.
    """

    sequence: Int64Array
    innermost: Int64Array
    builder: Int64Array


def _boundaries(
    intervals: Intervals, enclosing: Int64Array, thread: int, ranges: dict[int, tuple[int, int]]
) -> _Boundaries:
    calls = np.flatnonzero((intervals.thread == thread) & ~intervals.is_node)
    builders = np.array([node for node in ranges if intervals.thread[node] == thread], np.int64)
    built = np.array([ranges[node] for node in builders.tolist()], np.int64).reshape(-1, 2)
    no_call = np.full(len(builders), -1, np.int64)
    no_builder = np.full(len(calls), -1, np.int64)
    start, end = intervals.start_position, intervals.end_position
    position = np.concatenate([start[calls], end[calls], start[builders], end[builders]])
    sequence = np.concatenate([intervals.sequence[calls], intervals.exit_sequence[calls], built[:, 0], built[:, 1]])
    innermost = np.concatenate([calls, enclosing[calls], no_call, enclosing[builders]])
    builder = np.concatenate([no_builder, no_builder, builders, no_call])
    known = sequence >= 0
    # A clipped interval ends together with the one around it, and that one comes last.
    tie = np.concatenate([no_builder, -start[calls], no_call, -start[builders]])
    order = np.lexsort((tie[known], position[known]))
    return _Boundaries(sequence[known][order], innermost[known][order], builder[known][order])


def _create_graph_nodes(intervals: Intervals, events: Events) -> dict[int, tuple[int, int]]:
    """Return the nodes that ran with `create_graph=True`, with the thread's sequence numbers before and after each."""
    if not np.any(events.kind == Kind.GRAPH_BUILT):
        return {}
    nodes = np.flatnonzero(intervals.is_node & (intervals.forward_thread >= 0))
    by_begin = {(int(intervals.start_position[node]) - 1) // 2: int(node) for node in nodes}
    by_end = {(int(intervals.end_position[node]) - 1) // 2: int(node) for node in nodes}
    previous: dict[int, int] = {}
    before: dict[int, int] = {}
    ranges: dict[int, tuple[int, int]] = {}
    # The first of these events follows its node's begin and the second comes just before its end, on the same thread.
    kinds = (Kind.GRAPH_BUILT, Kind.NODE_BEGIN, Kind.NODE_END)
    for index in np.flatnonzero(np.isin(events.kind, kinds)).tolist():
        thread = int(events.thread[index])
        kind = events.kind[index]
        last = previous.get(thread)
        if kind == Kind.GRAPH_BUILT and last in by_begin:
            before[by_begin[last]] = int(events.value[index]) & SEQUENCE_MASK
        elif kind == Kind.NODE_END and last is not None and events.kind[last] == Kind.GRAPH_BUILT:
            node = by_end.get(index)
            if node is not None and node in before:
                ranges[node] = (before[node], int(events.value[last]) & SEQUENCE_MASK)
        previous[thread] = index
    return ranges
