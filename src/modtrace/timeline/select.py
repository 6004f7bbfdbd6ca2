"""Parts of a timeline: a range of time, some steps, some modules."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from typing import TYPE_CHECKING

import numpy as np

from .._typing import BoolArray, IndexArray, Int32Array, Int64Array
from .columns import BACKWARD, Columns, sort_by_start

if TYPE_CHECKING:
    from .contents import CounterSeries
    from .timeline import Timeline

__all__ = [
    "chosen_steps",
    "first_ended_step",
    "first_process_tracks",
    "keep_tracks",
    "modules",
    "steps",
    "steps_at",
    "whole_spans",
    "window",
]


def window(timeline: Timeline, start_ns: int | None = None, end_ns: int | None = None) -> Timeline:
    """Return what lies in a range of time; see `Timeline.window`."""
    low = np.iinfo(np.int64).min if start_ns is None else start_ns
    high = np.iinfo(np.int64).max if end_ns is None else end_ns
    if high < low:
        raise ValueError(f"the window ends {low - high} ns before it starts")
    columns = timeline.columns
    # An empty span has no inside to overlap with: it is in where its moment is.
    overlaps = (columns.start < high) & (columns.end > low) | (columns.start == columns.end) & (columns.start == low)
    part = _keep(timeline, np.flatnonzero(overlaps & (columns.start < high)))
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
        collectives=timeline.collectives.in_window(low, high),
        backward_passes=[
            run._replace(
                start_ns=max(run.start_ns, low),
                end_ns=min(run.end_ns, high),
                complete=run.complete and low <= run.start_ns and run.end_ns <= high,
            )
            for run in timeline.backward_passes
            if run.start_ns < high and run.end_ns > low
        ],
    )


def whole_spans(timeline: Timeline, start_ns: int, end_ns: int) -> Timeline:
    """Return what overlaps a range of time, uncut, with the marks and samples in it."""
    columns, table = timeline.columns, timeline.collectives
    rows = np.flatnonzero((columns.start <= end_ns) & (columns.end >= start_ns))
    return dataclasses.replace(
        _keep(timeline, rows),
        marks=[mark for mark in timeline.marks if start_ns <= mark.time_ns <= end_ns],
        counters=[_samples(counter, start_ns, end_ns + 1) for counter in timeline.counters],
        collectives=table.take((table.start <= end_ns) & (table.end >= start_ns)),
        backward_passes=[run for run in timeline.backward_passes if run.start_ns <= end_ns and run.end_ns >= start_ns],
    )


def keep_tracks(timeline: Timeline, kept: BoolArray) -> Timeline:
    """Return the timeline with some of its tracks and what lies on them; what lies on no track stays.

    Args:
        timeline: what to choose from.
        kept: bool, per track whether it stays.
    """
    if kept.all():
        return timeline
    new_index = (np.cumsum(kept) - 1).astype(np.int32)
    rows = np.flatnonzero(kept[timeline.columns.track])
    position = np.full(len(timeline.columns) + 1, -1, np.int64)
    position[rows] = np.arange(len(rows))
    columns = timeline.columns.take(rows)
    table = timeline.collectives.take(kept[timeline.collectives.track])
    part = dataclasses.replace(
        timeline,
        columns=dataclasses.replace(columns, parent=position[columns.parent], track=new_index[columns.track]),
        tracks=[timeline.tracks[index] for index in np.flatnonzero(kept).tolist()],
        span_args={int(position[span]): args for span, args in timeline.span_args.items() if position[span] >= 0},
    )
    table = dataclasses.replace(table, track=new_index[table.track], track_names=part.track_names)
    return dataclasses.replace(part, collectives=table)


def steps(timeline: Timeline, first: int | None = None, last: int | None = None) -> Timeline:
    """Return the spans that began in the steps from `first` to before `last`, whole; see `Timeline.steps`."""
    columns = timeline.columns
    count = int(columns.step.max(initial=-1)) + 1
    low = 0 if first is None else first if first >= 0 else max(count + first, 0)
    high = np.iinfo(np.int64).max if last is None else last if last >= 0 else max(count + last, 0)
    if high < low and min(first or 0, last or 0) < 0:
        high = max(low, high)  # as in a slice of a list: nothing
    if high < low:
        raise ValueError(f"step {high} is before step {low}")
    part = _keep(timeline, np.flatnonzero((columns.step >= low) & (columns.step < high)))
    step_ends = np.array([mark.time_ns for mark in timeline.marks if mark.kind == "step"], np.int64)
    # The mark that ends step n is the last in it; what had ended when the recording began has no mark.
    first_ended = first_ended_step(timeline, step_ends)
    since = _time_at(step_ends, low - first_ended - 1, np.iinfo(np.int64).min)
    until = _time_at(step_ends, high - first_ended - 1, np.iinfo(np.int64).max)
    return dataclasses.replace(
        part,
        marks=[mark for mark in timeline.marks if since < mark.time_ns <= until],
        counters=[_samples(counter, since, until) for counter in timeline.counters],
        collectives=timeline.collectives.take((timeline.collectives.step >= low) & (timeline.collectives.step < high)),
        backward_passes=[run for run in timeline.backward_passes if since <= run.start_ns < until],
    )


def chosen_steps(timeline: Timeline, numbers: Int64Array) -> Timeline:
    """Return the spans, marks and samples of some steps.

    Args:
        timeline: what to choose from.
        numbers: int64[n], the steps.
    """
    columns = timeline.columns

    def is_chosen(times: Int64Array) -> BoolArray:
        return np.isin(steps_at(timeline, times), numbers)

    passes_chosen = is_chosen(np.array([run.start_ns for run in timeline.backward_passes], np.int64))
    marks_chosen = is_chosen(np.array([mark.time_ns for mark in timeline.marks], np.int64))
    return dataclasses.replace(
        _keep(timeline, np.flatnonzero(np.isin(columns.step, numbers))),
        marks=[mark for mark, chosen in zip(timeline.marks, marks_chosen, strict=True) if chosen],
        counters=[
            dataclasses.replace(counter, time=counter.time[chosen], value=counter.value[chosen])
            for counter in timeline.counters
            for chosen in (is_chosen(counter.time),)
        ],
        collectives=timeline.collectives.take(np.isin(timeline.collectives.step, numbers)),
        backward_passes=[run for run, chosen in zip(timeline.backward_passes, passes_chosen, strict=True) if chosen],
    )


def modules(timeline: Timeline, pattern: str | None = None, max_depth: int | None = None) -> Timeline:
    """Return the spans of the modules whose fully qualified name matches; see `Timeline.modules`."""
    part = timeline
    if pattern is not None and timeline.names:
        matches = re.compile(fnmatch.translate(pattern)).match
        chosen = np.array([matches(name.fqn) is not None for name in timeline.names])
        part = _keep(timeline, np.flatnonzero(chosen[timeline.columns.name]))
    if max_depth is not None:
        part = _keep(part, np.flatnonzero(part.columns.depth < max_depth))
    return part


def _keep(timeline: Timeline, rows: IndexArray) -> Timeline:
    """Keep some spans, in order. Each lies in the innermost one around it that is kept; links to none are dropped."""
    columns = timeline.columns
    if len(rows) == len(columns):
        return timeline
    new_index = np.full(len(columns), -1, np.int64)
    new_index[rows] = np.arange(len(rows))
    kept = columns.take(rows)
    parent = _kept_parents(columns.parent, new_index, kept.parent)
    kept = dataclasses.replace(kept, parent=parent, depth=_depths(parent), link=_complete_links(columns, rows))
    return dataclasses.replace(
        timeline,
        columns=kept,
        span_args={int(new_index[span]): args for span, args in timeline.span_args.items() if new_index[span] >= 0},
    )


def _kept_parents(parent: Int64Array, new_index: Int64Array, kept_parent: Int64Array) -> Int64Array:
    """Return the new index of the innermost kept span around each kept one.

    Args:
        parent: the parent of each span.
        new_index: of each span among the kept ones, or -1.
        kept_parent: the parent of each kept span till now.
    """
    outer = kept_parent.copy()
    while True:
        dropped = np.flatnonzero((outer >= 0) & (new_index[outer] < 0))
        if not len(dropped):
            return np.where(outer >= 0, new_index[outer], -1)
        outer[dropped] = parent[outer[dropped]]


def _depths(parent: Int64Array) -> Int32Array:
    depth = np.zeros(len(parent), np.int32)
    inner = np.flatnonzero(parent >= 0)
    outer = parent[inner]
    while len(inner):
        depth[inner] += 1
        further = parent[outer] >= 0
        inner, outer = inner[further], parent[outer][further]
    return depth


def _complete_links(columns: Columns, rows: IndexArray) -> Int64Array:
    """Return the links of the kept rows, without those that joined forward and backward and have only one left."""
    numbers, link = np.unique(columns.link, return_inverse=True)
    backward = columns.phase == BACKWARD

    def joining(spans: IndexArray | slice) -> BoolArray:
        sides = np.zeros((2, len(numbers)), bool)
        sides[backward[spans].astype(np.int64), link[spans]] = True
        both: BoolArray = sides[0] & sides[1]
        return both

    broken = joining(slice(None)) & ~joining(rows)
    return np.where(broken[link[rows]], -1, columns.link[rows])


def _reordered(timeline: Timeline, columns: Columns) -> Timeline:
    """Sort by (start, depth) anew, as cutting makes spans begin together."""
    ordered, new_index = sort_by_start(columns)
    return dataclasses.replace(
        timeline,
        columns=ordered,
        span_args={int(new_index[span]): args for span, args in timeline.span_args.items()},
    )


def _samples(counter: CounterSeries, low: int, high: int) -> CounterSeries:
    """Keep the samples from `low` to before `high`, and the last one before, moved to `low`."""
    first, last = np.searchsorted(counter.time, (low, high))
    time, value = counter.time[first:last], counter.value[first:last]
    if first > 0 and low < high and (first == len(counter.time) or counter.time[first] > low):
        time, value = np.insert(time, 0, low), np.insert(value, 0, counter.value[first - 1])
    return dataclasses.replace(counter, time=time, value=value)


def steps_at(timeline: Timeline, times: Int64Array) -> Int64Array:
    """Return for each moment the number of the step that it lies in."""
    step_ends = np.array([mark.time_ns for mark in timeline.marks if mark.kind == "step"], np.int64)
    return np.searchsorted(step_ends, times).astype(np.int64) + first_ended_step(timeline, step_ends)


def first_process_tracks(timeline: Timeline) -> BoolArray:
    """Return bool, per track whether it is of the first process: of several ranks, the marks are those of the first."""
    tracks = timeline.tracks
    return np.array([track.process == tracks[0].process for track in tracks] or [True], np.bool_)


def first_ended_step(timeline: Timeline, step_ends: Int64Array) -> int:
    """Return which step the first of the marks in `step_ends` ends: as many as had ended before."""
    columns, own = timeline.columns, first_process_tracks(timeline)
    rows = np.arange(min(len(columns), 1)) if own.all() else np.flatnonzero(own[columns.track])[:1]
    if not len(rows):
        return 0
    return int(columns.step[rows[0]] - np.searchsorted(step_ends, columns.start[rows[0]], side="right"))


def _time_at(step_ends: Int64Array, index: int, otherwise: int) -> int:
    return int(step_ends[index]) if 0 <= index < len(step_ends) else otherwise
