"""Which span is in which, computed from their times alone; and what it took outside of those inside it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from .._numbering import split_by
from .._typing import BoolArray, Int32Array, Int64Array, SignedIntArray

if TYPE_CHECKING:
    from .slices import Slices

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
    for own in split_by(track):
        rows = outermost_first(start, end, own)
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
        for own in split_by(spans.track[index], index):
            # Of spans that begin together the innermost comes last.
            rows = own[np.argsort(spans.start[own], kind="stable")]
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
        for here in split_by(thread):
            innermost[here] = self.on_thread(int(thread[here[0]]), time[here])
        return innermost


def self_times(columns: Slices) -> Int64Array:
    """Return int64[n]: what each span took outside the spans directly inside it, in ns."""
    duration = columns.end - columns.start
    self_ns: Int64Array = duration.copy()
    has_parent = columns.parent >= 0
    np.subtract.at(self_ns, columns.parent[has_parent], duration[has_parent])
    return self_ns


def times_in_phase(columns: Slices) -> Int64Array:
    """Return int64[n]: what each span took, in ns, without the spans of other phases inside it."""
    duration = columns.end - columns.start
    in_phase_ns: Int64Array = duration.copy()
    phase, parent = columns.phase, columns.parent
    other = np.flatnonzero(parent >= 0)
    other = other[phase[other] != phase[parent[other]]]
    outer = parent[other]
    while len(other):
        np.subtract.at(in_phase_ns, outer, duration[other])
        further = parent[outer]
        climbs = (further >= 0) & (phase[further] == phase[outer])
        other, outer = other[climbs], further[climbs]
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
