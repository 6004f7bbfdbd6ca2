"""Percentiles over steps, of ranges, and of calls or ranges that are steps; and the rates of these steps."""

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
        """Return the entries at the indices `rows`."""
        return GroupTimes(*(column[rows] for column in self))


class Percentiles(NamedTuple):
    """Percentiles of each group's time in a step, over the steps: int64[groups] nanoseconds each."""

    p50: Int64Array
    p95: Int64Array
    p10: Int64Array


def join_times(pieces: Sequence[GroupTimes]) -> GroupTimes:
    """Return the rows of all pieces, in the order of the pieces."""
    return GroupTimes(*(np.concatenate(columns) for columns in zip(*pieces, strict=True)))


def percentiles_by_group(pieces: Sequence[GroupTimes], *, steps: Int64Array, groups: int) -> Percentiles:
    """Return percentiles of each group's time over the given steps in which it ran, 0 if it ran in none.

    Each piece is sorted by group, as `sum_by_group_and_step` returns it.
    """
    tables = []
    for group, step, ns in pieces:
        counted = np.isin(step, steps)
        tables.append((np.searchsorted(group[counted], np.arange(groups + 1)), ns[counted]))
    p50, p95, p10 = np.zeros((3, groups), np.int64)
    for index in range(groups):
        sums = np.sort(np.concatenate([ns[first[index] : first[index + 1]] for first, ns in tables]))
        p50[index], p95[index], p10[index] = median(sums), nearest_rank(sums, 0.95), nearest_rank(sums, 0.1)
    return Percentiles(p50, p95, p10)


def sum_by_group_and_step(times: GroupTimes) -> GroupTimes:
    """Return the sum of the times of each pair of group and step, in the order of the pairs."""
    group, step, ns = times.take(np.lexsort((times.step, times.group)))
    first = np.flatnonzero(begins_run(group, step))
    sums = np.add.reduceat(ns, first) if len(first) else np.zeros(0, np.int64)
    return GroupTimes(group[first], step[first], sums)


