"""The slices of a profiler trace that attribution needs, as columns per kind, selected from the table of its events.

The category and the name of an event determine its kind, also in traces of old versions of torch.profiler.
Times are integer nanoseconds from the trace's own base. As in every reader of JSON, they are read as doubles.
Traces from before torch 2.4 count from 1970, so their times are multiples of 250 ns.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np

from .._arrays import AnyArray, BoolArray, Int64Array, Numbering, number_values
from ..formats.chrome_values import TrackKey
from ..formats.event_table import ENDS, NO_NUMBER, NONE, SLICE, EventTable
from ..formats.limits import restored_name
from ..ring.slot_format import SYNC_PREFIX
from ..timeline import PHASES


class ApiCall(IntEnum):
    """The kinds of calls of the GPU's runtime or driver."""

    OTHER, KERNEL, MEMCPY, MEMSET, GRAPH, CAPTURE_BEGIN, CAPTURE_END = range(7)


class EventColumns:
    """Slices of one kind; int64 columns of equal length.

    A kind has only those columns after `duration_ns` that apply to it; -1 marks a slice without a value.
    """

    track: Int64Array  # index into `ProfilerEvents.tracks`
    start_ns: Int64Array  # from the base
    duration_ns: Int64Array
    # Index into `names`; for collectives and for GPU work, into `ProfilerEvents.collective_names`: -1 for GPU work
    # that does not communicate.
    name: Int64Array
    sequence: Int64Array  # sequence number of an operation, or of the operation that made a node
    forward_thread: Int64Array  # nodes: autograd's id of the thread that ran the operation
    api: Int64Array  # an `ApiCall`
    correlation: Int64Array  # id shared by a launch and the work that it launched
    external: Int64Array  # the `External id`, which both share too
    work: Int64Array  # GPU work: 0 for a kernel, 1 for a memcpy, 2 for a memset
    graph: Int64Array  # GPU work in a graph: the graph's id
    node: Int64Array  # GPU work in a graph: the id of its node
    phase: Int64Array  # calls of modules: index into `PHASES`
    call: Int64Array  # number of the call among its module's calls
    step: Int64Array  # number of its training step, or of a `ProfilerStep#`
    is_operator: Int64Array  # 1 for an operator of c10d, which does more than launch a collective, 0 for a range
    start_track: Int64Array  # arrows: track of the forward thread; the arrow itself is at the start of a node
    names: Sequence[Any]

    def __init__(
        self,
        track: Int64Array,
        start_ns: Int64Array,
        duration_ns: Int64Array,
        names: Sequence[Any] = (),
        **columns: Int64Array,
    ) -> None:
        self.track, self.start_ns, self.duration_ns, self.names = track, start_ns, duration_ns, names
        vars(self).update(columns)

    @property
    def end_ns(self) -> Int64Array:
        """Ends in ns from the base."""
        return self.start_ns + self.duration_ns

    def __len__(self) -> int:
        return len(self.start_ns)

    def take(self, index: AnyArray) -> "EventColumns":
        """Return the rows at `index` (positions or a mask)."""
        columns = {name: column[index] for name, column in vars(self).items() if name != "names"}
        return EventColumns(names=self.names, **columns)


