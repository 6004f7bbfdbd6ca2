"""Which call made each node: the innermost one whose range of sequence numbers holds the node's."""

from typing import NamedTuple

import numpy as np

from ..._arrays import IndexArray, Int64Array, is_any, stack_parts
from ...ring.slot_format import FORWARD_THREAD_MASK, GREENLET_KINDS, NO_NAME, SEQUENCE_MASK, Events, Kind
from .intervals import Intervals, find_key

_MAX_ROUNDS = 4
"""Number of backward passes that are followed, each of which runs the graph that the one before it made."""


def enclosing_call(intervals: Intervals) -> Int64Array:
    """Return for each interval the index of the innermost call around it, through nodes, or -1."""
    call: Int64Array = intervals.parent.copy()
    while True:
        through = (call >= 0) & intervals.is_node[call]
        if not through.any():
            return call
        call[through] = intervals.parent[call[through]]


def attribute_nodes(intervals: Intervals, events: Events, torch_threads: Int64Array) -> Int64Array:
    """Return for each node the index of the call it belongs to; -1 for calls, and for nodes of no known call."""
    call = np.full(len(intervals), -1, np.int64)
    _attribute_by_key(intervals, call)
    if np.any(intervals.is_node & (intervals.forward_thread >= 0)):
        _attribute_by_sequence(intervals, events, torch_threads, call)
    return call


def count_outside_runs(intervals: Intervals, call: Int64Array) -> int:
    """Return how many runs of nodes of no known call there are, each in one pass on one thread.

    Runs, as engines that write only where the nodes of another call begin do not see each node.
    """
    nodes = np.flatnonzero(intervals.is_node)
    thread, backward_pass = intervals.thread[nodes], intervals.backward_pass[nodes]
    order = np.lexsort((backward_pass, thread))
    outside = call[nodes[order]] < 0
    goes_on = (np.diff(thread[order]) == 0) & (np.diff(backward_pass[order]) == 0) & outside[:-1]
    return int(np.count_nonzero(outside)) - int(np.count_nonzero(outside[1:] & goes_on))


def _attribute_by_key(intervals: Intervals, call: Int64Array) -> None:
    """Fill in `call` for the nodes of the Python engine, which notes the call itself."""
    nodes = np.flatnonzero(intervals.is_node & (intervals.forward_thread < 0) & (intervals.name != NO_NAME))
    if len(nodes):
        calls = np.flatnonzero(~intervals.is_node)
        # Pairs of (name, key) are compared as one number.
        call_id, wanted = ((intervals.name[rows] << 32) + intervals.call_key[rows] for rows in (calls, nodes))
        call[nodes] = np.append(calls, -1)[find_key(call_id, wanted)]


def _attribute_by_sequence(intervals: Intervals, events: Events, torch_threads: Int64Array, call: Int64Array) -> None:
    """Fill in `call` for the nodes of the native engine, by their sequence numbers."""
    builders = create_graph_nodes(intervals, events)
    boundaries = _find_boundaries(intervals, events, builders)
    nodes = np.flatnonzero(intervals.is_node & (intervals.forward_thread >= 0))
    forward_thread = intervals.forward_thread[nodes]
    parts = []
    for torch_thread in np.unique(torch_threads[torch_threads >= 0]).tolist():
        greenlets = np.flatnonzero(torch_threads == torch_thread)
        made_by = boundaries.take(np.flatnonzero(np.isin(boundaries.thread, greenlets)))
        parts.append((nodes[forward_thread == torch_thread & FORWARD_THREAD_MASK], made_by))
    for _ in range(_MAX_ROUNDS if builders else 1):
        before = call.copy()
        for made, made_by in parts:
            # Before the first boundary it is -1, the last entry of both columns.
            place = np.searchsorted(made_by.sequence, intervals.sequence[made], side="right") - 1
            builder = np.append(made_by.builder, -1)[place]
            call[made] = np.where(builder >= 0, before[builder], np.append(made_by.innermost, -1)[place])
        if np.array_equal(before, call):
            break


