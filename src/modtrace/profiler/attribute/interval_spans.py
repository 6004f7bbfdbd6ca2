"""Work with the calls it belongs to → slices, nested by construction: the same for autograd nodes and for kernels."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..._typing import Int64Array

__all__ = ["LabelledInterval", "PathSpan", "nest", "spans_from_intervals"]


class LabelledInterval(NamedTuple):
    """Something that ran, and for whom: `path` leads from the outermost call to the innermost; empty for nobody."""

    start: int
    end: int
    path: Sequence[Hashable]


class PathSpan(NamedTuple):
    """A stretch in which all that ran belonged to `key`; `depth` slices lie around it."""

    start: int
    end: int
    key: Hashable
    depth: int


def spans_from_intervals(pieces: Iterable[LabelledInterval]) -> list[PathSpan]:
    """Cut slices that begin and end with the pieces; neighbours share the slices of the calls they have in common.

    Args:
        pieces: in start order; where one begins before its forerunner has ended, the forerunner's slices end there.
    """
    done: list[PathSpan] = []
    keys: list[Hashable] = []
    starts: list[int] = []
    ends: list[int] = []
    for piece in pieces:
        shared = 0
        for ours, theirs in zip(keys, piece.path, strict=False):
            if ours != theirs:
                break
            shared += 1
        _close(done, keys, starts, ends, shared, piece.start)
        ends[:] = [max(end, piece.end) for end in ends]
        more = len(piece.path) - shared
        keys += piece.path[shared:]
        starts += [piece.start] * more
        ends += [piece.end] * more
    _close(done, keys, starts, ends, 0, None)
    done.sort(key=lambda slice_: (slice_.start, slice_.depth))
    return done


def _close(
    done: list[PathSpan], keys: list[Hashable], starts: list[int], ends: list[int], left: int, before: int | None
) -> None:
    while len(keys) > left:
        key, start, end = keys.pop(), starts.pop(), ends.pop()
        if before is not None:
            end = min(end, before)
        if end > start:
            done.append(PathSpan(start, end, key, len(keys)))


def nest(
    track: Int64Array, start: Int64Array, end: Int64Array, rank: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Nest slices that may overlap: what would outlive the slice around it ends with that one.

    Args:
        track: int64[n].
        start: int64[n].
        end: int64[n].
        rank: int64[n]; of two equal slices the one with the lower rank is the outer.

    Returns:
        The end, the parent's index or -1, and the depth of each.
    """
    end = end.copy()
    parent = np.full(len(start), -1, np.int64)
    depth = np.zeros(len(start), np.int64)
    stack: list[tuple[int, int]] = []
    current = -1
    order = np.lexsort((rank, -end, start, track))
    rows = zip(order.tolist(), track[order].tolist(), start[order].tolist(), end[order].tolist(), strict=True)
    for at, track_, start_, end_ in rows:
        if track_ != current:
            current = track_
            stack.clear()
        while stack and stack[-1][1] <= start_:
            stack.pop()
        closes = end_
        if stack:
            parent[at], around = stack[-1]
            closes = min(end_, around)
            end[at], depth[at] = closes, len(stack)
        stack.append((at, closes))
    return end, parent, depth
