"""Intervals → one row per span with its depth and track; backward spans are cut from runs of nodes.

Consecutive nodes of a thread share the spans of their common calls. A call whose nodes are interleaved with the nodes
of another call has several spans, so backward spans are nested by construction.
"""

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from ..._arrays import AnyArray, Int64Array, Numbering, count_in_run, expand_ranges, order_in_groups
from ...ring.slot_format import CALL_INDEX_MASK
from ..slices import BACKWARD, FORWARD, RECOMPUTE
from .intervals import Intervals


class BackwardSpans(NamedTuple):
    """Backward spans; int64 arrays of equal length."""

    first_node: Int64Array  # index of the interval of its first node
    last_node: Int64Array  # index of the interval of its last node
    call: Int64Array  # index of the interval of its call
    level: Int64Array  # number of calls around it in the same call path


def call_path_lengths(intervals: Intervals) -> Int64Array:
    """Return the length of each call's path: the call and the calls around it, up to the next node."""
    length = np.zeros(len(intervals), np.int64)
    for level in intervals.levels:
        calls = level[~intervals.is_node[level]]
        parent = intervals.parent[calls]
        length[calls] = 1 + np.where(parent >= 0, np.where(intervals.is_node[parent], 0, length[parent]), 0)
    return length


def cut_backward_spans(intervals: Intervals, call: Int64Array, length: Int64Array) -> BackwardSpans:
    """Cut the runs of nodes into spans of the calls that they belong to."""
    # Siblings stay in the order of their starts.
    siblings = np.lexsort((intervals.parent, intervals.thread))
    index = np.flatnonzero(intervals.is_node[siblings])
    nodes: Int64Array = siblings[index]
    # Consecutive nodes of one backward pass without another interval between them share the spans of common calls.
    adjacent = np.diff(index) == 1
    for column in (intervals.thread, intervals.parent, intervals.backward_pass):
        adjacent &= column[nodes[:-1]] == column[nodes[1:]]
    node_call = call[nodes]
    path_length = np.where(node_call >= 0, length[node_call], 0)
    shared = np.zeros(len(nodes) + 1, np.int64)
    shared[1:-1] = np.where(adjacent, _shared_lengths(intervals, node_call, length), 0)
    # The levels that start (or end) at a node run from the levels shared with its neighbour to its path's length.
    level, first = expand_ranges(shared[:-1], path_length)
    last_level, last = expand_ranges(shared[1:], path_length)
    span_call, inner_levels = node_call[first], path_length[first] - 1 - level
    while len(outer := np.flatnonzero(inner_levels)):
        span_call[outer] = intervals.parent[span_call[outer]]
        inner_levels[outer] -= 1
    # On one level starts and ends alternate, so the n-th start belongs to the n-th end.
    by_start, by_end = order_in_groups(level << 32 | first, 32), order_in_groups(last_level << 32 | last, 32)
    return BackwardSpans(
        first_node=nodes[first[by_start]],
        last_node=nodes[last[by_end]],
        call=span_call[by_start],
        level=level[by_start],
    )


def _shared_lengths(intervals: Intervals, node_call: Int64Array, length: Int64Array) -> Int64Array:
    """Return the number of outer calls that the call paths of consecutive nodes have in common."""
    left, right = node_call[:-1].copy(), node_call[1:].copy()
    while len(pair := np.flatnonzero((left >= 0) & (right >= 0) & (left != right))):
        surplus = length[left[pair]] - length[right[pair]]
        for call, climbing in ((left, pair[surplus >= 0]), (right, pair[surplus <= 0])):
            outer = intervals.parent[call[climbing]]
            call[climbing] = np.where((outer >= 0) & ~intervals.is_node[outer], outer, -1)
    return np.where((left >= 0) & (left == right), length[left], 0)


SpanRows = dict[str, AnyArray]
"""One column per field of a span and one entry per span; times are monotonic nanoseconds."""


