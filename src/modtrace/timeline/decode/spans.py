"""Intervals → one row per span, each at its depth on its track; backward spans are cut from runs of nodes.

Neighbouring nodes of one thread share the spans of the calls that they have in common. A call whose nodes are
interleaved with another's has several spans. So backward spans are nested by construction.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..._arrays import AnyArray, Int64Array, Numbering, count_in_run, expand_ranges, order_in_groups
from ...ring.slot_format import CALL_INDEX_MASK
from ..contents import Process, Track
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
    own_call = call[nodes]
    path_length = np.where(own_call >= 0, length[own_call], 0)
    shared = np.zeros(len(nodes) + 1, np.int64)
    shared[1:-1] = np.where(adjacent, _shared_lengths(intervals, own_call, length), 0)
    first, level, span_call = _starts(intervals, own_call, path_length, path_length - shared[:-1])
    # The levels that end at a node run from the ones it shares with the next up to its own path's length.
    last_level, last = expand_ranges(shared[1:], path_length)
    # On one level starts and ends alternate, so the n-th of one belongs to the n-th of the other.
    by_start, by_end = order_in_groups(level << 32 | first, 32), order_in_groups(last_level << 32 | last, 32)
    return BackwardSpans(
        first_node=nodes[first[by_start]],
        last_node=nodes[last[by_end]],
        call=span_call[by_start],
        level=level[by_start],
    )


def _shared_lengths(intervals: Intervals, own_call: Int64Array, length: Int64Array) -> Int64Array:
    """int64[n-1]: how many calls the call paths of consecutive nodes have in common, from the outermost on."""
    left, right = own_call[:-1].copy(), own_call[1:].copy()
    apart = (left >= 0) & (right >= 0) & (left != right)
    while apart.any():
        pair = np.flatnonzero(apart)
        left_length, right_length = length[left[pair]], length[right[pair]]
        climb_left, climb_right = pair[left_length >= right_length], pair[right_length >= left_length]
        outer_left = _outer_call(intervals, left[climb_left])
        outer_right = _outer_call(intervals, right[climb_right])
        left[climb_left], right[climb_right] = outer_left, outer_right
        apart[pair] = (left[pair] >= 0) & (right[pair] >= 0) & (left[pair] != right[pair])
    return np.where((left >= 0) & (left == right), length[left], 0)


def _outer_call(intervals: Intervals, call: Int64Array) -> Int64Array:
    """Return the call around each, within its call path, or -1."""
    parent = intervals.parent[call]
    return np.where((parent >= 0) & ~intervals.is_node[parent], parent, -1)


def _starts(
    intervals: Intervals, own_call: Int64Array, path_length: Int64Array, starting: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return where spans start: the position of the node, the level, and the call, for each level that starts there."""
    node = np.flatnonzero(starting > 0)
    call, level, left = own_call[node], path_length[node] - 1, starting[node]
    nodes, levels, calls = [node], [level], [call]
    while True:
        more = left > 1
        if not more.any():
            break
        node, call, level, left = node[more], _outer_call(intervals, call[more]), level[more] - 1, left[more] - 1
        nodes.append(node)
        levels.append(level)
        calls.append(call)
    return np.concatenate(nodes), np.concatenate(levels), np.concatenate(calls)


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
    inside = intervals.is_node & (parent >= 0) & intervals.is_node[parent]
    same_pass = intervals.backward_pass == intervals.backward_pass[parent]
    return np.where(inside & same_pass & (call == call[parent]), -1, call)


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
    number[used] = [numbers[one] for one in used.tolist()]
    return number[key]


