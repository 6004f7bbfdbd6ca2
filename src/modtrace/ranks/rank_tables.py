"""A rank's timeline → the tables that questions over many ranks are asked of: spans, collectives and steps.

Times are Unix nanoseconds of the job's clock.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .._arrays import (
    AnyArray,
    BoolArray,
    Int8Array,
    Int32Array,
    Int64Array,
    begins_run,
    group_lengths,
    group_starts,
    number_distinct,
    split_by,
)
from ..record_options import StepRange
from ..ring.event_text import CATEGORIES, RangeCategory, RangeName, parse_ranks, rank_list
from ..timeline import Name, Timeline
from ..timeline.memory import measure_calls
from ..timeline.nesting import self_times, union_of
from ..timeline.slices import GARBAGE_COLLECTION, RANGE, UNKNOWN_FLOPS, Arg
from .all_ranks import RankTimeline, read_ranks
from .rank_folder import JobTime, RankRecording
from .sync_points import group_keys, inferred_waits

ROW_KINDS = ("call", "wait", "inferred wait")
"""The kinds of rows of the collectives, by their codes in `CollectiveTable.kind`."""
CALL, WAIT, INFERRED_WAIT = range(3)

_MAX_STEP_DIGITS = 9
"""Any number of so many digits fits an int32."""


class SpanTable(NamedTuple):
    """Spans of some ranks; each rank's in start order, a parent before its children. Arrays of equal length."""

    names: Sequence[Name]  # what `name` points into
    rank: Int32Array
    step: Int32Array
    track: Int32Array  # one row of spans of its rank
    phase: Int8Array  # index into `timeline.PHASES`
    name: Int32Array  # index into `names`
    call: Int64Array  # which call of the module it is
    start: Int64Array  # Unix ns
    duration: Int64Array  # ns
    self_time: Int64Array  # ns outside the spans inside it
    depth: Int32Array  # the number of spans around it on its track
    flops: Int64Array  # of the operators in it; -1 if they were not counted
    retained: Int64Array  # bytes that tensors held at its end less those at its begin; 0 if that was not counted
    peak: Int64Array  # the most that they held inside it less those at its begin; -1 if that was not counted


class CollectiveTable(NamedTuple):
    """Collectives of some ranks, and the waits for them; each rank's in start order. Arrays of equal length."""

    operators: Sequence[str]  # what `operator` points into; "" for a wait for something unknown
    groups: Sequence[str]  # what `group` points into, see `group_text`
    rank: Int32Array
    step: Int32Array
    operator: Int32Array
    group: Int32Array
    peer: Int32Array  # the rank in the group at the other end of a message, or -1
    kind: Int8Array  # index into `ROW_KINDS`
    counter: Int64Array  # which collective of its group it is, or -1
    start: Int64Array  # Unix ns
    end: Int64Array  # Unix ns
    done: Int64Array  # Unix ns; -1 if it is not known
    nbytes: Int64Array


EXCLUSIVE_CATEGORIES: tuple[RangeCategory, ...] = ("evaluation", "gc", "compile", "saving", "data loading")
"""Categories that count for themselves wherever they run, as in the parts of a step: before others, in this order."""


class StepTable(NamedTuple):
    """When the steps of some ranks ended. Arrays of equal length."""

    rank: Int32Array
    step: Int32Array
    end: Int64Array  # Unix ns


class RangeTable(NamedTuple):
    """Ranges of some ranks, and collections of garbage. Arrays of equal length."""

    places: Sequence[str]  # what `place` points into, as `RangeName.place` says it
    rank: Int32Array
    step: Int32Array
    place: Int32Array
    category: Int8Array  # index into `CATEGORIES`
    start: Int64Array  # Unix ns
    end: Int64Array  # Unix ns
    # True if it overlaps no module and no outer range of this kind, or has one of `EXCLUSIVE_CATEGORIES` and its thread
    # runs modules. Slow ranks are found by these ranges.
    apart: BoolArray


Table = TypeVar("Table", SpanTable, CollectiveTable, StepTable, RangeTable)
NUMBERED = {"names": "name", "operators": "operator", "groups": "group", "places": "place"}
"""Fields of texts, and the fields with numbers that point into them."""


