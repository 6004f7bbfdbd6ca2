"""Which forward call a recomputation repeats: so that its number is the one the reader knows."""

from __future__ import annotations

import numpy as np

from ..._typing import BoolArray, Int64Array
from .call_tree import Brackets

__all__ = ["originals"]


def originals(brackets: Brackets, call: Int64Array) -> Int64Array:
    """Return for each call the forward call that it is or repeats; itself where nothing is known to be repeated.

    A recomputation begins inside a node. With the non-reentrant kind the node belongs to the call that is repeated, or
    to one inside it; with the reentrant kind to the call that asked for the checkpoint, and then the latest call of
    that name in there that was not repeated yet is meant. What is called inside it repeats its namesakes, in order.

    Args:
        brackets: calls and nodes.
        call: for each node the call it belongs to, or -1.
    """
    original = np.arange(len(brackets), dtype=np.int64)
    again = brackets.recompute
    is_root = again & ((brackets.parent < 0) | brackets.node[brackets.parent])
    if not is_root.any():
        return original
    forward = np.flatnonzero(~brackets.node & ~again)
    forward = forward[np.lexsort((brackets.opened[forward], brackets.name[forward]))]
    _match_roots(brackets, call, np.flatnonzero(is_root), forward, original)
    _match_inside(brackets, _roots(brackets, again, is_root), forward, original)
    return original


def _match_roots(
    brackets: Brackets, call: Int64Array, roots: Int64Array, forward: Int64Array, original: Int64Array
) -> None:
    names = brackets.name[forward]
    opened, closed = brackets.opened, brackets.closed
    # What was matched is taken from the end of its namesakes, so a long run stays linear.
    waiting: dict[int, list[int]] = {}
    for root in roots[np.argsort(opened[roots], kind="stable")].tolist():
        name = int(brackets.name[root])
        if name not in waiting:
            left, right = np.searchsorted(names, [name, name + 1])
            waiting[name] = forward[left:right].tolist()
        parent = int(brackets.parent[root])
        asked_by = int(call[parent]) if parent >= 0 else -1
        found = _in_chain(brackets, asked_by, name)
        if found < 0:
            namesakes = waiting[name]
            for place in range(len(namesakes) - 1, -1, -1):
                candidate = namesakes[place]
                if opened[candidate] < opened[root] and (
                    asked_by < 0 or (opened[asked_by] <= opened[candidate] and closed[candidate] <= closed[asked_by])
                ):
                    found = namesakes.pop(place)
                    break
        if found >= 0:
            original[root] = original[found]


def _in_chain(brackets: Brackets, inner: int, name: int) -> int:
    """Return the innermost call of that name in the chain that ends in `inner`, or -1."""
    at = inner
    while at >= 0 and (brackets.node[at] or brackets.name[at] != name):
        at = int(brackets.parent[at])
    return at


def _roots(brackets: Brackets, again: BoolArray, is_root: BoolArray) -> Int64Array:
    """Return for each recomputed call the outermost call of the same recomputation; -1 for all else."""
    root = np.where(is_root, np.arange(len(brackets)), -1)
    for depth in range(int(brackets.depth.max()) + 1):
        at = np.flatnonzero((brackets.depth == depth) & again & ~is_root)
        root[at] = root[brackets.parent[at]]
    return root


def _match_inside(brackets: Brackets, root: Int64Array, forward: Int64Array, original: Int64Array) -> None:
    """Pair the n-th call of a name inside a recomputation with the n-th of that name inside what it repeats."""
    inner = np.flatnonzero((root >= 0) & (root != np.arange(len(brackets))))
    inner = inner[original[root[inner]] != root[inner]]
    if not len(inner) or not len(forward):
        return
    inner = inner[np.lexsort((brackets.opened[inner], brackets.name[inner], root[inner]))]
    fresh = np.ones(len(inner), np.bool_)
    fresh[1:] = (np.diff(root[inner]) != 0) | (np.diff(brackets.name[inner]) != 0)
    rank = np.arange(len(inner))
    occurrence = rank - np.maximum.accumulate(np.where(fresh, rank, 0))
    lowest = int(brackets.opened.min())
    stride = int(brackets.opened.max()) - lowest + 1
    repeated = original[root[inner]]
    place = occurrence + np.searchsorted(
        brackets.name[forward] * stride + brackets.opened[forward] - lowest,
        brackets.name[inner] * stride + brackets.opened[repeated] - lowest,
    )
    candidate = forward[np.minimum(place, len(forward) - 1)]
    match = (
        (place < len(forward))
        & (brackets.name[candidate] == brackets.name[inner])
        & (brackets.closed[candidate] <= brackets.closed[repeated])
    )
    original[inner[match]] = candidate[match]