def describe_tracks(keys: Iterable[int], threads: Sequence[tuple[str, int]], process: Process) -> list[Track]:
    """Return the tracks of some keys, as of `number_tracks`."""
    return [Track(("forward", "backward")[key % 2], *threads[key // 2], process) for key in keys]


def forward_of_recompute(intervals: Intervals, call: Int64Array) -> Int64Array:
    """Return for each call the forward call that it is or repeats; itself if nothing is known to be repeated.

    A recomputation begins inside a node, and can be several calls in a row. With the non-reentrant kind the node
    belongs to the last of those that are repeated, or to one inside it; with the reentrant kind to the call that asked
    for the checkpoint, and then the latest calls of that name in there that were not repeated yet are meant, else those
    before it in the call around it. Where all were repeated, as with `retain_graph=True`, it is the latest again. What
    is called inside them repeats its namesakes, in order.
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
    for again in _runs(intervals, roots):
        node, name = int(parent[again[0]]), int(intervals.name[again[0]])
        if name not in namesakes:
            left, right = np.searchsorted(names, [name, name + 1])
            namesakes[name] = _Namesakes(forward[left:right].tolist(), start)
        asked_by = int(call[node]) if node >= 0 else -1
        last = _in_call_path(intervals, asked_by, name)
        if last >= 0:
            repeated = namesakes[name].until(int(start[last]), len(again))
            repeated = [candidate for candidate in repeated if parent[candidate] == parent[last]]
        else:
            first = int(start[again[0]])
            before = first if asked_by < 0 else min(first, int(end[asked_by]))
            while not (repeated := namesakes[name].take(asked_by, before, len(again))) and asked_by >= 0:
                before = int(start[asked_by])
                asked_by = int(parent[asked_by])
            repeated = repeated or namesakes[name].until(first, len(again))
        # Where fewer are known than ran again, the last ones are.
        for root, candidate in zip(reversed(again), repeated, strict=False):
            original[root] = original[candidate]


def _runs(intervals: Intervals, roots: Int64Array) -> list[list[int]]:
    """Return the calls of one name that a node makes until nodes run inside it: by their first one, in order."""
    start, parent, thread = intervals.start_position, intervals.parent, intervals.thread
    lowest = int(start.min())
    stride = int(start.max()) - lowest + 1
    inside = parent * stride + start - lowest
    ran_before = np.searchsorted(np.sort(inside[intervals.is_node]), inside[roots])
    columns = (thread[roots], ran_before, parent[roots], intervals.name[roots])
    keys = zip(*(column.tolist() for column in columns), strict=True)
    runs: dict[tuple[int, ...], list[int]] = {}
    for _, root, key in sorted(zip(start[roots].tolist(), roots.tolist(), keys, strict=True)):
        runs.setdefault(key, []).append(root)
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


def _in_call_path(intervals: Intervals, inner: int, name: int) -> int:
    """Return the innermost call of that name in the call path that ends in `inner`, or -1."""
    call = inner
    while call >= 0 and (intervals.is_node[call] or intervals.name[call] != name):
        call = int(intervals.parent[call])
    return call


def _match_inside(intervals: Intervals, root: Int64Array, forward: Int64Array, original: Int64Array) -> None:
    """Pair the n-th call of a name in a recomputation with the n-th in what it repeats; changes `original`."""
    start, end = intervals.start_position, intervals.end_position
    inner = np.flatnonzero((root >= 0) & (root != np.arange(len(intervals))))
    inner = inner[original[root[inner]] != root[inner]]
    if not len(inner) or not len(forward):
        return
    inner = inner[np.lexsort((start[inner], intervals.name[inner], root[inner]))]
    occurrence = count_in_run(root[inner], intervals.name[inner])
    lowest = int(start.min())
    stride = int(start.max()) - lowest + 1
    repeated = original[root[inner]]
    position = occurrence + np.searchsorted(
        intervals.name[forward] * stride + start[forward] - lowest,
        intervals.name[inner] * stride + start[repeated] - lowest,
    )
    candidate = forward[np.minimum(position, len(forward) - 1)]
    match = (
        (position < len(forward))
        & (intervals.name[candidate] == intervals.name[inner])
        & (end[candidate] <= end[repeated])
    )
    original[inner[match]] = candidate[match]
