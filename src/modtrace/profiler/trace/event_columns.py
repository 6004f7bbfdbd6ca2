"""What merging needs to know of a profiler trace, gathered from its events into columns.

Times are integer nanoseconds from the trace's own base. They are read as doubles, like every reader of JSON does: in a
trace of before torch 2.4, which counts from 1970, they come in steps of 250 ns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..._typing import AnyArray, Float64Array, Int64Array
from .trace_file import MAX_TIME_NS

__all__ = [
    "MAX_TIME_US",
    "ProfilerEvents",
    "SliceColumns",
    "TrackKey",
    "is_track_key",
    "microseconds_to_ns",
]

TrackKey = tuple[int | str, int | str]
"""pid and tid as they stand in the trace."""

MAX_TIME_US = MAX_TIME_NS / 1000
"""Where times end, in µs."""


def is_track_key(key: tuple[object, object]) -> bool:
    """Tell whether pid and tid are what they can be: text, or whole numbers of 64 bits."""
    return all(isinstance(part, str) or (type(part) is int and -(2**63) <= part < 2**63) for part in key)


def microseconds_to_ns(microseconds: Float64Array) -> Int64Array:
    """Times in µs, as a JSON reader has them → int64 ns; whole and fraction apart, as a large product would round."""
    whole = np.floor(microseconds)
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000.0).astype(np.int64)


class SliceColumns(NamedTuple):
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

    def take(self, index: AnyArray) -> SliceColumns:
        """Return the rows at `index` (positions or a mask)."""
        return SliceColumns(*(column[index] for column in self))


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
            `collective_names`; -1 where it computes, as far as its name tells.
        work_graph: int64, for each the id of the graph of which it is a node, or -1.
        work_node: int64, for each the id of this node, or -1.
        work_external: int64, for each its `External id`, which its launch shares; -1 where there is none.
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
        window: start and end, in ns from the base, of what was profiled; None where the trace does not say.
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
    ops: SliceColumns
    plain_ops: SliceColumns
    nodes: SliceColumns
    launches: SliceColumns
    captures: SliceColumns
    work: SliceColumns
    work_collective: Int64Array
    work_graph: Int64Array
    work_node: Int64Array
    work_external: Int64Array
    launch_external: Int64Array
    collectives: SliceColumns
    cpu_collectives: SliceColumns
    collective_names: list[str]
    regions: SliceColumns
    region_names: list[str]
    modules: SliceColumns
    steps: SliceColumns
    module_names: list[str]
    syncs: dict[str, list[tuple[int, int]]]
    flows: SliceColumns
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
