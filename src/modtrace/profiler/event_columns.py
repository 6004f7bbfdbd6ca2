"""What attribution needs of a profiler trace: its events as columns, and the tables that gather them.

Times are integer nanoseconds from the trace's own base. They are read as doubles, as every reader of JSON does: in a
trace of before torch 2.4, which counts from 1970, they come in steps of 250 ns.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Generic, TypeVar

import numpy as np

from .._typing import AnyArray, Int64Array
from ..formats.chrome_values import MAX_TIME_US, TrackKey, microseconds_to_ns
from ..formats.odd_events import parse_microseconds
from ..timeline import Name


class ApiCall(IntEnum):
    """What a call of the GPU's runtime or driver does."""

    OTHER, KERNEL, MEMCPY, MEMSET, GRAPH, CAPTURE_BEGIN, CAPTURE_END = range(7)


_Columns = TypeVar("_Columns", bound="EventColumns")


@dataclass(frozen=True)
class EventColumns:
    """Slices of one kind; int64 columns of equal length.

    Attributes:
        track: index into `ProfilerEvents.tracks`.
        start: ns from the base.
        duration: ns.
    """

    track: Int64Array
    start: Int64Array
    duration: Int64Array

    @property
    def end(self) -> Int64Array:
        """Ends in ns from the base."""
        return self.start + self.duration

    def __len__(self) -> int:
        return len(self.start)

    def take(self: _Columns, index: AnyArray) -> _Columns:
        """Return the rows at `index` (positions or a mask)."""
        return type(self)(**{name: column[index] for name, column in vars(self).items()})


@dataclass(frozen=True)
class NumberedOps(EventColumns):
    """Forward operations with a sequence number: their gradient was asked for.

    Attributes:
        sequence: this number.
    """

    sequence: Int64Array


@dataclass(frozen=True)
class NodeSlices(EventColumns):
    """The slices of autograd nodes, `autograd::engine::evaluate_function`.

    Attributes:
        sequence: the sequence number of what made the node, or -1.
        forward_thread: the autograd id of the thread of that, or -1.
    """

    sequence: Int64Array
    forward_thread: Int64Array


@dataclass(frozen=True)
class ApiCalls(EventColumns):
    """Calls of the GPU's runtime or driver.

    Attributes:
        call: an `ApiCall`.
    """

    call: Int64Array


@dataclass(frozen=True)
class Launches(ApiCalls):
    """Calls of the GPU's runtime or driver that may have launched work.

    Attributes:
        correlation: the id that what they launched has too.
        external: the `External id` that it has too; -1 if there is none.
    """

    correlation: Int64Array
    external: Int64Array


@dataclass(frozen=True)
class DeviceWork(EventColumns):
    """Kernels, memcpys and memsets.

    Attributes:
        kind: 0 of a kernel, 1 of a memcpy, 2 of a memset.
        correlation: the id of the launch, or -1.
        external: the `External id` of the launch, or -1.
        graph: the id of the graph of which it is a node, or -1.
        node: the id of this node, or -1.
        collective: the collective that its name tells, index into `ProfilerEvents.collective_names`; -1 if it computes,
            as far as its name tells.
    """

    kind: Int64Array
    correlation: Int64Array
    external: Int64Array
    graph: Int64Array
    node: Int64Array
    collective: Int64Array


@dataclass(frozen=True)
class NamedSlices(EventColumns):
    """Slices that have a name.

    Attributes:
        name: index into the names of the kind.
    """

    name: Int64Array


@dataclass(frozen=True)
class CallSlices(NamedSlices):
    """Slices whose args say which call of which module they are.

    Attributes:
        phase: index into `PHASES`.
        call: which call of the module.
        step: which step it was in.
    """

    phase: Int64Array
    call: Int64Array
    step: Int64Array


@dataclass(frozen=True)
class CollectiveSlices(NamedSlices):
    """Slices of the CPU in which a collective is launched.

    Attributes:
        is_operator: 1 for an operator of c10d, which does more than that, else 0.
    """

    is_operator: Int64Array


@dataclass(frozen=True)
class StepRanges(EventColumns):
    """`ProfilerStep#` ranges of the CPU.

    Attributes:
        step: the number of the step.
    """

    step: Int64Array


@dataclass(frozen=True)
class Arrows(EventColumns):
    """Forward-backward arrows: where the backward node begins.

    Attributes:
        begin_track: the forward thread's track.
    """

    begin_track: Int64Array


