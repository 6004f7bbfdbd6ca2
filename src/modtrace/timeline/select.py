"""Parts of a timeline: a range of time, some steps, some modules; an excerpt, if all of it would be too much."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .._arrays import INT64_MAX, INT64_MIN, BoolArray, Float64Array, IndexArray, Int32Array, Int64Array, Numbering
from .contents import COUNTED, WHOLE_RUN
from .nesting import InnermostLookup, extents
from .slices import BACKWARD, FORWARD, KINDS, MODULE, UNKNOWN_FLOPS, Arg, Slices, in_start_order, map_arg

if TYPE_CHECKING:
    from .contents import CounterSeries, GpuWork
    from .timeline import Timeline


_CHUNK = 1 << 20
"""Slices that are compared at a time."""


def window(timeline: Timeline, start_ns: int | None = None, end_ns: int | None = None) -> Timeline:
    """Return what is in a range of time; see `Timeline.window`."""
    low = INT64_MIN if start_ns is None else start_ns
    high = INT64_MAX if end_ns is None else end_ns
    if high < low:
        raise ValueError(f"the window ends {low - high} ns before it starts")
    slices = timeline.slices
    # An empty slice has no inside to overlap with: it is in if its moment is.
    overlaps = (slices.start < high) & (slices.end > low) | (slices.start == slices.end) & (slices.start == low)
    part = _in_time(timeline, overlaps & (slices.start < high), low, high)
    cut = dataclasses.replace(
        part.slices,
        start=np.maximum(part.slices.start, low),
        end=np.minimum(part.slices.end, high),
        complete=part.slices.complete & (part.slices.start >= low) & (part.slices.end <= high),
        # What was complete only later is not known to be.
        args=map_arg(part.slices.args, Arg.DONE, lambda column: column.at(column.values < high)),
    )
    return dataclasses.replace(
        part,
        slices=in_start_order(cut),  # cutting makes slices begin together: these are sorted by depth
        # It has no times, but steps.
        gpu_work=None if start_ns is not None or end_ns is not None else timeline.gpu_work,
        begin_ns=timeline.begin_ns if start_ns is None else None,
    )


def whole_spans(timeline: Timeline, start_ns: int, end_ns: int) -> Timeline:
    """Return what overlaps a range of time, uncut, with the marks and samples in it."""
    slices = timeline.slices
    return _in_time(timeline, (slices.start <= end_ns) & (slices.end >= start_ns), start_ns, end_ns + 1)


def begun_in(timeline: Timeline, start_ns: int, end_ns: int) -> Timeline:
    """Return what began in a range of time, uncut, with what it launched on GPUs, and the marks and samples in it."""
    slices = timeline.slices
    begun = (slices.start >= start_ns) & (slices.start < end_ns)
    begun |= np.isin(slices.link, slices.link[begun & (slices.link >= 0)])
    return dataclasses.replace(_in_time(timeline, begun, start_ns, end_ns), gpu_work=None)


def _in_time(timeline: Timeline, chosen: BoolArray, low: int, high: int) -> Timeline:
    """Return the chosen slices, and the marks and samples from `low` to before `high`."""
    return dataclasses.replace(
        keep_rows(timeline, np.flatnonzero(chosen)),
        marks=[mark for mark in timeline.marks if low <= mark.time_ns < high],
        counters=[samples_between(counter, low, high) for counter in timeline.counters],
        begin_ns=None,
    )


def keep_tracks(timeline: Timeline, kept: BoolArray) -> Timeline:
    """Return the timeline with some of its tracks and the slices on them."""
    if kept.all():
        return timeline
    new_index = (np.cumsum(kept) - 1).astype(np.int32)
    part = keep_rows(timeline, np.flatnonzero(kept[timeline.slices.track]), cut_links=False)
    return dataclasses.replace(
        part,
        slices=dataclasses.replace(part.slices, track=new_index[part.slices.track]),
        tracks=[timeline.tracks[index] for index in np.flatnonzero(kept).tolist()],
    )


DEVICE_METADATA = ("device_clock_bound_ns", "device_events_dropped", "device_events_unread")
"""The keys of device times in a recording's metadata."""


def on_gpu(timeline: Timeline) -> BoolArray:
    """Return bool[n]: whether a span is on the track of a GPU stream."""
    tracks = np.array([track.device is not None for track in timeline.tracks] or [False])
    chosen: BoolArray = tracks[timeline.columns.track]
    return chosen


