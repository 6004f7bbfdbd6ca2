"""Nesting of spans by their times, spans from chains of calls, and unions of time intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._arrays import INT64_MAX, INT64_MIN, BoolArray, Int32Array, Int64Array, SignedIntArray, split_by

if TYPE_CHECKING:
    from .slices import Slices


class TimeIntervals(NamedTuple):
    """Intervals of time in order that do not touch; columns of equal length."""

    start_ns: Int64Array  # int64[n]
    end_ns: Int64Array  # int64[n]

    def contains(self, moment: Int64Array) -> BoolArray:
        """Return True for moments from the start of an interval to before its end."""
        index = np.searchsorted(self.start_ns, moment, side="right") - 1
        return np.asarray((index >= 0) & (moment < np.append(self.end_ns, 0)[index]), np.bool_)

    def time_until(self, moment: Int64Array) -> Int64Array:
        """Return the time of these intervals before each moment, in ns."""
        total_ns = np.concatenate([[0], np.cumsum(self.end_ns - self.start_ns)])
        index = np.searchsorted(self.start_ns, moment)
        later_ns = np.zeros(len(moment), np.int64)  # part of the last interval that is after the moment
        has_interval = index > 0
        later_ns[has_interval] = np.maximum(self.end_ns[index[has_interval] - 1] - moment[has_interval], 0)
        earlier_ns: Int64Array = total_ns[index] - later_ns
        return earlier_ns

    def time_within(self, start: Int64Array, end: Int64Array) -> Int64Array:
        """Return the time that each given interval shares with these intervals, in ns."""
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
    """Return the first start and the last end of each group's intervals; the end is before the start if it has none."""
    first, last = np.full(groups, INT64_MAX), np.full(groups, INT64_MIN)
    np.minimum.at(first, group, start)
    np.maximum.at(last, group, end)
    return first, last


def shift_apart(group: Int64Array, start: Int64Array, end: Int64Array, groups: int) -> tuple[Int64Array, Int64Array]:
    """Return the shift of each group's times that makes groups follow each other without touching, and its new start.

    Code for one thread can then handle the work of many threads.
    """
    first, last = extents(group, start, end, groups)
    length = np.where(first <= last, last - first + 1, 0)
    new_start = np.cumsum(length) - length
    return np.where(first <= last, new_start - first, 0), new_start


_CHUNK = 1 << 16


def outermost_first(start: Int64Array, end: Int64Array, rows: SignedIntArray) -> SignedIntArray:
    """Sort spans of one track by start, longer spans first; usually they are in this order already."""
    for first in range(0, len(rows), _CHUNK):
        part = rows[first : first + _CHUNK + 1]
        starts, ends = start[part], end[part]
        is_later = starts[1:] > starts[:-1]
        if not np.all(is_later | (starts[1:] == starts[:-1]) & (ends[1:] <= ends[:-1])):
            return rows[np.lexsort((-end[rows], start[rows]))]
    return rows


def depth_by_time(columns: Slices) -> Int32Array:
    """Return the depth of slices as trace viewers compute it: for empty slices by their times."""
    return nest_by_time(columns).depth if np.any(columns.start == columns.end) else columns.depth


def nest_by_time(columns: Slices) -> Slices:
    """Recompute `depth` and `parent`, see `nest_times`; the order stays."""
    depth, parent = nest_times(columns.start, columns.end, columns.track)
    return dataclasses.replace(columns, depth=depth, parent=parent)


def nest_times(start: Int64Array, end: Int64Array, track: Int32Array) -> tuple[Int32Array, Int64Array]:
    """Return depth and parent of spans per track, computed from their starts and ends.

    A span is inside all spans that start no later and end no earlier. An empty span (start = end) is inside the longest
    span that starts or runs at its time, and empty spans of one time are inside each other. Perfetto nests Chrome
    events, which have no depth, in the same way.
    """
    depth = np.zeros(len(start), np.int32)
    parent = np.full(len(start), -1, np.int64)
    for track_rows in split_by(track):
        rows = outermost_first(start, end, track_rows)
        depth[rows], parent[rows] = _nest(start[rows], end[rows], rows)
    return depth, parent


