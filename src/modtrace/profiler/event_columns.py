"""What attribution needs of a profiler trace: its events as columns, and the tables that gather them.

Times are integer nanoseconds from the trace's own base. They are read as doubles, as every reader of JSON does: in a
trace of before torch 2.4, which counts from 1970, they come in steps of 250 ns.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from .._typing import AnyArray, Int64Array
from ..formats.chrome_values import MAX_TIME_US, TrackKey, microseconds_to_ns

__all__ = ["ApiCall", "EventColumns", "FlowPairs", "ProfilerEvents", "SliceTable"]


class ApiCall(IntEnum):
    """What a call of the GPU's runtime or driver does."""

    OTHER = 0
    KERNEL = 1
    MEMCPY = 2
    MEMSET = 3
    GRAPH = 4
    CAPTURE_BEGIN = 5
    CAPTURE_END = 6


class EventColumns(NamedTuple):
    """Slices of one kind; columns of equal length.

    Attributes:
        track: index into `ProfilerEvents.tracks`.
        start: int64, ns from the base.
        duration: int64, ns.
        value: int64, by kind.
        other: int64, by kind.
    """

    track: Int64Array
    start: Int64Array
    duration: Int64Array
    value: Int64Array
    other: Int64Array

    @property
    def end(self) -> Int64Array:
        """Ends in ns from the base."""
        return self.start + self.duration

    def __len__(self) -> int:
        return len(self.start)

    def take(self, index: AnyArray) -> EventColumns:
        """Return the rows at `index` (positions or a mask)."""
        return EventColumns(*(column[index] for column in self))


@dataclass(frozen=True)
class ProfilerEvents:
    """What is known of the profiler's events.

    Attributes:
        tracks: pid and tid of each track that has slices.
        thread_names: names by pid and tid.
        process_names: names by pid.
        sort_indexes: where a viewer sorts the rows of threads and streams, by pid and tid.
        ops: forward operations with a sequence number (`value`).
        plain_ops: operations without a sequence number: nothing asked for their gradient, or autograd called them.
        nodes: `evaluate_function` slices; `value` the sequence number or -1, `other` the forward thread's id.
        launches: runtime calls; `value` the correlation id, `other` an `ApiCall`.
        captures: runtime calls that begin and end the capture of a graph; `other` an `ApiCall`.
        work: kernels, memcpys and memsets; `value` the correlation id or -1, `other` 0, 1 or 2.
        work_collective: int64, for each piece of work the collective that its name tells, index into
            `collective_names`; -1 if it computes, as far as its name tells.
        work_graph: int64, for each the id of the graph of which it is a node, or -1.
        work_node: int64, for each the id of this node, or -1.
        work_external: int64, for each its `External id`, which its launch shares; -1 if there is none.
        launch_external: int64, the same for each of the launches.
        collectives: slices of the CPU in which a collective is launched; `value` index into `collective_names`, `other`
            1 for an operator of c10d, which does more than that, else 0.
        cpu_collectives: collectives that a thread of the CPU runs; `value` as above.
        collective_names: of the above (`all_reduce`).
        regions: ranges of `record_function` and the like; `value` index into `region_names`.
        region_names: their names.
        modules: `nn.Module:` slices; `value` index into `module_names`, `other` the "Python module id".
        steps: `ProfilerStep#` ranges of the CPU; `value` the step.
        module_names: what follows `nn.Module: `.
        syncs: start and end in ns from the base, by the sync mark's name; a name may occur more than once.
        flows: (forward thread's track, backward node's track, node's start) of each forward-backward arrow.
        first: ns from the base where the slices begin; `first > last` where there is none.
        last: where they end.
        window: start and end, in ns from the base, of what was profiled; None if the trace does not say.
        cpu_pids: number of CPU slices by pid.
        tids: all thread ids that are numbers.
        times_up_to_zero: slices at time 0 or before it, which no profiler means.
        malformed: events that are none: no object, or without what every event has.
        total: number of events.
    """

    tracks: list[TrackKey]
    thread_names: dict[TrackKey, str]
    process_names: dict[int | str, str]
    sort_indexes: dict[TrackKey, int]
    ops: EventColumns
    plain_ops: EventColumns
    nodes: EventColumns
    launches: EventColumns
    captures: EventColumns
    work: EventColumns
    work_collective: Int64Array
    work_graph: Int64Array
    work_node: Int64Array
    work_external: Int64Array
    launch_external: Int64Array
    collectives: EventColumns
    cpu_collectives: EventColumns
    collective_names: list[str]
    regions: EventColumns
    region_names: list[str]
    modules: EventColumns
    steps: EventColumns
    module_names: list[str]
    syncs: dict[str, list[tuple[int, int]]]
    flows: EventColumns
    first: int
    last: int
    window: tuple[int, int] | None
    cpu_pids: dict[int | str, int]
    tids: frozenset[int]
    times_up_to_zero: int
    malformed: int
    total: int

    @property
    def int_pids(self) -> frozenset[int]:
        """The ids of processes and devices that are numbers."""
        return frozenset(pid for pid, _ in self.tracks if isinstance(pid, int))


