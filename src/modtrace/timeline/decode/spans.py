"""Intervals → one row per span, each at its depth on its track; backward spans are cut from runs of nodes.

Neighbouring nodes of one thread share the spans of the calls that they have in common. A call whose nodes are
interleaved with another's has several spans. So backward spans are nested by construction.
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

    first_node: Int64Array  # index of the interval of the node it begins with
    last_node: Int64Array  # index of the interval of the node it ends with
    call: Int64Array  # index of the interval of the call it belongs to
    level: Int64Array  # how many calls of the same call path are around it


def call_path_lengths(intervals: Intervals) -> Int64Array:
    """Return for each call the length of its call path: itself and the calls around it, up to the next node."""
    length = np.zeros(len(intervals), np.int64)
    for level in intervals.levels:
        calls = level[~intervals.is_node[level]]
        parent = intervals.parent[calls]
        length[calls] = 1 + np.where(parent >= 0, np.where(intervals.is_node[parent], 0, length[parent]), 0)
    return length


def cut_backward_spans(intervals: Intervals, call: Int64Array, length: Int64Array) -> BackwardSpans:
    """Cut the runs of nodes into spans of the calls that they belong to."""
    # Intervals are in the order of their starts, and so are those in one.
    siblings = np.lexsort((intervals.parent, intervals.thread))
    place = np.flatnonzero(intervals.is_node[siblings])
    nodes: Int64Array = siblings[place]
    # Consecutive nodes of one backward pass that have no other event between them share what their calls share.
    adjacent = np.diff(place) == 1
    for column in (intervals.thread, intervals.parent, intervals.backward_pass):
        adjacent &= column[nodes[:-1]] == column[nodes[1:]]
    node_call = call[nodes]
    path_length = np.where(node_call >= 0, length[node_call], 0)
    shared = np.zeros(len(nodes) + 1, np.int64)
    shared[1:-1] = np.where(adjacent, _shared_lengths(intervals, node_call, length), 0)
    # The levels that start and end at a node run from those that it shares with its neighbour to its path's length.
    level, first = expand_ranges(shared[:-1], path_length)
    last_level, last = expand_ranges(shared[1:], path_length)
    span_call, inner_levels = node_call[first], path_length[first] - 1 - level
    while len(outer := np.flatnonzero(inner_levels)):
        span_call[outer] = intervals.parent[span_call[outer]]
        inner_levels[outer] -= 1
    # On one level starts and ends alternate, so the n-th of one belongs to the n-th of the other.
    by_start, by_end = order_in_groups(level << 32 | first, 32), order_in_groups(last_level << 32 | last, 32)
    return BackwardSpans(
        first_node=nodes[first[by_start]],
        last_node=nodes[last[by_end]],
        call=span_call[by_start],
        level=level[by_start],
    )


def _shared_lengths(intervals: Intervals, node_call: Int64Array, length: Int64Array) -> Int64Array:
    """Return how many calls the call paths of consecutive nodes have in common, from the outermost on."""
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
    """Return the spans of calls and of backward in start order; `original` is what each call is or repeats."""
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
    order = np.lexsort((depth, intervals.start_position[first], intervals.start[first]))
    first, last = first[order], last[order]
    return {
        "start": intervals.start[first],
        "end": intervals.end[last],
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
    """Return `call` without the nodes that another node of their pass and call runs as a part of itself.

    An in-place operation on a view makes such a node: it holds the operation's own.
    """
    parent = intervals.parent
    is_inner = intervals.is_node & (parent >= 0) & intervals.is_node[parent]
    same_pass = intervals.backward_pass == intervals.backward_pass[parent]
    return np.where(is_inner & same_pass & (call == call[parent]), -1, call)


def _outer_depths(intervals: Intervals, call: Int64Array, length: Int64Array) -> Int64Array:
    """Return for each interval the depth on the backward track at which it starts."""
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
    """Return the number of each span's track: of twice its thread, plus one if backward. New ones get the next."""
    used = np.flatnonzero(np.bincount(key))
    number = np.zeros(int(used.max(initial=-1)) + 1, np.int64)
    number[used] = [numbers[thread_key] for thread_key in used.tolist()]
    return number[key]


