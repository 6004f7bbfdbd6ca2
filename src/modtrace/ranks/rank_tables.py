"""A rank's timeline → the tables used by queries over many ranks: spans, collectives, steps and ranges.

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
"""Maximum number of digits of a step number; every such number fits an int32."""


class SpanTable(NamedTuple):
    """Spans of ranks; each rank's in start order, a parent before its children. Arrays of equal length."""

    names: Sequence[Name]  # the names that `name` refers to
    rank: Int32Array
    step: Int32Array
    track: Int32Array  # number of the track among its rank's tracks
    phase: Int8Array  # index into `timeline.PHASES`
    name: Int32Array  # index into `names`
    call: Int64Array  # number of the call among the module's calls
    start_ns: Int64Array  # Unix time
    duration_ns: Int64Array
    self_ns: Int64Array  # time outside its inner spans
    depth: Int32Array  # number of spans around it on its track
    flops: Int64Array  # operations of the operators in the span; -1 if not counted
    retained_bytes: Int64Array  # of tensors at its end less those at its start; 0 if memory was not recorded
    peak_bytes: Int64Array  # maximum of tensors inside less those at its start; -1 if memory was not recorded


class CollectiveTable(NamedTuple):
    """Collectives of ranks, and the waits for them; each rank's in start order. Arrays of equal length."""

    operators: Sequence[str]  # the names that `operator` refers to; "" for a wait of unknown target
    groups: Sequence[str]  # the texts that `group` refers to, see `group_text`
    rank: Int32Array
    step: Int32Array
    operator: Int32Array
    group: Int32Array
    peer: Int32Array  # index in the group of the rank at the other end of a message, or -1
    kind: Int8Array  # index into `ROW_KINDS`
    counter: Int64Array  # number of the collective in its group, or -1
    start_ns: Int64Array  # Unix time
    end_ns: Int64Array  # Unix time
    done_ns: Int64Array  # Unix time at which the collective was complete; -1 if unknown
    nbytes: Int64Array


EXCLUSIVE_CATEGORIES: tuple[RangeCategory, ...] = ("evaluation", "gc", "compile", "saving", "data loading")
"""Categories whose time counts for no module or other range, as in the parts of a step; the first has priority."""


class StepTable(NamedTuple):
    """The ends of the steps of ranks. Arrays of equal length."""

    rank: Int32Array
    step: Int32Array
    end_ns: Int64Array  # Unix time


class RangeTable(NamedTuple):
    """Ranges of ranks, and garbage collections. Arrays of equal length."""

    places: Sequence[str]  # the texts that `place` refers to, see `RangeName.place`
    rank: Int32Array
    step: Int32Array
    place: Int32Array
    category: Int8Array  # index into `CATEGORIES`
    start_ns: Int64Array  # Unix time
    end_ns: Int64Array  # Unix time
    # True if it overlaps no module and no outer range of this kind, or has one of `EXCLUSIVE_CATEGORIES` and its thread
    # runs modules. Slow ranks are found by these ranges.
    apart: BoolArray


Table = TypeVar("Table", SpanTable, CollectiveTable, StepTable, RangeTable)
NUMBERED = {"names": "name", "operators": "operator", "groups": "group", "places": "place"}
"""Field with the texts -> field with the indices into these texts."""


def take(table: Table, index: AnyArray) -> Table:
    """Return the rows of a table at `index` (indices or a mask)."""
    columns: Any = table
    rows: Table = columns._make(column[index] if isinstance(column, np.ndarray) else column for column in columns)
    return rows


def join_tables(parts: Sequence[Table]) -> Table:
    """Return the rows of several tables as one; `parts` is not empty."""
    columns: dict[str, Any] = {field: [getattr(part, field) for part in parts] for field in parts[0]._fields}
    for texts, index in NUMBERED.items():
        if texts in columns:
            numbers: dict[Any, int] = {}
            remap = [[numbers.setdefault(text, len(numbers)) for text in part] or [0] for part in columns[texts]]
            columns[index] = [
                np.array(codes, np.int32)[code] for codes, code in zip(remap, columns[index], strict=True)
            ]
            columns[texts] = list(numbers)
    arrays: dict[str, Any] = {
        field: values if field in NUMBERED else np.concatenate(values) for field, values in columns.items()
    }
    joined: Table = type(parts[0])(**arrays)
    return joined


