"""Which span is in which, by their times alone; spans of chains of calls; sets of times, when any of several ran."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._arrays import INT64_MAX, INT64_MIN, BoolArray, Int32Array, Int64Array, SignedIntArray, split_by

if TYPE_CHECKING:
    from .slices import Slices


class TimeIntervals(NamedTuple):
    """Intervals of time in order, none of which touches another; columns of equal length."""

    start: Int64Array  # int64[n], ns
    end: Int64Array  # int64[n], ns

    def hold(self, moment: Int64Array) -> BoolArray:
        """Return for each moment whether it is in one of the intervals, from its start to before its end."""
        index = np.searchsorted(self.start, moment, side="right") - 1
        return np.asarray((index >= 0) & (moment < np.append(self.end, 0)[index]), np.bool_)

    def time_until(self, moment: Int64Array) -> Int64Array:
        """Return for each moment how much of the time before it is in these intervals."""
        before = np.concatenate([[0], np.cumsum(self.end - self.start)])
        index = np.searchsorted(self.start, moment)
        over = np.zeros(len(moment), np.int64)
        inside = index > 0
        over[inside] = np.maximum(self.end[index[inside] - 1] - moment[inside], 0)
        until: Int64Array = before[index] - over
        return until

    def time_within(self, start: Int64Array, end: Int64Array) -> Int64Array:
        """Return for each given interval how much of it is in these intervals."""
        return self.time_until(end) - self.time_until(start)


def union_of(start: Int64Array, end: Int64Array) -> TimeIntervals:
    """Return the time that any of the intervals covers; none ends before its start."""
    if not len(start):
        return TimeIntervals(start, end)
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    covered_until = np.maximum.accumulate(end)
    first = np.flatnonzero(np.append(True, start[1:] > covered_until[:-1]))
    return TimeIntervals(start[first], covered_until[np.append(first[1:], len(start)) - 1])


def extents(group: Int64Array, start: Int64Array, end: Int64Array, groups: int) -> tuple[Int64Array, Int64Array]:
    """Return the first start and the last end of the intervals of each group; of one without, the end is before."""
    first, last = np.full(groups, INT64_MAX), np.full(groups, INT64_MIN)
    np.minimum.at(first, group, start)
    np.maximum.at(last, group, end)
    return first, last


def shift_apart(group: Int64Array, start: Int64Array, end: Int64Array, groups: int) -> tuple[Int64Array, Int64Array]:
    """Move the intervals of each group so that groups follow each other in time and none touches another.

    So what many threads did can be looked at as if one had. It returns what to add to the times of each group, and
    where that begins then.
    """
    first, last = extents(group, start, end, groups)
    length = np.where(first <= last, last - first + 1, 0)
    begin = np.cumsum(length) - length
    return np.where(first <= last, begin - first, 0), begin


_CHUNK = 1 << 16


def outermost_first(start: Int64Array, end: Int64Array, rows: SignedIntArray) -> SignedIntArray:
    """Sort spans of one track by start, the longer first; mostly they are in this order already."""
    for first in range(0, len(rows), _CHUNK):
        part = rows[first : first + _CHUNK + 1]
        starts, ends = start[part], end[part]
        later = starts[1:] > starts[:-1]
        if not np.all(later | (starts[1:] == starts[:-1]) & (ends[1:] <= ends[:-1])):
            return rows[np.lexsort((-end[rows], start[rows]))]
    return rows


def depth_by_time(columns: Slices) -> Int32Array:
    """Return the depth of slices as readers of files find it: an empty slice has the one that its time gives it."""
    return nest_by_time(columns).depth if np.any(columns.start == columns.end) else columns.depth


def nest_by_time(columns: Slices) -> Slices:
    """Compute `depth` and `parent` anew; the order stays. See `nest_times`."""
    depth, parent = nest_times(columns.start, columns.end, columns.track)
    return dataclasses.replace(columns, depth=depth, parent=parent)


def nest_times(start: Int64Array, end: Int64Array, track: Int32Array) -> tuple[Int32Array, Int64Array]:
    """Return depth and parent of spans, per track, from when they start and end.

    A span lies in all that began no later and end no earlier. An empty span (start = end) lies in the longest one that
    begins or runs at its instant, and empty spans of one instant lie in each other: this is how Perfetto lays out
    Chrome's events, which carry no depth.
    """
    depth = np.zeros(len(start), np.int32)
    parent = np.full(len(start), -1, np.int64)
    for of_track in split_by(track):
        rows = outermost_first(start, end, of_track)
        depth[rows], parent[rows] = _nest(start[rows], end[rows], rows)
    return depth, parent


def _nest(start: Int64Array, end: Int64Array, rows: SignedIntArray) -> tuple[Int64Array, Int64Array]:
    """Return depth and parent of the spans of one track; `rows` are their indices."""
    empty = start == end
    depth = np.arange(len(start))
    depth -= np.searchsorted(np.sort(end[~empty]), start, side="right")
    depth -= np.searchsorted(start[empty], start, side="left")
    return depth, np.append(rows, -1)[find_parents(np.zeros(len(rows), np.int32), depth)]


def find_parents(track: SignedIntArray, depth: SignedIntArray) -> Int64Array:
    """Return each row's parent, rows in start order: the last row before it on its track, one level up; else -1."""
    rows = np.argsort(track, kind="stable")
    depth, parent = depth[rows], np.full(len(rows), -1, np.int64)
    outer = np.flatnonzero(depth == 0)
    for level in range(1, int(depth.max(initial=0)) + 1):
        inner = np.flatnonzero(depth == level)
        parent[rows[inner]] = rows[outer[np.searchsorted(outer, inner) - 1]]
        outer = inner
    return parent


