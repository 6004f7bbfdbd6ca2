"""The steps of a timeline: the calls, ranges or marks that make them, and the start and end of each.

Marks end training steps. If nothing is trained and no step is marked, each outermost call is a step: a request, a
batch. `ThreadLine` lays the times of all threads end to end, so that one search serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np

from ..._arrays import (
    INT64_MAX,
    INT64_MIN,
    AnyArray,
    AnyIntArray,
    BoolArray,
    Int64Array,
    Numbering,
    ObjectArray,
    distinct,
    number_values,
    split_by,
)
from ..._errors import ArgumentError, ModtraceError
from .. import select
from ..contents import FIRST_CALLED, Name
from ..nesting import shift_apart
from ..slices import BACKWARD, BACKWARD_PASS, MODULE, RANGE
from ..step_pieces import find_step_starts, trained_modules

if TYPE_CHECKING:
    from ..timeline import Timeline


class ThreadLine:
    """The threads of the first process on one axis: each thread's times are shifted, so that no two threads overlap.

    Attributes:
        tids: int64[threads], ascending.
        of_track: int64[tracks], the index of the track's thread; -1 for a track of another process or of a device.
        slices: the timeline's slices with shifted times; the times on other tracks mean nothing.
    """

    def __init__(self, timeline: Timeline, bounds: StepBounds) -> None:
        """Shift each thread's slices and steps; steps of the whole process are steps of each thread."""
        slices, tracks = timeline.slices, timeline.tracks
        tid = np.array([track.tid for track in tracks], np.int64)
        is_own = select.first_process_tracks(timeline) & [track.device is None for track in tracks]
        self.tids = distinct(tid[is_own])
        self.of_track = np.where(is_own, np.searchsorted(self.tids, tid), -1)
        self._shift, self._start, self.slices = np.zeros(1, np.int64), np.full(1, INT64_MIN), slices
        if len(self.tids) == 1:
            return
        thread = self.of_track[slices.track]
        rows = np.flatnonzero(thread >= 0)
        step_thread, start, end = np.searchsorted(self.tids, bounds.tid), bounds.start_ns, bounds.end_ns
        if len(start) and bounds.tid[0] < 0:
            step_thread = np.arange(len(self.tids))
            start, end = (np.full(len(self.tids), edge) for edge in (start.min(), end.max()))
        groups, count = np.append(thread[rows], step_thread), len(self.tids)
        times = np.append(slices.start[rows], start), np.append(slices.end[rows], end)
        self._shift, self._start = shift_apart(groups, *times, count)
        shift = self._shift[thread]
        self.slices = replace(slices, start=slices.start + shift, end=slices.end + shift)

    def move(self, thread: AnyIntArray, time: Int64Array) -> Int64Array:
        """Return moments of threads as moments on the line, clipped to the thread's section of the line."""
        last = np.append(self._start[1:] - 1, INT64_MAX)
        moved: Int64Array = np.clip(time + self._shift[thread], self._start[thread], last[thread])
        return moved

    def back(self, moment: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return (index of the thread, real time) of each moment on the line."""
        thread = np.searchsorted(self._start, moment, side="right") - 1
        return thread, moment - self._shift[thread]

    def number_between(self, edges: Int64Array, moment: Int64Array) -> Int64Array:
        """Return an ascending number per moment; two share it if on one thread with no edge (real time) between."""
        thread, time = self.back(moment)
        number: Int64Array = thread * (len(edges) + 1) + np.searchsorted(edges, time, side="right")
        return number

    def first_of_threads(self, moment: Int64Array) -> Int64Array:
        """Return the index of each thread's first moment; `moment` is ascending."""
        first = np.searchsorted(moment, self._start)
        return first[first < len(moment)]


OPTIMIZER = "optimizer"
"""Kind of steps that optimizers or `recording.step()` end."""
CALL = "call"
"""Kind of steps that are outermost calls."""
STEP = "step"
"""Name of a step that a mark ends."""
GENERATE = "generate"
"""Name of a step that is a call of `generate`, with all of its calls of the model."""
_RANGE = "range "
_PROCESS = -1
_MAX_NAMES = 5
"""Maximum number of names in an error."""

_Result_co = TypeVar("_Result_co", covariant=True)


class _StepFunction(Protocol[_Result_co]):
    def __call__(self, timeline: Timeline, step_by: str | None = OPTIMIZER) -> _Result_co: ...


def once_per_timeline(function: Callable[[Timeline, str], _Result_co]) -> _StepFunction[_Result_co]:
    """Return a function that caches its result per timeline and `step_by`; callers must not change the result."""

    @wraps(function)
    def compute(timeline: Timeline, step_by: str | None = OPTIMIZER) -> _Result_co:
        if step_by is None:
            step_by = OPTIMIZER if _trains(timeline) else CALL
        # A timeline does not change, so results are kept in its `__dict__`, as `cached_property` does.
        results = vars(timeline).setdefault("_results", {})
        if (function, step_by) not in results:
            results[function, step_by] = function(timeline, step_by)
        result: _Result_co = results[function, step_by]
        return result

    return compute


class StepBounds(NamedTuple):
    """The start and end of each step: columns of equal length, in start order."""

    number: Int64Array  # int64[n], the step's number, from 0
    # int64[n], Unix time. If marks end steps: the end of the step before, but see `find_step_starts`.
    start_ns: Int64Array
    end_ns: Int64Array  # int64[n], Unix time
    is_whole: BoolArray  # bool[n], False if the step's start was overwritten, or its end is unknown
    tid: Int64Array  # int64[n], thread of the call or range that is the step; -1 for a step of the whole process
    name: ObjectArray  # object[n], "step", or the name of the call or range
    step_by: str  # kind of the steps: "optimizer", "call", "range NAME", or a class of modules

    def take(self, rows: AnyArray | slice) -> StepBounds:
        """Return the steps at the indices `rows`."""
        return StepBounds._make([*(column[rows] for column in self[:-1]), self.step_by])

    @classmethod
    def joined(cls, pieces: Sequence[StepBounds]) -> StepBounds:
        """Return the steps of consecutive pieces of a timeline."""
        columns = zip(*(piece[:-1] for piece in pieces), strict=True)
        return cls._make([*map(np.concatenate, columns), pieces[0].step_by])

    @classmethod
    def of_process(cls, number: Int64Array, start: Int64Array, end: Int64Array, whole: BoolArray) -> StepBounds:
        """Return steps of a whole process."""
        tid, name = np.full(len(start), _PROCESS), np.full(len(start), STEP, object)
        return cls(number, start, end, whole, tid, name, OPTIMIZER)

    def by_name(self) -> dict[str, Int64Array]:
        """Return the indices of each name's steps, in the order of the names' first steps."""
        numbers = Numbering[str]()
        number = np.array([numbers[name] for name in self.name.tolist()], np.int64)
        return dict(zip(numbers, split_by(number), strict=True))

    def between(self, timeline: Timeline) -> StepBounds:
        """Return the gaps between the steps of each thread; if marks end steps, also before and after all steps.

        A mark cuts the gap around it, so that a timeline has the same gaps as its pieces. The gap after the last mark
        is not whole: in a piece of a timeline it belongs to the next piece.
        """
        in_order = self.take(np.lexsort((self.start_ns, self.tid)))
        if self.step_by == OPTIMIZER:
            edges = _edges(timeline)
            edges[0] = self.start_ns.min(initial=edges[0])
            edges[-1] = self.end_ns.max(initial=edges[-1])
            edges = np.maximum(edges, edges[0])
            points = StepBounds.of_process(np.full(len(edges), _PROCESS), edges, edges, edges < 0)
            in_order = StepBounds.joined([points, in_order])
            in_order = in_order.take(np.argsort(in_order.start_ns, kind="stable"))
        whole = np.ones(len(in_order.tid), np.bool_)
        whole[-1:] = self.step_by != OPTIMIZER
        in_order = in_order._replace(is_whole=whole)
        later = in_order.take(np.arange(1, len(in_order.tid)))
        gaps = later._replace(start_ns=in_order.end_ns[:-1], end_ns=later.start_ns)
        gaps = gaps.take(np.flatnonzero((in_order.tid[:-1] == later.tid) & (gaps.start_ns < gaps.end_ns)))
        return gaps.take(np.argsort(gaps.start_ns, kind="stable"))

    @property
    def counted(self) -> BoolArray:
        """bool[n], the steps that statistics cover: the whole steps, or all if no step is whole."""
        return self.is_whole if self.is_whole.any() else ~self.is_whole

    def index_at(self, moment: Int64Array, tid: Int64Array) -> Int64Array:
        """Return the index of the step that contains each moment on its thread; -1 outside steps."""
        (tids, thread), count = number_values(self.tid), len(self.tid)
        if not count:
            return np.full(len(moment), -1)
        row_tid = np.searchsorted(tids, tid) if tids[0] != _PROCESS else np.zeros(len(moment), np.int64)
        # The key is the thread, then the number of steps of any thread that have started.
        key = thread * (count + 1) + np.searchsorted(self.start_ns, self.start_ns, side="right")
        order = np.argsort(key, kind="stable")
        row_key = row_tid * (count + 1) + np.searchsorted(self.start_ns, moment, side="right")
        index = order[np.searchsorted(key[order], row_key, side="right") - 1]
        is_own = (self.tid[index] == tid) | (self.tid[index] == _PROCESS)
        return np.where(is_own & (self.start_ns[index] <= moment) & (moment < self.end_ns[index]), index, -1)

    def of_spans(self, timeline: Timeline) -> Int64Array:
        """Return the number of each span's step; -1 outside steps. GPU work belongs to the step of its call."""
        columns, on_stream = timeline.columns, select.on_gpu(timeline)
        if self.step_by == OPTIMIZER:
            starts = np.append(self.start_ns, -INT64_MAX)
            is_before = columns.start < starts[np.searchsorted(self.end_ns, columns.start, side="right")]
            return np.where(is_before & ~on_stream, -1, columns.step)
        tid = np.array([track.tid for track in timeline.tracks], np.int64)[columns.track]
        step = np.append(self.number, -1)[self.index_at(columns.start, tid)]
        numbers, link = np.unique(columns.link, return_inverse=True)
        step_of_link, calls = np.full(len(numbers), -1), np.flatnonzero(~on_stream & (columns.link >= 0))
        step_of_link[link[calls]] = step[calls]
        return np.where(on_stream, step_of_link[link], step)


_NOTHING = np.zeros(0, np.int64)
NO_STEPS = StepBounds.of_process(_NOTHING, _NOTHING, _NOTHING, np.zeros(0, np.bool_))


@once_per_timeline
def find_step_bounds(timeline: Timeline, step_by: str) -> StepBounds:
    """Return the steps of the first process, see `Timeline.summary`; raises ModtraceError if there are none."""
    return _marked_steps(timeline) if step_by == OPTIMIZER else _called_steps(timeline, step_by)


def take_steps(
    timeline: Timeline, first: int | None = None, last: int | None = None, step_by: str | None = None
) -> Timeline:
    """Return the slices that started in steps `first` to `last`; see `Timeline.steps`."""
    bounds = find_step_bounds(timeline, step_by)
    if bounds.step_by == OPTIMIZER:
        part = select.steps(timeline, first, last)
        is_known = timeline.begin_ns is None or timeline.trained is not None
        low = int(part.slices.step.min(initial=INT64_MAX))
        return replace(part, trained=trained_modules(timeline, low) if is_known else None)
    low, high = select.step_interval(first, last, int(bounds.number[-1]) + 1)
    called = bounds.take(np.flatnonzero((bounds.number >= low) & (bounds.number < high)))
    part = select.started_in(
        timeline, int(called.start_ns.min(initial=INT64_MAX)), int(called.end_ns.max(initial=-INT64_MAX))
    )
    return replace(part, metadata={**part.metadata, FIRST_CALLED: {bounds.step_by: max(low, int(bounds.number[0]))}})


def _trains(timeline: Timeline) -> bool:
    """Return whether marks end steps, or there is a backward pass, or no call that could be a step."""
    slices = timeline.slices
    is_backward = (slices.kind == BACKWARD_PASS) | (slices.kind == MODULE) & (slices.phase == BACKWARD)
    has_marks = timeline.begin_ns is not None or len(timeline.step_ends) > 0
    return has_marks or bool(is_backward.any()) or not len(select.outermost_calls(timeline))


def _marked_steps(timeline: Timeline) -> StepBounds:
    """Return the steps that marks end; without marks, the whole timeline is one step.

    `find_step_starts` finds the start of the first step, except in a selection of steps (`Timeline.begin_ns`). A last
    step without a mark ends with its last span or range. A step in which no span starts is left out.
    """
    columns = timeline.columns
    spans = np.flatnonzero(select.first_process_tracks(timeline)[columns.track])
    if not len(spans):
        return NO_STEPS
    starts, last_end = columns.start[spans], int(columns.end[spans].max())
    marks = timeline.step_ends
    first_step = select.first_ended_step(timeline)
    range_starts, range_ends = _range_edges(timeline)
    first_start = timeline.begin_ns
    if first_start is None:
        first_start = min([int(starts[0]), *marks[:1].tolist(), *range_starts])
    last_end = max([last_end, *range_ends])
    edges = np.concatenate([[first_start], marks])
    whole = np.ones(len(marks), np.bool_)
    if not len(marks) or starts[-1] >= marks[-1]:
        edges, whole = np.append(edges, max(last_end, int(edges[-1]))), np.append(whole, False)
    if timeline.stats.overwritten and timeline.begin_ns is None:
        whole[0] = False
    number = first_step + np.arange(len(whole), dtype=np.int64)
    used = np.flatnonzero(np.diff(np.searchsorted(starts, marks), prepend=0, append=len(starts)))
    start, end, whole = edges[:-1][used], edges[1:][used], whole[used]
    start = np.where(whole, find_step_starts(timeline, start, end), start)
    return StepBounds.of_process(number[used], start, end, whole)


def _edges(timeline: Timeline) -> Int64Array:
    """Return the start of the first process, or of the selected steps; its marks; and its end."""
    rows = np.flatnonzero(select.first_process_tracks(timeline)[timeline.slices.track])
    start, marks = timeline.begin_ns, timeline.step_ends
    if start is None:
        start = int(timeline.slices.start[rows].min(initial=INT64_MAX))
    return np.array([start, *marks, timeline.slices.end[rows].max(initial=marks.max(initial=start))])


def _range_edges(timeline: Timeline) -> tuple[list[int], list[int]]:
    """Return the first start and the last end of the first process's ranges, in a list each; empty without ranges."""
    slices, rows = timeline.slices, timeline.slices.block_of(RANGE)
    ranges = rows.start + np.flatnonzero(select.first_process_tracks(timeline)[slices.track[rows]])
    return slices.start[ranges[:1]].tolist(), [int(slices.end[ranges].max())] if len(ranges) else []


def _called_steps(timeline: Timeline, step_by: str) -> StepBounds:
    """Return the steps that are calls or ranges; a call or range inside another is not a step of its own."""
    slices, names = timeline.slices, timeline.names
    calls = select.forward_calls(timeline)
    ranges = np.flatnonzero((slices.kind == RANGE) & select.first_process_tracks(timeline)[slices.track])
    if step_by == CALL:
        generated = named_rows(timeline, ranges, lambda name: name.category == GENERATE)
        rows = np.append(select.outermost_calls(timeline), generated)
    elif step_by.startswith(_RANGE):
        rows = named_rows(timeline, ranges, lambda name: name.label == step_by.removeprefix(_RANGE))
    else:
        rows = named_rows(timeline, calls, lambda name: name.module_class == step_by)
    if not len(rows):
        error = ModtraceError if step_by == CALL else ArgumentError
        raise error(_nothing_found(timeline, step_by, calls, ranges))
    tid = np.array([track.tid for track in timeline.tracks], np.int64)[slices.track[rows]]
    tids, thread = number_values(tid)
    shift = shift_apart(thread, slices.start[rows], slices.end[rows], len(tids))[0][thread]
    start, end = slices.start[rows] + shift, slices.end[rows] + shift
    order = np.lexsort((-end, start))
    last_end = np.maximum.accumulate(end[order])
    outermost = np.sort(order[start[order] >= np.append(INT64_MIN, last_end[:-1])])
    outermost = outermost[np.argsort(slices.start[rows[outermost]], kind="stable")]
    rows, tid = rows[outermost], tid[outermost]
    is_range = step_by.startswith(_RANGE)
    labels = [name.fqn if step_by == CALL else name.label if is_range else step_by for name in names]
    name = np.array(labels, object)[slices.name[rows]]
    first = timeline.metadata.get(FIRST_CALLED, {}).get(step_by, 0)
    number = first + np.arange(len(rows), dtype=np.int64)
    return StepBounds(number, slices.start[rows], slices.end[rows], slices.complete[rows], tid, name, step_by)


def named_rows(timeline: Timeline, rows: Int64Array, matches: Callable[[Name], bool]) -> Int64Array:
    """Return the rows whose names match."""
    return rows[np.array([*map(matches, timeline.names), False], np.bool_)[timeline.slices.name[rows]]]


def _nothing_found(timeline: Timeline, step_by: str, calls: Int64Array, ranges: Int64Array) -> str:
    """Return the message of an error: the reason why no slice is a step, and the names that exist."""
    if step_by == CALL:
        return "no module is called, so no call is a step"
    noun, rows = ("range", ranges) if step_by.startswith(_RANGE) else ("class of modules", calls)
    names = [timeline.names[name] for name in np.unique(timeline.slices.name[rows]).tolist()]
    texts = list(dict.fromkeys(name.label if noun == "range" else name.module_class for name in names))
    ellipsis = ", …" if len(texts) > _MAX_NAMES else ""
    hint = f"there are {', '.join(texts[:_MAX_NAMES])}{ellipsis}" if texts else "there is none"
    if noun != "range" and len(ranges):
        is_range = len(named_rows(timeline, ranges, lambda name: name.label == step_by))
        hint += f"; the range is {f'range {step_by}'!r}" if is_range else "; a range is 'range NAME', --ranges has them"
    return f"no {noun} is called {step_by.removeprefix(_RANGE)!r}; {hint}"