def without_gpu(timeline: Timeline) -> Timeline:
    """Return what ran on threads, without the tracks of GPU streams."""
    return keep_tracks(timeline, np.array([track.device is None for track in timeline.tracks], np.bool_))


def step_interval(first: int | None, last: int | None, count: int) -> tuple[int, int]:
    """Return the numbers that `Timeline.steps` is given as numbers from 0; `count` is how many steps there are."""
    low = 0 if first is None else first if first >= 0 else max(count + first, 0)
    high = INT64_MAX if last is None else last if last >= 0 else max(count + last, 0)
    if high < low and min(first or 0, last or 0) >= 0:
        raise ValueError(f"step {high} is before step {low}")
    return low, max(low, high)  # as in a slice of a list, nothing is from -1 to -2


def steps(timeline: Timeline, first: int | None = None, last: int | None = None) -> Timeline:
    """Return the spans that began in the training steps from `first` to before `last`, whole; see `Timeline.steps`.

    What is counted of all spans and nodes is left out: of the chosen spans, `complete` says which lost an end.
    """
    low, high = step_interval(first, last, int(timeline.columns.step.max(initial=-1)) + 1)
    slices = timeline.slices
    part = keep_rows(timeline, np.flatnonzero((slices.step >= low) & (slices.step < high)))
    # The mark that ends step n is the last in it; what had ended when the recording began has no mark.
    first_ended = first_ended_step(timeline)
    since, until = (_end_before(timeline.step_ends, number - first_ended) for number in (low, high))
    unknown = int(np.count_nonzero(part.slices.arg(Arg.FLOPS).values == UNKNOWN_FLOPS))
    changed = {WHOLE_RUN: {"spans": None}, COUNTED: {"unknown": unknown}}
    changed = {key: timeline.metadata[key] | new for key, new in changed.items() if key in timeline.metadata}
    return dataclasses.replace(
        part,
        stats=dataclasses.replace(timeline.stats, unfinished=0, unstarted=0, unattributed=0),
        metadata={**timeline.metadata, **changed},
        marks=[mark for mark in timeline.marks if since < mark.time_ns <= until],
        counters=[samples_between(counter, since, until) for counter in timeline.counters],
        gpu_work=_gpu_work_of(timeline, lambda step: (step >= low) & (step < high)),
        begin_ns=since if since in timeline.step_ends else timeline.begin_ns,
    )


def _gpu_work_of(timeline: Timeline, is_chosen: Callable[[Int64Array], BoolArray]) -> GpuWork | None:
    """Return what was launched on GPUs in some steps; None if that is not known."""
    work = timeline.gpu_work
    return None if work is None or np.any(work.step < 0) else work.take(is_chosen(work.step))


def chosen_steps(timeline: Timeline, numbers: Int64Array) -> Timeline:
    """Return the spans, marks and samples of some steps."""

    def is_chosen(times: Int64Array) -> BoolArray:
        return np.isin(steps_at(timeline, times), numbers)

    marks_chosen = is_chosen(np.array([mark.time_ns for mark in timeline.marks], np.int64))
    return dataclasses.replace(
        keep_rows(timeline, np.flatnonzero(np.isin(timeline.slices.step, numbers))),
        marks=[mark for mark, chosen in zip(timeline.marks, marks_chosen, strict=True) if chosen],
        counters=[
            dataclasses.replace(counter, time=counter.time[chosen], value=counter.value[chosen])
            for counter in timeline.counters
            for chosen in (is_chosen(counter.time),)
        ],
        gpu_work=_gpu_work_of(timeline, lambda step: np.isin(step, numbers)),
        begin_ns=None,
    )


def modules(timeline: Timeline, pattern: str | None = None, max_depth: int | None = None) -> Timeline:
    """Return the spans of the modules whose fully qualified name matches; see `Timeline.modules`."""
    work = timeline.gpu_work
    part = dataclasses.replace(timeline, gpu_work=None if work is None else work.only(pattern, max_depth))
    if pattern is not None and timeline.names:
        chosen = np.array([fnmatch.fnmatchcase(name.fqn, pattern) for name in timeline.names])
        slices = timeline.slices
        part = keep_rows(part, np.flatnonzero(chosen[slices.name] | (slices.kind != MODULE)))
    if max_depth is not None:
        part = keep_rows(part, np.flatnonzero((part.slices.depth < max_depth) | (part.slices.kind != MODULE)))
    return part