def median(values: Sequence[int] | Int64Array) -> int:
    """Return the middle value, or the mean of the middle two rounded down; 0 without values."""
    in_order, count = np.sort(values), len(values)
    return (int(in_order[(count - 1) // 2]) + int(in_order[count // 2])) // 2 if count else 0


def nearest_rank(values: Sequence[int] | Int64Array, fraction: float) -> int:
    """Return the smallest value that at least `fraction` of the values do not exceed; 0 without values."""
    return int(np.sort(values)[max(int(np.ceil(len(values) * fraction)), 1) - 1]) if len(values) else 0


_STAGES = ("first call", "later calls")
_STAGES_OF_GENERATE = ("prefill", "decode")


class UnitTimes(NamedTuple):
    """The durations of the calls or ranges of one name, each of which is a step; times are integer nanoseconds.

    Only steps that were recorded whole count.

    Attributes:
        unit: name of the module or range: "generate", "GPT".
        stage: stage of the step; empty for the whole step. Inside `generate` the first call of each module is "prefill"
            and its other calls are "decode"; elsewhere these are "first call" and "later calls".
        thread: name of the thread; empty for all threads together.
        measured: number of steps, or of calls in the stage.
        calls: number of outermost calls of modules inside.
        p50_ns: median duration.
        p95_ns: 95th percentile of the durations.
        p99_ns: 99th percentile of the durations.
        per_second: `measured` divided by the time from the start of the first to the end of the last.
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
        range: name of the ranges.
        part: part of a step that they belong to, unless a part that takes precedence covers them.
        calls: number of ranges.
        total_ns: total duration, with nested ranges.
        p50_ns: median duration.
        p95_ns: 95th percentile of the durations.
    """

    range: str
    part: str
    calls: int
    total_ns: int
    p50_ns: int
    p95_ns: int


class _Times(NamedTuple):
    """Steps, or calls in them: columns of equal length."""

    start_ns: Int64Array
    end_ns: Int64Array
    tid: Int64Array
    calls: Int64Array

    def take(self, rows: AnyArray) -> _Times:
        return _Times(*(column[rows] for column in self))

    def by_thread(self) -> dict[int, _Times]:
        """Return the rows of each thread by its id, ascending."""
        return {int(self.tid[rows[0]]): self.take(rows) for rows in split_by(self.tid)}


def measure_units(timeline: Timeline, step_by: str | None) -> list[UnitTimes]:
    """Return the times of steps that are calls or ranges, by name; empty if marks end the steps."""
    bounds = find_step_bounds(timeline, step_by)
    return [] if bounds.step_by == OPTIMIZER else list(_measure(timeline, bounds))


def _measure(timeline: Timeline, bounds: StepBounds) -> Iterator[UnitTimes]:
    """Yield the times of steps by name, with their stages: of all threads together, then of each thread."""
    call, step, is_first = _calls_inside(timeline, bounds)
    calls = np.bincount(step, minlength=len(bounds.number))
    slices = timeline.slices
    threads, units = _thread_names(timeline), _Times(bounds.start_ns, bounds.end_ns, bounds.tid, calls)
    call_times = _Times(slices.start[call], slices.end[call], bounds.tid[step], np.ones(len(call), np.int64))
    for name, rows in bounds.by_name().items():
        counts = np.zeros(len(bounds.is_whole), np.bool_)
        counts[rows] = bounds.is_whole[rows]
        times = {"": units.take(counts)}
        if np.any(counts[step] & ~is_first):
            stages = _STAGES_OF_GENERATE if name == GENERATE else _STAGES
            for stage, is_in_stage in zip(stages, (is_first, ~is_first), strict=True):
                times[stage] = call_times.take(counts[step] & is_in_stage)
        yield from (
            _row(name, stage, "", stage_times) for stage, stage_times in times.items() if len(stage_times.start_ns)
        )
        by_thread = {stage: stage_times.by_thread() for stage, stage_times in times.items()}
        tids = [*by_thread[""]] if len(by_thread[""]) > 1 else []
        for tid, (stage, thread_times) in itertools.product(tids, by_thread.items()):
            if tid in thread_times:
                yield _row(name, stage, threads[tid], thread_times[tid])


def _calls_inside(timeline: Timeline, bounds: StepBounds) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Return (rows, step indices, is_first) of the outermost calls in steps.

    `is_first` is True for a module's first call in a step. A step that is a call contains itself.
    """
    slices = timeline.slices
    rows = forward_calls(timeline)
    tid = np.array([track.tid for track in timeline.tracks] or [0], np.int64)[slices.track[rows]]
    step = np.full(len(slices) + 1, -1)
    step[rows] = bounds.index_at(slices.start[rows], tid)
    # The parent of a root is -1, the last entry, which is in no step.
    rows = rows[(step[rows] >= 0) & (step[rows] != step[slices.parent[rows]])]
    fqn = np.unique([name.fqn for name in timeline.names] or [""], return_inverse=True)[1][slices.name[rows]]
    _, first = np.unique(np.stack([step[rows], fqn]), axis=1, return_index=True)
    is_first = np.zeros(len(rows), np.bool_)
    is_first[first] = True
    return rows, step[rows], is_first


def _row(unit: str, stage: str, thread: str, times: _Times) -> UnitTimes:
    """Return the row of a table for steps, or calls in them, with these times."""
    duration_ns = times.end_ns - times.start_ns
    period_ns = int(times.end_ns.max() - times.start_ns.min())
    return UnitTimes(
        unit=unit,
        stage=stage,
        thread=thread,
        measured=len(duration_ns),
        calls=int(times.calls.sum()),
        p50_ns=median(duration_ns),
        p95_ns=nearest_rank(duration_ns, 0.95),
        p99_ns=nearest_rank(duration_ns, 0.99),
        per_second=len(duration_ns) * 1e9 / period_ns if period_ns else 0.0,
    )


def _thread_names(timeline: Timeline) -> dict[int, str]:
    """Return the name of each thread by its id; the id is appended if two threads share a name."""
    process = timeline.tracks[0].process
    names = {track.tid: track.thread for track in reversed(timeline.tracks) if track.process == process}
    count = Counter(names.values())
    return {tid: name if count[name] == 1 else f"{name} {tid}" for tid, name in names.items()}


def measure_ranges(timeline: Timeline) -> dict[tuple[str, str], Int64Array]:
    """Return the first process's ranges by (name, part): int64[n, 4], with thread, start, end and depth."""
    slices, names = timeline.slices, timeline.names
    is_range = np.isin(slices.kind, (RANGE, GARBAGE_COLLECTION)) & first_process_tracks(timeline)[slices.track]
    rows = np.flatnonzero(is_range)
    tid = np.array([track.tid for track in timeline.tracks] or [0], np.int64)[slices.track[rows]]
    ranges = np.stack([tid, slices.start[rows], slices.end[rows], slices.depth[rows]], axis=1)
    tables: dict[tuple[str, str], Int64Array] = {}
    for name in np.unique(slices.name[rows]).tolist():
        label, category = names[name].label, names[name].category
        default_part = OTHER if category == "torch" else label
        part = category if category in PARTS else default_part
        table = ranges[slices.name[rows] == name]
        tables[label, part] = np.concatenate([tables.get((label, part), table[:0]), table])
    return tables


def sum_up_ranges(pieces: Sequence[Mapping[tuple[str, str], Int64Array]]) -> list[RangeTimes]:
    """Return the times of the ranges of each name in all pieces, the longest total first; no range counts twice."""
    rows, no_ranges = [], np.zeros((0, 4), np.int64)
    for label, part in dict.fromkeys(key for piece in pieces for key in piece):
        tables = [piece.get((label, part), no_ranges) for piece in pieces]
        new = [tables[0], *(_new_ranges(piece, previous) for previous, piece in itertools.pairwise(tables))]
        ns = np.concatenate([table[:, 2] - table[:, 1] for table in new])
        rows.append(RangeTimes(label, part, len(ns), int(ns.sum()), median(ns), nearest_rank(ns, 0.95)))
    return sorted(rows, key=lambda row: -row.total_ns)


def _new_ranges(piece: Int64Array, previous: Int64Array) -> Int64Array:
    """Return the ranges of a piece that the previous piece does not contain already."""
    last_end = previous[:, 2].max(initial=INT64_MIN)
    overlapping = np.flatnonzero(piece[:, 1] <= last_end)
    known = {*map(tuple, previous[np.isin(previous[:, 2], piece[overlapping, 2])].tolist())}
    is_known = np.array([tuple(row) in known for row in piece[overlapping].tolist()], np.bool_)
    return np.delete(piece, overlapping[is_known], axis=0)
