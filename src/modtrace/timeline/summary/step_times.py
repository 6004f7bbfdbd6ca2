"""Times of each step, by phase and outside modules; the typical step, and the steps of the warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._arrays import INT64_MAX, INT64_MIN, AnyArray, BoolArray, Int64Array, Numbering
from ..._errors import ModtraceError
from ..contents import Process
from ..nesting import TimeIntervals, shift_apart, union_of
from ..select import first_process_tracks, keep_tracks, without_gpu
from ..slices import BACKWARD_PASS, FORWARD, MODULE, RANGE, RECOMPUTE, Slices
from ..timeline import LazyRows
from .step_bounds import OPTIMIZER, ThreadLine, find_step_bounds, named_rows, once_per_timeline

if TYPE_CHECKING:
    from ..timeline import Timeline


class StepTimes(NamedTuple):
    """One step; times are integer nanoseconds.

    A training step lasts from the previous mark to its own: `Recording.step`, or the end of an optimizer's step if the
    recording marks these. The first step of a training starts with the first call that trains. Other steps are calls
    or ranges, see `Timeline.summary`, and only their own thread counts. Each moment counts once, however many threads
    run: as recompute if any module runs again, else as backward if any module is in backward, else as forward. The
    times from `forward_ns` to `after_ns`, and `evaluation_ns`, therefore add up to `duration_ns`.

    Attributes:
        step: number of the step, from 0.
        duration_ns: duration of the step.
        forward_ns: time in forward.
        backward_ns: time in backward, without recompute, with other forward calls inside it.
        recompute_ns: time in recompute.
        before_ns: time before its first span: loading a batch, for example.
        between_ns: time between its spans: the loss, and the loop around the model.
        after_ns: time after its last span: the optimizer and everything else until the mark. `StepParts` divides it.
        backward_pass_ns: time in whole backward passes, from call to return, with waiting for other ranks; it overlaps
            the times above. 0 if the timeline has no passes.
        whole: False if the start was overwritten or the end is not marked; the step may then have been longer.
        evaluation_ns: time of evaluations between the steps: part of `duration_ns`, and of no other time.
    """

    step: int
    duration_ns: int
    forward_ns: int = 0
    backward_ns: int = 0
    recompute_ns: int = 0
    before_ns: int = 0
    between_ns: int = 0
    after_ns: int = 0
    backward_pass_ns: int = 0
    whole: bool = True
    evaluation_ns: int = 0

    @property
    def training_ns(self) -> int:
        """The duration without evaluations, in nanoseconds: the basis of medians, percentiles and slowest steps."""
        return self.duration_ns - self.evaluation_ns


class Steps(LazyRows[StepTimes]):
    """Steps as columns.

    Args:
        tables: int64[11, steps] each, the fields of `StepTimes`, of consecutive steps.

    Attributes:
        table: int64[11, steps], of all steps.
        columns: `StepTimes` whose fields are arrays.
    """

    def __init__(self, *tables: Int64Array) -> None:
        none = np.zeros((len(StepTimes._fields), 0), np.int64)
        self.table = tables[0] if len(tables) == 1 else np.concatenate([none, *tables], axis=1)
        columns: Any = StepTimes(*self.table)
        self.columns: Any = columns._replace(whole=columns.whole > 0)

    def __len__(self) -> int:
        return len(self.columns.step)

    def take(self, rows: AnyArray | slice) -> Steps:
        """Return the steps at the indices `rows`."""
        return Steps(self.table[:, rows])

    def _make(self, rows: slice) -> Iterator[StepTimes]:
        return map(StepTimes._make, zip(*(column[rows].tolist() for column in self.columns), strict=True))

    @property
    def counted(self) -> Steps:
        """The steps that statistics cover: the whole steps, or all if no step is whole."""
        is_whole = self.columns.whole
        return self.take(is_whole) if is_whole.any() else self

    @property
    def slowest(self) -> Steps:
        """The steps, sorted by descending `training_ns`."""
        return self.take(np.argsort(-self.columns.training_ns, kind="stable"))


@once_per_timeline
def measure_steps(timeline: Timeline, step_by: str) -> Steps:
    """Return the times of the steps of `find_step_bounds`, in order.

    With several processes, only the first counts. If a step is a call or range, only its thread counts.
    """
    bounds = find_step_bounds(timeline, step_by)
    timeline = keep_tracks(timeline, first_process_tracks(timeline))
    slices, (number, start, end, is_whole) = timeline.slices, bounds[:4]
    trains, evaluation_rows = ~is_in_evaluation(timeline), _evaluation_rows(timeline)
    if bounds.step_by != OPTIMIZER:  # an evaluation's calls are steps too
        trains, evaluation_rows = np.ones(len(trains), np.bool_), evaluation_rows[:0]
        line = ThreadLine(timeline, bounds)
        slices, thread = line.slices, np.searchsorted(line.tids, bounds.tid)
        start, end = line.move(thread, start), line.move(thread, end)
    columns = slices.take(slices.block_of(MODULE))

    def union(slices: Slices, rows: AnyArray | slice) -> TimeIntervals:
        return union_of(slices.start[rows], slices.end[rows])

    evaluations = union(slices, evaluation_rows)
    is_root = columns.parent < 0
    recomputes = columns.phase == RECOMPUTE
    is_backward = columns.phase != FORWARD
    all_busy = union(columns, is_root & trains)
    modules = all_busy.time_within(start, end)
    backward = union(columns, is_backward & trains & (is_root | ~is_backward[columns.parent])).time_within(start, end)
    recompute = union(columns, recomputes & trains & (is_root | ~recomputes[columns.parent])).time_within(start, end)
    passes = union(slices, slices.block_of(BACKWARD_PASS)).time_within(start, end)
    before_ns, after_ns = _edges_outside(all_busy, start, end)
    either = union_of(
        np.append(all_busy.start_ns, evaluations.start_ns), np.append(all_busy.end_ns, evaluations.end_ns)
    )
    evaluation = either.time_within(start, end) - modules
    before_ns = before_ns - evaluations.time_within(start, start + before_ns)
    after_ns = after_ns - evaluations.time_within(end - after_ns, end)
    between_ns = end - start - evaluation - modules - before_ns - after_ns
    phases = modules - backward, backward - recompute, recompute
    return Steps(
        np.stack([number, end - start, *phases, before_ns, between_ns, after_ns, passes, is_whole, evaluation])
    )


def is_in_evaluation(timeline: Timeline) -> BoolArray:
    """Return bool[spans], whether the span's thread is in an evaluation at its start; see `StepTimes.evaluation_ns`."""
    columns, slices = timeline.columns, timeline.slices
    evaluates = np.zeros(len(columns), np.bool_)
    rows = _evaluation_rows(timeline)
    if len(rows):
        number = Numbering[tuple[Process, int]]()
        thread = np.array([number[track.process, track.tid] for track in timeline.tracks], np.int64)
        shift, _ = shift_apart(thread[slices.track], slices.start, slices.end, len(number))
        row_shift, span_shift = shift[thread[slices.track[rows]]], shift[thread[columns.track]]
        evaluations = union_of(slices.start[rows] + row_shift, slices.end[rows] + row_shift)
        evaluates = evaluations.contains(columns.start + span_shift)
    return evaluates


