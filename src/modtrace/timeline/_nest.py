"""Which span lies in which, from their times alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from ._columns import Columns

__all__ = ["nested", "outermost_first"]

Ints = npt.NDArray[np.int64]


def outermost_first(start: Ints, end: Ints) -> npt.NDArray[np.intp] | None:
    """Return the order (start, then the longer first) of spans of one track; None where they have it already."""
    same = start[1:] == start[:-1]
    if np.all(start[1:] >= start[:-1]) and not np.any(same & (end[1:] > end[:-1])):
        return None
    return np.lexsort((-end, start))


def nested(columns: Columns) -> Columns:
    """Compute `depth` and `parent` anew, per track, from start and end; the order of the spans stays.

    A span lies in all that began no later and end no earlier. An empty span (start = end) lies in the longest one that
    begins or runs at its instant, and empty spans of one instant lie in each other: this is how Perfetto lays out
    Chrome's events, which carry no depth.
    """
    depth = np.zeros(len(columns), np.int32)
    parent = np.full(len(columns), -1, np.int64)
    for track in np.unique(columns.track):
        rows = np.flatnonzero(columns.track == track)
        order = outermost_first(columns.start[rows], columns.end[rows])
        if order is not None:
            rows = rows[order]
        depth[rows], parent[rows] = _nest(columns.start[rows], columns.end[rows], rows)
    return dataclasses.replace(columns, depth=depth, parent=parent)


def _nest(start: Ints, end: Ints, rows: npt.NDArray[np.intp]) -> tuple[Ints, Ints]:
    empty = start == end
    ended = np.searchsorted(np.sort(end[~empty]), start, side="right")
    ended += np.searchsorted(start[empty], start, side="left")
    depth = np.arange(len(start)) - ended
    parent = np.full(len(start), -1, np.int64)
    outer = np.flatnonzero(depth == 0)
    for level in range(1, int(depth.max(initial=0)) + 1):
        inner = np.flatnonzero(depth == level)
        parent[inner] = rows[outer[np.searchsorted(outer, inner) - 1]]
        outer = inner
    return depth, parent