@dataclass(frozen=True)
class ProfilerEvents:
    """What is known of the profiler's events.

    Attributes:
        tracks: pid and tid of each track that has slices.
        thread_names: names by pid and tid.
        process_names: names by pid.
        sort_indexes: where a viewer sorts the rows of threads and streams, by pid and tid.
        ops: forward operations with a sequence number.
        plain_ops: operations without one: nothing asked for their gradient, or autograd called them.
        nodes: autograd nodes that ran.
        launches: runtime calls that have a correlation id.
        captures: runtime calls that begin and end the capture of a graph.
        work: what GPUs did.
        collectives: slices of the CPU in which a collective is launched.
        cpu_collectives: collectives that a thread of the CPU runs.
        collective_names: names of both (`all_reduce`).
        regions: ranges of `record_function` and the like.
        region_names: their names.
        modules: `nn.Module:` slices.
        calls: slices whose args say which call of a module they are, as modtrace writes them.
        call_names: label, fully qualified name and class of their modules.
        steps: the profiler's steps.
        module_names: what follows `nn.Module: `.
        syncs: start and end in ns from the base, by the sync mark's name; a name may occur more than once.
        flows: forward-backward arrows.
        first: ns from the base where the slices begin; `first > last` where there is none.
        last: where they end.
        window: start and end, in ns from the base, of what was profiled; None if the trace does not say.
        cpu_pids: number of CPU slices by pid.
        tids: all thread ids that are numbers.
        malformed: events that are not one: no object, without what every event has, or at no time.
        total: number of events.
    """

    tracks: list[TrackKey]
    thread_names: dict[TrackKey, str]
    process_names: dict[int | str, str]
    sort_indexes: dict[TrackKey, int]
    ops: NumberedOps
    plain_ops: EventColumns
    nodes: NodeSlices
    launches: Launches
    captures: ApiCalls
    work: DeviceWork
    collectives: CollectiveSlices
    cpu_collectives: NamedSlices
    collective_names: list[str]
    regions: NamedSlices
    region_names: list[str]
    modules: NamedSlices
    calls: CallSlices
    call_names: list[Name]
    steps: StepRanges
    module_names: list[str]
    syncs: dict[str, list[tuple[int, int]]]
    flows: Arrows
    first: int
    last: int
    window: tuple[int, int] | None
    cpu_pids: dict[int | str, int]
    tids: frozenset[int]
    malformed: int
    total: int

    @property
    def int_pids(self) -> frozenset[int]:
        """The ids of processes and devices that are numbers."""
        return frozenset(pid for pid, _ in self.tracks if isinstance(pid, int))


_NO_NUMBERS = (TypeError, OverflowError, ValueError)
"""What comes of rows in which something is not a number, or has more than 64 bits."""


class SliceTable(Generic[_Columns]):
    """Slices of one kind while they are gathered, times in µs.

    Attributes:
        pending: rows that are not in the columns yet: track, start, duration, and what the kind has beside those.
    """

    __slots__ = ("_columns", "_kind", "pending")

    def __init__(self, kind: type[_Columns]) -> None:
        self.pending: list[tuple[Any, ...]] = []
        self._kind = kind
        self._columns = self._empty()

    def _empty(self) -> "list[array[Any]]":
        return [array("d" if field.name in ("start", "duration") else "q") for field in fields(self._kind)]

    def _of(self, rows: list[tuple[Any, ...]]) -> "list[array[Any]]":
        by_column = zip(self._columns, zip(*rows, strict=True), strict=True)
        return [array(column.typecode, numbers) for column, numbers in by_column]

    def take_pending(self) -> tuple[float, float, int, int, int]:
        """Move what is pending to the columns.

        Returns:
            Its first and last moment, µs; and how many rows are left out: as they have no time, are before the time 0
            of the trace, and as something else in them is no number.
        """
        rows, self.pending[:] = self.pending[:], []
        numbers, timeless = rows, 0
        try:
            new = self._of(rows)
        except _NO_NUMBERS:
            timed = [row for row in map(_with_times, rows) if row is not None]
            numbers = [row for row in timed if self._is_of_numbers(row)]
            timeless = len(rows) - len(timed)
            if not numbers:
                return np.inf, -np.inf, timeless, 0, len(timed)
            new = self._of(numbers)
        first, length = np.frombuffer(new[1], np.float64), np.frombuffer(new[2], np.float64)
        last = first + length
        is_early = first < 0 if self._kind is CallSlices else first <= 0  # the profiler has events at 0 that never ran
        valid = ~is_early & (length >= 0) & (last < MAX_TIME_US)
        early = int(np.count_nonzero(is_early & (length >= 0)))
        left_out = len(first)
        if not valid.all():
            first, last = first[valid], last[valid]
            kept = np.flatnonzero(valid).tolist()
            new = [array(column.typecode, [column[row] for row in kept]) for column in new]
        left_out -= len(first)
        for column, more in zip(self._columns, new, strict=True):
            column.extend(more)
        first_and_last = float(first.min(initial=np.inf)), float(last.max(initial=-np.inf))
        return *first_and_last, timeless + left_out - early, early, len(rows) - timeless - len(numbers)

    def _is_of_numbers(self, row: tuple[Any, ...]) -> bool:
        try:
            self._of([row])
        except _NO_NUMBERS:
            return False
        return True

    def take_rows(self) -> _Columns:
        """Return the columns, with times in nanoseconds, and empty the table: nothing is in memory twice."""
        columns, self._columns = self._columns, self._empty()
        return self._kind(*map(_array, columns))


def _with_times(row: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return a row with its times as numbers, which may be texts of some; None if they are none."""
    track, start, duration, *rest = row
    try:
        return track, parse_microseconds(start), parse_microseconds(duration), *rest
    except _NO_NUMBERS:
        return None


def _array(column: "array[Any]") -> Any:
    """Return a column as an array; one of times, which are µs, in ns."""
    if column.typecode == "d":
        return microseconds_to_ns(np.frombuffer(column, np.float64) if column else np.empty(0))
    return np.frombuffer(column, np.int64) if column else np.empty(0, np.int64)


def pair_arrows(begins: Mapping[Any, int], ends: Mapping[Any, tuple[int, float]]) -> Arrows:
    """Return a row for each arrow that has both ends.

    Args:
        begins: the track on which each arrow begins.
        ends: the track on which it ends, and when, in µs.
    """
    rows = [(track, start, begins[flow]) for flow, (track, start) in ends.items() if flow in begins]
    start = microseconds_to_ns(np.array([start for _, start, _ in rows], np.float64))
    track, begin = np.array([(track, begin) for track, _, begin in rows], np.int64).reshape(-1, 2).T
    return Arrows(track, start, np.zeros(len(rows), np.int64), begin)
