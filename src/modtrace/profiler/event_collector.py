"""Picks what attribution needs to know of a profiler trace from the table of its events.

Categories and names say what an event is; those of old versions of torch.profiler are among them.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .._numbering import Numbering, number_values
from .._typing import BoolArray, Int64Array
from ..formats.escape import restored_name
from ..formats.event_table import ENDS, NO_NUMBER, NONE, SLICE, EventTable
from ..ring.slot_format import SYNC_PREFIX
from ..timeline import PHASES, Name
from .event_columns import ApiCall, EventColumns, ProfilerEvents

STEP = "ProfilerStep#"
NODE = "autograd::engine::evaluate_function: "
MODULE = "nn.Module: "
GRAPH_CALL = "## Call CompiledFxGraph "
C10D, PARAM_COMMS = "c10d::", "record_param_comms"

KERNEL, MEMCPY, MEMSET, CPU_OP, ANNOTATION, PYTHON, RUNTIME, WINDOW, OTHER = range(9)
"""What slices are by their categories; the first three are work of a GPU."""
_NODE, _SYNC, _STEP, _COLLECTIVE, _COLLECTIVE_OP, _CPU_COLLECTIVE, _MODULE, _CALL = range(OTHER + 1, OTHER + 9)
"""What slices of the CPU are by their names too."""

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
"""The kind of a slice by its category; of others `_slice_kind` tells it."""

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
"""What a collective is called of which nothing tells more."""
_LATEST = 1 << 62


_NUMBERS = (
    *("Sequence number", "Fwd thread id", "correlation", "External id"),
    *("graph id", "graph node id", "call", "step"),
)
_TEXTS = ("Collective name", "fqn", "module_class")
_WANTED = {
    **dict.fromkeys((KERNEL, MEMCPY, MEMSET), (*_NUMBERS[2:6], "Collective name")),
    **dict.fromkeys((CPU_OP, ANNOTATION, _NODE), _NUMBERS[:2]),
    **dict.fromkeys((_COLLECTIVE, _COLLECTIVE_OP, _CPU_COLLECTIVE), ("Collective name",)),
    RUNTIME: _NUMBERS[2:4],
    _CALL: ("call", "step", "fqn", "module_class"),
}
_AUTOGRAD_ARROWS = "fwdbwd"


class EventCollector(EventTable):
    """The table of a profiler's events, with what attribution needs; perhaps with all arrows, not only autograd's."""

    TEXT_ARGS = frozenset(_TEXTS)

    def __init__(self, *, all_arrows: bool = False) -> None:
        super().__init__()
        self.wanted_arrows = None if all_arrows else (_AUTOGRAD_ARROWS,)
        self._no_numbers = 0

    def wanted_args(self, category: object, name: str) -> Sequence[str]:
        """Return which args say more of an event of a category and name; an E has none."""
        return _WANTED.get(_kind(name, category), ()) if category is not None else (*_NUMBERS, *_TEXTS)

    def events(self) -> ProfilerEvents:
        """Return the columns of each kind of slices, once all events were added."""
        sequence, of_forward, correlation, *others, call, step = map(self.arg, _NUMBERS)
        external, graph, node = (np.maximum(column, NONE) for column in others)
        operator, fqn, module_class = map(self.arg, _TEXTS)
        of_kind = np.array([_kind(str(name), category) for category, name in self.kinds] or [NONE], np.int64)
        kind = np.where(self.phase == SLICE, of_kind[self.kind], NONE)
        kind[(kind == _CALL) & (fqn == NONE)] = OTHER
        is_early = (kind != NONE) & (kind != _CALL) & (self.start <= 0)  # the profiler has events at 0 that never ran
        kind[is_early] = NONE
        is_op, is_api, is_work = kind == CPU_OP, kind == RUNTIME, (kind >= KERNEL) & (kind <= MEMSET)
        is_region, is_launch = kind == ANNOTATION, (kind == _COLLECTIVE) | (kind == _COLLECTIVE_OP)
        has_sequence = sequence != NONE
        collectives = Numbering[str]()

        def collective_of_work(name: str, operator: str | None) -> int:
            collective = collective_of_kernel(name)
            if collective is not None and operator is not None:
                collective = collective_of_operator(PARAM_COMMS, operator)
            return NONE if collective is None else collectives[collective]

        def collective_of_slice(name: str, operator: str | None) -> int:
            annotated = collective_of_annotation(name)
            return collectives[annotated[0] if annotated else collective_of_operator(name, operator) or ""]

        def call_name(name: str, fqn: str | None, module_class: str | None) -> Name:
            return restored_name((name, fqn or "", module_class or ""))

        api, collective = self._by(api_call), self._by(collective_of_slice, operator)
        is_of_c10d = self._by(lambda name: name.startswith(C10D))
        is_plain = is_op & ~has_sequence | (kind == _COLLECTIVE_OP)
        phases = [PHASES.index(category) if category in PHASES else NONE for category, _ in self.kinds]
        phase = np.array(phases or [NONE], np.int64)[self.kind]
        said = {"phase": phase, "call": call, "step": step}
        tables: dict[str, Any] = {
            "ops": self._rows(is_op & has_sequence & np.isin(of_forward, (NONE, 0)), sequence=sequence),
            "plain_ops": self._rows(is_plain),
            "nodes": self._rows(kind == _NODE, sequence=sequence, forward_thread=of_forward),
            "launches": self._rows(is_api & (correlation != NONE), api=api, correlation=correlation, external=external),
            "modules": self._named(kind == _MODULE, lambda name: name[len(MODULE) :]),
            "calls": self._named(kind == _CALL, call_name, fqn, module_class, **said),
            "regions": self._named(is_region & ~has_sequence),
        }
        is_graph_call = np.array([str(name).startswith(GRAPH_CALL) for _, name in self.kinds] or [False])[self.kind]
        is_graph_call &= is_op | is_region
        graph_calls = self._named(is_graph_call, lambda name: name[len(GRAPH_CALL) :].removesuffix(" ##"))
        windows = self._rows(kind == WINDOW)
        covered = np.flatnonzero((kind != NONE) & (kind != WINDOW))
        begins = self.start_ns(covered)
        api_calls = self._rows(is_api, api=api)
        work = {
            "work": kind,
            "correlation": np.maximum(correlation, NONE),
            "external": external,
            "graph": np.where(graph, graph, NONE),
            "node": np.where(node, node, NONE),
        }
        return ProfilerEvents(
            **tables,
            captures=api_calls.take(api_calls.api >= ApiCall.CAPTURE_BEGIN),
            work=self._rows(is_work, **work, name=self._by(collective_of_work, operator)),
            collectives=self._rows(is_launch, name=collective, is_operator=is_of_c10d),
            cpu_collectives=self._rows(kind == _CPU_COLLECTIVE, name=collective),
            graph_calls=graph_calls,
            graph_ops=self._named(is_op & ~is_graph_call & bool(len(graph_calls))),
            steps=self._rows(kind == _STEP, step=self._by(lambda name: int(name[len(STEP) :]))),
            tracks=list(self.tracks.known),
            thread_names=self.thread_names,
            process_names=self.process_names,
            sort_indexes=self.sort_indexes,
            collective_names=list(collectives),
            syncs=self._sync_times(kind == _SYNC),
            flows=self._arrows(),
            first=int(begins.min(initial=_LATEST)),
            last=int((begins + self.duration_ns(covered)).max(initial=0)),
            window=(int(windows.start.min()), int(windows.end.max())) if len(windows) else None,
            cpu_pids=self._cpu_pids(tables.values()),
            tids=frozenset(self.tids | {tid for _, tid in self.tracks.known if isinstance(tid, int)}),
            malformed=self.malformed + int(np.count_nonzero(is_early)) + self._no_numbers,
            total=len(self),
        )

    def _by(self, describe: Callable[..., int], *texts: Int64Array) -> Callable[[Int64Array], Int64Array]:
        """Return what returns a value for some rows; `describe` makes one of each different name and texts."""
        names, text_of = [name for _, name in self.kinds], [*self.texts, None]

        def values(rows: Int64Array) -> Int64Array:
            key = self.kind[rows].astype(np.int64)
            for numbers in texts:
                key = key * len(text_of) + numbers[rows] + 1
            known, place = number_values(key)
            first = np.empty(len(known), np.int64)
            first[place] = rows
            columns = [[text_of[number] for number in numbers[first].tolist()] for numbers in texts]
            described = [
                describe(str(names[kind]), *own) for kind, *own in zip(self.kind[first].tolist(), *columns, strict=True)
            ]
            return np.array(described, np.int64)[place]

        return values

    def _rows(self, chosen: BoolArray, **columns: Int64Array | Callable[[Int64Array], Int64Array]) -> EventColumns:
        """Return the chosen slices with columns, or what makes them; those without a number for one are counted."""
        rows = np.flatnonzero(chosen)
        more: dict[str, Any] = {
            name: column(rows) if callable(column) else column[rows] for name, column in columns.items()
        }
        if more and (is_odd := np.any(np.array([*more.values()]) == NO_NUMBER, axis=0)).any():
            self._no_numbers += int(np.count_nonzero(is_odd))
            rows, more = rows[~is_odd], {name: column[~is_odd] for name, column in more.items()}
        return EventColumns(self.track[rows].astype(np.int64), self.start_ns(rows), self.duration_ns(rows), **more)

    def _named(
        self, chosen: BoolArray, name: Callable[..., Any] = str, *texts: Int64Array, **columns: Int64Array
    ) -> EventColumns:
        """Return the chosen slices with their `names`, which a function makes as `_by` calls it."""
        numbers = Numbering[Any]()
        rows = self._rows(chosen, name=self._by(lambda *said: numbers[name(*said)], *texts), **columns)
        rows.names = [*numbers]
        return rows

    def _sync_times(self, chosen: BoolArray) -> dict[str, list[tuple[int, int]]]:
        """Return start and end of the chosen slices, which are sync marks, by their names."""
        marks = self._named(chosen)
        times: dict[str, list[tuple[int, int]]] = {name: [] for name in marks.names}
        for mark, start, end in zip(marks.name.tolist(), marks.start.tolist(), marks.end.tolist(), strict=True):
            times[marks.names[mark]].append((start, end))
        return times

    def _cpu_pids(self, tables: Iterable[EventColumns]) -> dict[int | str, int]:
        """Return how many slices each process has in tables of what only a process has, and no device."""
        track = np.concatenate([table.track for table in tables])
        pids = Counter[int | str]()
        for (pid, _), count in zip(self.tracks.known, np.bincount(track).tolist(), strict=False):
            pids[pid] += count
        return {pid: count for pid, count in pids.items() if count}

    def _arrows(self) -> EventColumns:
        """Return the forward-backward arrows that have both ends."""
        flows = self.flows
        rows = flows.row
        of_autograd = np.array([category == _AUTOGRAD_ARROWS for category, _ in self.kinds] or [False])[self.kind[rows]]
        chosen = of_autograd & np.isin(self.phase[rows], (ord("s"), ord("f")))
        pids = [pid for pid, _ in self.tracks.known]
        begins, ends = dict[Any, int](), dict[Any, int]()
        columns = (column[chosen].tolist() for column in (rows, flows.flow, flows.ways, self.track[rows]))
        for row, flow, ways, track in zip(*columns, strict=True):
            (ends if ways & ENDS else begins)[pids[track], flow] = row
        both = np.array([(row, begins[arrow]) for arrow, row in ends.items() if arrow in begins], np.int64).reshape(
            -1, 2
        )
        end, begin = both.T
        begin_track, nothing = self.track[begin].astype(np.int64), np.zeros(len(end), np.int64)
        return EventColumns(self.track[end].astype(np.int64), self.start_ns(end), nothing, begin_track=begin_track)


def _kind(name: str, category: object) -> int:
    """Return what a slice is, by its name and category."""
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
    """Return what a call of the GPU's runtime or driver does, by its name (`cudaLaunchKernel`): an `ApiCall`."""
    return next((int(call) for pattern, call in _API_CALLS if pattern.match(name)), 0)


def collective_of_kernel(name: str) -> str | None:
    """Return which collective a kernel is part of (`all_reduce`), by its name; None for one that computes."""
    return _collective(name) if _COMMUNICATION_KERNEL.search(name) else None


def collective_of_annotation(name: str) -> tuple[str, bool] | None:
    """Return the collective that a range of a communication library is for, and whether a CPU thread runs it there.

    Example:
        >>> collective_of_annotation("nccl:all_reduce"), collective_of_annotation("gloo:broadcast")
        (('all_reduce', False), ('broadcast', True))
    """
    match = _ANNOTATION.fullmatch(name)
    return (_collective(match[2]), match[1] in ("gloo", "mpi")) if match else None


def collective_of_operator(name: str, collective_name: object) -> str | None:
    """Return the collective that an operator launches, by its name and its arg `Collective name`, or None."""
    if name == PARAM_COMMS:
        return _collective(collective_name if isinstance(collective_name, str) else "")
    return _collective(name[len(C10D) :]) if name.startswith(C10D) else None


def _collective(text: str) -> str:
    letters = re.sub(r"[^a-z]", "", text.lower())
    return next((name for name in _COLLECTIVES if name.replace("_", "") in letters), UNNAMED_COLLECTIVE)
