"""Turn intervals labelled with a call path into nested spans; used for autograd nodes and for GPU work."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..._typing import Int64Array


class LabelledInterval(NamedTuple):
    """Something that ran, and the calls it ran for.

    Attributes:
        start: ns.
        end: ns.
        path: a key for each call around it, from the outermost to the innermost; empty if it ran for none.
    """

    start: int
    end: int
    path: Sequence[Hashable]


class PathSpan(NamedTuple):
    """A time in which all that ran belonged to one call.

    Attributes:
        start: ns.
        end: ns.
        key: of the call.
        depth: how many spans are around it.
    """

    start: int
    end: int
    key: Hashable
    depth: int


def spans_from_intervals(intervals: Iterable[LabelledInterval]) -> list[PathSpan]:
    """Return spans that begin and end with the intervals; neighbours share the spans of the calls they have in common.

    Args:
        intervals: in start order; where one begins before its forerunner has ended, the forerunner's spans end there.

    Returns:
        The spans in order of start and depth; those of one depth do not overlap.

    Example:
        >>> spans_from_intervals([LabelledInterval(0, 10, "a"), LabelledInterval(10, 20, "ab")])
        [PathSpan(start=0, end=20, key='a', depth=0), PathSpan(start=10, end=20, key='b', depth=1)]
    """
    spans: list[PathSpan] = []
    keys: list[Hashable] = []
    starts: list[int] = []
    ends: list[int] = []
    for interval in intervals:
        shared = 0
        for open_key, key in zip(keys, interval.path, strict=False):
            if open_key != key:
                break
            shared += 1
        _close(spans, keys, starts, ends, shared, interval.start)
        ends[:] = [max(end, interval.end) for end in ends]
        more = len(interval.path) - shared
        keys += interval.path[shared:]
        starts += [interval.start] * more
        ends += [interval.end] * more
    _close(spans, keys, starts, ends, 0, None)
    spans.sort(key=lambda span: (span.start, span.depth))
    return spans


def _close(
    spans: list[PathSpan], keys: list[Hashable], starts: list[int], ends: list[int], left: int, before: int | None
) -> None:
    while len(keys) > left:
        key, start, end = keys.pop(), starts.pop(), ends.pop()
        if before is not None:
            end = min(end, before)
        if end > start:
            spans.append(PathSpan(start, end, key, len(keys)))


def clip_and_nest(
    track: Int64Array, start: Int64Array, end: Int64Array, rank: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Nest spans that may overlap: a span ends with the one around it at the latest.

    Args:
        track: int64[n].
        start: int64[n].
        end: int64[n].
        rank: int64[n]; of two equal spans the one with the lower rank is the outer.

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
    for index, track_, start_, end_ in rows:
        if track_ != current:
            current = track_
            stack.clear()
        while stack and stack[-1][1] <= start_:
            stack.pop()
        new_end = end_
        if stack:
            parent[index], around = stack[-1]
            new_end = min(end_, around)
            end[index], depth[index] = new_end, len(stack)
        stack.append((index, new_end))
    return end, parent, depth