def modules_only(timeline: Timeline) -> Timeline:
    """Return the timeline without the slices of other kinds, and without their tracks."""
    other_kinds = {kind.track for kind in KINDS}
    return keep_tracks(timeline, np.array([track.kind not in other_kinds for track in timeline.tracks], np.bool_))


def keep_rows(timeline: Timeline, rows: IndexArray, *, cut_links: bool = True) -> Timeline:
    """Keep some slices, in order. Each is then in the innermost kept one around it.

    The rows are ascending. With `cut_links` a link goes that joined forward and backward and now has one side only.
    """
    slices = timeline.slices
    if len(rows) == len(slices):
        return timeline
    # The parent of an outermost slice, -1, is the last entry.
    new_index = np.full(len(slices) + 1, -1, np.int64)
    new_index[rows] = np.arange(len(rows))
    outer: Int64Array = slices.parent[rows]
    while len(dropped := np.flatnonzero((outer >= 0) & (new_index[outer] < 0))):
        outer[dropped] = slices.parent[outer[dropped]]
    parent = new_index[outer]
    link = _complete_links(slices, rows) if cut_links else slices.link[rows]
    kept = dataclasses.replace(slices.take(rows), parent=parent, depth=_depths(parent), link=link)
    return dataclasses.replace(timeline, slices=kept)


def _depths(parent: Int64Array) -> Int32Array:
    depth = np.zeros(len(parent), np.int32)
    inner = np.flatnonzero(parent >= 0)
    outer = parent[inner]
    while len(inner):
        depth[inner] += 1
        further = parent[outer] >= 0
        inner, outer = inner[further], parent[outer][further]
    return depth


def _complete_links(columns: Slices, rows: IndexArray) -> Int64Array:
    """Return the links of the kept rows, without those that joined forward and backward and have only one left."""
    numbers, link = np.unique(columns.link[rows], return_inverse=True)
    sides = np.zeros((2, 2, len(numbers) + 1), np.bool_)
    sides[0, (columns.phase[rows] == BACKWARD).astype(np.int8), link] = True
    for first in range(0, len(columns), _CHUNK):
        part = slice(first, first + _CHUNK)
        number = np.searchsorted(numbers, columns.link[part])
        number[np.append(numbers, -1)[number] != columns.link[part]] = len(numbers)  # no kept row has it
        sides[1, (columns.phase[part] == BACKWARD).astype(np.int8), number] = True
    broken = sides[1].all(axis=0) & ~sides[0].all(axis=0)
    return np.where(broken[link], -1, columns.link[rows])


def samples_between(counter: CounterSeries, low: int, high: int) -> CounterSeries:
    """Keep the samples from `low` to before `high`, and the last one before, moved to `low`."""
    first, last = np.searchsorted(counter.time, (low, high))
    time, value = counter.time[first:last], counter.value[first:last]
    if first > 0 and low < high and (first == len(counter.time) or counter.time[first] > low):
        time, value = np.insert(time, 0, low), np.insert(value, 0, counter.value[first - 1])
    return dataclasses.replace(counter, time=time, value=value)


def steps_at(timeline: Timeline, times: Int64Array, *, begins: bool = False) -> Int64Array:
    """Return for each moment the number of the step that it is in.

    The moment that ends a step, as its mark says it, is in this step; what `begins` then is in the next one.
    """
    ended = np.searchsorted(timeline.step_ends, times, side="right" if begins else "left").astype(np.int64)
    return ended + first_ended_step(timeline)


def first_process_tracks(timeline: Timeline) -> BoolArray:
    """Return bool, per track whether it is of the first process: of several ranks, the marks are those of the first."""
    tracks = timeline.tracks
    return np.array([track.process == tracks[0].process for track in tracks] or [True], np.bool_)


def first_ended_step(timeline: Timeline) -> int:
    """Return which step the first mark of a step ends: as many as had ended before."""
    columns = timeline.columns
    is_of_process = first_process_tracks(timeline)[columns.track]
    if not is_of_process.any():
        return 0
    # Of a span that is not complete it is not known when it began.
    row = int(np.argmax(is_of_process * (1 + columns.complete.view(np.int8))))
    return int(columns.step[row] - np.searchsorted(timeline.step_ends, columns.start[row], side="right"))


