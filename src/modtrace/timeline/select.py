"""Parts of a timeline: a stretch of time, some steps, some modules."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from typing import TYPE_CHECKING

import numpy as np

from .._typing import IndexArray, Int32Array, Int64Array
from .columns import BACKWARD, Columns

if TYPE_CHECKING:
    from .timeline import CounterSeries, Timeline

__all__ = ["modules", "steps", "window"]


def window(timeline: Timeline, start_ns: int | None = None, end_ns: int | None = None) -> Timeline:
    """Return what lies in a stretch of time.

    A span that begins before it or ends behind it is cut to it and marked incomplete; one that only touches it is
    left out. Marks and samples are kept from `start_ns` to before `end_ns`, and for each counter the last sample
    before, moved to `start_ns`, so that its value there is known.

    Args:
        timeline: what to cut.
        start_ns: Unix nanoseconds; None: from the beginning.
        end_ns: Unix nanoseconds; None: to the end.

    Raises:
        ValueError: the end is before the start.
    """
    low = np.iinfo(np.int64).min if start_ns is None else start_ns
    high = np.iinfo(np.int64).max if end_ns is None else end_ns
    if high < low:
        raise ValueError(f"the window ends {low - high} ns before it starts")
    columns = timeline.columns
    # An empty span has no inside to overlap with: it is in where its moment is.
    within = (columns.start < high) & (columns.end > low) | (columns.start == columns.end) & (columns.start == low)
    kept = np.flatnonzero(within & (columns.start < high))
    part = _only(timeline, kept)
    cut = dataclasses.replace(
        part.columns,
        start=np.maximum(part.columns.start, low),
        end=np.minimum(part.columns.end, high),
        complete=part.columns.complete & (part.columns.start >= low) & (part.columns.end <= high),
    )
    return dataclasses.replace(
        _reordered(part, cut),
        marks=[mark for mark in timeline.marks if low <= mark.time_ns < high],
        counters=[_samples(counter, low, high) for counter in timeline.counters],
    )


def steps(timeline: Timeline, first: int | None = None, last: int | None = None) -> Timeline:
    """Return the spans that began in the steps from `first` to before `last`, whole; None: from or to the end.

    A step begins where the one before it ended, so marks and samples are those between these moments.

    Raises:
        ValueError: `last` is before `first`.
    """
    low = 0 if first is None else first
    high = np.iinfo(np.int64).max if last is None else last
    if high < low:
        raise ValueError(f"step {high} is before step {low}")
    columns = timeline.columns
    part = _only(timeline, np.flatnonzero((columns.step >= low) & (columns.step < high)))
    ends = np.array([mark.time_ns for mark in timeline.marks if mark.kind == "step"], np.int64)
    # The mark that ends step n is the last in it; what had ended when the recording began has no mark.
    before = _steps_before(columns, ends)
    since = _moment(ends, low - before - 1, np.iinfo(np.int64).min)
    until = _moment(ends, high - before - 1, np.iinfo(np.int64).max)
    return dataclasses.replace(
        part,
        marks=[mark for mark in timeline.marks if since < mark.time_ns <= until],
        counters=[_samples(counter, since, until) for counter in timeline.counters],
    )


def modules(timeline: Timeline, pattern: str | None = None, max_depth: int | None = None) -> Timeline:
    """Return the spans of the modules whose qualified name matches.

    A span whose outer spans are left out moves up. Its label stays, though it names the path below what called it.

    Args:
        timeline: what to choose from.
        pattern: as of a shell, over the whole name, case matters: `GPT.h.*`; `*` also matches dots. None: all.
        max_depth: how many levels to keep, counted after those left out by the pattern; None: all.
    """
    part = timeline
    if pattern is not None and timeline.names:
        matches = re.compile(fnmatch.translate(pattern)).match
        chosen = np.array([matches(name.fqn) is not None for name in timeline.names])
        part = _only(timeline, np.flatnonzero(chosen[timeline.columns.name]))
    if max_depth is not None:
        part = _only(part, np.flatnonzero(part.columns.depth < max_depth))
    return part


def _only(timeline: Timeline, rows: IndexArray) -> Timeline:
    """Keep some spans, in order. Each lies in the innermost one around it that is kept; links to none are dropped."""
    columns = timeline.columns
    if len(rows) == len(columns):
        return timeline
    place = np.full(len(columns), -1, np.int64)
    place[rows] = np.arange(len(rows))
    kept = columns.take(rows)
    parent = _kept_parents(columns.parent, place, kept.parent)
    kept = dataclasses.replace(kept, parent=parent, depth=_depths(parent), link=_halves(columns, kept))
    return dataclasses.replace(
        timeline,
        columns=kept,
        span_args={int(place[row]): said for row, said in timeline.span_args.items() if place[row] >= 0},
    )


def _kept_parents(parent: Int64Array, place: Int64Array, own: Int64Array) -> Int64Array:
    """Return the new position of the innermost kept span around each kept one; `own` are their parents till now."""
    found = own.copy()
    while True:
        lost = np.flatnonzero((found >= 0) & (place[found] < 0))
        if not len(lost):
            return np.where(found >= 0, place[found], -1)
        found[lost] = parent[found[lost]]


def _depths(parent: Int64Array) -> Int32Array:
    depth = np.zeros(len(parent), np.int32)
    inner = np.flatnonzero(parent >= 0)
    outer = parent[inner]
    while len(inner):
        depth[inner] += 1
        further = parent[outer] >= 0
        inner, outer = inner[further], parent[outer][further]
    return depth


def _halves(columns: Columns, kept: Columns) -> Int64Array:
    """Return the links of the kept spans, without those that had two halves and have only one left."""

    def halves(some: Columns) -> Int64Array:
        backward = some.phase == BACKWARD
        return np.intersect1d(some.link[backward], some.link[~backward])

    lost = np.setdiff1d(halves(columns), halves(kept))
    return np.where(np.isin(kept.link, lost), -1, kept.link)


def _reordered(timeline: Timeline, columns: Columns) -> Timeline:
    """Sort by (start, depth) anew, as cutting makes spans begin together."""
    order = np.lexsort((columns.depth, columns.start))
    place = np.empty(len(order) + 1, np.int64)
    place[order] = np.arange(len(order))
    place[-1] = -1
    moved = columns.take(order)
    return dataclasses.replace(
        timeline,
        columns=dataclasses.replace(moved, parent=place[moved.parent]),
        span_args={int(place[row]): said for row, said in timeline.span_args.items()},
    )


def _samples(counter: CounterSeries, low: int, high: int) -> CounterSeries:
    first, last = np.searchsorted(counter.time, (low, high))
    time, value = counter.time[first:last], counter.value[first:last]
    if first > 0 and low < high and (first == len(counter.time) or counter.time[first] > low):
        time, value = np.insert(time, 0, low), np.insert(value, 0, counter.value[first - 1])
    return dataclasses.replace(counter, time=time, value=value)


def _steps_before(columns: Columns, ends: Int64Array) -> int:
    """Return how many steps had ended before the first mark of a step that is left, so that it ends that step."""
    if not len(columns):
        return 0
    return int(columns.step[0] - np.searchsorted(ends, columns.start[0], side="right"))


def _moment(ends: Int64Array, index: int, otherwise: int) -> int:
    return int(ends[index]) if 0 <= index < len(ends) else otherwise