def build_span_rows(intervals: Intervals, call: Int64Array, original: Int64Array) -> SpanRows:
    """Return the spans of calls and of backward in start order; `original` is the result of `forward_of_recompute`."""
    length = call_path_lengths(intervals)
    outermost = _without_inner_nodes(intervals, call)
    backward = cut_backward_spans(intervals, outermost, length)
    calls = np.flatnonzero(~intervals.is_node)
    recompute, in_backward = intervals.is_recompute[calls], intervals.in_backward[calls]
    outer_depth = _outer_depths(intervals, outermost, length)
    span_call = original[backward.call]
    is_linked = np.zeros(len(intervals), np.bool_)
    is_linked[span_call] = True
    link = np.where(is_linked, np.cumsum(is_linked) - 1, -1)

    first, last = np.append(calls, backward.first_node), np.append(calls, backward.last_node)
    depth = np.where(in_backward, outer_depth[calls], intervals.depth[calls])
    depth = np.append(depth, outer_depth[backward.first_node] + backward.level)
    order = np.lexsort((depth, intervals.start_position[first], intervals.start_ns[first]))
    first, last = first[order], last[order]
    return {
        "start_ns": intervals.start_ns[first],
        "end_ns": intervals.end_ns[last],
        "start_position": intervals.start_position[first],
        "end_position": intervals.end_position[last],
        "interval": np.append(calls, span_call)[order],
        "name": intervals.name[np.append(calls, backward.call)[order]],
        "phase": np.append(np.where(recompute, RECOMPUTE, FORWARD), np.full(len(span_call), BACKWARD))[order],
        "on_backward": np.append(in_backward, np.ones(len(span_call), np.bool_))[order],
        "thread": intervals.thread[first],
        "depth": depth[order],
        "call": intervals.call_key[np.append(original[calls], span_call)[order]] & CALL_INDEX_MASK,
        "link": np.append(np.where(recompute, -1, link[calls]), link[span_call])[order],
        "has_start": intervals.has_start[first],
        "has_end": intervals.has_end[last],
    }


def _without_inner_nodes(intervals: Intervals, call: Int64Array) -> Int64Array:
    """Return `call` with -1 for nodes that run inside another node of the same pass and call.

    An in-place operation on a view makes such an outer node around the operation's node.
    """
    parent = intervals.parent
    is_inner = intervals.is_node & (parent >= 0) & intervals.is_node[parent]
    same_pass = intervals.backward_pass == intervals.backward_pass[parent]
    return np.where(is_inner & same_pass & (call == call[parent]), -1, call)


def _outer_depths(intervals: Intervals, call: Int64Array, length: Int64Array) -> Int64Array:
    """Return the depth on the backward track at which each interval starts."""
    inner = np.zeros(len(intervals), np.int64)
    outer = np.zeros(len(intervals), np.int64)
    in_backward = intervals.in_backward
    for level in intervals.levels:
        parent = intervals.parent[level]
        outer[level] = np.where(parent >= 0, inner[parent], 0)
        path_length = np.where(call[level] >= 0, length[call[level]], 0)
        inner[level] = outer[level] + np.where(intervals.is_node[level], path_length, in_backward[level])
    return outer


def number_tracks(key: AnyArray, numbers: Numbering[int]) -> Int64Array:
    """Return the number of each track key (twice the thread, plus one if backward); new keys get the next numbers."""
    keys = np.flatnonzero(np.bincount(key))
    number = np.zeros(int(keys.max(initial=-1)) + 1, np.int64)
    number[keys] = [numbers[track_key] for track_key in keys.tolist()]
    return number[key]


def forward_of_recompute(intervals: Intervals, call: Int64Array) -> Int64Array:
    """Return the forward call that each call repeats; the call itself if it repeats none.

    A recomputation starts inside a node, and can be several calls in a row. With a non-reentrant checkpoint the node
    belongs to the last call that is repeated, or to a call inside it. With a reentrant checkpoint the node belongs to
    the call that used the checkpoint. Then the latest calls of that name inside it that were not repeated yet are
    repeated; if there are none, those before it in the call around it. If all were repeated (`retain_graph=True`), the
    latest are repeated again. Inner calls repeat calls of the same name, in order.
    """
    original = np.arange(len(intervals), dtype=np.int64)
    recompute = intervals.is_recompute
    is_root = recompute & ((intervals.parent < 0) | intervals.is_node[intervals.parent])
    if not is_root.any():
        return original
    forward = np.flatnonzero(~intervals.is_node & ~recompute)
    forward = forward[np.lexsort((intervals.start_position[forward], intervals.name[forward]))]
    root = np.where(is_root, np.arange(len(intervals)), -1)
    for level in intervals.levels:
        inner = level[recompute[level] & ~is_root[level]]
        root[inner] = root[intervals.parent[inner]]
    _match_roots(intervals, call, np.flatnonzero(is_root), forward, original)
    _match_inside(intervals, root, forward, original)
    return original


