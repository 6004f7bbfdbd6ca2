"""Waits that nothing saw, as those in C++ of DistributedDataParallel's reducer: told by what ran around them.

A backward pass that launched collectives does not end before they are complete, where nobody waited for them before.
So what lies between the last thing that ran and their completion was waiting. Where a recording holds no passes, as a
saved trace, the same holds for each step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._typing import Int64Array
from ..timeline import Timeline
from .sync_points import sync_points

__all__ = ["InferredWaits", "inferred_waits"]


class InferredWaits(NamedTuple):
    """Waits of one rank; arrays of equal length.

    Attributes:
        start: int64, ns.
        end: int64, ns.
        step: int64, the step that they are in.
    """

    start: Int64Array
    end: Int64Array
    step: Int64Array


def inferred_waits(timeline: Timeline) -> InferredWaits:
    """Return the waits of a rank that no row of `Timeline.collectives` tells."""
    collectives = timeline.collectives
    points = sync_points(collectives)
    unseen = (collectives.done[points.row] >= 0) & (collectives.done[points.row] > collectives.end[points.row])
    unseen &= ~collectives.on_device[points.row]
    waits = collectives.is_wait & (collectives.counter >= 0)
    seen = np.stack([collectives.name[waits].astype(np.int64), collectives.counter[waits]])
    called = np.stack([collectives.name[points.row].astype(np.int64), collectives.counter[points.row]])
    unseen &= ~_in(called, seen)
    row, done = points.row[unseen], points.released[unseen]
    if not len(row):
        return InferredWaits(*(np.empty(0, np.int64) for _ in range(3)))
    begin, end = _sections(timeline)
    section = np.searchsorted(begin, collectives.start[row], side="right") - 1
    inside = (section >= 0) & (collectives.start[row] < end[section])
    row, done, section = row[inside], done[inside], section[inside]
    until = np.zeros(len(begin), np.int64)
    np.maximum.at(until, section, np.minimum(done, end[section]))
    last_row = np.full(len(begin), -1, np.int64)
    np.maximum.at(last_row, section, row)
    used = np.flatnonzero(last_row >= 0)
    # What ran last before: the call itself, or a span behind it.
    since = np.maximum(collectives.end[last_row[used]], _last_activity(timeline, until[used]))
    waited = since < until[used]
    return InferredWaits(since[waited], until[used][waited], collectives.step[last_row[used]][waited])


def _in(wanted: Int64Array, known: Int64Array) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Tell which pairs of (name, counter) are among the known ones."""
    return np.isin(wanted[0] << 40 | wanted[1], known[0] << 40 | known[1])


def _sections(timeline: Timeline) -> tuple[Int64Array, Int64Array]:
    """Return begins and ends of backward passes; where there are none, of steps."""
    passes = sorted((one.start_ns, one.end_ns) for one in timeline.backward_passes)
    if passes:
        begin, end = np.array(passes, np.int64).T
        return begin, end
    marks = sorted(mark.time_ns for mark in timeline.marks if mark.kind == "step")
    edges = [np.iinfo(np.int64).min, *marks, np.iinfo(np.int64).max]
    return np.array(edges[:-1], np.int64), np.array(edges[1:], np.int64)


def _last_activity(timeline: Timeline, until: Int64Array) -> Int64Array:
    """Return for some moments when the last span had ended before; the moment itself where one is open then."""
    columns = timeline.columns
    outermost = columns.depth == 0
    start, end = columns.start[outermost], np.maximum.accumulate(columns.end[outermost])
    index = np.searchsorted(start, until) - 1
    if not len(start):
        return np.full(len(until), np.iinfo(np.int64).min)
    return np.where(index >= 0, np.minimum(end[np.maximum(index, 0)], until), np.iinfo(np.int64).min)