@dataclass(frozen=True)
class ProfilerEvents:
    """The slices, arrows and tracks of a profiler's trace."""

    tracks: list[TrackKey]  # pid and tid of each track that has slices
    thread_names: dict[TrackKey, str]  # names by pid and tid
    process_names: dict[int | str, str]  # names by pid
    sort_indexes: dict[TrackKey, int]  # sort index of the rows of threads and streams in a viewer, by pid and tid
    ops: EventColumns  # forward operations with a sequence number: autograd recorded them
    plain_ops: EventColumns  # operations without one: autograd did not record them, or called them
    nodes: EventColumns  # autograd nodes that ran: slices called `autograd::engine::evaluate_function`
    launches: EventColumns  # calls of the GPU's runtime or driver that may have launched work
    captures: EventColumns  # calls of the runtime or driver that start and end the capture of a graph
    work: EventColumns  # kernels, memcpys and memsets of GPUs
    collectives: EventColumns  # slices of the CPU in which a collective is launched
    cpu_collectives: EventColumns  # collectives that a thread of the CPU runs
    collective_names: list[str]  # kinds of collectives (`all_reduce`)
    regions: EventColumns  # ranges of `record_function` and other annotations
    modules: EventColumns  # `nn.Module:` slices, named by the text after this prefix
    # Slices of modtrace, whose args identify the call of a module; `names` has a `Name` of each.
    calls: EventColumns
    graph_calls: EventColumns  # calls of graphs that Inductor compiled, named by the key of the cache
    graph_ops: EventColumns  # all operators, if the trace has calls of compiled graphs
    steps: EventColumns  # the profiler's steps, by start: `ProfilerStep#` ranges of the CPU
    # Start and end in ns from the base, by the sync mark's name; a name may occur more than once.
    syncs: dict[str, list[tuple[int, int]]]
    flows: EventColumns  # forward-backward arrows, each at the start of its backward node
    first: int  # start of the first slice in ns from the base; `first > last` without slices
    last: int  # end of the last slice in ns from the base
    # Start and end of the profiled time in ns from the base; None if the trace does not have them.
    window: tuple[int, int] | None
    cpu_pids: dict[int | str, int]  # number of CPU slices by pid
    tids: frozenset[int]  # all thread ids that are numbers
    malformed: int  # number of malformed events: not an object, without a required field, or without a usable time
    event_count: int  # number of events
    # The OS thread id of each track in the timeline of its modules; -1 for other processes and for devices.
    threads: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))

    def of_process(self, pid: int | str) -> "ProfilerEvents":
        """Return the events without those on threads of other processes; the work of devices stays."""
        is_of_process = np.array([track_pid == pid for track_pid, _ in self.tracks], np.bool_)
        tables: dict[str, Any] = {
            name: rows.take(is_of_process[rows.track])
            for name, rows in vars(self).items()
            if isinstance(rows, EventColumns) and name != "work"
        }
        return replace(self, **tables)

    def with_threads_of(self, pid: int | str) -> "ProfilerEvents":
        """Return the events with `threads` set for one process."""
        tids = [tid if track_pid == pid and isinstance(tid, int) else -1 for track_pid, tid in self.tracks]
        return replace(self, threads=np.array(tids or [-1], np.int64))

    @property
    def int_pids(self) -> frozenset[int]:
        """The ids of processes and devices that are numbers."""
        return frozenset(pid for pid, _ in self.tracks if isinstance(pid, int))


STEP = "ProfilerStep#"
NODE = "autograd::engine::evaluate_function: "
MODULE = "nn.Module: "
GRAPH_CALL = "## Call CompiledFxGraph "
C10D, PARAM_COMMS = "c10d::", "record_param_comms"

KERNEL, MEMCPY, MEMSET, CPU_OP, ANNOTATION, PYTHON, RUNTIME, WINDOW, OTHER = range(9)
"""Kinds of slices by category; the first three are work of a GPU."""
_NODE, _SYNC, _STEP, _COLLECTIVE, _COLLECTIVE_OP, _CPU_COLLECTIVE, _MODULE, _CALL = range(OTHER + 1, OTHER + 9)
"""Kinds of CPU slices, recognized by their names."""

_SLICE_KINDS: dict[object, int] = {
    "kernel": KERNEL,
    "gpu_memcpy": MEMCPY,
    "gpu_memset": MEMSET,
    "cpu_op": CPU_OP,
    "user_annotation": ANNOTATION,
    "python_function": PYTHON,
    "Trace": WINDOW,
    # Kineto before torch 1.13.
    "Kernel": KERNEL,
    "Memcpy": MEMCPY,
    "Memset": MEMSET,
    "Operator": CPU_OP,
    "Runtime": RUNTIME,
}
"""The kind of a slice by its category."""

