"""Autograd nodes of a trace and the calls that made them, by sequence number and forward thread."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ..._typing import Int64Array
from ..trace.event_columns import ProfilerEvents, SliceColumns
from .call_lookup import InnermostLookup

__all__ = ["Nodes", "find_nodes"]

_ROUNDS = 4
"""Backward passes through graphs that a backward pass made, each deeper by one, that are followed."""


class Nodes:
    """The `evaluate_function` slices of a trace, in start order of each thread.

    Attributes:
        track: int64[n], index into `ProfilerEvents.tracks`.
        start: int64[n], ns from the base.
        end: int64[n].
        parent: int64[n], the node inside which it ran, or -1.
        call: int64[n], index of the innermost span that made it, or -1.
        numbered: bool[n], whether its number was found among the trace's forward operations.
    """

    def __init__(self, rows: SliceColumns) -> None:
        order = np.lexsort((-rows.duration, rows.start, rows.track))
        self.rows = rows.take(order)
        self.track, self.start, self.end = self.rows.track, self.rows.start, self.rows.end
        self.parent = _parents(self.track, self.start, self.end)
        self.call = np.full(len(rows), -1, np.int64)
        self.numbered = np.zeros(len(rows), np.bool_)

    def __len__(self) -> int:
        return len(self.start)

    @property
    def innermost(self) -> InnermostLookup:
        """Which node ran on a track at a moment."""
        everything = np.ones(len(self), np.bool_)
        return InnermostLookup(self.track, self.track, self.start, self.end, self.parent, everything)


def find_nodes(events: ProfilerEvents, running: InnermostLookup, threads: Int64Array) -> Nodes:
    """Find the nodes, and for each the call that made it.

    Args:
        events: the trace's.
        running: forward and recompute spans; a node was made by the one in which the last operation with its
            sequence number began, as the number goes up with each node.
        threads: the thread of each of the trace's tracks, as `running` knows it; -1 where it knows none.
    """
    # Sequence numbers, threads and arrows are numbered by each process for itself.
    nodes = Nodes(events.nodes.take(np.flatnonzero(threads[events.nodes.track] != -1)))
    if not len(nodes) or not len(events.ops):
        return nodes
    made_on = _forward_tracks(events, nodes, threads)
    op = _making_ops(events.ops, nodes.rows, made_on)
    numbered = np.flatnonzero(op >= 0)
    nodes.numbered[numbered] = True
    ops = events.ops.take(op[numbered])
    nodes.call[numbered] = running.on_threads(threads[ops.track], ops.start)
    inside = nodes.innermost.on_threads(ops.track, ops.start)
    # An operation inside a node, but in no call, made its nodes for that node's call.
    through = (nodes.call[numbered] < 0) & (inside >= 0)
    for _ in range(_ROUNDS):
        nodes.call[numbered[through]] = nodes.call[inside[through]]
    return nodes


def _parents(track: Int64Array, start: Int64Array, end: Int64Array) -> Int64Array:
    parent = np.full(len(start), -1, np.int64)
    stack: list[int] = []
    starts, ends = start.tolist(), end.tolist()
    current = -1
    for index, (track_, start_, end_) in enumerate(zip(track.tolist(), starts, ends, strict=True)):
        if track_ != current:
            current = track_
            stack.clear()
        # Two of the same extent are the same node twice, not one inside the other.
        while stack and (ends[stack[-1]] <= start_ or (starts[stack[-1]], ends[stack[-1]]) == (start_, end_)):
            stack.pop()
        if stack:
            parent[index] = stack[-1]
        stack.append(index)
    return parent


def _forward_tracks(events: ProfilerEvents, nodes: Nodes, threads: Int64Array) -> dict[int, int]:
    """Return the track of each forward thread, by the id that nodes know it by.

    The profiler draws arrows from forward operations to nodes: most of them decide. Without arrows the thread that
    has most of the numbers is meant, unless two have the same number of them.
    """
    votes: dict[int, Counter[int]] = {}
    flows = events.flows
    node = nodes.innermost.on_threads(flows.track, flows.start)
    ids = np.where(node >= 0, nodes.rows.other[node], -1)
    for thread_id, track in zip(ids.tolist(), flows.value.tolist(), strict=True):
        if thread_id >= 0:
            votes.setdefault(thread_id, Counter())[track] += 1
    for thread_id in np.unique(nodes.rows.other[nodes.rows.value >= 0]).tolist():
        if thread_id in votes:
            continue
        numbers = np.unique(nodes.rows.value[(nodes.rows.other == thread_id) & (nodes.rows.value >= 0)])
        for track in np.unique(events.ops.track[threads[events.ops.track] != -1]).tolist():
            shared = int(np.isin(numbers, events.ops.value[events.ops.track == track]).sum())
            if shared:
                votes.setdefault(thread_id, Counter())[track] = shared
        best = votes.get(thread_id, Counter()).most_common(2)
        if len(best) == 2 and best[0][1] == best[1][1]:
            del votes[thread_id]
    return {thread_id: counter.most_common(1)[0][0] for thread_id, counter in votes.items()}


def _making_ops(ops: SliceColumns, nodes: SliceColumns, made_on: dict[int, int]) -> Int64Array:
    """Return for each node the last operation with its number that began before it on its forward thread, or -1."""
    order = np.lexsort((ops.start, ops.value, ops.track))
    key = _key(ops.track[order], ops.value[order])
    track = np.array([made_on.get(thread_id, -1) for thread_id in nodes.other.tolist()], np.int64)
    wanted = _key(track, nodes.value)
    first = np.searchsorted(key, wanted, side="left")
    candidate = np.searchsorted(key, wanted, side="right") - 1
    start = ops.start[order]
    while True:
        late = (candidate >= first) & (start[candidate] >= nodes.start)
        if not late.any():
            break
        candidate[late] -= 1
    found = (candidate >= first) & (track >= 0) & (nodes.value >= 0)
    return np.where(found, order[np.maximum(candidate, 0)], -1)


def _key(track: Int64Array, number: Int64Array) -> Int64Array:
    return (track << 44) | (number & (1 << 44) - 1)