def take(table: Table, index: AnyArray) -> Table:
    """Return the rows of a table at `index` (indices or a mask)."""
    columns: Any = table
    taken: Table = columns._make(column[index] if isinstance(column, np.ndarray) else column for column in columns)
    return taken


def join_tables(parts: Sequence[Table]) -> Table:
    """Return the rows of several tables as one; `parts` is not empty."""
    columns: dict[str, Any] = {field: [getattr(part, field) for part in parts] for field in parts[0]._fields}
    for texts, index in NUMBERED.items():
        if texts in columns:
            numbers: dict[Any, int] = {}
            place = [[numbers.setdefault(text, len(numbers)) for text in part] or [0] for part in columns[texts]]
            columns[index] = [
                np.array(codes, np.int32)[code] for codes, code in zip(place, columns[index], strict=True)
            ]
            columns[texts] = list(numbers)
    arrays: dict[str, Any] = {
        field: values if field in NUMBERED else np.concatenate(values) for field, values in columns.items()
    }
    joined: Table = type(parts[0])(**arrays)
    return joined


def span_table(timeline: Timeline, rank: int) -> SpanTable:
    """Return the spans of a rank's timeline; those above GPUs, which no thread ran, are left out."""
    columns, memory = timeline.columns, measure_calls(timeline)
    on_gpu = np.array([track.device is not None for track in timeline.tracks] or [False])
    counted = ~on_gpu[columns.track]
    if np.any(on_gpu):
        columns = columns.take(counted)
    return SpanTable(
        names=timeline.names,
        rank=np.full(len(columns), rank, np.int32),
        step=columns.step.astype(np.int32),
        track=columns.track,
        phase=columns.phase,
        name=columns.name,
        call=columns.call,
        start=columns.start,
        duration=columns.end - columns.start,
        self_time=self_times(timeline.columns)[counted],
        depth=columns.depth,
        flops=columns.arg(Arg.FLOPS).dense(len(columns), UNKNOWN_FLOPS),
        retained=np.zeros(len(columns), np.int64) if memory is None else memory.retained[counted],
        peak=np.full(len(columns), -1) if memory is None else np.where(memory.known, memory.peak, -1)[counted],
    )


def collective_table(timeline: Timeline, rank: int) -> CollectiveTable:
    """Return the collectives of a rank's timeline, and the waits that are inferred from what ran around them."""
    table = timeline.collectives
    inferred = inferred_waits(timeline)
    texts = {name: group_text(*key) for name, key in group_keys(table.groups).items()}
    # The last of each is that of a wait for something unknown, whose name is -1.
    operators, operator = number_distinct([*(name.operator for name in table.names), ""])
    groups, group = number_distinct([*(texts.get(name.group, name.group) for name in table.names), ""])
    peer = np.array([name.peer for name in table.names] + [-1], np.int32)
    count, more = len(table), len(inferred.start)

    def join(seen: Int64Array, unseen: Int64Array) -> Int64Array:
        return np.concatenate([seen, unseen]).astype(np.int64)

    none = np.full(more, -1, np.int64)
    # A thread waits for a device until that knows what to do, and not for other ranks.
    awaited = np.where(table.is_wait & table.on_device, -1, table.counter)
    name = join(table.name.astype(np.int64), none)
    start = join(table.start, inferred.start)
    order = np.argsort(start, kind="stable")
    kind = join(np.where(table.is_wait, WAIT, CALL), np.full(more, INFERRED_WAIT))
    return CollectiveTable(
        operators=operators,
        groups=groups,
        rank=np.full(count + more, rank, np.int32),
        step=join(table.step, inferred.step).astype(np.int32)[order],
        operator=operator[name][order],
        group=group[name][order],
        peer=peer[name][order],
        kind=kind.astype(np.int8)[order],
        counter=join(awaited, none)[order],
        start=start[order],
        end=join(table.end, inferred.end)[order],
        done=join(np.where(table.on_device, -1, table.done), none)[order],
        nbytes=join(table.nbytes, np.zeros(more, np.int64))[order],
    )