_Row = tuple[int, float, float, int, int]
"""Track, start and duration in µs, value and other."""


class SliceTable:
    """Slices of one kind; columns of equal length, times in µs.

    Attributes:
        pending: rows that are not in the columns yet.
    """

    __slots__ = ("duration", "other", "pending", "start", "track", "value")

    def __init__(self) -> None:
        self.pending: list[_Row] = []
        self.track, self.value, self.other = array("q"), array("q"), array("q")
        self.start, self.duration = array("d"), array("d")

    def take_pending(self) -> tuple[float, float, int, int]:
        """Move what is pending to the columns; return its first and last moment, µs, how many are up to 0, and broken.

        Rows that are not at a time, or not of numbers, are left out.
        """
        rows, self.pending[:] = self.pending[:], []
        broken = 0
        try:
            track, start, duration, value, other = (
                array(kind, column) for kind, column in zip("qddqq", zip(*rows, strict=True), strict=True)
            )
        except (TypeError, OverflowError, ValueError):
            numbers = [row for row in map(_numbers, rows) if row is not None]
            broken = len(rows) - len(numbers)
            if not numbers:
                return float("inf"), float("-inf"), 0, broken
            track, start, duration, value, other = (
                array(kind, column) for kind, column in zip("qddqq", zip(*numbers, strict=True), strict=True)
            )
        first, length = np.frombuffer(start, np.float64), np.frombuffer(duration, np.float64)
        last = first + length
        valid = (first > 0) & (length >= 0) & (last < MAX_TIME_US)
        zeros = 0
        if not valid.all():
            zeros = int(np.count_nonzero(first <= 0))
            first, last = first[valid], last[valid]
            kept = np.flatnonzero(valid).tolist()
            track, start, duration, value, other = (
                array(column.typecode, [column[row] for row in kept])
                for column in (track, start, duration, value, other)
            )
        self.track += track
        self.start += start
        self.duration += duration
        self.value += value
        self.other += other
        return float(first.min(initial=np.inf)), float(last.max(initial=-np.inf)), zeros, broken

    def take_rows(self) -> EventColumns:
        """Return the columns, with times in nanoseconds, and empty the table: nothing is in memory twice."""
        start, duration = (microseconds_to_ns(_array(column, np.float64)) for column in (self.start, self.duration))
        track, value, other = (_array(column, np.int64) for column in (self.track, self.value, self.other))
        self.track, self.value, self.other = array("q"), array("q"), array("q")
        self.start, self.duration = array("d"), array("d")
        return EventColumns(track, start, duration, value, other)


def _array(column: array[Any], dtype: type[np.generic]) -> Any:
    """Return a column as an array, without copying it."""
    return np.frombuffer(column, dtype) if column else np.empty(0, dtype)


def _numbers(row: tuple[Any, ...]) -> _Row | None:
    """Return a row with times that are numbers, of text as readers take it; None if there are none."""
    track, start, duration, value, other = row
    try:
        array("q", (value, other))
        return track, float(start), float(duration), value, other
    except (TypeError, OverflowError, ValueError):
        return None


class FlowPairs:
    """Takes the ends of arrows, in any order."""

    def __init__(self) -> None:
        self._begins: dict[Any, int] = {}
        self._ends: dict[Any, tuple[int, float]] = {}

    def add_begin(self, flow: Any, track: int) -> None:
        """Take the begin of an arrow."""
        self._begins[flow] = track

    def add_end(self, flow: Any, track: int, start: float) -> None:
        """Take the end of an arrow; `start` in µs."""
        if 0 <= start < MAX_TIME_US:
            self._ends[flow] = (track, start)

    def columns(self) -> EventColumns:
        """Return a row for each arrow that has both: the track and the time of its end, `value` its begin's track."""
        rows = [
            (track, start, self._begins[flow]) for flow, (track, start) in self._ends.items() if flow in self._begins
        ]
        start = microseconds_to_ns(np.array([start for _, start, _ in rows], np.float64))
        track, begin = np.array([(track, begin) for track, _, begin in rows], np.int64).reshape(-1, 2).T
        zeros = np.zeros(len(rows), np.int64)
        return EventColumns(track, start, zeros, begin, zeros)