_API_CALLS = (
    (re.compile(r"(cuda|hip)StreamBeginCapture|cuStreamBeginCapture"), ApiCall.CAPTURE_BEGIN),
    (re.compile(r"(cuda|hip)StreamEndCapture|cuStreamEndCapture"), ApiCall.CAPTURE_END),
    (re.compile(r"(cuda|hip|cu)GraphLaunch"), ApiCall.GRAPH),
    (re.compile(r"(cuda|hip|cu)(Module|Ext|ExtModule)?Launch"), ApiCall.KERNEL),
    (re.compile(r"(cuda|hip|cu)Memcpy"), ApiCall.MEMCPY),
    (re.compile(r"(cuda|hip|cu)Memset"), ApiCall.MEMSET),
)

_COMMUNICATION_KERNEL = re.compile(
    r"nccl|rccl|msccl|nvshmem|multimem_|_shot_all_reduce|cross_device_reduce", re.IGNORECASE
)
_ANNOTATION = re.compile(r"(nccl|rccl|gloo|mpi|ucc|xccl):(\w+)")
_COLLECTIVES = (
    *("reduce_scatter", "all_reduce", "all_gather", "all_to_all", "broadcast", "send_recv"),
    *("barrier", "scatter", "gather", "reduce", "send", "recv"),
)
UNNAMED_COLLECTIVE = "collective"
"""The name of a collective whose kind is not known."""
_LATEST_NS = 1 << 62


_NUMBER_ARGS = (
    *("Sequence number", "Fwd thread id", "correlation", "External id"),
    *("graph id", "graph node id", "call", "step"),
)
_TEXT_ARGS = ("Collective name", "fqn", "module_class")
_ARGS_BY_KIND = {
    **dict.fromkeys((KERNEL, MEMCPY, MEMSET), (*_NUMBER_ARGS[2:6], "Collective name")),
    **dict.fromkeys((CPU_OP, ANNOTATION, _NODE), _NUMBER_ARGS[:2]),
    **dict.fromkeys((_COLLECTIVE, _COLLECTIVE_OP, _CPU_COLLECTIVE), ("Collective name",)),
    RUNTIME: _NUMBER_ARGS[2:4],
    _CALL: ("call", "step", "fqn", "module_class"),
}
_AUTOGRAD_ARROWS = "fwdbwd"