class InnermostLookup:
    """The innermost span of each thread at any moment; the spans of a thread nest on each of its tracks.

    If some are `chosen`, those around them on their track have to be among them, or nothing is found.
    """

    def __init__(self, thread: Int64Array, spans: Slices, chosen: BoolArray | None = None) -> None:
        self._start, self._end, self._parent = spans.start, spans.end, spans.parent
        self._chosen = np.ones(len(thread), np.bool_) if chosen is None else chosen
        self._rows: dict[int, list[Int64Array]] = {}
        index = np.flatnonzero(self._chosen)
        for on_track in split_by(spans.track[index], index):
            # Of spans that begin together the innermost comes last.
            rows = on_track[np.argsort(spans.start[on_track], kind="stable")]
            self._rows.setdefault(int(thread[rows[0]]), []).append(rows)

    def on_thread(self, thread: int, time: Int64Array) -> Int64Array:
        """Return for each moment the index of the innermost span, or -1; of two tracks' the one begun last."""
        best = np.full(len(time), -1, np.int64)
        for rows in self._rows.get(thread, []):
            position = np.searchsorted(self._start[rows], time, side="right") - 1
            span = np.where(position >= 0, rows[np.maximum(position, 0)], -1)
            while True:
                ended = (span >= 0) & ((self._end[span] <= time) | ~self._chosen[span])
                if not ended.any():
                    break
                span[ended] = self._parent[span[ended]]
            later = (span >= 0) & ((best < 0) | (self._start[span] > self._start[best]))
            best[later] = span[later]
        return best

    def on_threads(self, thread: Int64Array, time: Int64Array) -> Int64Array:
        """Return the same for moments of several threads."""
        innermost = np.full(len(time), -1, np.int64)
        for rows in split_by(thread):
            innermost[rows] = self.on_thread(int(thread[rows[0]]), time[rows])
        return innermost


def without_inner(values: Int64Array, parent: Int64Array) -> Int64Array:
    """Return the value of each span less those of the spans directly inside it; a parent of -1 is none."""
    left: Int64Array = values.copy()
    inner = np.flatnonzero(parent >= 0)
    np.subtract.at(left, parent[inner], values[inner])
    return left


def self_times(columns: Slices) -> Int64Array:
    """Return int64[n]: what each span took outside the spans directly inside it, in ns."""
    return without_inner(columns.end - columns.start, columns.parent)


def times_in_phase(columns: Slices) -> Int64Array:
    """Return int64[n]: what each span took, in ns, without the spans of other phases inside it."""
    duration = columns.end - columns.start
    in_phase_ns: Int64Array = duration.copy()
    phase, parent = columns.phase, columns.parent
    inner = np.flatnonzero(parent >= 0)
    inner = inner[phase[inner] != phase[parent[inner]]]
    outer = parent[inner]
    while len(inner):
        np.subtract.at(in_phase_ns, outer, duration[inner])
        further = parent[outer]
        climbs = (further >= 0) & (phase[further] == phase[outer])
        inner, outer = inner[climbs], further[climbs]
    return in_phase_ns


def is_outermost(columns: Slices, group: Int64Array) -> BoolArray:
    """Return bool[n]: False for a span inside one of its group, with only spans of the same phase between them."""
    outermost = np.ones(len(columns), np.bool_)
    span = np.flatnonzero(columns.parent >= 0)
    outer = columns.parent[span]
    while len(span):
        same_phase = columns.phase[outer] == columns.phase[span]
        span, outer = span[same_phase], outer[same_phase]
        same_group = group[outer] == group[span]
        outermost[span[same_group]] = False
        outer = columns.parent[outer]
        climbs = ~same_group & (outer >= 0)
        span, outer = span[climbs], outer[climbs]
    return outermost


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
    close(0, INT64_MAX)
    spans.sort(key=lambda span: (span.start, span.depth))
    return spans


def clip_and_nest(
    track: Int64Array, start: Int64Array, end: Int64Array, rank: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Nest spans, each ending with the one around it, equal ones by rank; return end, parent or -1, and depth."""
    order = np.lexsort((rank, -end, start, track))
    end, parent, depth = end.copy(), np.full(len(start), -1, np.int64), np.zeros(len(start), np.int64)
    first = int(start.min(initial=INT64_MAX))
    stride = max(int(end.max(initial=first)) - first, 0) + 1
    if (int(track.max(initial=0)) + 1) * stride < INT64_MAX:
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
            parent[index], outer_end = stack[-1]
            new_end = min(end_, outer_end)
            end[index], depth[index] = new_end, len(stack)
        stack.append((index, new_end))
    return end, parent, depth
