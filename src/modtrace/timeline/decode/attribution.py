"""Which call made each node: the innermost one whose range of sequence numbers holds the node's."""

from typing import NamedTuple

import numpy as np

from ..._arrays import BoolArray, Int64Array, is_any
from ...ring.slot_format import FORWARD_THREAD_MASK, GREENLET_KINDS, NO_NAME, SEQUENCE_MASK, Events, Kind
from .intervals import Intervals, find_key

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
    """Return for each node the index of the call it belongs to; -1 for calls, and for nodes of no known call."""
    call = np.full(len(intervals), -1, np.int64)
    _attribute_by_key(intervals, call)
    native = intervals.is_node & (intervals.forward_thread >= 0)
    if native.any():
        _attribute_by_sequence(intervals, events, torch_threads, native, call)
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
    calls = np.flatnonzero(~intervals.is_node) if len(nodes) else nodes
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
    ranges = create_graph_nodes(intervals, events)
    nodes = np.flatnonzero(native)
    forward_thread = intervals.forward_thread[nodes]
    switches = _switches(intervals, events)
    threads = [
        (
            nodes[forward_thread == torch_thread & FORWARD_THREAD_MASK],
            # All greenlets of the thread.
            _boundaries(intervals, enclosing, np.flatnonzero(torch_threads == torch_thread), ranges, switches),
        )
        for torch_thread in np.unique(torch_threads[torch_threads >= 0]).tolist()
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
    """What makes the nodes of one thread, from each sequence number on."""

    sequence: Int64Array  # ascending
    innermost: Int64Array  # the innermost call from there on, or -1
    builder: Int64Array  # the node that makes nodes while it runs (`create_graph=True`) from there on, or -1


class _Switches(NamedTuple):
    """Where greenlets switched."""

    thread: Int64Array  # the thread that the event is of
    position: Int64Array  # as `Intervals` has positions
    sequence: Int64Array  # the number of the next node
    interval: Int64Array  # the innermost interval in which the one that goes on is, or -1


def _switches(intervals: Intervals, events: Events) -> _Switches:
    at = np.flatnonzero(is_any(events.kind, GREENLET_KINDS))
    thread, position = events.thread[at].astype(np.int64), 2 * at.astype(np.int64) + 1
    interval = intervals.open_at(thread, position)
    interval[events.kind[at] == Kind.GREENLET_SUSPENDED] = -1
    return _Switches(thread, position, events.value[at] & SEQUENCE_MASK, interval)


def _boundaries(
    intervals: Intervals,
    enclosing: Int64Array,
    threads: Int64Array,
    ranges: dict[int, tuple[int, int]],
    switches: _Switches,
) -> _Boundaries:
    calls = np.flatnonzero(np.isin(intervals.thread, threads) & ~intervals.is_node)
    builders = np.array([node for node in ranges if intervals.thread[node] in threads], np.int64)
    built = np.array([ranges[node] for node in builders.tolist()], np.int64).reshape(-1, 2)
    no_call = np.full(len(builders), -1, np.int64)
    no_builder = np.full(len(calls), -1, np.int64)
    start, end = intervals.start_position, intervals.end_position
    own = np.isin(switches.thread, threads)
    inside = switches.interval[own]
    is_builder = np.isin(inside, builders)
    is_call = (inside >= 0) & ~intervals.is_node[inside] if len(intervals) else inside >= 0
    switched = np.where(is_call | (inside < 0), inside, enclosing[inside] if len(enclosing) else -1)
    position = np.concatenate([start[calls], end[calls], start[builders], end[builders], switches.position[own]])
    sequence = np.concatenate(
        [intervals.sequence[calls], intervals.exit_sequence[calls], built[:, 0], built[:, 1], switches.sequence[own]]
    )
    innermost = np.concatenate([calls, enclosing[calls], no_call, enclosing[builders], switched])
    builder = np.concatenate([no_builder, no_builder, builders, no_call, np.where(is_builder, inside, -1)])
    known = sequence >= 0
    # A clipped interval ends together with the one around it, and that one comes last.
    tie = np.concatenate([no_builder, -start[calls], no_call, -start[builders], np.zeros(len(inside), np.int64)])
    order = np.lexsort((tie[known], position[known]))
    return _Boundaries(sequence[known][order], innermost[known][order], builder[known][order])


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
    known, sequence = (before >= 0) & (after >= 0), events.value & SEQUENCE_MASK
    ranges = sequence[second[begins]][before[known]].tolist(), sequence[first[ends]][after[known]].tolist()
    return dict(zip(nodes[known].tolist(), zip(*ranges, strict=True), strict=True))
