"""Turn intervals labelled with a call path into nested spans; used for autograd nodes and for GPU work."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._typing import Int64Array
from ..nesting import find_parents

_NEVER = int(np.iinfo(np.int64).max)


class LabelledInterval(NamedTuple):
    """Something that ran, and the calls it ran for."""

    start: int  # ns
    end: int  # ns
    # A key for each call around it, from the outermost to the innermost; empty if it ran for none
    path: Sequence[Hashable]


class PathSpan(NamedTuple):
    """A time in which all that ran belonged to one call."""

    start: int  # ns
    end: int  # ns
    key: Hashable  # of the call
    depth: int  # how many spans are around it


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
    still_open: list[list[Any]] = []  # start, end and key

    def close(left: int, before: int) -> None:
        while len(still_open) > left:
            start, end, key = still_open.pop()
            if still_open:
                still_open[-1][1] = max(still_open[-1][1], end)
            if min(end, before) > start:
                spans.append(PathSpan(start, min(end, before), key, len(still_open)))

    for interval in intervals:
        shared = 0
        for (_, _, open_key), key in zip(still_open, interval.path, strict=False):
            if open_key != key:
                break
            shared += 1
        close(shared, interval.start)
        still_open += [[interval.start, interval.end, key] for key in interval.path[shared:]]
        if still_open:
            still_open[-1][1] = max(still_open[-1][1], interval.end)
    close(0, _NEVER)
    spans.sort(key=lambda span: (span.start, span.depth))
    return spans


def clip_and_nest(
    track: Int64Array, start: Int64Array, end: Int64Array, rank: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Nest spans, each ending with the one around it, equal ones by rank; return end, parent or -1, and depth."""
    order = np.lexsort((rank, -end, start, track))
    end, parent, depth = end.copy(), np.full(len(start), -1, np.int64), np.zeros(len(start), np.int64)
    first = int(start.min(initial=_NEVER))
    stride = max(int(end.max(initial=first)) - first, 0) + 1
    if (int(track.max(initial=0)) + 1) * stride < _NEVER:
        # As if each track began where the one before it ends. An empty span is over when the next one begins.
        begins, ends = (track[order] * stride + (time[order] - first) for time in (start, end))
        is_empty = ends <= begins
        over = np.searchsorted(np.sort(ends[~is_empty], kind="stable"), begins, "right")
        depth[order] = np.arange(len(order)) - over - (np.cumsum(is_empty) - is_empty)
        parent[order] = np.append(order, -1)[find_parents(track[order], depth[order])]
        if np.all((parent < 0) | (end <= end[parent])):
            return end, parent, depth
        parent[:], depth[:] = -1, 0
    # One outlasts the span around it: each is cut where that ends, row by row.
    stack: list[tuple[int, int]] = []
    current = -1
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