def _evaluation_rows(timeline: Timeline) -> Int64Array:
    ranges = np.flatnonzero(timeline.slices.kind == RANGE)
    return named_rows(timeline, ranges, lambda name: name.category == "evaluation")


def _edges_outside(busy: TimeIntervals, start: Int64Array, end: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return, for each step, the time before its first span (the whole step without spans) and after its last span."""
    starts, ends = np.append(busy.start_ns, INT64_MAX), np.append(busy.end_ns, INT64_MIN)
    first_start = np.clip(starts[np.searchsorted(busy.end_ns, start, side="right")], start, end)
    last_end = np.clip(ends[np.searchsorted(busy.start_ns, end) - 1], start, end)
    return first_start - start, np.where(first_start < end, end - last_end, 0)


def find_typical_step(timeline: Timeline, step_by: str | None = None) -> StepTimes:
    """Return the first whole step after the warm-up that is nearest their median; raises ModtraceError without one."""
    steps = measure_steps(without_gpu(timeline), step_by)
    whole_steps = steps.take(steps.columns.whole)
    if not len(whole_steps):
        raise ModtraceError(
            "the recording has no whole step, so it has no typical one; call recording.step() after each step"
        )
    later_steps = whole_steps[warm_up_steps(whole_steps.columns.training_ns) :]
    durations = later_steps.columns.training_ns
    return later_steps[int(np.argmin(np.abs(durations - np.median(durations))))]


def warm_up_steps(duration_ns: Int64Array) -> int:
    """Return the number of first steps that are slower than usual in the second half; at most half of the steps."""
    half = len(duration_ns) // 2
    second_half = duration_ns[half:]
    median = np.median(second_half)
    spread = np.median(np.abs(second_half - median))
    limit = max(median + 6 * spread, 1.05 * median)
    slow = duration_ns[:half] > limit
    return int(np.argmin(slow)) if half and not slow.all() else half