def span_table(timeline: Timeline, rank: int) -> SpanTable:
    """Return the spans of a rank's timeline, except spans on device tracks, which no thread ran."""
    columns, memory = timeline.columns, measure_calls(timeline)
    on_gpu = np.array([track.device is not None for track in timeline.tracks] or [False])
    on_thread = ~on_gpu[columns.track]
    if np.any(on_gpu):
        columns = columns.take(on_thread)
    return SpanTable(
        names=timeline.names,
        rank=np.full(len(columns), rank, np.int32),
        step=columns.step.astype(np.int32),
        track=columns.track,
        phase=columns.phase,
        name=columns.name,
        call=columns.call,
        start_ns=columns.start,
        duration_ns=columns.end - columns.start,
        self_ns=self_times(timeline.columns)[on_thread],
        depth=columns.depth,
        flops=columns.arg(Arg.FLOPS).dense(len(columns), UNKNOWN_FLOPS),
        retained_bytes=np.zeros(len(columns), np.int64) if memory is None else memory.retained_bytes[on_thread],
        peak_bytes=np.full(len(columns), -1)
        if memory is None
        else np.where(memory.is_known, memory.peak_bytes, -1)[on_thread],
    )


def collective_table(timeline: Timeline, rank: int) -> CollectiveTable:
    """Return the collectives of a rank's timeline, and the waits inferred from the spans around them."""
    table = timeline.collectives
    inferred = inferred_waits(timeline)
    texts = {name: group_text(*key) for name, key in group_keys(table.groups).items()}
    # A wait of unknown target has name -1, and so the last entry of each list.
    operators, operator = number_distinct([*(name.operator for name in table.names), ""])
    groups, group = number_distinct([*(texts.get(name.group, name.group) for name in table.names), ""])
    peer = np.array([name.peer for name in table.names] + [-1], np.int32)
    count, inferred_count = len(table), len(inferred.start_ns)

    def join(recorded: Int64Array, inferred_values: Int64Array) -> Int64Array:
        return np.concatenate([recorded, inferred_values]).astype(np.int64)

    unknown = np.full(inferred_count, -1, np.int64)
    # A thread waits for a device only until the work is queued, not for other ranks.
    counter = np.where(table.is_wait & table.on_device, -1, table.counter)
    name = join(table.name.astype(np.int64), unknown)
    start = join(table.start, inferred.start_ns)
    order = np.argsort(start, kind="stable")
    kind = join(np.where(table.is_wait, WAIT, CALL), np.full(inferred_count, INFERRED_WAIT))
    return CollectiveTable(
        operators=operators,
        groups=groups,
        rank=np.full(count + inferred_count, rank, np.int32),
        step=join(table.step, inferred.step).astype(np.int32)[order],
        operator=operator[name][order],
        group=group[name][order],
        peer=peer[name][order],
        kind=kind.astype(np.int8)[order],
        counter=join(counter, unknown)[order],
        start_ns=start[order],
        end_ns=join(table.end, inferred.end_ns)[order],
        done_ns=join(np.where(table.on_device, -1, table.done), unknown)[order],
        nbytes=join(table.nbytes, np.zeros(inferred_count, np.int64))[order],
    )


def range_table(timeline: Timeline, rank: int) -> RangeTable:
    """Return the ranges of a rank, and its garbage collections."""
    spans, slices = timeline.columns, timeline.slices
    ranges = np.flatnonzero(slices.kind == RANGE)
    names = [_range_name(timeline, row) for row in ranges.tolist()]
    category = np.array([name.category for name in names], object)
    is_apart = ~np.isin(category, ("communication", "torch", *EXCLUSIVE_CATEGORIES))
    thread = np.array([track.tid for track in timeline.tracks], np.int64)
    has_modules = np.isin(thread[slices.track[ranges]], thread[spans.track]) | (len(spans.track) == 0)
    in_modules = union_of(spans.start, spans.end).time_within(slices.start[ranges], slices.end[ranges])
    is_apart &= in_modules == 0
    # Sorted by start, outer ranges first; of nested ranges only the outermost is apart.
    order = np.lexsort((-slices.end[ranges], slices.start[ranges], slices.track[ranges]))
    order = order[is_apart[order]]
    end, track = slices.end[ranges[order]], slices.track[ranges[order]]
    for track_rows in split_by(track):
        end[track_rows] = np.maximum.accumulate(end[track_rows])
    is_inner = ~begins_run(track)
    is_inner[1:] &= slices.start[ranges[order]][1:] < end[:-1]
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
        start_ns=slices.start[rows],
        end_ns=slices.end[rows],
        category=np.array([CATEGORIES.index(name.category) for name in names], np.int8),
        apart=apart,
    )


def _range_name(timeline: Timeline, row: int) -> RangeName:
    name = timeline.names[timeline.slices.name[row]]
    return RangeName(name.label, name.category if name.category in CATEGORIES else "user")


def step_end_table(timeline: Timeline, rank: int) -> StepTable:
    """Return the step ends of a rank."""
    step = np.array([_step_number(mark.text) for mark in timeline.marks if mark.ends_step], np.int32)
    return StepTable(np.full(len(step), rank, np.int32), step, timeline.step_ends)


def _step_number(text: str) -> int:
    """Return the number of the step that a mark ends; -1 if its text, which a file can contain, has no number."""
    number = text.removeprefix("step ")
    return int(number) if number.isdecimal() and len(number) <= _MAX_STEP_DIGITS else -1