def _nest(start: Int64Array, end: Int64Array, rows: SignedIntArray) -> tuple[Int64Array, Int64Array]:
    """Return depth and parent of the spans of one track; `rows` are their indexes."""
    empty = start == end
    depth = np.arange(len(start))
    depth -= np.searchsorted(np.sort(end[~empty]), start, side="right")
    depth -= np.searchsorted(start[empty], start, side="left")
    return depth, np.append(rows, -1)[find_parents(np.zeros(len(rows), np.int32), depth)]


def find_parents(track: SignedIntArray, depth: SignedIntArray) -> Int64Array:
    """Return the last row before each row on its track one level up; -1 if none. The rows are in start order.

    The rows of some steps can be without the spans around them, which started earlier.
    """
    rows = np.argsort(track, kind="stable")
    track, depth, parent = track[rows], depth[rows], np.full(len(rows), -1, np.int64)
    outer = np.flatnonzero(depth == 0)
    for level in range(1, int(depth.max(initial=0)) + 1):
        inner = np.flatnonzero(depth == level)
        previous = np.append(outer, -1)[np.searchsorted(outer, inner) - 1]
        is_inside = (previous >= 0) & (track[previous] == track[inner])
        parent[rows[inner[is_inside]]] = rows[previous[is_inside]]
        outer = inner
    return parent


class InnermostLookup:
    """The innermost span of each thread at any moment; the spans of a thread nest on each of its tracks.

    If `is_selected` is given, only the selected spans count; the parents of selected spans must be selected too.
    """

    def __init__(self, thread: Int64Array, spans: Slices, is_selected: BoolArray | None = None) -> None:
        self._start, self._end, self._parent = spans.start, spans.end, spans.parent
        self._is_selected = np.ones(len(thread), np.bool_) if is_selected is None else is_selected
        self._rows: dict[int, list[Int64Array]] = {}
        index = np.flatnonzero(self._is_selected)
        for track_rows in split_by(spans.track[index], index):
            # Among spans that start together the innermost comes last.
            rows = track_rows[np.argsort(spans.start[track_rows], kind="stable")]
            self._rows.setdefault(int(thread[rows[0]]), []).append(rows)

    def on_thread(self, thread: int, time: Int64Array) -> Int64Array:
        """Return the innermost span at each time, -1 if none; among several tracks the one that started last."""
        innermost = np.full(len(time), -1, np.int64)
        for rows in self._rows.get(thread, []):
            position = np.searchsorted(self._start[rows], time, side="right") - 1
            span = np.where(position >= 0, rows[np.maximum(position, 0)], -1)
            while True:
                is_over = (span >= 0) & ((self._end[span] <= time) | ~self._is_selected[span])
                if not is_over.any():
                    break
                span[is_over] = self._parent[span[is_over]]
            is_later = (span >= 0) & ((innermost < 0) | (self._start[span] > self._start[innermost]))
            innermost[is_later] = span[is_later]
        return innermost

    def on_threads(self, thread: Int64Array, time: Int64Array) -> Int64Array:
        """Return the same as `on_thread` for times on several threads: `thread` has one entry per time."""
        innermost = np.full(len(time), -1, np.int64)
        for rows in split_by(thread):
            innermost[rows] = self.on_thread(int(thread[rows[0]]), time[rows])
        return innermost


def without_inner(values: Int64Array, parent: Int64Array) -> Int64Array:
    """Return the value of each span minus the values of the spans directly inside it."""
    self_values: Int64Array = values.copy()
    inner = np.flatnonzero(parent >= 0)
    np.subtract.at(self_values, parent[inner], values[inner])
    return self_values


def self_times(columns: Slices) -> Int64Array:
    """Return int64[n]: the duration of each span in ns, without the spans directly inside it."""
    return without_inner(columns.end - columns.start, columns.parent)


