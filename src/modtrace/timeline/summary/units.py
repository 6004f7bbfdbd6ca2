"""Percentiles: over steps, of ranges, and of calls or ranges that are the steps; and how many end per second."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._arrays import INT64_MIN, AnyArray, BoolArray, Int64Array, begins_run, split_by
from ..select import first_process_tracks, forward_calls
from ..slices import GARBAGE_COLLECTION, RANGE
from .parts import OTHER, PARTS
from .step_bounds import GENERATE, OPTIMIZER, StepBounds, find_step_bounds

if TYPE_CHECKING:
    from ..timeline import Timeline


class GroupTimes(NamedTuple):
    """The times of groups of modules in steps: columns of equal length; `ns` are nanoseconds."""

    group: Int64Array
    step: Int64Array
    ns: Int64Array

    def take(self, rows: AnyArray | slice) -> GroupTimes:
        """Return some of the rows."""
        return GroupTimes(*(column[rows] for column in self))


class Percentiles(NamedTuple):
    """Percentiles over the steps: what each group took in a step, int64[groups] nanoseconds."""

    p50: Int64Array
    p95: Int64Array
    p10: Int64Array


def join_times(pieces: Sequence[GroupTimes]) -> GroupTimes:
    """Return the rows of all pieces, one piece after the other."""
    return GroupTimes(*(np.concatenate(columns) for columns in zip(*pieces, strict=True)))


def percentiles_by_group(pieces: Sequence[GroupTimes], *, steps: Int64Array, groups: int) -> Percentiles:
    """Return the percentiles of what each group took in steps that count, 0 if in none; the pieces are in order."""
    kept = []
    for group, step, ns in pieces:
        counted = np.isin(step, steps)
        kept.append((np.searchsorted(group[counted], np.arange(groups + 1)), ns[counted]))
    p50, p95, p10 = np.zeros((3, groups), np.int64)
    for index in range(groups):
        sums = np.sort(np.concatenate([ns[first[index] : first[index + 1]] for first, ns in kept]))
        p50[index], p95[index], p10[index] = median(sums), nearest_rank(sums, 0.95), nearest_rank(sums, 0.1)
    return Percentiles(p50, p95, p10)


def sum_by_group_and_step(times: GroupTimes) -> GroupTimes:
    """Add up times per group and step; return one row for each pair, in their order."""
    group, step, ns = times.take(np.lexsort((times.step, times.group)))
    first = np.flatnonzero(begins_run(group, step))
    sums = np.add.reduceat(ns, first) if len(first) else np.zeros(0, np.int64)
    return GroupTimes(group[first], step[first], sums)


def median(values: Sequence[int] | Int64Array) -> int:
    """Return the middle value, or the whole mean of the middle two; 0 without values."""
    in_order, count = np.sort(values), len(values)
    return (int(in_order[(count - 1) // 2]) + int(in_order[count // 2])) // 2 if count else 0


def nearest_rank(values: Sequence[int] | Int64Array, fraction: float) -> int:
    """Return the least of the values that `fraction` of them do not exceed; 0 without values."""
    return int(np.sort(values)[max(int(np.ceil(len(values) * fraction)), 1) - 1]) if len(values) else 0


_STAGES = ("first call", "later calls")
_STAGES_OF_GENERATE = ("prefill", "decode")


class UnitTimes(NamedTuple):
    """The durations of the calls or ranges of one name, each of which is a step; times are integer nanoseconds.

    Only those count that were recorded whole.

    Attributes:
        unit: what the module or range is called: "generate", "GPT".
        stage: which part of a step this is. The whole step has the empty text. Inside `generate` the first call of each
            module is "prefill" and the others are "decode"; elsewhere these are "first call" and "later calls".
        thread: the thread's name; empty for all threads together.
        measured: how many there are.
        calls: how many outermost calls of modules are inside.
        p50_ns: the median of how long they took.
        p95_ns: what 95 % of them do not exceed.
        p99_ns: what 99 % of them do not exceed.
        per_second: how many there are per second, from the begin of the first to the end of the last.
    """

    unit: str
    stage: str
    thread: str
    measured: int
    calls: int
    p50_ns: int
    p95_ns: int
    p99_ns: int
    per_second: float


class RangeTimes(NamedTuple):
    """All ranges, or garbage collections, of one name; times are integer nanoseconds.

    Attributes:
        range: what they are called.
        part: the part of a step that they are, where nothing else wins.
        calls: how many there are.
        total_ns: of all together; ranges in others have their time too.
        p50_ns: the median.
        p95_ns: what 95 % of them do not exceed.
    """

    range: str
    part: str
    calls: int
    total_ns: int
    p50_ns: int
    p95_ns: int


class _Times(NamedTuple):
    """Steps, or calls in them: columns of equal length."""

    start: Int64Array
    end: Int64Array
    tid: Int64Array
    calls: Int64Array

    def take(self, rows: AnyArray) -> _Times:
        return _Times(*(column[rows] for column in self))

    def by_thread(self) -> dict[int, _Times]:
        """Return those of each thread by its id, ascending."""
        return {int(self.tid[rows[0]]): self.take(rows) for rows in split_by(self.tid)}


def measure_units(timeline: Timeline, step_by: str | None) -> list[UnitTimes]:
    """Return the times of steps that are calls or ranges, by name; nothing if marks end the steps."""
    bounds = find_step_bounds(timeline, step_by)
    return [] if bounds.step_by == OPTIMIZER else list(_measure(timeline, bounds))


def _measure(timeline: Timeline, bounds: StepBounds) -> Iterator[UnitTimes]:
    """Yield the times of steps by name: of all threads together, then of each, and of their stages."""
    call, step, is_first = _calls_inside(timeline, bounds)
    calls = np.bincount(step, minlength=len(bounds.number))
    slices = timeline.slices
    threads, units = _thread_names(timeline), _Times(bounds.start, bounds.end, bounds.tid, calls)
    of_calls = _Times(slices.start[call], slices.end[call], bounds.tid[step], np.ones(len(call), np.int64))
    for name, rows in bounds.by_name().items():
        chosen = np.zeros(len(bounds.whole), np.bool_)
        chosen[rows] = bounds.whole[rows]
        times = {"": units.take(chosen)}
        if np.any(chosen[step] & ~is_first):
            stages = _STAGES_OF_GENERATE if name == GENERATE else _STAGES
            for stage, belongs in zip(stages, (is_first, ~is_first), strict=True):
                times[stage] = of_calls.take(chosen[step] & belongs)
        yield from (_row(name, stage, "", of_stage) for stage, of_stage in times.items() if len(of_stage.start))
        by_thread = {stage: of_stage.by_thread() for stage, of_stage in times.items()}
        tids = [*by_thread[""]] if len(by_thread[""]) > 1 else []
        for tid, (stage, of_threads) in itertools.product(tids, by_thread.items()):
            if tid in of_threads:
                yield _row(name, stage, threads[tid], of_threads[tid])


def _calls_inside(timeline: Timeline, bounds: StepBounds) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Return the rows of outermost calls in steps, the step of each by index, and whether it is its module's first.

    A step that is a call holds itself.
    """
    slices = timeline.slices
    rows = forward_calls(timeline)
    tid = np.array([track.tid for track in timeline.tracks] or [0], np.int64)[slices.track[rows]]
    step = np.full(len(slices) + 1, -1)
    step[rows] = bounds.index_at(slices.start[rows], tid)
    # The parent of a root, -1, is the last entry: in no step.
    rows = rows[(step[rows] >= 0) & (step[rows] != step[slices.parent[rows]])]
    fqn = np.unique([name.fqn for name in timeline.names] or [""], return_inverse=True)[1][slices.name[rows]]
    _, first = np.unique(np.stack([step[rows], fqn]), axis=1, return_index=True)
    is_first = np.zeros(len(rows), np.bool_)
    is_first[first] = True
    return rows, step[rows], is_first