def forward_of_recompute(intervals: Intervals, call: Int64Array) -> Int64Array:
    """Return for each call the forward call that it is or repeats; itself if nothing is known to be repeated.

    A recomputation begins inside a node, and can be several calls in a row. With the non-reentrant kind of checkpoint
    the node belongs to the last call that is repeated, or to one inside it. With the reentrant kind the node belongs to
    the call that asked for the checkpoint. Then the latest calls of that name in there are repeated that were not yet,
    else those before it in the call around it. If all were repeated, as with `retain_graph=True`, it is the latest
    again. What is called inside them repeats its namesakes, in order.
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
        last = asked_by = int(call[node]) if node >= 0 else -1
        while last >= 0 and (intervals.is_node[last] or intervals.name[last] != name):
            last = int(parent[last])
        if last >= 0:
            repeated = namesakes[name].until(int(start[last]), len(rerun))
            repeated = [candidate for candidate in repeated if parent[candidate] == parent[last]]
        else:
            first = int(start[rerun[0]])
            before = first if asked_by < 0 else min(first, int(end[asked_by]))
            while not (repeated := namesakes[name].take(asked_by, before, len(rerun))) and asked_by >= 0:
                before = int(start[asked_by])
                asked_by = int(parent[asked_by])
            repeated = repeated or namesakes[name].until(first, len(rerun))
        # Where fewer are known than ran again, the last ones are.
        for root, candidate in zip(reversed(rerun), repeated, strict=False):
            original[root] = original[candidate]


def _runs(intervals: Intervals, roots: Int64Array) -> list[list[int]]:
    """Return the calls of one name that a node makes until nodes run inside it: by their first one, in order."""
    roots = roots[np.argsort(intervals.start_position[roots], kind="stable")]
    order = intervals.sort_keys(intervals.parent, intervals.start_position)
    nodes_before = np.searchsorted(np.sort(order[intervals.is_node]), order[roots])
    columns = intervals.thread[roots], nodes_before, intervals.parent[roots], intervals.name[roots]
    runs: dict[tuple[int, ...], list[int]] = {}
    for root, *key in zip(roots.tolist(), *(column.tolist() for column in columns), strict=True):
        runs.setdefault(tuple(key), []).append(root)
    return list(runs.values())


class _Namesakes:
    """The forward calls of one name, in order; asked for at later and later positions."""

    def __init__(self, calls: list[int], start: Int64Array) -> None:
        self._calls = calls
        self._start = start
        self._begun = 0
        self._not_repeated: list[int] = []

    def until(self, position: int, count: int) -> list[int]:
        """Return the latest calls that began up to there, at most `count`, the latest first."""
        end = bisect_right(self._calls, position, key=self._start.__getitem__)
        return self._calls[max(end - count, 0) : end][::-1]

    def take(self, scope: int, before: int, count: int) -> list[int]:
        """Return the latest calls inside `scope` (-1: anywhere) that began `before`, the latest first, only once."""
        waiting, start = self._not_repeated, self._start
        while self._begun < len(self._calls) and start[self._calls[self._begun]] < before:
            waiting.append(self._calls[self._begun])
            self._begun += 1
        end = len(waiting)
        while end and start[waiting[end - 1]] >= before:
            end -= 1
        begin = end
        while begin and end - begin < count and (scope < 0 or start[waiting[begin - 1]] > start[scope]):
            begin -= 1
        taken = waiting[begin:end]
        del waiting[begin:end]
        return taken[::-1]


def _match_inside(intervals: Intervals, root: Int64Array, forward: Int64Array, original: Int64Array) -> None:
    """Pair the n-th call of a name in a recomputation with the n-th in what it repeats; changes `original`."""
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
