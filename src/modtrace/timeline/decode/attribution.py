"""The call that made each node: the innermost one whose range of sequence numbers contains the node's number."""

from typing import NamedTuple

import numpy as np

from ..._arrays import IndexArray, Int64Array, is_any, stack_parts
from ...ring.slot_format import FORWARD_THREAD_MASK, GREENLET_KINDS, NO_NAME, SEQUENCE_MASK, Events, Kind
from .intervals import Intervals, find_key

_MAX_ROUNDS = 4
"""Maximum number of chained backward passes, each running the graph that the previous one made."""


def enclosing_call(intervals: Intervals) -> Int64Array:
    """Return the index of the innermost call around each interval, skipping nodes; -1 if there is none."""
    call: Int64Array = intervals.parent.copy()
    while True:
        in_node = (call >= 0) & intervals.is_node[call]
        if not in_node.any():
            return call
        call[in_node] = intervals.parent[call[in_node]]


def attribute_nodes(intervals: Intervals, events: Events, torch_threads: Int64Array) -> Int64Array:
    """Return the index of the call of each node; -1 for calls, and for nodes without a known call."""
    call = np.full(len(intervals), -1, np.int64)
    _attribute_by_key(intervals, call)
    if np.any(intervals.is_node & (intervals.forward_thread >= 0)):
        _attribute_by_sequence(intervals, events, torch_threads, call)
    return call


def count_outside_runs(intervals: Intervals, call: Int64Array) -> int:
    """Return the number of runs of nodes without a known call, each in one pass on one thread.

    Single nodes cannot be counted, because engines may write only the start of each call's nodes.
    """
    nodes = np.flatnonzero(intervals.is_node)
    thread, backward_pass = intervals.thread[nodes], intervals.backward_pass[nodes]
    order = np.lexsort((backward_pass, thread))
    outside = call[nodes[order]] < 0
    continues = (np.diff(thread[order]) == 0) & (np.diff(backward_pass[order]) == 0) & outside[:-1]
    return int(np.count_nonzero(outside)) - int(np.count_nonzero(outside[1:] & continues))


def _attribute_by_key(intervals: Intervals, call: Int64Array) -> None:
    """Fill in `call` for the nodes of the Python engine, whose events contain the call."""
    nodes = np.flatnonzero(intervals.is_node & (intervals.forward_thread < 0) & (intervals.name != NO_NAME))
    if len(nodes):
        calls = np.flatnonzero(~intervals.is_node)
        # (name, key) as one number.
        call_id, node_id = ((intervals.name[rows] << 32) + intervals.call_key[rows] for rows in (calls, nodes))
        call[nodes] = np.append(calls, -1)[find_key(call_id, node_id)]


def _attribute_by_sequence(intervals: Intervals, events: Events, torch_threads: Int64Array, call: Int64Array) -> None:
    """Fill in `call` for the nodes of the native engine, by their sequence numbers."""
    builders = create_graph_nodes(intervals, events)
    boundaries = _find_boundaries(intervals, events, builders)
    nodes = np.flatnonzero(intervals.is_node & (intervals.forward_thread >= 0))
    forward_thread = intervals.forward_thread[nodes]
    parts = []
    for torch_thread in np.unique(torch_threads[torch_threads >= 0]).tolist():
        greenlets = np.flatnonzero(torch_threads == torch_thread)
        makers = boundaries.take(np.flatnonzero(np.isin(boundaries.thread, greenlets)))
        parts.append((nodes[forward_thread == torch_thread & FORWARD_THREAD_MASK], makers))
    for _ in range(_MAX_ROUNDS if builders else 1):
        previous_call = call.copy()
        for thread_nodes, makers in parts:
            # Before the first boundary the index is -1, the last entry of both columns.
            index = np.searchsorted(makers.sequence, intervals.sequence[thread_nodes], side="right") - 1
            builder = np.append(makers.builder, -1)[index]
            innermost = np.append(makers.innermost, -1)[index]
            call[thread_nodes] = np.where(builder >= 0, previous_call[builder], innermost)
        if np.array_equal(previous_call, call):
            break


