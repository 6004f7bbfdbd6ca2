"""Which forward call a recomputation repeats: so that its number is the one the reader knows."""

from __future__ import annotations

import numpy as np

from ..._typing import Int64Array
from .call_tree import Intervals

__all__ = ["forward_of_recompute"]


def forward_of_recompute(intervals: Intervals, call: Int64Array) -> Int64Array:
    """Return for each call the forward call that it is or repeats; itself where nothing is known to be repeated.

    A recomputation begins inside a node. With the non-reentrant kind the node belongs to the call that is repeated, or
    to one inside it; with the reentrant kind to the call that asked for the checkpoint, and then the latest call of
    that name in there that was not repeated yet is meant. What is called inside it repeats its namesakes, in order.

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
    """Fill in `original` for the outermost call of each recomputation."""
    names = intervals.name[forward]
    start, end = intervals.start_position, intervals.end_position
    # What was matched is taken from the end of its namesakes, so a long run stays linear.
    unmatched: dict[int, list[int]] = {}
    for root in roots[np.argsort(start[roots], kind="stable")].tolist():
        name = int(intervals.name[root])
        if name not in unmatched:
            left, right = np.searchsorted(names, [name, name + 1])
            unmatched[name] = forward[left:right].tolist()
        parent = int(intervals.parent[root])
        asked_by = int(call[parent]) if parent >= 0 else -1
        found = _in_call_path(intervals, asked_by, name)
        if found < 0:
            namesakes = unmatched[name]
            for position in range(len(namesakes) - 1, -1, -1):
                candidate = namesakes[position]
                if start[candidate] < start[root] and (
                    asked_by < 0 or (start[asked_by] <= start[candidate] and end[candidate] <= end[asked_by])
                ):
                    found = namesakes.pop(position)
                    break
        if found >= 0:
            original[root] = original[found]


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
