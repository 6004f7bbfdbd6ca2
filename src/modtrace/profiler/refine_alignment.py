"""Refine an alignment by the operators of a trace, until as few as can be lie partly outside a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from .._typing import Float64Array, Int64Array
from ..timeline import Timeline
from .alignment import Alignment, ClockSegment, OperatorFit, sync_bounds
from .call_lookup import runs_module_code, threads_of
from .clock_steps import SharedThread, move_clock_steps, step_uncertainty_ns
from .coarse_shift import InnermostCalls, find_coarse_shift
from .event_columns import ProfilerEvents
from .offset_band import LEAST_DRIFT_LIMIT, OffsetBand, OffsetBounds, intersect
from .operator_gaps import (
    REACH_NS,
    CallEdges,
    bounds_from_gaps,
    busy_intervals,
    certain_offsets,
    innermost_operators,
    most_likely_shift,
)
from .recorded_part import profiled_window

__all__ = ["refine_by_operators"]

_PASSES = ((REACH_NS, 2_000.0), (10_000, 1_000.0), (5_000, 500.0))
"""How far off the guess of each pass may be, and how deep an edge may lie in an operator and still count, ns."""
_AROUND_NS = 1_000_000
_MAX_PROVEN_DRIFT_LIMIT = 2 * LEAST_DRIFT_LIMIT
"""Where operators show more drift than `LEAST_DRIFT_LIMIT`, half of this, the clock may have been set by some µs."""


def refine_by_operators(
    alignment: Alignment, timeline: Timeline, events: ProfilerEvents, threads: Int64Array
) -> Alignment:
    """Return an alignment within what the operators of the trace prove; the same where none runs in a call.

    Args:
        alignment: by sync marks, off by at most `REACH_NS`, or by the wall clock, by at most `COARSE_REACH_NS`.
        timeline: the recording, in its own time.
        events: the trace's.
        threads: the OS thread of each of the trace's tracks, or -1.
    """
    shared = list(_shared_threads(timeline, events, threads))
    if not shared:
        return alignment
    marks = sync_bounds(timeline.marks, events.syncs, alignment.base_ns)
    if not len(marks.time):
        alignment = _bring_near(alignment, shared)
    found = alignment
    for margin, tolerance in _PASSES:
        alignment = replace(alignment, segments=move_clock_steps(found, shared))
        found = replace(found, segments=alignment.segments)
        times, lows, highs = [marks.time], [marks.low], [marks.high]
        operators = cut = 0
        for thread in shared:
            guess = found.to_trace_clock(thread.edges)
            near = np.flatnonzero(
                (guess > int(thread.start.min()) - _AROUND_NS) & (guess < int(thread.end.max()) + _AROUND_NS)
            )
            if not len(near):
                continue
            edges = CallEdges(thread.edges[near], guess[near])
            busy = busy_intervals(thread.start, thread.end, np.sort(edges.guess), margin)
            if not len(busy.start):
                continue
            # What was guessed to be the offset: what is found from here on are corrections of it.
            guessed = (edges.guess + alignment.base_ns - edges.time).astype(np.float64)
            least, most = _within_marks(alignment.segments, marks, edges.time)
            shift = most_likely_shift(edges, busy, least - guessed, most - guessed)
            bounds = bounds_from_gaps(edges, shift, busy, tolerance)
            low, high = bounds.low + guessed, bounds.high + guessed
            # Of a mark it is certain in which slice it lies, of an edge only likely in which gap.
            agrees = (low <= most) & (high >= least) & (np.isfinite(low) | np.isfinite(high))
            times.append(bounds.time[agrees])
            lows.append(low[agrees])
            highs.append(high[agrees])
            operators += len(thread.start)
            cut += int(np.count_nonzero(~agrees))
        if not operators:
            return alignment
        every = OffsetBounds(np.concatenate(times), np.concatenate(lows), np.concatenate(highs))
        fit = _fit(every, alignment.segments, operators, cut)
        if fit is None:
            return alignment
        found = replace(alignment, operators=fit)
    return _with_certain_bound(found, marks, shared, profiled_window(events)) if len(marks.time) else found


def _with_certain_bound(
    found: Alignment, marks: OffsetBounds, shared: Sequence[SharedThread], window: tuple[int, int] | None
) -> Alignment:
    """Return the alignment with the bound that holds whichever of the possible gaps the edges lie in.

    The likely gaps tell the offset, mostly to less than that. Where they are not the only possible ones, as around
    long operators, the bound is wider, and where no operator is near. It is that of all edges in the window, which is
    where the trace has something to compare them with.
    """
    fit = found.operators
    if fit is None or fit.contradicted or window is None:
        return found
    by_marks = replace(found, operators=None)
    limit = max(band.drift_limit for band in fit.bands if band is not None)
    if limit > _MAX_PROVEN_DRIFT_LIMIT:
        return found
    limit += max(abs(segment.drift) for segment in found.segments)
    times, lows, highs = [marks.time], [marks.low], [marks.high]
    asked = [marks.time]
    for thread in shared:
        place = found.to_trace_clock(thread.edges)
        asked.append(thread.edges[(place > window[0] - _AROUND_NS) & (place < window[1] + _AROUND_NS)])
        for every in _edges_by_segment(by_marks, thread):
            place = found.to_trace_clock(every.time)
            busy = busy_intervals(thread.start, thread.end, np.sort(place), _PASSES[-1][0])
            guessed = (every.guess + found.base_ns - every.time).astype(np.float64)
            least, most = _within_marks(found.segments, marks, every.time)
            # All edges count, also those that lie in an operator by the likely offset, as behind a step of the clock.
            bounds = certain_offsets(every, busy, least - guessed, most - guessed, limit)
            if bounds is None:
                return replace(found, operators=replace(fit, is_certain=False))
            times.append(every.time)
            lows.append(bounds.low + guessed)
            highs.append(bounds.high + guessed)
    certain = OffsetBounds(np.concatenate(times), np.concatenate(lows), np.concatenate(highs))
    moments = np.concatenate(asked)
    least, most = _within_marks(found.segments, certain, moments)
    place = found.to_trace_clock(moments)
    offset = place + found.base_ns - moments
    off = np.maximum(most - offset, offset - least)
    if not np.isfinite(off).all():
        return replace(found, operators=replace(fit, is_certain=False))
    bound = float(off.max())
    beside_steps = step_uncertainty_ns(found, shared, bound)
    if beside_steps is None:
        return replace(found, operators=replace(fit, is_certain=False))
    # Where a clock was set back, times stand still until it has caught up: by that much they are off too.
    still = found.to_trace(moments) - place
    bound += beside_steps + float(still.max())
    fit = replace(fit, typical_ns=float(np.median(off + still)), bound_ns=bound, is_certain=True)
    return replace(found, operators=fit)


def _edges_by_segment(alignment: Alignment, thread: SharedThread) -> Iterator[CallEdges]:
    """Yield the edges of a thread that lie near what was traced of it, those of each segment apart."""
    guess = alignment.to_trace_clock(thread.edges)
    near = (guess > int(thread.start.min()) - _AROUND_NS) & (guess < int(thread.end.max()) + _AROUND_NS)
    begins = np.array([segment.begin_ns for segment in alignment.segments[1:]], np.int64)
    segment_of = np.searchsorted(begins, thread.edges, side="right")
    for segment in np.unique(segment_of[near]).tolist():
        here = near & (segment_of == segment)
        yield CallEdges(thread.edges[here], guess[here])


def _bring_near(alignment: Alignment, shared: Sequence[SharedThread]) -> Alignment:
    """Return an alignment by the wall clock, off by less than `REACH_NS` now where that is clear, else as it was."""
    base = alignment.base_ns
    threads = [
        (
            InnermostCalls(thread.calls.start - base, thread.calls.end - base),
            innermost_operators(thread.start, thread.end),
        )
        for thread in shared
    ]
    shift = find_coarse_shift(threads)
    if shift is None or not shift.is_clear:
        return alignment
    note = "no sync mark is in both files; calls and operators tell that the clocks are "
    if abs(shift.shift_ns) <= REACH_NS:
        return replace(alignment, note=f"{note}less than {REACH_NS // 1000} µs apart")
    segment = ClockSegment(0, shift.center_ns + base, shift.shift_ns, shift.drift)
    return replace(alignment, segments=[segment], note=f"{note}{abs(shift.shift_ns) / 1000:,.0f} µs apart")


def _within_marks(
    segments: Sequence[ClockSegment], marks: OffsetBounds, time: Int64Array
) -> tuple[Float64Array, Float64Array]:
    """Return the least and the greatest offset at each moment that the sync marks of its segment allow."""
    begins = np.array([segment.begin_ns for segment in segments[1:]], np.int64)
    of_mark, of_time = (np.searchsorted(begins, moments, side="right") for moments in (marks.time, time))
    low, high = np.full(len(time), -np.inf), np.full(len(time), np.inf)
    for index in range(len(segments)):
        here = of_time == index
        known = OffsetBounds(*(column[of_mark == index] for column in marks))
        nothing = np.full(int(np.count_nonzero(here)), np.inf)
        asked = OffsetBounds(time[here], -nothing, nothing)
        band = intersect(OffsetBounds(*(np.concatenate(both) for both in zip(known, asked, strict=True))))
        if band is not None:
            at = np.searchsorted(band.time, time[here])
            agree = band.low[at] <= band.high[at]
            low[here] = np.where(agree, band.low[at], -np.inf)
            high[here] = np.where(agree, band.high[at], np.inf)
    return low, high


def _fit(bounds: OffsetBounds, segments: Sequence[ClockSegment], operators: int, cut: int) -> OperatorFit | None:
    bands: list[OffsetBand | None] = []
    begins = np.array([segment.begin_ns for segment in segments[1:]], np.int64)
    segment_of = np.searchsorted(begins, bounds.time, side="right")
    halves: list[Float64Array] = []
    for index in range(len(segments)):
        band = intersect(OffsetBounds(*(column[segment_of == index] for column in bounds)))
        bands.append(band)
        if band is not None:
            halves.append((band.high - band.low) / 2)
    if not halves:
        return None
    half = np.concatenate(halves)
    contradicted = int(np.count_nonzero(half < 0))
    return OperatorFit(bands, operators, cut, contradicted, float(np.median(np.abs(half))), float(np.abs(half).max()))


def _shared_threads(timeline: Timeline, events: ProfilerEvents, threads: Int64Array) -> Iterator[SharedThread]:
    """Yield the threads on which calls were recorded and operators traced."""
    columns = timeline.columns
    if not len(columns):
        return
    thread_of_span = threads_of(columns, (track.tid for track in timeline.tracks))
    chosen = runs_module_code(columns) & columns.complete
    track = np.concatenate([events.ops.track, events.plain_ops.track])
    start = np.concatenate([events.ops.start, events.plain_ops.start])
    end = np.concatenate([events.ops.end, events.plain_ops.end])
    on = threads[track]
    holds = np.zeros(len(columns) + 1, np.bool_)  # the last is no span
    holds[columns.parent[chosen]] = True
    for thread in np.unique(thread_of_span[chosen]).tolist():
        running = on == thread
        if running.any():
            spans = chosen & (thread_of_span == thread)
            edges = np.sort(np.concatenate([columns.start[spans], columns.end[spans]]))
            begins, ends = start[running], end[running]
            order = np.lexsort((-ends, begins))
            innermost = np.flatnonzero(spans & ~holds[:-1])
            calls = InnermostCalls(columns.start[innermost], columns.end[innermost])
            yield SharedThread(edges, begins[order], ends[order], calls)
