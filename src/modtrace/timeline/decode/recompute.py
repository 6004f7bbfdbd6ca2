"""Which forward call a recomputation repeats: so that its number is the one the reader knows."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from ..._typing import Int64Array
from .call_tree import Intervals

__all__ = ["forward_of_recompute"]


def forward_of_recompute(intervals: Intervals, call: Int64Array) -> Int64Array:
    """Return for each call the forward call that it is or repeats; itself where nothing is known to be repeated.

    A recomputation begins inside a node, and can be several calls in a row. With the non-reentrant kind
    the node belongs to the last of those that are repeated, or to one inside it; with the reentrant kind to the call
    that asked for the checkpoint, and then the latest calls of that name in there that were not repeated yet are meant,
    else those before it in the call around it. Where all were repeated, as with `retain_graph=True`, it is the latest
    again. What is called inside them repeats its namesakes, in order.

    Args:
        intervals: calls and nodes.
        call: for each node the call it belongs to, or -1.
    """
    original = np.arange(len(intervals), dtype=np.int64)
    recompute = intervals.is_recompute
    is_root = recompute & ((intervals.parent < 0) | intervals.is_node[intervals.parent])
    if not is_root.any():
        return original
    forward = np.flatnonzero(~intervals.is_node & ~recompute)
    forward = forward[np.lexsort((intervals.start_position[forward], intervals.name[forward]))]
    root = np.where(is_root, np.arange(len(intervals)), -1)
    for depth in range(int(intervals.depth.max()) + 1):
        inner = np.flatnonzero((intervals.depth == depth) & recompute & ~is_root)
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
            found = namesakes[name].until(int(start[last]), len(again))
            found = [candidate for candidate in found if parent[candidate] == parent[last]]
        else:
            first = int(start[again[0]])
            before = first if asked_by < 0 else min(first, int(end[asked_by]))
            while not (found := namesakes[name].take(asked_by, before, len(again))) and asked_by >= 0:
                before = int(start[asked_by])
                asked_by = int(parent[asked_by])
            found = found or namesakes[name].until(first, len(again))
        # Where fewer are known than ran again, the last ones are.
        for root, candidate in zip(reversed(again), found, strict=False):
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
    """The forward calls of one name, in order; asked for at later and later positions.

    Args:
        calls: indices of their intervals.
        start: the start position of every interval.
    """

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
        found = waiting[begin:end]
        del waiting[begin:end]
        return found[::-1]


def _in_call_path(intervals: Intervals, inner: int, name: int) -> int:
    """Return the innermost call of that name in the call path that ends in `inner`, or -1."""
    call = inner
    while call >= 0 and (intervals.is_node[call] or intervals.name[call] != name):
        call = int(intervals.parent[call])
    return call


def _match_inside(intervals: Intervals, root: Int64Array, forward: Int64Array, original: Int64Array) -> None:
    """Pair the n-th call of a name inside a recomputation with the n-th of that name inside what it repeats.

    Args:
        intervals: calls and nodes.
        root: for each recomputed call the outermost call of the same recomputation; -1 for all else.
        forward: the forward calls, by name and then by start.
        original: changed in place; that of the roots is known.
    """
    start, end = intervals.start_position, intervals.end_position
    inner = np.flatnonzero((root >= 0) & (root != np.arange(len(intervals))))
    inner = inner[original[root[inner]] != root[inner]]
    if not len(inner) or not len(forward):
        return
    inner = inner[np.lexsort((start[inner], intervals.name[inner], root[inner]))]
    is_first = np.ones(len(inner), np.bool_)
    is_first[1:] = (np.diff(root[inner]) != 0) | (np.diff(intervals.name[inner]) != 0)
    rank = np.arange(len(inner))
    occurrence = rank - np.maximum.accumulate(np.where(is_first, rank, 0))
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
