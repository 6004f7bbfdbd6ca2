"""Refine an alignment by the operators of a trace, until as few as can be lie partly outside a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..._typing import Float64Array, Int64Array
from ...timeline import Timeline
from ..align.alignment import Alignment, ClockSegment, OperatorFit, sync_bounds
from ..align.certain_offsets import certain_offsets
from ..align.coarse_shift import InnermostCalls, find_coarse_shift
from ..align.offset_band import OffsetBand, OffsetBounds, intersect
from ..align.operator_bounds import (
    REACH_NS,
    CallEdges,
    bounds_from_gaps,
    busy_intervals,
    cut_depth,
    distance_to_end,
    innermost_operators,
    most_likely_shift,
)
from ..trace.event_columns import ProfilerEvents
from .call_lookup import runs_module_code, threads_of

__all__ = ["refine_by_operators"]

_PASSES = ((REACH_NS, 2_000.0), (10_000, 1_000.0), (5_000, 500.0))
"""How far off the guess of each pass may be, and how deep an edge may lie in an operator and still count, ns."""
_AROUND_NS = 1_000_000


class _Thread(NamedTuple):
    """One thread, as both files know it.

    Attributes:
        edges: int64[n], ns of the recording's clock, ascending: where calls begin and end.
        start: int64[m], ns from the trace's base, of its operators; ascending, an outer one first.
        end: int64[m].
        calls: those in which no other ran, of the recording's clock.
    """

    edges: Int64Array
    start: Int64Array
    end: Int64Array
    calls: InnermostCalls


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
        alignment = replace(alignment, segments=_move_clock_steps(found, shared))
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
    return _with_certain_bound(found, marks, shared) if len(marks.time) else found


def _with_certain_bound(found: Alignment, marks: OffsetBounds, shared: Sequence[_Thread]) -> Alignment:
    """Return the alignment with the bound that holds whichever of the possible gaps the edges lie in.

    The likely gaps tell the offset, mostly to less than that. Where they are not the only possible ones, as around
    long operators, the bound is wider.
    """
    fit = found.operators
    if fit is None or fit.contradicted:
        return found
    by_marks = replace(found, operators=None)
    limit = max(band.drift_limit for band in fit.bands if band is not None)
    limit += max(abs(segment.drift) for segment in found.segments)
    times, lows, highs = [marks.time], [marks.low], [marks.high]
    asked = [marks.time]
    for thread in shared:
        for every in _edges_by_segment(by_marks, thread):
            asked.append(every.time)
            place = found.to_trace_clock(every.time)
            busy = busy_intervals(thread.start, thread.end, np.sort(place), _PASSES[-1][0])
            # What lies in an operator nonetheless is none of what the proof is about.
            outside = cut_depth(busy, place) == 0
            edges = CallEdges(every.time[outside], every.guess[outside])
            if not len(edges.time):
                continue
            guessed = (edges.guess + found.base_ns - edges.time).astype(np.float64)
            least, most = _within_marks(found.segments, marks, edges.time)
            bounds = certain_offsets(edges, busy, least - guessed, most - guessed, limit)
            if bounds is None:
                return replace(found, operators=replace(fit, is_certain=False))
            times.append(edges.time)
            lows.append(bounds.low + guessed)
            highs.append(bounds.high + guessed)
    certain = OffsetBounds(np.concatenate(times), np.concatenate(lows), np.concatenate(highs))
    moments = np.concatenate(asked)
    least, most = _within_marks(found.segments, certain, moments)
    offset = found.to_trace_clock(moments) + found.base_ns - moments
    off = np.maximum(most - offset, offset - least)
    if not np.isfinite(off).all():
        return replace(found, operators=replace(fit, is_certain=False))
    fit = replace(fit, typical_ns=float(np.median(off)), bound_ns=float(off.max()), is_certain=True)
    return replace(found, operators=fit)


def _edges_by_segment(alignment: Alignment, thread: _Thread) -> Iterator[CallEdges]:
    """Yield the edges of a thread that lie near what was traced of it, those of each segment apart."""
    guess = alignment.to_trace_clock(thread.edges)
    near = (guess > int(thread.start.min()) - _AROUND_NS) & (guess < int(thread.end.max()) + _AROUND_NS)
    begins = np.array([segment.begin_ns for segment in alignment.segments[1:]], np.int64)
    segment_of = np.searchsorted(begins, thread.edges, side="right")
    for segment in np.unique(segment_of[near]).tolist():
        here = near & (segment_of == segment)
        yield CallEdges(thread.edges[here], guess[here])


def _bring_near(alignment: Alignment, shared: Sequence[_Thread]) -> Alignment:
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


def _shared_threads(timeline: Timeline, events: ProfilerEvents, threads: Int64Array) -> Iterator[_Thread]:
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
            yield _Thread(edges, begins[order], ends[order], calls)


def _move_clock_steps(found: Alignment, shared: Sequence[_Thread]) -> Sequence[ClockSegment]:
    """Return the segments, each from where on its offset suits the operators better than the one before.

    Marks say between which two of them a clock was set; the edges of calls in between say when: by the right offset
    they lie near an end of an operator.
    """
    segments = list(found.segments)
    for index, (first, last) in enumerate(found.brackets):
        sides = [found.of_segment(at) for at in (index, index + 1)]
        moments = [np.array([first, last], np.int64)]
        gained = [np.zeros(2, np.int64)]
        for thread in shared:
            edges = thread.edges[(thread.edges > first) & (thread.edges < last)]
            if not len(edges):
                continue
            before, after = (
                distance_to_end(busy_intervals(thread.start, thread.end, guess, REACH_NS), guess)
                for guess in (side.to_trace(edges) for side in sides)
            )
            moments.append(edges)
            gained.append(before - after)
        time = np.concatenate(moments)
        order = np.argsort(time, kind="stable")
        # What is lost by giving the edges up to each moment the first offset and not the second.
        lost = np.cumsum(np.concatenate(gained)[order])[:-1]
        at = int(np.argmin(lost))
        left, right = time[order[at]], time[order[at + 1]]
        segments[index + 1] = replace(segments[index + 1], begin_ns=int(left + (right - left) // 2 + 1))
    return segments