class _Boundaries(NamedTuple):
    """The makers of each thread's nodes, from each sequence number on; in the order of its events."""

    thread: Int64Array  # index into the name table's threads
    sequence: Int64Array  # in a thread ascending
    innermost: Int64Array  # the innermost call from there on, or -1
    builder: Int64Array  # the node that makes nodes while it runs (`create_graph=True`) from there on, or -1

    def take(self, rows: IndexArray) -> "_Boundaries":
        """Return some of the boundaries."""
        return _Boundaries(*(column[rows] for column in self))


def _find_boundaries(intervals: Intervals, events: Events, made_by: dict[int, tuple[int, int]]) -> _Boundaries:
    """Return where calls begin and end, and nodes that make nodes, and where greenlets switch."""
    enclosing, calls = enclosing_call(intervals), np.flatnonzero(~intervals.is_node)
    builders, (low, high) = np.array([*made_by], np.int64), np.array([*made_by.values()], np.int64).reshape(-1, 2).T
    thread, start, end = intervals.thread, intervals.start_position, intervals.end_position
    switch = np.flatnonzero(is_any(events.kind, GREENLET_KINDS))
    switched, moment = events.thread[switch].astype(np.int64), 2 * switch + 1
    resumed = intervals.open_at(switched, moment)
    resumed[events.kind[switch] == Kind.GREENLET_SUSPENDED] = -1
    resumed_call = np.where((resumed >= 0) & intervals.is_node[resumed], enclosing[resumed], resumed)
    resumed_builder = np.where(np.isin(resumed, builders), resumed, -1)
    # Thread, position, sequence number, innermost call, builder. A clipped interval ends together with the one around
    # it, and that one comes last: by the last column.
    table = stack_parts(
        (thread[calls], start[calls], intervals.sequence[calls], calls, -1, -1),
        (thread[calls], end[calls], intervals.exit_sequence[calls], enclosing[calls], -1, -start[calls]),
        (thread[builders], start[builders], low, -1, builders, -1),
        (thread[builders], end[builders], high, enclosing[builders], -1, -start[builders]),
        (switched, moment, events.value[switch] & SEQUENCE_MASK, resumed_call, resumed_builder, 0),
    )
    table = table[:, table[2] >= 0]
    order = np.lexsort((table[5], table[1]))
    return _Boundaries(table[0], *table[2:5]).take(order)


def create_graph_nodes(intervals: Intervals, events: Events) -> dict[int, tuple[int, int]]:
    """Return the nodes that ran with `create_graph=True`, with the thread's sequence numbers before and after each."""
    if not np.any(events.kind == Kind.GRAPH_BUILT):
        return {}
    # The first of these events follows its node's begin and the second comes just before its end, on the same thread.
    index = np.flatnonzero(is_any(events.kind, (Kind.GRAPH_BUILT, Kind.NODE_BEGIN, Kind.NODE_END)))
    index = index[np.argsort(events.thread[index], kind="stable")]
    first, second = index[:-1], index[1:]
    together = events.thread[first] == events.thread[second]
    begins = together & (events.kind[first] == Kind.NODE_BEGIN) & (events.kind[second] == Kind.GRAPH_BUILT)
    ends = together & (events.kind[first] == Kind.GRAPH_BUILT) & (events.kind[second] == Kind.NODE_END)
    nodes = np.flatnonzero(intervals.is_node & (intervals.forward_thread >= 0))
    before = find_key(2 * first[begins] + 1, intervals.start_position[nodes])
    after = find_key(2 * second[ends] + 1, intervals.end_position[nodes])
    is_found, sequence = (before >= 0) & (after >= 0), events.value & SEQUENCE_MASK
    ranges = sequence[second[begins]][before[is_found]].tolist(), sequence[first[ends]][after[is_found]].tolist()
    return dict(zip(nodes[is_found].tolist(), zip(*ranges, strict=True), strict=True))
