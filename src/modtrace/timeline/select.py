"""Parts of a timeline: a time window, selected steps or modules, and excerpts of large timelines."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .._arrays import INT64_MAX, INT64_MIN, BoolArray, Float64Array, IndexArray, Int32Array, Int64Array, Numbering
from .._errors import ArgumentError
from .contents import COUNTED, WHOLE_RUN
from .nesting import InnermostLookup, extents
from .slices import BACKWARD, FORWARD, KINDS, MODULE, UNKNOWN_FLOPS, Arg, Slices, map_arg, sort_by_start

if TYPE_CHECKING:
    from .contents import CounterSeries, GpuWork
    from .timeline import Timeline


_CHUNK = 1 << 20
"""Number of slices that are compared at a time."""


def window(timeline: Timeline, start_ns: int | None = None, end_ns: int | None = None) -> Timeline:
    """Return the slices, marks and samples in a time window; see `Timeline.window`."""
    low = INT64_MIN if start_ns is None else start_ns
    high = INT64_MAX if end_ns is None else end_ns
    if high < low:
        raise ArgumentError(f"the window ends {low - high} ns before it starts; end_ns must not be less than start_ns")
    slices = timeline.slices
    # An empty slice has no inside that could overlap: it counts if its moment is in the window.
    overlaps = (slices.start < high) & (slices.end > low) | (slices.start == slices.end) & (slices.start == low)
    part = _keep_in_window(timeline, overlaps & (slices.start < high), low, high)
    cut = dataclasses.replace(
        part.slices,
        start=np.maximum(part.slices.start, low),
        end=np.minimum(part.slices.end, high),
        complete=part.slices.complete & (part.slices.start >= low) & (part.slices.end <= high),
        # Collectives that completed only after the window have no known completion.
        args=map_arg(part.slices.args, Arg.DONE, lambda column: column.at(column.values < high)),
    )
    return dataclasses.replace(
        part,
        slices=sort_by_start(cut),  # cut slices start together, and are sorted by depth
        # GPU work has steps, but no times.
        gpu_work=None if start_ns is not None or end_ns is not None else timeline.gpu_work,
        begin_ns=timeline.begin_ns if start_ns is None else None,
    )


def whole_spans(timeline: Timeline, start_ns: int, end_ns: int) -> Timeline:
    """Return the slices that overlap a time window, uncut, with the marks and samples in it."""
    slices = timeline.slices
    return _keep_in_window(timeline, (slices.start <= end_ns) & (slices.end >= start_ns), start_ns, end_ns + 1)


def started_in(timeline: Timeline, start_ns: int, end_ns: int) -> Timeline:
    """Return the slices that start in a time window and the slices linked to them, uncut, with marks and samples."""
    slices = timeline.slices
    is_selected = (slices.start >= start_ns) & (slices.start < end_ns)
    is_selected |= np.isin(slices.link, slices.link[is_selected & (slices.link >= 0)])
    return dataclasses.replace(_keep_in_window(timeline, is_selected, start_ns, end_ns), gpu_work=None)


def _keep_in_window(timeline: Timeline, is_selected: BoolArray, low: int, high: int) -> Timeline:
    """Return the selected slices, and the marks and samples from `low` to before `high`."""
    return dataclasses.replace(
        keep_rows(timeline, np.flatnonzero(is_selected)),
        marks=[mark for mark in timeline.marks if low <= mark.time_ns < high],
        counters=[samples_between(counter, low, high) for counter in timeline.counters],
        begin_ns=None,
    )


def keep_tracks(timeline: Timeline, is_selected: BoolArray) -> Timeline:
    """Return the timeline with the selected tracks and their slices."""
    if is_selected.all():
        return timeline
    new_index = (np.cumsum(is_selected) - 1).astype(np.int32)
    part = keep_rows(timeline, np.flatnonzero(is_selected[timeline.slices.track]), cut_links=False)
    return dataclasses.replace(
        part,
        slices=dataclasses.replace(part.slices, track=new_index[part.slices.track]),
        tracks=[timeline.tracks[index] for index in np.flatnonzero(is_selected).tolist()],
    )


DEVICE_METADATA = ("device_clock_bound_ns", "device_events_dropped", "device_events_unread")
"""Metadata keys of device times."""


def on_gpu(timeline: Timeline) -> BoolArray:
    """Return bool[n]: True for spans on the track of a GPU stream."""
    is_gpu_track = np.array([track.device is not None for track in timeline.tracks] or [False])
    is_gpu_span: BoolArray = is_gpu_track[timeline.columns.track]
    return is_gpu_span


def without_gpu(timeline: Timeline) -> Timeline:
    """Return the timeline without the tracks of GPU streams."""
    return keep_tracks(timeline, np.array([track.device is None for track in timeline.tracks], np.bool_))


def step_interval(first: int | None, last: int | None, count: int) -> tuple[int, int]:
    """Return the arguments of `Timeline.steps` as numbers from 0, given the `count` of steps."""

    def number(argument: int) -> int:
        return argument if argument >= 0 else max(count + argument, 0)

    low, high = 0 if first is None else number(first), INT64_MAX if last is None else number(last)
    if high < low and min(first or 0, last or 0) >= 0:
        raise ArgumentError(f"step {high} is before step {low}; give the first step, then the step after the last")
    return low, max(low, high)  # a range from -1 to -2 is empty, like a slice of a list


def steps(timeline: Timeline, first: int | None = None, last: int | None = None) -> Timeline:
    """Return the spans that started in the training steps from `first` to before `last`, uncut; see `Timeline.steps`.

    The counts of all spans and nodes are left out; `Slices.complete` shows the selected spans that lost an end.
    """
    low, high = step_interval(first, last, int(timeline.columns.step.max(initial=-1)) + 1)
    slices = timeline.slices
    part = keep_rows(timeline, np.flatnonzero((slices.step >= low) & (slices.step < high)))
    # The mark that ends step n is the last in it; steps that ended before the recording started have no mark.
    first_ended = first_ended_step(timeline)
    since, until = (_end_of_previous(timeline.step_ends, number - first_ended) for number in (low, high))
    unknown = int(np.count_nonzero(part.slices.arg(Arg.FLOPS).values == UNKNOWN_FLOPS))
    changed = {WHOLE_RUN: {"spans": None}, COUNTED: {"unknown": unknown}}
    changed = {key: timeline.metadata[key] | new for key, new in changed.items() if key in timeline.metadata}
    return dataclasses.replace(
        part,
        stats=dataclasses.replace(timeline.stats, unfinished=0, unstarted=0, unattributed=0),
        metadata={**timeline.metadata, **changed},
        marks=[mark for mark in timeline.marks if since < mark.time_ns <= until],
        counters=[samples_between(counter, since, until) for counter in timeline.counters],
        gpu_work=_select_gpu_work(timeline, lambda step: (step >= low) & (step < high)),
        begin_ns=since if since in timeline.step_ends else timeline.begin_ns,
    )


def _select_gpu_work(timeline: Timeline, is_selected: Callable[[Int64Array], BoolArray]) -> GpuWork | None:
    """Return the GPU work launched in the selected steps; None if unknown."""
    work = timeline.gpu_work
    return None if work is None or np.any(work.step < 0) else work.take(is_selected(work.step))


def select_steps(timeline: Timeline, numbers: Int64Array) -> Timeline:
    """Return the spans, marks and samples of the steps with the numbers."""

    def in_steps(times: Int64Array) -> BoolArray:
        return np.isin(steps_at(timeline, times), numbers)

    has_mark = in_steps(np.array([mark.time_ns for mark in timeline.marks], np.int64))
    return dataclasses.replace(
        keep_rows(timeline, np.flatnonzero(np.isin(timeline.slices.step, numbers))),
        marks=[mark for mark, is_selected in zip(timeline.marks, has_mark, strict=True) if is_selected],
        counters=[
            dataclasses.replace(counter, time=counter.time[mask], value=counter.value[mask])
            for counter in timeline.counters
            for mask in (in_steps(counter.time),)
        ],
        gpu_work=_select_gpu_work(timeline, lambda step: np.isin(step, numbers)),
        begin_ns=None,
    )


def modules(timeline: Timeline, pattern: str | None = None, max_depth: int | None = None) -> Timeline:
    """Return the spans of the modules whose fully qualified name matches; see `Timeline.only`."""
    work = timeline.gpu_work
    part = dataclasses.replace(timeline, gpu_work=None if work is None else work.only(pattern, max_depth))
    if pattern is not None and timeline.names:
        matches = np.array([fnmatch.fnmatchcase(name.fqn, pattern) for name in timeline.names])
        slices = timeline.slices
        part = keep_rows(part, np.flatnonzero(matches[slices.name] | (slices.kind != MODULE)))
    if max_depth is not None:
        part = keep_rows(part, np.flatnonzero((part.slices.depth < max_depth) | (part.slices.kind != MODULE)))
    return part


def modules_only(timeline: Timeline) -> Timeline:
    """Return the timeline without the slices of other kinds, and without their tracks."""
    other_kinds = {kind.track for kind in KINDS}
    return keep_tracks(timeline, np.array([track.kind not in other_kinds for track in timeline.tracks], np.bool_))


def keep_rows(timeline: Timeline, rows: IndexArray, *, cut_links: bool = True) -> Timeline:
    """Return the timeline with the slices `rows`, ascending. The parent of each is the innermost one around it.

    If `cut_links`, links that joined forward and backward and now have one side only are removed.
    """
    slices = timeline.slices
    if len(rows) == len(slices):
        return timeline
    # The parent of an outermost slice, -1, is the last entry.
    new_index = np.full(len(slices) + 1, -1, np.int64)
    new_index[rows] = np.arange(len(rows))
    outer: Int64Array = slices.parent[rows]
    while len(orphans := np.flatnonzero((outer >= 0) & (new_index[outer] < 0))):
        outer[orphans] = slices.parent[outer[orphans]]
    parent = new_index[outer]
    link = _complete_links(slices, rows) if cut_links else slices.link[rows]
    selected = dataclasses.replace(slices.take(rows), parent=parent, depth=_depths(parent), link=link)
    return dataclasses.replace(timeline, slices=selected)


def _depths(parent: Int64Array) -> Int32Array:
    depth = np.zeros(len(parent), np.int32)
    inner = np.flatnonzero(parent >= 0)
    outer = parent[inner]
    while len(inner):
        depth[inner] += 1
        has_outer = parent[outer] >= 0
        inner, outer = inner[has_outer], parent[outer][has_outer]
    return depth


def _complete_links(columns: Slices, rows: IndexArray) -> Int64Array:
    """Return the links of the rows; -1 for a link of forward and backward that has only one side among them."""
    numbers, link = np.unique(columns.link[rows], return_inverse=True)
    sides = np.zeros((2, 2, len(numbers) + 1), np.bool_)
    sides[0, (columns.phase[rows] == BACKWARD).astype(np.int8), link] = True
    for first in range(0, len(columns), _CHUNK):
        part = slice(first, first + _CHUNK)
        number = np.searchsorted(numbers, columns.link[part])
        number[np.append(numbers, -1)[number] != columns.link[part]] = len(numbers)  # not among the rows
        sides[1, (columns.phase[part] == BACKWARD).astype(np.int8), number] = True
    broken = sides[1].all(axis=0) & ~sides[0].all(axis=0)
    return np.where(broken[link], -1, columns.link[rows])


def samples_between(counter: CounterSeries, low: int, high: int) -> CounterSeries:
    """Return the samples from `low` to before `high`, and the last one before them, moved to `low`."""
    first, last = np.searchsorted(counter.time, (low, high))
    time, value = counter.time[first:last], counter.value[first:last]
    if first > 0 and low < high and (first == len(counter.time) or counter.time[first] > low):
        time, value = np.insert(time, 0, low), np.insert(value, 0, counter.value[first - 1])
    return dataclasses.replace(counter, time=time, value=value)


def steps_at(timeline: Timeline, times: Int64Array, *, starts: bool = False) -> Int64Array:
    """Return the number of the step at each time.

    The time of a step's mark belongs to the step; if the times are `starts` of slices, to the next step.
    """
    index = np.searchsorted(timeline.step_ends, times, side="right" if starts else "left").astype(np.int64)
    return index + first_ended_step(timeline)


def first_process_tracks(timeline: Timeline) -> BoolArray:
    """Return True for the tracks of the first process, whose marks a timeline of several ranks has."""
    tracks = timeline.tracks
    return np.array([track.process == tracks[0].process for track in tracks] or [True], np.bool_)


def first_ended_step(timeline: Timeline) -> int:
    """Return the number of the step that the first step mark ends."""
    columns = timeline.columns
    in_process = first_process_tracks(timeline)[columns.track]
    if not in_process.any():
        return 0
    # The first complete span if there is one: others may have an unknown start.
    row = int(np.argmax(in_process * (1 + columns.complete.view(np.int8))))
    return int(columns.step[row] - np.searchsorted(timeline.step_ends, columns.start[row], side="right"))


def forward_calls(timeline: Timeline) -> Int64Array:
    """Return the rows of module calls on the forward tracks of the first process."""
    slices = timeline.slices
    is_forward_track = np.array([track.kind == "forward" for track in timeline.tracks] or [False], np.bool_)
    is_forward_track &= first_process_tracks(timeline)
    rows = slices.block_of(MODULE)
    return np.flatnonzero(is_forward_track[slices.track[rows]] & (slices.phase[rows] == FORWARD))


def outermost_calls(timeline: Timeline) -> Int64Array:
    """Return the rows of `forward_calls` that are inside no other call."""
    rows = forward_calls(timeline)
    return rows[timeline.slices.parent[rows] < 0]


def _end_of_previous(step_ends: Int64Array, index: int) -> int:
    """Return the end of the step before step `index`: INT64_MIN for the first step, INT64_MAX beyond the last."""
    return int(step_ends[index - 1]) if 0 < index <= len(step_ends) else INT64_MIN if index <= 0 else INT64_MAX


class Excerpt(NamedTuple):
    """A part of a timeline.

    Attributes:
        timeline: the part.
        description: a phrase for the part (`the last 3 of 20 steps`).
    """

    timeline: Timeline
    description: str


def last_steps(timeline: Timeline, max_spans: int) -> Excerpt | None:
    """Return the last steps that together have at most `max_spans` spans; None if not even one step fits."""
    numbers, counts = np.unique(timeline.columns.step, return_counts=True)
    fitting = int(np.count_nonzero(np.cumsum(counts[::-1]) <= max_spans))
    if not fitting or len(numbers) < 2:
        return None
    description = "the last step" if fitting == 1 else f"the last {fitting} steps"
    return Excerpt(steps(timeline, int(numbers[-fitting])), f"{description} of {len(numbers)}")


def last_spans(timeline: Timeline, max_spans: int) -> Excerpt:
    """Return the window from the start of the first of the last `max_spans` spans; slices open then are cut there."""
    columns = timeline.columns
    start = int(columns.start[-max_spans]) if max_spans < len(columns) else int(columns.start[0])
    end = int(columns.end.max())
    excerpt_ms, total_ms = (end - start) / 1e6, (end - int(columns.start[0])) / 1e6
    return Excerpt(window(timeline, start), f"the last {excerpt_ms:,.3f} ms of {total_ms:,.3f} ms")


def slowest_steps(timeline: Timeline, max_spans: int) -> Excerpt | None:
    """Return the slowest steps that together have at most `max_spans` spans; None if not even one step fits."""
    columns = timeline.columns
    numbers, index, counts = np.unique(columns.step, return_inverse=True, return_counts=True)
    if len(numbers) < 2:
        return None
    start, end = extents(index, columns.start, columns.end, len(numbers))
    slowest = choose_slowest(end - start, counts, max_spans)
    if not len(slowest):
        return None
    description = "the slowest step" if len(slowest) == 1 else f"the {len(slowest)} slowest steps"
    return Excerpt(select_steps(timeline, numbers[slowest]), f"{description} of {len(numbers)}")


def choose_slowest(durations: Int64Array | Float64Array, counts: Int64Array, max_count: int) -> IndexArray:
    """Return the indexes of the slowest steps that together have at most `max_count` spans, in order."""
    slowest_first = np.lexsort((-np.arange(len(durations)), -np.asarray(durations)))  # later first among equals
    fitting = int(np.count_nonzero(np.cumsum(counts[slowest_first]) <= max_count))
    return np.sort(slowest_first[:fitting])


def launching_spans(timeline: Timeline) -> Int64Array:
    """Return the innermost span in which each of `timeline.collectives` started on its thread; -1 if there is none."""
    collectives, columns = timeline.collectives, timeline.columns
    if not len(collectives):
        return np.empty(0, np.int64)
    threads = Numbering[object]()
    keys = [(track.process, track.thread, track.tid, track.device) for track in timeline.tracks]
    thread = np.array([threads[key] for key in keys] or [0], np.int64)
    # A collective that starts as a span ends is still in the span.
    running = InnermostLookup(thread[columns.track], dataclasses.replace(columns, end=columns.end + 1))
    return running.on_threads(thread[collectives.track], collectives.start)
