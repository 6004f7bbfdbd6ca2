"""What attribution needs of a profiler trace: its slices of each kind as columns.

Times are integer nanoseconds from the trace's own base. They are read as doubles, as every reader of JSON does: in a
trace of before torch 2.4, which counts from 1970, they come in steps of 250 ns.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np

from .._typing import AnyArray, Int64Array
from ..formats.chrome_values import TrackKey
from ..timeline import Name


class ApiCall(IntEnum):
    """What a call of the GPU's runtime or driver does."""

    OTHER, KERNEL, MEMCPY, MEMSET, GRAPH, CAPTURE_BEGIN, CAPTURE_END = range(7)


_Columns = TypeVar("_Columns", bound="EventColumns")


@dataclass(frozen=True)
class EventColumns:
    """Slices of one kind; int64 columns of equal length."""

    track: Int64Array  # index into `ProfilerEvents.tracks`
    start: Int64Array  # ns from the base
    duration: Int64Array  # ns

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
    """The slices of autograd nodes, `autograd::engine::evaluate_function`."""

    sequence: Int64Array  # the sequence number of what made the node, or -1
    forward_thread: Int64Array  # the autograd id of the thread of that, or -1


@dataclass(frozen=True)
class ApiCalls(EventColumns):
    """Calls of the GPU's runtime or driver.

    Attributes:
        call: an `ApiCall`.
    """

    call: Int64Array


@dataclass(frozen=True)
class Launches(ApiCalls):
    """Calls of the GPU's runtime or driver that may have launched work."""

    correlation: Int64Array  # the id that what they launched has too
    external: Int64Array  # the `External id` that it has too; -1 if there is none


@dataclass(frozen=True)
class DeviceWork(EventColumns):
    """Kernels, memcpys and memsets."""

    kind: Int64Array  # 0 of a kernel, 1 of a memcpy, 2 of a memset
    correlation: Int64Array  # the id of the launch, or -1
    external: Int64Array  # the `External id` of the launch, or -1
    graph: Int64Array  # the id of the graph of which it is a node, or -1
    node: Int64Array  # the id of this node, or -1
    # The collective that its name tells, index into `ProfilerEvents.collective_names`; -1 if it computes, as far as its
    # name tells.
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
    """What is known of the profiler's events."""

    tracks: list[TrackKey]  # pid and tid of each track that has slices
    thread_names: dict[TrackKey, str]  # names by pid and tid
    process_names: dict[int | str, str]  # names by pid
    sort_indexes: dict[TrackKey, int]  # where a viewer sorts the rows of threads and streams, by pid and tid
    ops: NumberedOps  # forward operations with a sequence number
    plain_ops: EventColumns  # operations without one: nothing asked for their gradient, or autograd called them
    nodes: NodeSlices  # autograd nodes that ran
    launches: Launches  # runtime calls that have a correlation id
    captures: ApiCalls  # runtime calls that begin and end the capture of a graph
    work: DeviceWork  # what GPUs did
    collectives: CollectiveSlices  # slices of the CPU in which a collective is launched
    cpu_collectives: NamedSlices  # collectives that a thread of the CPU runs
    collective_names: list[str]  # names of both (`all_reduce`)
    regions: NamedSlices  # ranges of `record_function` and the like
    region_names: list[str]  # their names
    modules: NamedSlices  # `nn.Module:` slices
    calls: CallSlices  # slices whose args say which call of a module they are, as modtrace writes them
    call_names: list[Name]  # label, fully qualified name and class of their modules
    graph_calls: NamedSlices  # calls of graphs that Inductor compiled
    graph_keys: list[str]  # which graph, by the key of the cache
    graph_ops: NamedSlices  # all operators, if there is such a call
    graph_op_names: list[str]  # their names
    steps: StepRanges  # the profiler's steps
    module_names: list[str]  # what follows `nn.Module: `
    # Start and end in ns from the base, by the sync mark's name; a name may occur more than once.
    syncs: dict[str, list[tuple[int, int]]]
    flows: Arrows  # forward-backward arrows
    first: int  # ns from the base where the slices begin; `first > last` where there is none
    last: int  # where they end
    # Start and end, in ns from the base, of what was profiled; None if the trace does not say.
    window: tuple[int, int] | None
    cpu_pids: dict[int | str, int]  # number of CPU slices by pid
    tids: frozenset[int]  # all thread ids that are numbers
    malformed: int  # events that are not one: no object, without what every event has, or at no time
    total: int  # number of events

    def of_process(self, pid: int | str) -> "ProfilerEvents":
        """Return these without what threads of other processes did; what devices did stays."""
        is_own = np.array([of == pid for of, _ in self.tracks], np.bool_)
        own: dict[str, Any] = {
            name: rows.take(is_own[rows.track])
            for name, rows in vars(self).items()
            if isinstance(rows, EventColumns) and name != "work"
        }
        return replace(self, **own)

    @property
    def int_pids(self) -> frozenset[int]:
        """The ids of processes and devices that are numbers."""
        return frozenset(pid for pid, _ in self.tracks if isinstance(pid, int))
