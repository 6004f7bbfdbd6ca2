"""Refine an alignment by the operators of a trace, until as few as can be lie partly outside a call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .._typing import Float64Array, Int64Array
from ..timeline import Timeline
from .alignment import Alignment, OffsetBounds, OperatorFit, intersect, sync_bounds
from .call_lookup import runs_module_code, threads_of
from .event_columns import ProfilerEvents
from .operator_gaps import REACH_NS, CallEdges, bounds_from_gaps, busy_intervals, most_likely_shift

_PASSES = ((REACH_NS, 2_000.0), (10_000, 1_000.0), (5_000, 500.0))
"""How far off the guess of each pass may be, and how deep an edge may lie in an operator and still count, ns."""
_AROUND_NS = 1_000_000


class SharedThread(NamedTuple):
    """One thread, as both files know it.

    Attributes:
        edges: int64[n], ns of the recording's clock, ascending: where calls begin and end.
        start: int64[m], ns from the trace's base, of its operators; ascending, an outer one first.
        end: int64[m].
    """

    edges: Int64Array
    start: Int64Array
    end: Int64Array


def refine_by_operators(
    alignment: Alignment, timeline: Timeline, events: ProfilerEvents, threads: Int64Array
) -> Alignment:
    """Return an alignment that suits the operators of the trace; the same where none runs in a call.

    Args:
        alignment: off by at most `REACH_NS`.
        timeline: the recording, in its own time.
        events: the trace's.
        threads: the OS thread of each of the trace's tracks, or -1.
    """
    shared = list(_shared_threads(timeline, events, threads))
    if not shared:
        return alignment
    marks = sync_bounds(timeline.marks, events.syncs, alignment.base_ns)
    found = alignment
    for margin, tolerance in _PASSES:
        times, lows, highs = [marks.time], [marks.low], [marks.high]
        operators = cut = 0
        for thread in shared:
            edges = _near_edges(found, thread)
            if not len(edges.time):
                continue
            busy = busy_intervals(thread.start, thread.end, np.sort(edges.guess), margin)
            if not len(busy.start):
                continue
            # What was guessed to be the offset: what is found from here on are corrections of it.
            guessed = (edges.guess + alignment.base_ns - edges.time).astype(np.float64)
            least, most = _within_marks(marks, edges.time)
            shift = most_likely_shift(edges, busy, least - guessed, most - guessed)
            bounds = bounds_from_gaps(edges, shift, busy, tolerance)
            low, high = bounds.low + guessed, bounds.high + guessed
            # The slice of a mark is certain, the gap of an edge only likely.
            agrees = (low <= most) & (high >= least) & (np.isfinite(low) | np.isfinite(high))
            times.append(bounds.time[agrees])
            lows.append(low[agrees])
            highs.append(high[agrees])
            operators += len(thread.start)
            cut += int(np.count_nonzero(~agrees))
        if not operators:
            return alignment
        every = OffsetBounds(np.concatenate(times), np.concatenate(lows), np.concatenate(highs))
        fit = _fit(every, operators, cut)
        if fit is None:
            return alignment
        found = replace(alignment, operators=fit)
    return found


def _near_edges(alignment: Alignment, thread: SharedThread) -> CallEdges:
    """Return the edges of a thread that are near what was traced of it."""
    guess = alignment.to_trace(thread.edges)
    near = (guess > int(thread.start.min()) - _AROUND_NS) & (guess < int(thread.end.max()) + _AROUND_NS)
    return CallEdges(thread.edges[near], guess[near])


def _within_marks(marks: OffsetBounds, time: Int64Array) -> tuple[Float64Array, Float64Array]:
    """Return the least and the greatest offset at each moment that the sync marks allow."""
    nothing = np.full(len(time), np.inf)
    asked = OffsetBounds(time, -nothing, nothing)
    band = intersect(OffsetBounds(*(np.concatenate(both) for both in zip(marks, asked, strict=True))))
    if band is None:
        return -nothing, nothing
    at = np.searchsorted(band.time, time)
    agree = band.low[at] <= band.high[at]
    return np.where(agree, band.low[at], -np.inf), np.where(agree, band.high[at], np.inf)


def _fit(bounds: OffsetBounds, operators: int, cut: int) -> OperatorFit | None:
    band = intersect(bounds)
    if band is None:
        return None
    half = (band.high - band.low) / 2
    contradicted = int(np.count_nonzero(half < 0))
    return OperatorFit(band, operators, cut, contradicted, float(np.median(np.abs(half))), float(np.abs(half).max()))


def _shared_threads(timeline: Timeline, events: ProfilerEvents, threads: Int64Array) -> Iterator[SharedThread]:
    """Yield the threads on which calls were recorded and operators traced."""
    columns = timeline.columns
    if not len(columns):
        return
    thread_of_span = threads_of(timeline)
    chosen = runs_module_code(columns) & columns.complete
    track = np.concatenate([events.ops.track, events.plain_ops.track])
    start = np.concatenate([events.ops.start, events.plain_ops.start])
    end = np.concatenate([events.ops.end, events.plain_ops.end])
    on = threads[track]
    for thread in np.unique(thread_of_span[chosen]).tolist():
        running = on == thread
        if running.any():
            spans = chosen & (thread_of_span == thread)
            edges = np.sort(np.concatenate([columns.start[spans], columns.end[spans]]))
            begins, ends = start[running], end[running]
            order = np.lexsort((-ends, begins))
            yield SharedThread(edges, begins[order], ends[order])
