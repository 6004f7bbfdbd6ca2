"""Times of each step, by phase and outside of modules; the typical step, and the steps of the warm-up."""

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

    A training step reaches from the mark that ends the one before it to its own: `Recording.step`, or the end of an
    optimizer's step if the recording marks these. The first of a training begins with what trains in it. Other steps
    are calls or ranges, see `Timeline.summary`: what their own thread did counts. Each moment counts once, however many
    threads run: as recompute if any module runs again, else as backward if any is in backward, else as forward.
    So the times from `forward_ns` to `after_ns`, and `evaluation_ns`, add up to `duration_ns`.

    Attributes:
        step: its number, from 0.
        duration_ns: how long it took.
        forward_ns: in forward.
        backward_ns: in backward, without recompute, with other forward calls inside it.
        recompute_ns: in recompute.
        before_ns: before its first span: loading a batch, and what else comes first.
        between_ns: between its spans: the loss, and the loop around the model.
        after_ns: after its last span: the optimizer and everything else until the mark. `StepParts` divides it.
        backward_pass_ns: of all that, inside whole backward passes, each from its call to its return, with waiting for
            other ranks; 0 if the timeline has none.
        whole: False if its beginning was overwritten, or its end not marked; it may then have been longer.
        evaluation_ns: in evaluations between the steps, which are no part of the training step: they are in
            `duration_ns`, and in none of the other times.
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
        """The duration without evaluations, in nanoseconds: medians, percentiles and the slowest steps are by this."""
        return self.duration_ns - self.evaluation_ns


class Steps(LazyRows[StepTimes]):
    """Steps as columns.

    Args:
        tables: int64[11, steps] each, the fields of `StepTimes`; these steps follow each other.

    Attributes:
        table: of all steps.
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
        """Return some of the steps."""
        return Steps(self.table[:, rows])

    def _make(self, rows: slice) -> Iterator[StepTimes]:
        return map(StepTimes._make, zip(*(column[rows].tolist() for column in self.columns), strict=True))

    @property
    def counted(self) -> Steps:
        """The steps that all figures are of: the whole ones, or all if none is."""
        whole = self.columns.whole
        return self.take(whole) if whole.any() else self

    @property
    def slowest(self) -> Steps:
        """The same steps, the slowest first, without evaluations."""
        return self.take(np.argsort(-self.columns.training_ns, kind="stable"))


@once_per_timeline
def measure_steps(timeline: Timeline, step_by: str) -> Steps:
    """Return the steps of a timeline in order, as `find_step_bounds` tells them.

    With several processes, marks and spans of the first count. For a step that is a call, those of its thread count.
    """
    bounds = find_step_bounds(timeline, step_by)
    timeline = keep_tracks(timeline, first_process_tracks(timeline))
    slices, (number, start, end, whole) = timeline.slices, bounds[:4]
    trains, evaluation_rows = ~is_in_evaluation(timeline), _evaluation_rows(timeline)
    if bounds.step_by != OPTIMIZER:  # an evaluation's calls are steps too
        trains, evaluation_rows = np.ones(len(trains), np.bool_), evaluation_rows[:0]
        line = ThreadLine(timeline, bounds)
        slices, thread = line.slices, np.searchsorted(line.tids, bounds.tid)
        start, end = line.move(thread, start), line.move(thread, end)
    columns = slices.take(slices.block_of(MODULE))

    def union(slices: Slices, chosen: AnyArray | slice) -> TimeIntervals:
        return union_of(slices.start[chosen], slices.end[chosen])

    evaluations = union(slices, evaluation_rows)
    is_root = columns.parent < 0
    recomputes = columns.phase == RECOMPUTE
    is_backward = columns.phase != FORWARD
    all_busy = union(columns, is_root & trains)
    modules = all_busy.time_within(start, end)
    backward = union(columns, is_backward & trains & (is_root | ~is_backward[columns.parent])).time_within(start, end)
    recompute = union(columns, recomputes & trains & (is_root | ~recomputes[columns.parent])).time_within(start, end)
    passes = union(slices, slices.block_of(BACKWARD_PASS)).time_within(start, end)
    before, after = _edges_outside(all_busy, start, end)
    either = union_of(np.append(all_busy.start, evaluations.start), np.append(all_busy.end, evaluations.end))
    evaluation = either.time_within(start, end) - modules
    before = before - evaluations.time_within(start, start + before)
    after = after - evaluations.time_within(end - after, end)
    between = end - start - evaluation - modules - before - after
    phases = modules - backward, backward - recompute, recompute
    return Steps(np.stack([number, end - start, *phases, before, between, after, passes, whole, evaluation]))


def is_in_evaluation(timeline: Timeline) -> BoolArray:
    """Return bool, per span whether its thread evaluates when it begins; see `StepTimes.evaluation_ns`."""
    columns, slices = timeline.columns, timeline.slices
    evaluates = np.zeros(len(columns), np.bool_)
    rows = _evaluation_rows(timeline)
    if len(rows):
        number = Numbering[tuple[Process, int]]()
        thread = np.array([number[track.process, track.tid] for track in timeline.tracks], np.int64)
        shift, _ = shift_apart(thread[slices.track], slices.start, slices.end, len(number))
        of_row, of_span = shift[thread[slices.track[rows]]], shift[thread[columns.track]]
        evaluates = union_of(slices.start[rows] + of_row, slices.end[rows] + of_row).contains(columns.start + of_span)
    return evaluates


def _evaluation_rows(timeline: Timeline) -> Int64Array:
    ranges = np.flatnonzero(timeline.slices.kind == RANGE)
    return named_rows(timeline, ranges, lambda name: name.category == "evaluation")


def _edges_outside(busy: TimeIntervals, start: Int64Array, end: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return for each step the time before its first span (all of it if it has none) and after its last."""
    starts, ends = np.append(busy.start, INT64_MAX), np.append(busy.end, INT64_MIN)
    first_start = np.clip(starts[np.searchsorted(busy.end, start, side="right")], start, end)
    last_end = np.clip(ends[np.searchsorted(busy.start, end) - 1], start, end)
    before = first_start - start
    return before, np.where(first_start < end, end - last_end, 0)


def find_typical_step(timeline: Timeline, step_by: str | None = None) -> StepTimes:
    """Return the whole step after the warm-up nearest their median, the first of equals, or raise ModtraceError."""
    steps = measure_steps(without_gpu(timeline), step_by)
    whole = steps.take(steps.columns.whole)
    if not len(whole):
        raise ModtraceError("a recording without whole steps has no typical one; call recording.step() after each step")
    kept = whole[warm_up_steps(whole.columns.training_ns) :]
    durations = kept.columns.training_ns
    return kept[int(np.argmin(np.abs(durations - np.median(durations))))]


def warm_up_steps(duration_ns: Int64Array) -> int:
    """Return how many of the first steps are slower than is usual in the second half; at most a half."""
    half = len(duration_ns) // 2
    usual = duration_ns[half:]
    median = np.median(usual)
    spread = np.median(np.abs(usual - median))
    limit = max(median + 6 * spread, 1.05 * median)
    slow = duration_ns[:half] > limit
    return int(np.argmin(slow)) if half and not slow.all() else half