def forward_calls(timeline: Timeline) -> Int64Array:
    """Return the rows of the calls of modules on the forward tracks of the first process's threads."""
    slices, of_process = timeline.slices, first_process_tracks(timeline)
    on_forward = np.array([track.kind == "forward" for track in timeline.tracks] or [False], np.bool_) & of_process
    rows = slices.block_of(MODULE)
    return np.flatnonzero(on_forward[slices.track[rows]] & (slices.phase[rows] == FORWARD))


def outermost_calls(timeline: Timeline) -> Int64Array:
    """Return the rows of `forward_calls` that are in no other call."""
    rows = forward_calls(timeline)
    return rows[timeline.slices.parent[rows] < 0]


def _end_before(step_ends: Int64Array, index: int) -> int:
    """Return when the step before one ended; before all times for the first, after all for one that never comes."""
    return int(step_ends[index - 1]) if 0 < index <= len(step_ends) else INT64_MIN if index <= 0 else INT64_MAX


class Excerpt(NamedTuple):
    """A part of a timeline.

    Attributes:
        timeline: what is left.
        description: which part that is (`the last 3 of 20 steps`).
    """

    timeline: Timeline
    description: str


def last_steps(timeline: Timeline, max_spans: int) -> Excerpt | None:
    """Return the last steps that together have at most `max_spans` spans; None if not even one step fits."""
    steps_held, counts = np.unique(timeline.columns.step, return_counts=True)
    fitting = int(np.count_nonzero(np.cumsum(counts[::-1]) <= max_spans))
    if not fitting or len(steps_held) < 2:
        return None
    description = "the last step" if fitting == 1 else f"the last {fitting} steps"
    return Excerpt(steps(timeline, int(steps_held[-fitting])), f"{description} of {len(steps_held)}")


def last_spans(timeline: Timeline, max_spans: int) -> Excerpt:
    """Return what is after the start of the first of the last `max_spans` spans; what was open then is cut there."""
    columns = timeline.columns
    start = int(columns.start[-max_spans]) if max_spans < len(columns) else int(columns.start[0])
    end = int(columns.end.max())
    kept_ms, whole_ms = (end - start) / 1e6, (end - int(columns.start[0])) / 1e6
    return Excerpt(window(timeline, start), f"the last {kept_ms:,.3f} ms of {whole_ms:,.3f} ms")


def slowest_steps(timeline: Timeline, max_spans: int) -> Excerpt | None:
    """Return the slowest steps that together have at most `max_spans` spans; None if not even one step fits."""
    columns = timeline.columns
    numbers, index, counts = np.unique(columns.step, return_inverse=True, return_counts=True)
    if len(numbers) < 2:
        return None
    start, end = extents(index, columns.start, columns.end, len(numbers))
    chosen = choose_slowest(end - start, counts, max_spans)
    if not len(chosen):
        return None
    description = "the slowest step" if len(chosen) == 1 else f"the {len(chosen)} slowest steps"
    return Excerpt(chosen_steps(timeline, numbers[chosen]), f"{description} of {len(numbers)}")


def choose_slowest(durations: Int64Array | Float64Array, counts: Int64Array, max_count: int) -> IndexArray:
    """Return the indexes of the slowest steps that together have at most `max_count` spans, in order."""
    slowest_first = np.lexsort((-np.arange(len(durations)), -np.asarray(durations)))  # of equal ones the later first
    fitting = int(np.count_nonzero(np.cumsum(counts[slowest_first]) <= max_count))
    return np.sort(slowest_first[:fitting])


def launching_spans(timeline: Timeline) -> Int64Array:
    """Return for each row of `timeline.collectives` the innermost span of its thread that it began in; -1 for none."""
    collectives, columns = timeline.collectives, timeline.columns
    if not len(collectives):
        return np.empty(0, np.int64)
    threads = Numbering[object]()
    keys = [(track.process, track.thread, track.tid, track.device) for track in timeline.tracks]
    thread = np.array([threads[key] for key in keys] or [0], np.int64)
    # A collective that begins as a span ends is still in it.
    running = InnermostLookup(thread[columns.track], dataclasses.replace(columns, end=columns.end + 1))
    return running.on_threads(thread[collectives.track], collectives.start)