def range_table(timeline: Timeline, rank: int) -> RangeTable:
    """Return the ranges of a rank; communication is not apart, nor what is beside modules on another thread."""
    spans, slices = timeline.columns, timeline.slices
    ranges = np.flatnonzero(slices.kind == RANGE)
    names = [_range_name(timeline, row) for row in ranges.tolist()]
    category = np.array([name.category for name in names], object)
    is_told = ~np.isin(category, ("communication", "torch", *EXCLUSIVE_CATEGORIES))
    thread = np.array([track.tid for track in timeline.tracks], np.int64)
    has_modules = np.isin(thread[slices.track[ranges]], thread[spans.track]) | (len(spans.track) == 0)
    in_modules = union_of(spans.start, spans.end).time_within(slices.start[ranges], slices.end[ranges])
    is_told &= in_modules == 0
    # In start order, an outer one before those in it: of these the outer one counts.
    order = np.lexsort((-slices.end[ranges], slices.start[ranges], slices.track[ranges]))
    order = order[is_told[order]]
    until, track = slices.end[ranges[order]], slices.track[ranges[order]]
    for track_rows in split_by(track):
        until[track_rows] = np.maximum.accumulate(until[track_rows])
    is_inner = ~begins_run(track)
    is_inner[1:] &= slices.start[ranges[order]][1:] < until[:-1]
    collections = np.flatnonzero(slices.kind == GARBAGE_COLLECTION)
    rows = np.append(ranges, collections)
    names += [_range_name(timeline, row) for row in collections.tolist()]
    apart = np.append(np.isin(category, EXCLUSIVE_CATEGORIES) & has_modules, np.ones(len(collections), np.bool_))
    apart[order[~is_inner]] = True
    places, place = number_distinct([name.place for name in names])
    return RangeTable(
        places=places,
        rank=np.full(len(rows), rank, np.int32),
        step=slices.step[rows].astype(np.int32),
        place=place.astype(np.int32),
        start=slices.start[rows],
        end=slices.end[rows],
        category=np.array([CATEGORIES.index(name.category) for name in names], np.int8),
        apart=apart,
    )


def _range_name(timeline: Timeline, row: int) -> RangeName:
    name = timeline.names[timeline.slices.name[row]]
    return RangeName(name.label, name.category if name.category in CATEGORIES else "user")


def step_end_table(timeline: Timeline, rank: int) -> StepTable:
    """Return when a rank's steps ended."""
    step = np.array([_step_number(mark.text) for mark in timeline.marks if mark.ends_step], np.int32)
    return StepTable(np.full(len(step), rank, np.int32), step, timeline.step_ends)


def _step_number(text: str) -> int:
    """Return the step that a mark ends; -1 if it does not say it: a mark of a file can say anything."""
    number = text.removeprefix("step ")
    return int(number) if number.isdecimal() and len(number) <= _MAX_STEP_DIGITS else -1


def group_text(name: str, ranks: Sequence[int]) -> str:
    """Return a text that no other group of the job has (`0 [0-3]`)."""
    return f"{name} [{rank_list(ranks)}]" if ranks else name


def ranks_in_group(text: str) -> list[int]:
    """Return the ranks of a group from what `group_text` made of it; none if it does not say them."""
    _, bracket, ranks = text.rpartition(" [")
    try:
        return parse_ranks(ranks.removesuffix("]")) if bracket else []
    except ValueError:  # the end of a name, which can be anything
        return []


class Bounds:
    """How far the times of ranks are off at most.

    Args:
        ranks: number, bound in ns, and clock of each, ascending: those with one clock are compared without error.
    """

    def __init__(self, ranks: Sequence[tuple[int, int, str]]) -> None:
        self._ranks = np.array([rank for rank, _, _ in ranks], np.int64)
        self._bound = np.array([bound_ns for _, bound_ns, _ in ranks], np.int64)
        self._clock = number_distinct([clock for _, _, clock in ranks])[1]

    def largest_bound(self, rank: int, others: Int64Array) -> int:
        """Return how wrong the time between a rank and any of the others can be, ns."""
        own_index, index = np.searchsorted(self._ranks, rank), np.searchsorted(self._ranks, others)
        apart = self._clock[index] != self._clock[own_index]
        return int(np.max((self._bound[index] + self._bound[own_index])[apart], initial=0))

    def of_groups(self, rank: Int64Array, group: Int64Array) -> Int64Array:
        """Return for times of ranks how far each is off at most against the others of its group, ascending, ns."""
        index = np.searchsorted(self._ranks, rank)
        bound, clock = self._bound[index], self._clock[index]
        begins = group_starts(group)
        apart = np.minimum.reduceat(clock, begins) != np.maximum.reduceat(clock, begins)
        most = np.where(apart, np.maximum.reduceat(bound, begins), -1)
        most = np.repeat(most, group_lengths(begins, len(rank)))
        return np.where(most >= 0, bound + most, 0)


