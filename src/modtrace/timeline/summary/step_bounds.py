"""The steps of a timeline: which calls, ranges or marks make them, and when each begins and ends.

Marks end training steps. If nothing is trained and no step is marked, each outermost call is one: a request, a batch.
`ThreadLine` has the times of all threads after each other, so that none asks what the others did.
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
from ..._errors import ModtraceError
from .. import select
from ..contents import FIRST_CALLED, Name
from ..nesting import shift_apart
from ..slices import BACKWARD, BACKWARD_PASS, MODULE, RANGE
from ..step_pieces import find_step_begins, trained_modules

if TYPE_CHECKING:
    from ..timeline import Timeline


class ThreadLine:
    """The threads of the first process after each other in time: each has its times moved, and none touches another.

    Attributes:
        tids: int64[threads], ascending.
        of_track: int64[tracks], the index of its thread; -1 for a track of another process or of a device.
        slices: those of the timeline with their times moved, which means nothing for those on other tracks.
    """

    def __init__(self, timeline: Timeline, bounds: StepBounds) -> None:
        """Make room for all that the threads did, and for their steps; those of the process are steps of each."""
        slices, tracks = timeline.slices, timeline.tracks
        tid = np.array([track.tid for track in tracks], np.int64)
        is_own = select.first_process_tracks(timeline) & [track.device is None for track in tracks]
        self.tids = distinct(tid[is_own])
        self.of_track = np.where(is_own, np.searchsorted(self.tids, tid), -1)
        self._shift, self._begin, self.slices = np.zeros(1, np.int64), np.full(1, INT64_MIN), slices
        if len(self.tids) == 1:
            return
        thread = self.of_track[slices.track]
        rows = np.flatnonzero(thread >= 0)
        of_step, start, end = np.searchsorted(self.tids, bounds.tid), bounds.start, bounds.end
        if len(start) and bounds.tid[0] < 0:
            of_step = np.arange(len(self.tids))
            start, end = (np.full(len(self.tids), edge) for edge in (start.min(), end.max()))
        groups, count = np.append(thread[rows], of_step), len(self.tids)
        times = np.append(slices.start[rows], start), np.append(slices.end[rows], end)
        self._shift, self._begin = shift_apart(groups, *times, count)
        shift = self._shift[thread]
        self.slices = replace(slices, start=slices.start + shift, end=slices.end + shift)

    def move(self, thread: AnyIntArray, time: Int64Array) -> Int64Array:
        """Return where moments of threads are on the line; those out of a thread's reach where it begins or ends."""
        last = np.append(self._begin[1:] - 1, INT64_MAX)
        moved: Int64Array = np.clip(time + self._shift[thread], self._begin[thread], last[thread])
        return moved

    def back(self, moment: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the thread that each moment on the line is of, by index, and when that was."""
        thread = np.searchsorted(self._begin, moment, side="right") - 1
        return thread, moment - self._shift[thread]

    def number_between(self, edges: Int64Array, moment: Int64Array) -> Int64Array:
        """Number moments, later ones no lower: alike if they are of one thread, with no edge, a real time, between."""
        thread, time = self.back(moment)
        number: Int64Array = thread * (len(edges) + 1) + np.searchsorted(edges, time, side="right")
        return number

    def first_of_threads(self, moment: Int64Array) -> Int64Array:
        """Return the index of the first of ascending moments of each thread that has any."""
        first = np.searchsorted(moment, self._begin)
        return first[first < len(moment)]


OPTIMIZER, CALL = "optimizer", "call"
"""Steps that optimizers or `recording.step()` end; steps that are outermost calls."""
STEP, GENERATE = "step", "generate"
"""The name of a step that a mark ends; of a call of `generate`, whose calls of the model are one step."""
_RANGE = "range "
_PROCESS = -1
_NAMED = 5
"""Number of names that an error lists."""

_Result_co = TypeVar("_Result_co", covariant=True)


class _OfSteps(Protocol[_Result_co]):
    def __call__(self, timeline: Timeline, step_by: str | None = OPTIMIZER) -> _Result_co: ...


def once_per_timeline(function: Callable[[Timeline, str], _Result_co]) -> _OfSteps[_Result_co]:
    """Return a function that computes its result once per timeline and `step_by`; do not change the result."""

    @wraps(function)
    def compute(timeline: Timeline, step_by: str | None = OPTIMIZER) -> _Result_co:
        if step_by is None:
            step_by = OPTIMIZER if _trains(timeline) else CALL
        # As a cached property has it: a timeline does not change.
        results = vars(timeline).setdefault("_results", {})
        if (function, step_by) not in results:
            results[function, step_by] = function(timeline, step_by)
        result: _Result_co = results[function, step_by]
        return result

    return compute


class StepBounds(NamedTuple):
    """From when to when each step lasts; columns of equal length, in the order of their begins."""

    number: Int64Array  # int64[n], the step's number, from 0
    # Int64[n], Unix nanoseconds. If marks end steps: the end of the step before, but see `find_step_begins`.
    start: Int64Array
    end: Int64Array  # int64[n], Unix nanoseconds
    whole: BoolArray  # bool[n], False if its beginning was overwritten, or its end is not known
    tid: Int64Array  # int64[n], the thread whose call or range the step is; -1 for a step of the whole process
    name: ObjectArray  # object[n], "step", or what the call or range is called
    step_by: str  # what the steps are: "optimizer", "call", "range NAME", or a class of modules

    def take(self, rows: AnyArray | slice) -> StepBounds:
        """Return some of the steps."""
        return StepBounds._make([*(column[rows] for column in self[:-1]), self.step_by])

    @classmethod
    def joined(cls, pieces: Sequence[StepBounds]) -> StepBounds:
        """Return the steps of pieces of a timeline that follow each other."""
        columns = zip(*(piece[:-1] for piece in pieces), strict=True)
        return cls._make([*map(np.concatenate, columns), pieces[0].step_by])

    @classmethod
    def of_process(cls, number: Int64Array, start: Int64Array, end: Int64Array, whole: BoolArray) -> StepBounds:
        """Return steps of a whole process."""
        tid, name = np.full(len(start), _PROCESS), np.full(len(start), STEP, object)
        return cls(number, start, end, whole, tid, name, OPTIMIZER)

    def by_name(self) -> dict[str, Int64Array]:
        """Return the indices of the steps of each name, in the order in which the names come first."""
        numbers = Numbering[str]()
        number = np.array([numbers[name] for name in self.name.tolist()], np.int64)
        return dict(zip(numbers, split_by(number), strict=True))

    def between(self, timeline: Timeline) -> StepBounds:
        """Return the times between the steps of each thread; if marks end steps, those before and after them too.

        A mark cuts the time that it is in, so that a timeline has the same times as its pieces. What comes after the
        last mark is not `whole`: in a piece of a timeline it belongs to the next piece.
        """
        in_order = self.take(np.lexsort((self.start, self.tid)))
        if self.step_by == OPTIMIZER:
            edges = _edges(timeline)
            edges[0] = self.start.min(initial=edges[0])
            edges[-1] = self.end.max(initial=edges[-1])
            edges = np.maximum(edges, edges[0])
            points = StepBounds.of_process(np.full(len(edges), _PROCESS), edges, edges, edges < 0)
            in_order = StepBounds.joined([points, in_order])
            in_order = in_order.take(np.argsort(in_order.start, kind="stable"))
        whole = np.ones(len(in_order.tid), np.bool_)
        whole[-1:] = self.step_by != OPTIMIZER
        in_order = in_order._replace(whole=whole)
        later = in_order.take(np.arange(1, len(in_order.tid)))
        gaps = later._replace(start=in_order.end[:-1], end=later.start)
        gaps = gaps.take(np.flatnonzero((in_order.tid[:-1] == later.tid) & (gaps.start < gaps.end)))
        return gaps.take(np.argsort(gaps.start, kind="stable"))

    @property
    def counted(self) -> BoolArray:
        """bool[n], the steps that all figures are of: the whole ones, or all if none is."""
        return self.whole if self.whole.any() else ~self.whole

    def index_at(self, moment: Int64Array, tid: Int64Array) -> Int64Array:
        """Return the index of the step that a thread is in at each moment; -1 for none."""
        (tids, thread), count = number_values(self.tid), len(self.tid)
        if not count:
            return np.full(len(moment), -1)
        row_tid = np.searchsorted(tids, tid) if tids[0] != _PROCESS else np.zeros(len(moment), np.int64)
        # By thread, and in it by how many steps of any thread had begun.
        key = thread * (count + 1) + np.searchsorted(self.start, self.start, side="right")
        order = np.argsort(key, kind="stable")
        begun = row_tid * (count + 1) + np.searchsorted(self.start, moment, side="right")
        index = order[np.searchsorted(key[order], begun, side="right") - 1]
        is_own = (self.tid[index] == tid) | (self.tid[index] == _PROCESS)
        return np.where(is_own & (self.start[index] <= moment) & (moment < self.end[index]), index, -1)

    def of_spans(self, timeline: Timeline) -> Int64Array:
        """Return the number of the step that each span belongs to; -1 for none. Work of a GPU belongs to its call."""
        columns, on_stream = timeline.columns, select.on_gpu(timeline)
        if self.step_by == OPTIMIZER:
            starts = np.append(self.start, -INT64_MAX)
            is_before = columns.start < starts[np.searchsorted(self.end, columns.start, side="right")]
            return np.where(is_before & ~on_stream, -1, columns.step)
        tid = np.array([track.tid for track in timeline.tracks], np.int64)[columns.track]
        step = np.append(self.number, -1)[self.index_at(columns.start, tid)]
        numbers, link = np.unique(columns.link, return_inverse=True)
        of_link, calls = np.full(len(numbers), -1), np.flatnonzero(~on_stream & (columns.link >= 0))
        of_link[link[calls]] = step[calls]
        return np.where(on_stream, of_link[link], step)


_NOTHING = np.zeros(0, np.int64)
NO_STEPS = StepBounds.of_process(_NOTHING, _NOTHING, _NOTHING, np.zeros(0, np.bool_))


@once_per_timeline
def find_step_bounds(timeline: Timeline, step_by: str) -> StepBounds:
    """Return the steps of the first process, see `Timeline.summary`; raises ModtraceError if nothing is one."""
    return _marked_steps(timeline) if step_by == OPTIMIZER else _called_steps(timeline, step_by)


def take_steps(
    timeline: Timeline, first: int | None = None, last: int | None = None, step_by: str | None = None
) -> Timeline:
    """Return what began in some steps; see `Timeline.steps`."""
    bounds = find_step_bounds(timeline, step_by)
    if bounds.step_by == OPTIMIZER:
        chosen = select.steps(timeline, first, last)
        is_known = timeline.begin_ns is None or timeline.trained is not None
        low = int(chosen.slices.step.min(initial=INT64_MAX))
        return replace(chosen, trained=trained_modules(timeline, low) if is_known else None)
    low, high = select.step_interval(first, last, int(bounds.number[-1]) + 1)
    called = bounds.take(np.flatnonzero((bounds.number >= low) & (bounds.number < high)))
    part = select.started_in(
        timeline, int(called.start.min(initial=INT64_MAX)), int(called.end.max(initial=-INT64_MAX))
    )
    return replace(part, metadata={**part.metadata, FIRST_CALLED: {bounds.step_by: max(low, int(bounds.number[0]))}})


def _trains(timeline: Timeline) -> bool:
    """Whether marks end steps, or there is a backward pass, or no call that could be a step."""
    slices = timeline.slices
    is_backward = (slices.kind == BACKWARD_PASS) | (slices.kind == MODULE) & (slices.phase == BACKWARD)
    marked = timeline.begin_ns is not None or len(timeline.step_ends) > 0
    return marked or bool(is_backward.any()) or not len(select.outermost_calls(timeline))


def _marked_steps(timeline: Timeline) -> StepBounds:
    """Return the steps that marks end; all of the timeline is one step if none was marked.

    `find_step_begins` says when the first begins, unless it is one of chosen steps (`Timeline.begin_ns`); what no mark
    ends ends with its last span or range. A step in which no span begins is left out.
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
    begun = np.flatnonzero(np.diff(np.searchsorted(starts, marks), prepend=0, append=len(starts)))
    start, end, whole = edges[:-1][begun], edges[1:][begun], whole[begun]
    start = np.where(whole, find_step_begins(timeline, start, end), start)
    return StepBounds.of_process(number[begun], start, end, whole)


def _edges(timeline: Timeline) -> Int64Array:
    """Return when the first process did something first, or the first of chosen steps began; its marks; its end."""
    rows = np.flatnonzero(select.first_process_tracks(timeline)[timeline.slices.track])
    begin = int(timeline.slices.start[rows].min(initial=INT64_MAX)) if timeline.begin_ns is None else timeline.begin_ns
    marks = timeline.step_ends
    return np.array([begin, *marks, timeline.slices.end[rows].max(initial=marks.max(initial=begin))])


def _range_edges(timeline: Timeline) -> tuple[list[int], list[int]]:
    """Return when ranges of the first process began first and ended last; empty lists if it has none."""
    slices, rows = timeline.slices, timeline.slices.block_of(RANGE)
    ranges = rows.start + np.flatnonzero(select.first_process_tracks(timeline)[slices.track[rows]])
    return slices.start[ranges[:1]].tolist(), [int(slices.end[ranges].max())] if len(ranges) else []


def _called_steps(timeline: Timeline, step_by: str) -> StepBounds:
    """Return the steps that are calls or ranges; one in another counts to that."""
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
        raise ModtraceError(_nothing_found(timeline, step_by, calls, ranges))
    tid = np.array([track.tid for track in timeline.tracks], np.int64)[slices.track[rows]]
    tids, thread = number_values(tid)
    shift = shift_apart(thread, slices.start[rows], slices.end[rows], len(tids))[0][thread]
    start, end = slices.start[rows] + shift, slices.end[rows] + shift
    order = np.lexsort((-end, start))
    until = np.maximum.accumulate(end[order])
    outermost = np.sort(order[start[order] >= np.append(INT64_MIN, until[:-1])])
    outermost = outermost[np.argsort(slices.start[rows[outermost]], kind="stable")]
    rows, tid = rows[outermost], tid[outermost]
    is_range = step_by.startswith(_RANGE)
    labels = [name.fqn if step_by == CALL else name.label if is_range else step_by for name in names]
    called = np.array(labels, object)[slices.name[rows]]
    first = timeline.metadata.get(FIRST_CALLED, {}).get(step_by, 0)
    number = first + np.arange(len(rows), dtype=np.int64)
    return StepBounds(number, slices.start[rows], slices.end[rows], slices.complete[rows], tid, called, step_by)


def named_rows(timeline: Timeline, rows: Int64Array, is_wanted: Callable[[Name], bool]) -> Int64Array:
    """Return those of some rows whose names are wanted."""
    return rows[np.array([*map(is_wanted, timeline.names), False], np.bool_)[timeline.slices.name[rows]]]


def _nothing_found(timeline: Timeline, step_by: str, calls: Int64Array, ranges: Int64Array) -> str:
    """Return why no slice is a step, and which names there are."""
    if step_by == CALL:
        return "no module is called, so no call is a step"
    noun, rows = ("range", ranges) if step_by.startswith(_RANGE) else ("class of modules", calls)
    names = [timeline.names[name] for name in np.unique(timeline.slices.name[rows]).tolist()]
    texts = list(dict.fromkeys(name.label if noun == "range" else name.module_class for name in names))
    more = ", …" if len(texts) > _NAMED else ""
    hint = f"there are {', '.join(texts[:_NAMED])}{more}" if texts else "there is none"
    if noun != "range" and len(ranges):
        is_range = len(named_rows(timeline, ranges, lambda name: name.label == step_by))
        hint += f"; the range is {f'range {step_by}'!r}" if is_range else "; a range is 'range NAME', --ranges has them"
    return f"no {noun} is called {step_by.removeprefix(_RANGE)!r}; {hint}"