def times_in_phase(columns: Slices) -> Int64Array:
    """Return int64[n]: the duration of each span in ns, without the spans of other phases inside it."""
    duration = columns.end - columns.start
    in_phase_ns: Int64Array = duration.copy()
    phase, parent = columns.phase, columns.parent
    inner = np.flatnonzero(parent >= 0)
    inner = inner[phase[inner] != phase[parent[inner]]]
    outer = parent[inner]
    while len(inner):
        np.subtract.at(in_phase_ns, outer, duration[inner])
        grandparent = parent[outer]
        climbs = (grandparent >= 0) & (phase[grandparent] == phase[outer])
        inner, outer = inner[climbs], grandparent[climbs]
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
    """A time interval, and the calls around it."""

    start_ns: int
    end_ns: int
    # A key for each call around it, from the outermost to the innermost; empty if there is none
    path: Sequence[Hashable]


class PathSpan(NamedTuple):
    """A time interval that belongs to one call."""

    start_ns: int
    end_ns: int
    key: Hashable  # key of the call
    depth: int  # number of spans around it


def spans_from_intervals(intervals: Iterable[LabelledInterval]) -> list[PathSpan]:
    """Return the spans of calls around the intervals; consecutive intervals share the spans of their common calls.

    Args:
        intervals: in start order; if one starts before the end of the previous one, the spans of that one end there.

    Returns:
        The spans in order of start and depth; spans of one depth do not overlap.

    Example:
        >>> spans_from_intervals([LabelledInterval(0, 10, "a"), LabelledInterval(10, 20, "ab")])
        [PathSpan(start=0, end=20, key='a', depth=0), PathSpan(start=10, end=20, key='b', depth=1)]
    """
    spans: list[PathSpan] = []
    still_open: list[list[Any]] = []  # start, end and key

    def close(depth: int, latest_end: int) -> None:
        while len(still_open) > depth:
            start, end, key = still_open.pop()
            if still_open:
                still_open[-1][1] = max(still_open[-1][1], end)
            if min(end, latest_end) > start:
                spans.append(PathSpan(start, min(end, latest_end), key, len(still_open)))

    for interval in intervals:
        shared = 0
        for (_, _, open_key), key in zip(still_open, interval.path, strict=False):
            if open_key != key:
                break
            shared += 1
        close(shared, interval.start_ns)
        still_open += [[interval.start_ns, interval.end_ns, key] for key in interval.path[shared:]]
        if still_open:
            still_open[-1][1] = max(still_open[-1][1], interval.end_ns)
    close(0, INT64_MAX)
    spans.sort(key=lambda span: (span.start_ns, span.depth))
    return spans


def clip_and_nest(
    track: Int64Array, start: Int64Array, end: Int64Array, rank: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Nest spans, clipping each to its parent, with equal spans by rank; return end, parent (-1: none) and depth."""
    order = np.lexsort((rank, -end, start, track))
    end, parent, depth = end.copy(), np.full(len(start), -1, np.int64), np.zeros(len(start), np.int64)
    first = int(start.min(initial=INT64_MAX))
    stride = max(int(end.max(initial=first)) - first, 0) + 1
    if (int(track.max(initial=0)) + 1) * stride < INT64_MAX:
        # As if each track started at the end of the previous one. An empty span is over when the next one starts.
        starts, ends = (track[order] * stride + (time[order] - first) for time in (start, end))
        is_empty = ends <= starts
        ended_count = np.searchsorted(np.sort(ends[~is_empty], kind="stable"), starts, "right")
        depth[order] = np.arange(len(order)) - ended_count - (np.cumsum(is_empty) - is_empty)
        parent[order] = np.append(order, -1)[find_parents(track[order], depth[order])]
        if np.all((parent < 0) | (end <= end[parent])):
            return end, parent, depth
        parent[:], depth[:] = -1, 0
    # A span outlasts its parent: clip each row by row.
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
