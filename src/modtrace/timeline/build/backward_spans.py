"""Nodes with their calls → backward slices, nested by construction.

Neighbouring nodes of one thread share the slices of the calls that they have in common. A call whose nodes are
interleaved with another's is several slices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..._typing import BoolArray, Int64Array
from .call_tree import Brackets

__all__ = ["Slices", "backward_slices", "chain_lengths"]


class Slices(NamedTuple):
    """Backward slices.

    Attributes:
        first: index of the node bracket it begins with.
        last: index of the node bracket it ends with.
        call: index of the call bracket it belongs to.
        level: how many calls of the same chain are around it.
    """

    first: Int64Array
    last: Int64Array
    call: Int64Array
    level: Int64Array


def chain_lengths(brackets: Brackets) -> Int64Array:
    """Return for each call the number of calls in its chain: itself and those around it, up to the next node."""
    length = np.zeros(len(brackets), np.int64)
    # Brackets stand in opening order, so a parent's length is there before its children ask, one depth at a time.
    for depth in range(int(brackets.depth.max()) + 1 if len(brackets) else 0):
        at = np.flatnonzero((brackets.depth == depth) & ~brackets.node)
        parent = brackets.parent[at]
        length[at] = 1 + np.where(parent >= 0, np.where(brackets.node[parent], 0, length[parent]), 0)
    return length


def backward_slices(brackets: Brackets, call: Int64Array, length: Int64Array) -> Slices:
    """Cut the slices.

    Args:
        brackets: calls and nodes.
        call: for each node the call it belongs to, or -1.
        length: for each call the length of its chain.
    """
    nodes = _in_sibling_order(brackets)
    if not len(nodes):
        none = np.zeros(0, np.int64)
        return Slices(none, none, none, none)
    own = call[nodes]
    height = np.where(own >= 0, length[own], 0)
    shared = np.zeros(len(nodes) + 1, np.int64)
    shared[1:-1] = np.where(_adjacent(brackets, nodes), _common(brackets, own, length), 0)
    opens, closes = height - shared[:-1], height - shared[1:]
    first, level, of_call = _openings(brackets, own, height, opens)
    last = np.repeat(np.arange(len(nodes)), closes)
    # The levels that close at a node run from the ones it shares with the next up to its own height.
    offset = np.arange(len(last)) - np.repeat(np.cumsum(closes) - closes, closes)
    last_level = np.repeat(shared[1:], closes) + offset
    # On one level openings and closings alternate, so the n-th of one belongs to the n-th of the other.
    by_opening = np.lexsort((first, level))
    by_closing = np.lexsort((last, last_level))
    return Slices(
        first=nodes[first[by_opening]],
        last=nodes[last[by_closing]],
        call=of_call[by_opening],
        level=level[by_opening],
    )


def _in_sibling_order(brackets: Brackets) -> Int64Array:
    nodes = np.flatnonzero(brackets.node)
    order = np.lexsort((brackets.opened[nodes], brackets.parent[nodes], brackets.thread[nodes]))
    return np.asarray(nodes[order], np.int64)


def _adjacent(brackets: Brackets, nodes: Int64Array) -> BoolArray:
    """Say of each two neighbours whether nothing but the engine's own work lies between them."""
    everything = np.lexsort((brackets.opened, brackets.parent, brackets.thread))
    place = np.empty(len(brackets), np.int64)
    place[everything] = np.arange(len(brackets))
    here, following = nodes[:-1], nodes[1:]
    same = (brackets.thread[here] == brackets.thread[following]) & (brackets.parent[here] == brackets.parent[following])
    same &= (brackets.task[here] == brackets.task[following]) & (place[here] + 1 == place[following])
    return np.asarray(same, np.bool_)


def _common(brackets: Brackets, own: Int64Array, length: Int64Array) -> Int64Array:
    """Return how many calls the chains of each two neighbours have in common, from the outermost on."""
    a, b = own[:-1].copy(), own[1:].copy()
    open_ = (a >= 0) & (b >= 0) & (a != b)
    while open_.any():
        at = np.flatnonzero(open_)
        higher, lower = length[a[at]], length[b[at]]
        climb_a, climb_b = at[higher >= lower], at[lower >= higher]
        next_a, next_b = _up(brackets, a[climb_a]), _up(brackets, b[climb_b])
        a[climb_a], b[climb_b] = next_a, next_b
        open_[at] = (a[at] >= 0) & (b[at] >= 0) & (a[at] != b[at])
    return np.where((a >= 0) & (a == b), length[a], 0)


def _up(brackets: Brackets, call: Int64Array) -> Int64Array:
    """Return the call around each, within its chain, or -1."""
    parent = brackets.parent[call]
    return np.where((parent >= 0) & ~brackets.node[parent], parent, -1)


def _openings(
    brackets: Brackets, own: Int64Array, height: Int64Array, opens: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return where slices open: the node's place, the level, and the call, for each level that opens there."""
    at = np.flatnonzero(opens > 0)
    call, level, left = own[at], height[at] - 1, opens[at]
    places, levels, calls = [at], [level], [call]
    while True:
        more = left > 1
        if not more.any():
            break
        at, call, level, left = at[more], _up(brackets, call[more]), level[more] - 1, left[more] - 1
        places.append(at)
        levels.append(level)
        calls.append(call)
    return np.concatenate(places), np.concatenate(levels), np.concatenate(calls)