def group_text(name: str, ranks: Sequence[int]) -> str:
    """Return a text that is unique to the group in the job (`0 [0-3]`)."""
    return f"{name} [{rank_list(ranks)}]" if ranks else name


def ranks_in_group(text: str) -> list[int]:
    """Return the ranks of a group, given its `group_text`; empty if the text does not contain them."""
    _, bracket, ranks = text.rpartition(" [")
    try:
        return parse_ranks(ranks.removesuffix("]")) if bracket else []
    except ValueError:  # the bracket is part of a group's name
        return []


class Bounds:
    """The maximum errors of times compared between ranks.

    Args:
        ranks: (rank, bound in ns, clock) of each rank, ascending. Times of one clock are compared without error.
    """

    def __init__(self, ranks: Sequence[tuple[int, int, str]]) -> None:
        self._ranks = np.array([rank for rank, _, _ in ranks], np.int64)
        self._bound = np.array([bound_ns for _, bound_ns, _ in ranks], np.int64)
        self._clock = number_distinct([clock for _, _, clock in ranks])[1]

    def largest_bound(self, rank: int, peers: Int64Array) -> int:
        """Return the maximum error of the time between a rank and any of its peers, ns."""
        own_index, index = np.searchsorted(self._ranks, rank), np.searchsorted(self._ranks, peers)
        differs = self._clock[index] != self._clock[own_index]
        return int(np.max((self._bound[index] + self._bound[own_index])[differs], initial=0))

    def within_groups(self, rank: Int64Array, group: Int64Array) -> Int64Array:
        """Return the maximum error of each rank's time against the others of its group, ns; `group` is ascending."""
        index = np.searchsorted(self._ranks, rank)
        bound, clock = self._bound[index], self._clock[index]
        starts = group_starts(group)
        differs = np.minimum.reduceat(clock, starts) != np.maximum.reduceat(clock, starts)
        max_bound = np.where(differs, np.maximum.reduceat(bound, starts), -1)
        max_bound = np.repeat(max_bound, group_lengths(starts, len(rank)))
        return np.where(max_bound >= 0, bound + max_bound, 0)


class RankEntry(NamedTuple):
    """The description of one rank and its recording."""

    rank: int  # number of the rank
    role: str  # its role in the job; empty if unknown
    bound_ns: int  # maximum error of its times, see `RankTimeline`
    method: str  # the method by which its clock was aligned, see `RankTime`
    clock: str  # id of its clock
    start_ns: int  # start of its first slice; 0 except in a dataset
    end_ns: int  # end of its last slice; 0 except in a dataset
    spans: int  # number of its spans; 0 except in a dataset
    peak_bytes: int  # maximum bytes of its tensors; -1 if memory was not recorded
    engine: str  # the engine that recorded it, "native" or "python"; empty if unknown
    source: list[Any]  # path, size and modification time of its file; empty except in a dataset
    lines: str = ""  # program lines around its longest time outside modules and ranges; empty if unknown
    damage: str = ""  # description of the damage of its ring


class RankTables(ABC):
    """The source of tables: a folder of recordings, or a dataset; `ranks` describes each rank."""

    ranks: Sequence[RankEntry]

    @property
    def roles(self) -> dict[int, str]:
        """The role of each rank in the job; empty if unknown."""
        return {entry.rank: entry.role for entry in self.ranks}

    @property
    def engines(self) -> set[str]:
        """The engines that recorded the ranks, "native" or "python"."""
        return {entry.engine for entry in self.ranks}

    def bounds(self) -> Bounds:
        """Return the maximum errors of the ranks' times."""
        return Bounds([(entry.rank, entry.bound_ns, entry.clock) for entry in self.ranks])

    @abstractmethod
    def read(self, kind: type[Table], first: int, stop: int, ranks: Sequence[int] | None = None) -> Table:
        """Return the rows of a kind of table in the steps from `first` to before `stop`, of all ranks or of `ranks`."""


TABLE_MAKERS: Mapping[type, Callable[[Timeline, int], Any]] = {
    SpanTable: span_table,
    CollectiveTable: collective_table,
    StepTable: step_end_table,
    RangeTable: range_table,
}
"""The function that makes each kind of table from a rank's timeline."""


def _rank_tables(rank: RankTimeline) -> tuple[RankEntry, dict[type, Any]]:
    peak_bytes = -1 if rank.peak_bytes is None else rank.peak_bytes
    identity = rank.rank, rank.file.role, rank.bound_ns, rank.time.method, rank.time.clock
    entry = RankEntry(*identity, 0, 0, 0, peak_bytes, rank.engine, [], rank.lines, rank.damage)
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

    def read(self, kind: type[Table], first: int, stop: int, ranks: Sequence[int] | None = None) -> Table:
        """Return rows, see `RankTables.read`."""
        tables: list[Table] = [self._tables[kind][rank] for rank in ranks or self._tables[kind]]
        return join_tables([take(table, (table.step >= first) & (table.step < stop)) for table in tables])