class _Boundaries(NamedTuple):
    """The makers of each thread's nodes from a sequence number on; in the order of the thread's events."""

    thread: Int64Array  # index into the name table's threads
    sequence: Int64Array  # first sequence number, ascending within a thread
    innermost: Int64Array  # the innermost call; -1 if there is none
    builder: Int64Array  # the running node that makes nodes (`create_graph=True`); -1 if there is none

    def take(self, rows: IndexArray) -> "_Boundaries":
        """Return the boundaries in `rows`."""
        return _Boundaries(*(column[rows] for column in self))


def _find_boundaries(intervals: Intervals, events: Events, made_by: dict[int, tuple[int, int]]) -> _Boundaries:
    """Return the boundaries: starts and ends of calls and of nodes that make nodes, and switches of greenlets."""
    enclosing, calls = enclosing_call(intervals), np.flatnonzero(~intervals.is_node)
    builders, (low, high) = np.array([*made_by], np.int64), np.array([*made_by.values()], np.int64).reshape(-1, 2).T
    thread, start, end = intervals.thread, intervals.start_position, intervals.end_position
    switch = np.flatnonzero(is_any(events.kind, GREENLET_KINDS))
    greenlet, moment = events.thread[switch].astype(np.int64), 2 * switch + 1
    resumed = intervals.open_at(greenlet, moment)
    resumed[events.kind[switch] == Kind.GREENLET_SUSPENDED] = -1
    resumed_call = np.where((resumed >= 0) & intervals.is_node[resumed], enclosing[resumed], resumed)
    resumed_builder = np.where(np.isin(resumed, builders), resumed, -1)
    # Thread, position, sequence number, innermost call, builder, and a sort key: a clipped interval ends together with
    # the interval around it, which must come last.
    table = stack_parts(
        (thread[calls], start[calls], intervals.sequence[calls], calls, -1, -1),
        (thread[calls], end[calls], intervals.exit_sequence[calls], enclosing[calls], -1, -start[calls]),
        (thread[builders], start[builders], low, -1, builders, -1),
        (thread[builders], end[builders], high, enclosing[builders], -1, -start[builders]),
        (greenlet, moment, events.value[switch] & SEQUENCE_MASK, resumed_call, resumed_builder, 0),
    )
    table = table[:, table[2] >= 0]
    order = np.lexsort((table[5], table[1]))
    return _Boundaries(table[0], *table[2:5]).take(order)


def create_graph_nodes(intervals: Intervals, events: Events) -> dict[int, tuple[int, int]]:
    """Return the nodes that ran with `create_graph=True`, and the thread's sequence numbers before and after each."""
    if not np.any(events.kind == Kind.GRAPH_BUILT):
        return {}
    # A node's first `GRAPH_BUILT` event directly follows its start, and the second precedes its end, on its thread.
    index = np.flatnonzero(is_any(events.kind, (Kind.GRAPH_BUILT, Kind.NODE_BEGIN, Kind.NODE_END)))
    index = index[np.argsort(events.thread[index], kind="stable")]
    first, second = index[:-1], index[1:]
    together = events.thread[first] == events.thread[second]
    is_start = together & (events.kind[first] == Kind.NODE_BEGIN) & (events.kind[second] == Kind.GRAPH_BUILT)
    is_end = together & (events.kind[first] == Kind.GRAPH_BUILT) & (events.kind[second] == Kind.NODE_END)
    nodes = np.flatnonzero(intervals.is_node & (intervals.forward_thread >= 0))
    start = find_key(2 * first[is_start] + 1, intervals.start_position[nodes])
    end = find_key(2 * second[is_end] + 1, intervals.end_position[nodes])
    has_both, sequence = (start >= 0) & (end >= 0), events.value & SEQUENCE_MASK
    ranges = sequence[second[is_start]][start[has_both]].tolist(), sequence[first[is_end]][end[has_both]].tolist()
    return dict(zip(nodes[has_both].tolist(), zip(*ranges, strict=True), strict=True))