def _row(unit: str, stage: str, thread: str, times: _Times) -> UnitTimes:
    """Return the row of the steps, or calls in them, that have these times."""
    took = times.end - times.start
    lasts = int(times.end.max() - times.start.min())
    per_second = len(took) * 1e9 / lasts if lasts else 0.0
    p95_ns, p99_ns = nearest_rank(took, 0.95), nearest_rank(took, 0.99)
    calls = int(times.calls.sum())
    return UnitTimes(unit, stage, thread, len(took), calls, median(took), p95_ns, p99_ns, per_second)


def _thread_names(timeline: Timeline) -> dict[int, str]:
    """Return the name of each thread, by its id, which follows if another one has that name."""
    process = timeline.tracks[0].process
    names = {track.tid: track.thread for track in reversed(timeline.tracks) if track.process == process}
    count = Counter(names.values())
    return {tid: name if count[name] == 1 else f"{name} {tid}" for tid, name in names.items()}


def measure_ranges(timeline: Timeline) -> dict[tuple[str, str], Int64Array]:
    """Return the ranges of the first process by name and part: int64[n, 4], thread, start, end and depth of each."""
    slices, names = timeline.slices, timeline.names
    is_range = np.isin(slices.kind, (RANGE, GARBAGE_COLLECTION)) & first_process_tracks(timeline)[slices.track]
    rows = np.flatnonzero(is_range)
    tid = np.array([track.tid for track in timeline.tracks] or [0], np.int64)[slices.track[rows]]
    ranges = np.stack([tid, slices.start[rows], slices.end[rows], slices.depth[rows]], axis=1)
    took: dict[tuple[str, str], Int64Array] = {}
    for name in np.unique(slices.name[rows]).tolist():
        label, category = names[name].label, names[name].category
        part = category if category in PARTS else OTHER if category == "torch" else label
        named = ranges[slices.name[rows] == name]
        took[label, part] = np.concatenate([took.get((label, part), named[:0]), named])
    return took


def sum_up_ranges(pieces: Sequence[Mapping[tuple[str, str], Int64Array]]) -> list[RangeTimes]:
    """Return what the ranges of each name took in all pieces, each once, the longest total first."""
    rows, none = [], np.zeros((0, 4), np.int64)
    for label, part in dict.fromkeys(key for piece in pieces for key in piece):
        tables = [piece.get((label, part), none) for piece in pieces]
        new = [tables[0], *(_not_in(later, earlier) for earlier, later in itertools.pairwise(tables))]
        took = np.concatenate([table[:, 2] - table[:, 1] for table in new])
        rows.append(RangeTimes(label, part, len(took), int(took.sum()), median(took), nearest_rank(took, 0.95)))
    return sorted(rows, key=lambda row: -row.total_ns)


def _not_in(later: Int64Array, earlier: Int64Array) -> Int64Array:
    """Return the ranges of a piece that are not in the piece before it too."""
    reaches = earlier[:, 2].max(initial=INT64_MIN)
    overlapping = np.flatnonzero(later[:, 1] <= reaches)
    seen = {*map(tuple, earlier[np.isin(earlier[:, 2], later[overlapping, 2])].tolist())}
    is_seen = np.array([tuple(row) in seen for row in later[overlapping].tolist()], np.bool_)
    return np.delete(later, overlapping[is_seen], axis=0)
