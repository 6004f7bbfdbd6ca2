"""Waits for collectives that no call shows, as those of DistributedDataParallel's reducer, which is in C++."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._typing import IndexArray, Int64Array
from ..timeline import Collectives, Timeline

_SYNCHRONIZING = ("all_", "reduce_scatter", "barrier", "monitored_barrier")
"""How the names of operators begin that end on no rank before all have called them."""


def is_synchronizing(operator: str) -> bool:
    """Tell whether no rank can leave a collective of this operator before the last one has come."""
    return operator.startswith(_SYNCHRONIZING)


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
    """Return the waits of a rank that have no row in `Timeline.collectives`."""
    collectives = timeline.collectives
    synchronizes = np.array([is_synchronizing(name.operator) for name in collectives.names] + [False], np.bool_)
    counted = collectives.counter >= 0
    calls = synchronizes[collectives.name] & counted & ~collectives.is_wait & ~collectives.on_device
    row = np.flatnonzero(calls & (collectives.done > collectives.end))
    seen = np.flatnonzero(collectives.is_wait & counted)
    row = row[~np.isin(_key(collectives, row), _key(collectives, seen))]
    done = collectives.done[row]
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


def _key(collectives: Collectives, rows: IndexArray) -> Int64Array:
    """Return a number for the name and the counter of each row."""
    return collectives.name[rows].astype(np.int64) << 40 | collectives.counter[rows]


def _sections(timeline: Timeline) -> tuple[Int64Array, Int64Array]:
    """Return begins and ends of backward passes, or of steps if there are no passes."""
    passes = sorted((one.start_ns, one.end_ns) for one in timeline.backward_passes)
    if passes:
        begin, end = np.array(passes, np.int64).T
        return begin, end
    marks = sorted(mark.time_ns for mark in timeline.marks if mark.kind == "step")
    edges = [np.iinfo(np.int64).min, *marks, np.iinfo(np.int64).max]
    return np.array(edges[:-1], np.int64), np.array(edges[1:], np.int64)


def _last_activity(timeline: Timeline, until: Int64Array) -> Int64Array:
    """Return for some moments when the last span before had ended; the moment itself if a span is open then."""
    columns = timeline.columns
    outermost = columns.depth == 0
    start, end = columns.start[outermost], np.maximum.accumulate(columns.end[outermost])
    index = np.searchsorted(start, until) - 1
    if not len(start):
        return np.full(len(until), np.iinfo(np.int64).min)
    return np.where(index >= 0, np.minimum(end[np.maximum(index, 0)], until), np.iinfo(np.int64).min)