class EventCollector(EventTable):
    """The table of a profiler's events, with the args that attribution needs; arrows are autograd's, or all arrows."""

    TEXT_ARGS = frozenset(_TEXT_ARGS)

    def __init__(self, *, all_arrows: bool = False) -> None:
        super().__init__()
        self.arrow_categories = None if all_arrows else (_AUTOGRAD_ARROWS,)
        self._unusable = 0

    def arg_names(self, category: object, name: str) -> Sequence[str]:
        """Return the names of the args to read from events of a category and name; an E has no category."""
        return _ARGS_BY_KIND.get(_kind(name, category), ()) if category is not None else (*_NUMBER_ARGS, *_TEXT_ARGS)

    def events(self) -> ProfilerEvents:
        """Return the columns of each kind of slices, once all events were added."""
        kind = self._kinds_of_slices()
        args = {name: self.arg(name) for name in (*_NUMBER_ARGS, *_TEXT_ARGS)}
        cpu_tables = self._cpu_tables(kind, args)
        calls_graph = self._number_by_kind(lambda _, name: name.startswith(GRAPH_CALL)) == 1
        is_op, is_graph_call = kind == CPU_OP, calls_graph & ((kind == CPU_OP) | (kind == ANNOTATION))
        graph_calls = self._named(is_graph_call, lambda name: name[len(GRAPH_CALL) :].removesuffix(" ##"))
        windows = self._rows(kind == WINDOW)
        slice_rows = np.flatnonzero((kind != NONE) & (kind != WINDOW))
        starts = self.start_ns(slice_rows)
        api_calls = self._rows(kind == RUNTIME, api=self._make_row_mapper(api_call))
        steps = self._rows(kind == _STEP, step=self._make_row_mapper(lambda name: int(name[len(STEP) :])))
        return ProfilerEvents(
            **cpu_tables,
            **self._device_work(kind, args),
            captures=api_calls.take(api_calls.api >= ApiCall.CAPTURE_BEGIN),
            graph_calls=graph_calls,
            graph_ops=self._named(is_op & ~is_graph_call & bool(len(graph_calls))),
            steps=steps.take(np.argsort(steps.start_ns, kind="stable")),
            tracks=list(self.tracks.known),
            thread_names=self.thread_names,
            process_names=self.process_names,
            sort_indexes=self.sort_indexes,
            syncs=self._sync_times(kind == _SYNC),
            flows=self._arrows(),
            first=int(starts.min(initial=_LATEST_NS)),
            last=int((starts + self.duration_ns(slice_rows)).max(initial=0)),
            window=(int(windows.start_ns.min()), int(windows.end_ns.max())) if len(windows) else None,
            cpu_pids=self._cpu_pids(cpu_tables.values()),
            tids=frozenset(self.tids | {tid for _, tid in self.tracks.known if isinstance(tid, int)}),
            malformed=self.malformed + self._unusable,
            event_count=len(self),
        )

    def _kinds_of_slices(self) -> Int64Array:
        """Return the kind of each event, or -1 if it is not a slice or never ran."""
        kind = np.where(self.phase == SLICE, self._number_by_kind(lambda category, name: _kind(name, category)), NONE)
        kind[(kind == _CALL) & (self.arg("fqn") == NONE)] = OTHER
        is_early = (
            (kind != NONE) & (kind != _CALL) & (self.start_us <= 0)
        )  # the profiler has events at 0 that never ran
        self._unusable += int(np.count_nonzero(is_early))
        kind[is_early] = NONE
        return kind

    def _cpu_tables(self, kind: Int64Array, args: Mapping[str, Int64Array]) -> dict[str, Any]:
        """Return the fields of `ProfilerEvents` for slices of processes, not of devices."""
        sequence, forward_thread, correlation = (args[name] for name in _NUMBER_ARGS[:3])
        has_sequence, is_op = sequence != NONE, kind == CPU_OP
        made_nodes = is_op & has_sequence & np.isin(forward_thread, (NONE, 0))
        is_launch = (kind == RUNTIME) & (correlation != NONE)
        ids = {"correlation": correlation, "external": np.maximum(args["External id"], NONE)}
        phase = self._number_by_kind(lambda category, _: PHASES.index(category) if category in PHASES else NONE)
        return {
            "ops": self._rows(made_nodes, sequence=sequence),
            "plain_ops": self._rows(is_op & ~has_sequence | (kind == _COLLECTIVE_OP)),
            "nodes": self._rows(kind == _NODE, sequence=sequence, forward_thread=forward_thread),
            "launches": self._rows(is_launch, api=self._make_row_mapper(api_call), **ids),
            "modules": self._named(kind == _MODULE, lambda name: name[len(MODULE) :]),
            "calls": self._named(
                kind == _CALL,
                lambda *texts: restored_name([text or "" for text in texts]),
                *(args["fqn"], args["module_class"]),
                phase=phase,
                call=args["call"],
                step=args["step"],
            ),
            "regions": self._named((kind == ANNOTATION) & ~has_sequence),
        }

    def _device_work(self, kind: Int64Array, args: Mapping[str, Int64Array]) -> dict[str, Any]:
        """Return the fields of `ProfilerEvents` for the work of devices, and for collectives."""
        operator, collectives = args["Collective name"], Numbering[str]()

        def collective_of_work(name: str, operator: str | None) -> int:
            collective = collective_of_kernel(name)
            if collective is not None and operator is not None:
                collective = collective_of_operator(PARAM_COMMS, operator)
            return NONE if collective is None else collectives[collective]

        def collective_of_slice(name: str, operator: str | None) -> int:
            annotated = collective_of_annotation(name)
            return collectives[annotated[0] if annotated else collective_of_operator(name, operator) or ""]

        is_work, is_launch = (kind >= KERNEL) & (kind <= MEMSET), (kind == _COLLECTIVE) | (kind == _COLLECTIVE_OP)
        collective, is_of_c10d = (
            self._make_row_mapper(collective_of_slice, operator),
            self._make_row_mapper(lambda name: name.startswith(C10D)),
        )
        graph, node = args["graph id"], args["graph node id"]
        ids = {
            "correlation": np.maximum(args["correlation"], NONE),
            "external": np.maximum(args["External id"], NONE),
            "graph": np.where(graph > 0, graph, NONE),  # 0: not in a graph
            "node": np.where(node > 0, node, NONE),
        }
        return {
            "work": self._rows(is_work, work=kind, **ids, name=self._make_row_mapper(collective_of_work, operator)),
            "collectives": self._rows(is_launch, name=collective, is_operator=is_of_c10d),
            "cpu_collectives": self._rows(kind == _CPU_COLLECTIVE, name=collective),
            "collective_names": list(collectives),
        }

    def _number_by_kind(self, describe: Callable[[Any, str], int]) -> Int64Array:
        """Return the number that `describe` computes from the category and name of each event."""
        return np.array([describe(category, str(name)) for category, name in self.kinds] or [0], np.int64)[self.kind]

    def _make_row_mapper(self, describe: Callable[..., int], *texts: Int64Array) -> Callable[[Int64Array], Int64Array]:
        """Return a function that maps rows to values; `describe` is called once per distinct (name, texts)."""
        names, text_of = [name for _, name in self.kinds], [*self.texts, None]

        def values(rows: Int64Array) -> Int64Array:
            key = self.kind[rows].astype(np.int64)
            for numbers in texts:
                key = key * len(text_of) + numbers[rows] + 1
            keys, index = number_values(key)
            example = np.empty(len(keys), np.int64)  # a row of each key
            example[index] = rows
            columns = [[text_of[number] for number in numbers[example].tolist()] for numbers in texts]
            kinds = [str(names[kind]) for kind in self.kind[example].tolist()]
            return np.array([describe(*row) for row in zip(kinds, *columns, strict=True)], np.int64)[index]

        return values

    def _rows(self, mask: BoolArray, **columns: Int64Array | Callable[[Int64Array], Int64Array]) -> EventColumns:
        """Return the masked slices with columns, given or computed; slices with an unusable number are only counted."""
        rows = np.flatnonzero(mask)
        values: dict[str, Any] = {
            name: column(rows) if callable(column) else column[rows] for name, column in columns.items()
        }
        if values and (is_odd := np.any(np.array([*values.values()]) == NO_NUMBER, axis=0)).any():
            self._unusable += int(np.count_nonzero(is_odd))
            rows, values = rows[~is_odd], {name: column[~is_odd] for name, column in values.items()}
        return EventColumns(self.track[rows].astype(np.int64), self.start_ns(rows), self.duration_ns(rows), **values)

    def _named(
        self, mask: BoolArray, name: Callable[..., Any] = str, *texts: Int64Array, **columns: Int64Array
    ) -> EventColumns:
        """Return the masked slices; `name` makes their `names`, called like `describe` in `_make_row_mapper`."""
        numbers = Numbering[Any]()
        rows = self._rows(mask, name=self._make_row_mapper(lambda *row: numbers[name(*row)], *texts), **columns)
        rows.names = [*numbers]
        return rows

    def _sync_times(self, is_mark: BoolArray) -> dict[str, list[tuple[int, int]]]:
        """Return start and end of the sync marks, by name."""
        marks = self._named(is_mark)
        times: dict[str, list[tuple[int, int]]] = {name: [] for name in marks.names}
        for mark, start, end in zip(marks.name.tolist(), marks.start_ns.tolist(), marks.end_ns.tolist(), strict=True):
            times[marks.names[mark]].append((start, end))
        return times

    def _cpu_pids(self, tables: Iterable[EventColumns]) -> dict[int | str, int]:
        """Return the number of slices of each process in tables that exclude the work of devices."""
        track = np.concatenate([table.track for table in tables])
        pids = Counter[int | str]()
        for (pid, _), count in zip(self.tracks.known, np.bincount(track).tolist(), strict=False):
            pids[pid] += count
        return {pid: count for pid, count in pids.items() if count}

    def _arrows(self) -> EventColumns:
        """Return the forward-backward arrows that have both ends."""
        flows = self.flows
        rows = flows.row
        is_autograd = self._number_by_kind(lambda category, _: category == _AUTOGRAD_ARROWS)[rows] == 1
        mask = is_autograd & np.isin(self.phase[rows], (ord("s"), ord("f")))
        pids = [pid for pid, _ in self.tracks.known]
        starts, ends = dict[Any, int](), dict[Any, int]()
        columns = (column[mask].tolist() for column in (rows, flows.flow, flows.ways, self.track[rows]))
        for row, flow, ways, track in zip(*columns, strict=True):
            (ends if ways & ENDS else starts)[pids[track], flow] = row
        pairs = [(row, starts[arrow]) for arrow, row in ends.items() if arrow in starts]
        end, start = np.array(pairs, np.int64).reshape(-1, 2).T
        start_track, zeros = self.track[start].astype(np.int64), np.zeros(len(end), np.int64)
        return EventColumns(self.track[end].astype(np.int64), self.start_ns(end), zeros, start_track=start_track)


