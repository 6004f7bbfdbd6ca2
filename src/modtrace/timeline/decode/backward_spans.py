"""Nodes with their calls → backward spans, nested by construction.

Neighbouring nodes of one thread share the spans of the calls that they have in common. A call whose nodes are
interleaved with another's has several spans.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..._typing import BoolArray, Int64Array
from .call_tree import Intervals

__all__ = ["BackwardSpans", "call_path_lengths", "cut_backward_spans"]


class BackwardSpans(NamedTuple):
    """Backward spans; int64 arrays of equal length.

    Attributes:
        first_node: index of the interval of the node it begins with.
        last_node: index of the interval of the node it ends with.
        call: index of the interval of the call it belongs to.
        level: how many calls of the same call path are around it.
    """

    first_node: Int64Array
    last_node: Int64Array
    call: Int64Array
    level: Int64Array


def call_path_lengths(intervals: Intervals) -> Int64Array:
    """Return for each call the length of its call path: itself and the calls around it, up to the next node."""
    length = np.zeros(len(intervals), np.int64)
    # One depth at a time, so that a parent's length is there before its children ask.
    for depth in range(int(intervals.depth.max()) + 1 if len(intervals) else 0):
        calls = np.flatnonzero((intervals.depth == depth) & ~intervals.is_node)
        parent = intervals.parent[calls]
        length[calls] = 1 + np.where(parent >= 0, np.where(intervals.is_node[parent], 0, length[parent]), 0)
    return length


def cut_backward_spans(intervals: Intervals, call: Int64Array, length: Int64Array) -> BackwardSpans:
    """Cut the runs of nodes into spans of the calls that they belong to.

    Args:
        intervals: calls and nodes.
        call: for each node the call it belongs to, or -1.
        length: for each call the length of its call path.
    """
    nodes = _in_sibling_order(intervals)
    if not len(nodes):
        none = np.zeros(0, np.int64)
        return BackwardSpans(none, none, none, none)
    own_call = call[nodes]
    path_length = np.where(own_call >= 0, length[own_call], 0)
    shared = np.zeros(len(nodes) + 1, np.int64)
    shared[1:-1] = np.where(_are_adjacent(intervals, nodes), _shared_lengths(intervals, own_call, length), 0)
    starting, ending = path_length - shared[:-1], path_length - shared[1:]
    first, level, span_call = _starts(intervals, own_call, path_length, starting)
    last = np.repeat(np.arange(len(nodes)), ending)
    # The levels that end at a node run from the ones it shares with the next up to its own path's length.
    offset = np.arange(len(last)) - np.repeat(np.cumsum(ending) - ending, ending)
    last_level = np.repeat(shared[1:], ending) + offset
    # On one level starts and ends alternate, so the n-th of one belongs to the n-th of the other.
    by_start = np.lexsort((first, level))
    by_end = np.lexsort((last, last_level))
    return BackwardSpans(
        first_node=nodes[first[by_start]],
        last_node=nodes[last[by_end]],
        call=span_call[by_start],
        level=level[by_start],
    )


def _in_sibling_order(intervals: Intervals) -> Int64Array:
    nodes = np.flatnonzero(intervals.is_node)
    order = np.lexsort((intervals.start_position[nodes], intervals.parent[nodes], intervals.thread[nodes]))
    return np.asarray(nodes[order], np.int64)


def _are_adjacent(intervals: Intervals, nodes: Int64Array) -> BoolArray:
    """bool[n-1]: True where consecutive sibling nodes of one backward pass have no other event between them."""
    order = np.lexsort((intervals.start_position, intervals.parent, intervals.thread))
    position = np.empty(len(intervals), np.int64)
    position[order] = np.arange(len(intervals))
    left, right = nodes[:-1], nodes[1:]
    adjacent = position[left] + 1 == position[right]
    for column in (intervals.thread, intervals.parent, intervals.backward_pass):
        adjacent &= column[left] == column[right]
    return np.asarray(adjacent, np.bool_)


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
