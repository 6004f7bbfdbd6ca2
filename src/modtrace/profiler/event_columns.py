"""What attribution needs of a profiler trace: its slices of each kind as columns.

Times are integer nanoseconds from the trace's own base. They are read as doubles, as every reader of JSON does: in a
trace of before torch 2.4, which counts from 1970, they come in steps of 250 ns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np

from .._typing import AnyArray, Int64Array
from ..formats.chrome_values import TrackKey


class ApiCall(IntEnum):
    """What a call of the GPU's runtime or driver does."""

    OTHER, KERNEL, MEMCPY, MEMSET, GRAPH, CAPTURE_BEGIN, CAPTURE_END = range(7)


class EventColumns:
    """Slices of one kind; int64 columns of equal length.

    A kind has some of those after `duration`; -1 is what a slice does not say.
    """

    track: Int64Array  # index into `ProfilerEvents.tracks`
    start: Int64Array  # ns from the base
    duration: Int64Array  # ns
    # Index into `names`; of a collective into `ProfilerEvents.collective_names`; of GPU work the same: the collective
    # that its name tells, and -1 if it computes, as far as its name tells.
    name: Int64Array
    sequence: Int64Array  # the sequence number of an operation; of a node that of what made it
    forward_thread: Int64Array  # of a node: the autograd id of the thread of what made it
    api: Int64Array  # an `ApiCall`
    correlation: Int64Array  # the id that a launch and what it launched have in common
    external: Int64Array  # the `External id` that both have too
    work: Int64Array  # of GPU work: 0 of a kernel, 1 of a memcpy, 2 of a memset
    graph: Int64Array  # the id of the graph of which it is a node
    node: Int64Array  # the id of this node
    phase: Int64Array  # of a module's call: index into `PHASES`
    call: Int64Array  # which call of the module
    step: Int64Array  # which step it was in; the number of a `ProfilerStep#`
    is_operator: Int64Array  # 1 for an operator of c10d, which does more than to launch a collective, else 0
    begin_track: Int64Array  # of an arrow, which is where a node begins: the track of the forward thread
    names: Sequence[Any]

    def __init__(
        self,
        track: Int64Array,
        start: Int64Array,
        duration: Int64Array,
        names: Sequence[Any] = (),
        **columns: Int64Array,
    ) -> None:
        self.track, self.start, self.duration, self.names = track, start, duration, names
        vars(self).update(columns)

    @property
    def end(self) -> Int64Array:
        """Ends in ns from the base."""
        return self.start + self.duration

    def __len__(self) -> int:
        return len(self.start)

    def take(self, index: AnyArray) -> "EventColumns":
        """Return the rows at `index` (positions or a mask)."""
        columns = {name: column[index] for name, column in vars(self).items() if name != "names"}
        return EventColumns(names=self.names, **columns)


@dataclass(frozen=True)
class ProfilerEvents:
    """What is known of the profiler's events."""

    tracks: list[TrackKey]  # pid and tid of each track that has slices
    thread_names: dict[TrackKey, str]  # names by pid and tid
    process_names: dict[int | str, str]  # names by pid
    sort_indexes: dict[TrackKey, int]  # where a viewer sorts the rows of threads and streams, by pid and tid
    ops: EventColumns  # forward operations with a sequence number: their gradient was asked for
    plain_ops: EventColumns  # operations without one: nothing asked for their gradient, or autograd called them
    nodes: EventColumns  # autograd nodes that ran: slices called `autograd::engine::evaluate_function`
    launches: EventColumns  # calls of the GPU's runtime or driver that may have launched work
    captures: EventColumns  # those that begin and end the capture of a graph
    work: EventColumns  # what GPUs did: kernels, memcpys and memsets
    collectives: EventColumns  # slices of the CPU in which a collective is launched
    cpu_collectives: EventColumns  # collectives that a thread of the CPU runs
    collective_names: list[str]  # names of these (`all_reduce`)
    regions: EventColumns  # ranges of `record_function` and the like
    modules: EventColumns  # `nn.Module:` slices; their names are what follows that
    # Slices whose args say which call of a module they are, as modtrace writes them; `names` has a `Name` of each.
    calls: EventColumns
    graph_calls: EventColumns  # calls of graphs that Inductor compiled, by the key of the cache
    graph_ops: EventColumns  # all operators, if there is such a call
    steps: EventColumns  # the profiler's steps: `ProfilerStep#` ranges of the CPU
    # Start and end in ns from the base, by the sync mark's name; a name may occur more than once.
    syncs: dict[str, list[tuple[int, int]]]
    flows: EventColumns  # forward-backward arrows: where the backward node begins
    first: int  # ns from the base where the slices begin; `first > last` where there is none
    last: int  # where they end
    # Start and end, in ns from the base, of what was profiled; None if the trace does not say.
    window: tuple[int, int] | None
    cpu_pids: dict[int | str, int]  # number of CPU slices by pid
    tids: frozenset[int]  # all thread ids that are numbers
    malformed: int  # events that are not one: no object, without what every event has, or at no time
    total: int  # number of events
    # The OS thread of each track, as the timeline of its modules has it; -1 for other processes and for devices.
    threads: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))

    def of_process(self, pid: int | str) -> "ProfilerEvents":
        """Return these without what threads of other processes did; what devices did stays."""
        is_own = np.array([of == pid for of, _ in self.tracks], np.bool_)
        own: dict[str, Any] = {
            name: rows.take(is_own[rows.track])
            for name, rows in vars(self).items()
            if isinstance(rows, EventColumns) and name != "work"
        }
        return replace(self, **own)

    def with_threads_of(self, pid: int | str) -> "ProfilerEvents":
        """Return these with the threads of one process."""
        tids = [tid if of == pid and isinstance(tid, int) else -1 for of, tid in self.tracks]
        return replace(self, threads=np.array(tids or [-1], np.int64))

    @property
    def int_pids(self) -> frozenset[int]:
        """The ids of processes and devices that are numbers."""
        return frozenset(pid for pid, _ in self.tracks if isinstance(pid, int))