def _match_roots(
    intervals: Intervals, call: Int64Array, roots: Int64Array, forward: Int64Array, original: Int64Array
) -> None:
    """Fill in `original` for the outermost calls of each recomputation."""
    names, parent = intervals.name[forward], intervals.parent
    start, end = intervals.start_position, intervals.end_position
    namesakes: dict[int, _Namesakes] = {}
    for rerun in _runs(intervals, roots):
        node, name = int(parent[rerun[0]]), int(intervals.name[rerun[0]])
        if name not in namesakes:
            left, right = np.searchsorted(names, [name, name + 1])
            namesakes[name] = _Namesakes(forward[left:right].tolist(), start)
        last = scope = int(call[node]) if node >= 0 else -1
        while last >= 0 and (intervals.is_node[last] or intervals.name[last] != name):
            last = int(parent[last])
        if last >= 0:
            repeated = namesakes[name].until(int(start[last]), len(rerun))
            repeated = [candidate for candidate in repeated if parent[candidate] == parent[last]]
        else:
            first = int(start[rerun[0]])
            limit = first if scope < 0 else min(first, int(end[scope]))
            while not (repeated := namesakes[name].take(scope, limit, len(rerun))) and scope >= 0:
                limit = int(start[scope])
                scope = int(parent[scope])
            repeated = repeated or namesakes[name].until(first, len(rerun))
        # If fewer forward calls are known than ran again, they are the last ones.
        for root, candidate in zip(reversed(rerun), repeated, strict=False):
            original[root] = original[candidate]


def _runs(intervals: Intervals, roots: Int64Array) -> list[list[int]]:
    """Return lists of calls of one name that a node makes without running nodes in between; ordered by first call."""
    roots = roots[np.argsort(intervals.start_position[roots], kind="stable")]
    order = intervals.sort_keys(intervals.parent, intervals.start_position)
    nodes_before = np.searchsorted(np.sort(order[intervals.is_node]), order[roots])
    columns = intervals.thread[roots], nodes_before, intervals.parent[roots], intervals.name[roots]
    runs: dict[tuple[int, ...], list[int]] = {}
    for root, *key in zip(roots.tolist(), *(column.tolist() for column in columns), strict=True):
        runs.setdefault(tuple(key), []).append(root)
    return list(runs.values())


class _Namesakes:
    """The forward calls of one name, in order; the positions of queries must ascend."""

    def __init__(self, calls: list[int], start: Int64Array) -> None:
        self._calls = calls
        self._start = start
        self._started_count = 0
        self._not_repeated: list[int] = []

    def until(self, position: int, count: int) -> list[int]:
        """Return the latest calls that started up to a position, at most `count`, latest first."""
        end = bisect_right(self._calls, position, key=self._start.__getitem__)
        return self._calls[max(end - count, 0) : end][::-1]

    def take(self, scope: int, limit: int, count: int) -> list[int]:
        """Remove and return the latest calls in `scope` (-1: anywhere) that started before `limit`, latest first."""
        candidates, start = self._not_repeated, self._start
        while self._started_count < len(self._calls) and start[self._calls[self._started_count]] < limit:
            candidates.append(self._calls[self._started_count])
            self._started_count += 1
        last = len(candidates)
        while last and start[candidates[last - 1]] >= limit:
            last -= 1
        first = last
        while first and last - first < count and (scope < 0 or start[candidates[first - 1]] > start[scope]):
            first -= 1
        calls = candidates[first:last]
        del candidates[first:last]
        return calls[::-1]


def _match_inside(intervals: Intervals, root: Int64Array, forward: Int64Array, original: Int64Array) -> None:
    """Fill in `original` for inner calls: the n-th call of a name repeats the n-th one in the repeated call."""
    start, end, name = intervals.start_position, intervals.end_position, intervals.name
    inner = np.flatnonzero((root >= 0) & (root != np.arange(len(intervals))))
    inner = inner[original[root[inner]] != root[inner]]
    if not len(inner) or not len(forward):
        return
    inner = inner[np.lexsort((start[inner], name[inner], root[inner]))]
    repeated = original[root[inner]]
    position = np.searchsorted(
        intervals.sort_keys(name[forward], start[forward]), intervals.sort_keys(name[inner], start[repeated])
    )
    position += count_in_run(root[inner], name[inner])
    candidate = forward[np.minimum(position, len(forward) - 1)]
    is_match = (position < len(forward)) & (name[candidate] == name[inner]) & (end[candidate] <= end[repeated])
    original[inner[is_match]] = candidate[is_match]
