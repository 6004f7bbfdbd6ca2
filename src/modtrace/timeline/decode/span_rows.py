"""Intervals and backward spans → one row per span, each at its depth on its track."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..._typing import AnyArray, Int64Array
from ...ring.slot_format import CALL_INDEX_MASK
from ..columns import BACKWARD, FORWARD, RECOMPUTE
from ..contents import Process, Track
from .backward_spans import call_path_lengths, cut_backward_spans
from .call_tree import Intervals
from .recompute import forward_of_recompute

__all__ = ["SpanRows", "assign_tracks", "build_span_rows", "find_parents"]

SpanRows = dict[str, AnyArray]
"""One column per field of a span and one entry per span; times are monotonic nanoseconds."""


def build_span_rows(intervals: Intervals, call: Int64Array) -> SpanRows:
    """Return the spans of calls and of backward, in the order of their starts.

    Args:
        intervals: calls and nodes.
        call: for each node the call it belongs to, or -1.
    """
    length = call_path_lengths(intervals)
    original = forward_of_recompute(intervals, call)
    outermost = _without_inner_nodes(intervals, call)
    backward = cut_backward_spans(intervals, outermost, length)
    calls = np.flatnonzero(~intervals.is_node)
    recompute, in_backward = intervals.is_recompute[calls], intervals.in_backward[calls]
    outer_depth = _outer_depths(intervals, outermost, length)
    span_call = original[backward.call]
    link = np.full(len(intervals), -1, np.int64)
    linked = np.unique(span_call)
    link[linked] = np.arange(len(linked))

    def join(of_calls: AnyArray, of_backward: AnyArray) -> AnyArray:
        return np.concatenate([of_calls, of_backward])

    rows = {
        "start": join(intervals.start[calls], intervals.start[backward.first_node]),
        "end": join(intervals.end[calls], intervals.end[backward.last_node]),
        "start_position": join(intervals.start_position[calls], intervals.start_position[backward.first_node]),
        "name": join(intervals.name[calls], intervals.name[backward.call]),
        "phase": join(np.where(recompute, RECOMPUTE, FORWARD), np.full(len(span_call), BACKWARD)),
        "on_backward": join(in_backward, np.ones(len(span_call), np.bool_)),
        "thread": join(intervals.thread[calls], intervals.thread[backward.first_node]),
        "depth": join(
            np.where(in_backward, outer_depth[calls], intervals.depth[calls]),
            outer_depth[backward.first_node] + backward.level,
        ),
        "call": join(intervals.call_key[original[calls]], intervals.call_key[span_call]) & CALL_INDEX_MASK,
        "link": join(np.where(recompute, -1, link[calls]), link[span_call]),
        "has_start": join(intervals.has_start[calls], intervals.has_start[backward.first_node]),
        "has_end": join(intervals.has_end[calls], intervals.has_end[backward.last_node]),
    }
    order = np.lexsort((rows["depth"], rows["start_position"], rows["start"]))
    return {field: column[order] for field, column in rows.items()}


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
    for depth in range(int(intervals.depth.max()) + 1 if len(intervals) else 0):
        level = np.flatnonzero(intervals.depth == depth)
        parent = intervals.parent[level]
        outer[level] = np.where(parent >= 0, inner[parent], 0)
        path_length = np.where(call[level] >= 0, length[call[level]], 0)
        inner[level] = outer[level] + np.where(intervals.is_node[level], path_length, in_backward[level])
    return outer


def assign_tracks(
    rows: SpanRows, threads: Sequence[tuple[str, int]], process: Process
) -> tuple[list[Track], Int64Array]:
    """Return the tracks that the spans need, and for each span the index of its track.

    Args:
        rows: the spans.
        threads: name and tid of each thread.
        process: whose threads these are.
    """
    track_key = rows["thread"] * 2 + rows["on_backward"]
    used, track = np.unique(track_key, return_inverse=True)
    tracks = []
    for key in used.tolist():
        thread, tid = threads[key // 2]
        tracks.append(Track(("forward", "backward")[key % 2], thread, tid, process))
    return tracks, track


def find_parents(track: Int64Array, depth: Int64Array) -> Int64Array:
    """Return the index of the span around each: the last one before it that lies one less deep on its track, or -1."""
    count = len(track)
    stride = np.int64(depth.max() + 2) if count else np.int64(1)
    rank = np.arange(count, dtype=np.int64)
    sort_key = (track * stride + depth) * count + rank
    order = np.argsort(sort_key, kind="stable")
    outer = np.searchsorted(sort_key[order], (track * stride + depth - 1) * count + rank) - 1
    return np.where(depth > 0, order[np.maximum(outer, 0)], -1) if count else rank