class RankEntry(NamedTuple):
    """One rank: its place in the job, and its recording."""

    rank: int  # its number
    role: str  # what it does in the job; empty if that is not known
    bound_ns: int  # how far its times are off at most, see `RankTimeline`
    method: str  # how it was found where it is, see `RankTime`
    clock: str  # the id of its clock
    start_ns: int  # when the first of what it recorded began
    end_ns: int  # when the last of it ended
    spans: int  # how many it has
    peak_bytes: int  # the most that its tensors held; -1 if it recorded no memory
    engine: str  # what recorded it, "native" or "python"; empty if that is not known
    source: list[Any]  # the file it came from: path, size and time of change; only a dataset says it
    lines: str = ""  # between which lines of the program it is longest in no module and no range, if that is known
    damage: str = ""  # what is damaged of its ring, in words


class RankTables(ABC):
    """The source of tables: a folder of recordings, or a dataset; `ranks` describes each rank."""

    ranks: Sequence[RankEntry]

    @property
    def roles(self) -> dict[int, str]:
        """The role of each rank in the job; empty if that is not known."""
        return {entry.rank: entry.role for entry in self.ranks}

    @property
    def engines(self) -> set[str]:
        """The engines that recorded the ranks, "native" or "python"."""
        return {entry.engine for entry in self.ranks}

    def bounds(self) -> Bounds:
        """Return how far the times of each rank are off."""
        return Bounds([(entry.rank, entry.bound_ns, entry.clock) for entry in self.ranks])

    @abstractmethod
    def read(self, kind: type[Table], first: int, last: int, ranks: Sequence[int] | None = None) -> Table:
        """Return the rows of a kind of table in the steps from `first` to before `last`, of all ranks or of these."""


TABLE_MAKERS: Mapping[type, Callable[[Timeline, int], Any]] = {
    SpanTable: span_table,
    CollectiveTable: collective_table,
    StepTable: step_end_table,
    RangeTable: range_table,
}
"""The function that makes each kind of table from a rank's timeline."""


def _rank_tables(rank: RankTimeline) -> tuple[RankEntry, dict[type, Any]]:
    peak_bytes = -1 if rank.peak_bytes is None else rank.peak_bytes
    place = rank.rank, rank.file.role, rank.bound_ns, rank.time.method, rank.time.clock
    # When, and how many, only a dataset says.
    entry = RankEntry(*place, 0, 0, 0, peak_bytes, rank.engine, [], rank.lines, rank.damage)
    return entry, {kind: make(rank.timeline, rank.rank) for kind, make in TABLE_MAKERS.items()}


class FolderTables(RankTables):
    """Reads all recordings of a folder."""

    def __init__(
        self,
        files: Sequence[RankRecording],
        job: JobTime,
        steps: StepRange | None = None,
        executor: Executor | None = None,
    ) -> None:
        loaded = read_ranks(_rank_tables, files, job, steps, executor)
        self.ranks = [entry for entry, _ in loaded]
        self._tables = {kind: {entry.rank: tables[kind] for entry, tables in loaded} for kind in TABLE_MAKERS}

    def read(self, kind: type[Table], first: int, last: int, ranks: Sequence[int] | None = None) -> Table:
        """Return rows, as `RankTables` says it."""
        tables: list[Table] = [self._tables[kind][rank] for rank in ranks or self._tables[kind]]
        return join_tables([take(table, (table.step >= first) & (table.step < last)) for table in tables])