def _kind(name: str, category: object) -> int:
    """Return the kind of a slice, by its name and category."""
    is_api = isinstance(category, str) and category.endswith(("_runtime", "_driver"))
    kind = _SLICE_KINDS.get(category, RUNTIME if is_api else _CALL if category in PHASES else OTHER)
    if kind == PYTHON:
        return _MODULE if name.startswith(MODULE) else OTHER
    if kind not in (CPU_OP, ANNOTATION):
        return kind
    if name.startswith(SYNC_PREFIX):
        return _SYNC
    if name.startswith(NODE):
        return _NODE
    if name.startswith(STEP) and name[len(STEP) :].isascii() and name[len(STEP) :].isdigit():
        return _STEP
    if annotated := collective_of_annotation(name):
        return _CPU_COLLECTIVE if annotated[1] else _COLLECTIVE
    return _COLLECTIVE_OP if collective_of_operator(name, None) else kind


def api_call(name: str) -> int:
    """Return the `ApiCall` of a function of the GPU's runtime or driver, by its name (`cudaLaunchKernel`)."""
    return next((int(call) for pattern, call in _API_CALLS if pattern.match(name)), 0)


def collective_of_kernel(name: str) -> str | None:
    """Return the collective of a communication kernel (`all_reduce`), by its name; None for other kernels."""
    return _collective(name) if _COMMUNICATION_KERNEL.search(name) else None


def collective_of_annotation(name: str) -> tuple[str, bool] | None:
    """Return the collective of a communication library's range, and whether a CPU thread runs it in this range.

    Example:
        >>> collective_of_annotation("nccl:all_reduce"), collective_of_annotation("gloo:broadcast")
        (('all_reduce', False), ('broadcast', True))
    """
    match = _ANNOTATION.fullmatch(name)
    return (_collective(match[2]), match[1] in ("gloo", "mpi")) if match else None


def collective_of_operator(name: str, collective_name: object) -> str | None:
    """Return the collective that an operator launches, from its name and its arg `Collective name`, or None."""
    if name == PARAM_COMMS:
        return _collective(collective_name if isinstance(collective_name, str) else "")
    return _collective(name[len(C10D) :]) if name.startswith(C10D) else None


def _collective(text: str) -> str:
    letters = re.sub(r"[^a-z]", "", text.lower())
    return next((name for name in _COLLECTIVES if name.replace("_", "") in letters), UNNAMED_COLLECTIVE)
