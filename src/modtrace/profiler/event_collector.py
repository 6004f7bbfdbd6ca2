"""Gathers what attribution needs to know of a profiler trace from its events, chunk by chunk.

Categories and names say what an event is; those of old versions of torch.profiler are among them.
"""

import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._numbering import Numbering
from ..formats.chrome_values import MAX_TIME_US, TrackKey, is_int64, microseconds_to_ns
from ..formats.escape import restored_name
from ..formats.odd_events import OddEvents
from ..timeline import PHASES, Name
from .event_columns import (
    ApiCall,
    ApiCalls,
    CallSlices,
    CollectiveSlices,
    DeviceWork,
    EventColumns,
    Launches,
    NamedSlices,
    NodeSlices,
    NumberedOps,
    ProfilerEvents,
    SliceTable,
    StepRanges,
    pair_arrows,
)

SYNC = "modtrace.sync#"
STEP = "ProfilerStep#"
NODE = "autograd::engine::evaluate_function: "
MODULE = "nn.Module: "
C10D, PARAM_COMMS = "c10d::", "record_param_comms"

KERNEL, MEMCPY, MEMSET, CPU_OP, ANNOTATION, PYTHON, RUNTIME, WINDOW, OTHER = range(9)
"""What slices are; the first three are work of a GPU."""

SLICE_KINDS: dict[object, int] = {
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
"""The kind of a slice by its category; of others `slice_kind` tells it."""


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

_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""What comes of an event that is not as events are."""

_ORDINARY, _NODE, _SYNC, _STEP, _COLLECTIVE, _CPU_COLLECTIVE = range(6)
"""What slices of the CPU are, by their names."""
_CAPTURE = int(ApiCall.CAPTURE_BEGIN)
_HAVE_SEQUENCES = (CPU_OP, ANNOTATION)
_MAX_CACHED_NAMES = 1 << 16
_MAX_PENDING = 1 << 14
"""Events whose rows may be pending."""
_NO_ARGS: dict[str, Any] = {}


class _Tables:
    """Tables of slices; of others than `windows`, the first and the last count to what the trace covers.

    Nothing else of `rest` does: its rows are dropped.
    """

    def __init__(self) -> None:
        self.ops, self.plain_ops = SliceTable(NumberedOps), SliceTable(EventColumns)
        self.nodes, self.steps = SliceTable(NodeSlices), SliceTable(StepRanges)
        self.launches, self.captures = SliceTable(Launches), SliceTable(ApiCalls)
        self.work, self.collectives = SliceTable(DeviceWork), SliceTable(CollectiveSlices)
        self.modules, self.regions = SliceTable(NamedSlices), SliceTable(NamedSlices)
        self.calls = SliceTable(CallSlices)
        self.cpu_collectives, self.syncs = SliceTable(NamedSlices), SliceTable(NamedSlices)
        self.windows, self.rest = SliceTable(EventColumns), SliceTable(EventColumns)


class EventCollector:
    """Takes chunks of parsed events; `events()` at the end.

    Attributes:
        tids: all thread ids that are numbers, of what was taken so far.
        odd: events that were not as most are.
    """

    def __init__(self) -> None:
        self.tids: set[int] = set()
        self.odd = OddEvents()
        self._thread_names: dict[TrackKey, str] = {}
        self._process_names: dict[int | str, str] = {}
        self._sort_indexes: dict[TrackKey, int] = {}
        self._tables = _Tables()
        self._module_names, self._region_names = Numbering[str](), Numbering[str]()
        self._call_names = Numbering[Name]()
        self._collective_names, self._sync_names = Numbering[str](), Numbering[str]()
        self._arrow_begins: dict[Any, int] = {}
        self._arrow_ends: dict[Any, tuple[int, float]] = {}
        self._first, self._last = float("inf"), float("-inf")
        self._early = self._no_numbers = self._total = self._pending = 0

    def add(self, events: Sequence[Any]) -> Sequence[Any]:
        """Take note of a chunk's events, and return them as torch.profiler would write them: most are so."""
        self._total += len(events)
        odd = self._add_ordinary(events)
        if odd:
            ordinary = [event for event in map(self.odd.ordinary, odd) if event is not None]
            self.odd.malformed += len(self._add_ordinary(ordinary))
            ids = {*map(id, odd)}
            events = [*(event for event in events if id(event) not in ids), *ordinary]
        self._pending += len(events)
        if self._pending >= _MAX_PENDING:
            self._take_pending()
        return events

    def _add_ordinary(self, events: Sequence[Any]) -> list[Any]:
        """Take note of events as most are; return the others."""
        odd: list[Any] = []
        tables, tracks = self._tables, self.odd.tracks
        plain_op, op, launch = (table.pending.append for table in (tables.plain_ops, tables.ops, tables.launches))
        # One pass, and no calls where there are many: this loop is what attribution takes beside parsing.
        for event in events:
            try:
                phase = event["ph"]
                if phase != "X":
                    if phase not in "sft" or event.get("cat") == "fwdbwd":
                        self._add_other(event, phase)
                    continue
                kind = slice_kind(event.get("cat"))
                track = tracks[event["pid"], event["tid"]]
                if kind in _HAVE_SEQUENCES:
                    name = event["name"]
                    what = _cpu_kind(name)
                    sequence = (event.get("args") or _NO_ARGS).get("Sequence number")
                    if what != _ORDINARY:
                        self._add_special(event, what, track, sequence)
                    elif kind == ANNOTATION:
                        if sequence is None:
                            tables.regions.pending.append((track, event["ts"], event["dur"], self._region_names[name]))
                    elif sequence is None:
                        plain_op((track, event["ts"], event["dur"]))
                    elif not event["args"].get("Fwd thread id"):
                        op((track, event["ts"], event["dur"], sequence))
                elif kind == RUNTIME:
                    call = api_call(event["name"])
                    args = event.get("args") or _NO_ARGS
                    correlation = args.get("correlation")
                    if correlation is not None:
                        external = _id(args.get("External id"))
                        launch((track, event["ts"], event["dur"], call, correlation, external))
                    if call >= _CAPTURE:
                        tables.captures.pending.append((track, event["ts"], event["dur"], call))
                elif kind <= MEMSET:
                    self._add_work(event, kind, track)
                else:
                    self._add_rare(event, kind, track)
            except _MALFORMED:
                odd.append(event)
        return odd

    def _add_other(self, event: dict[str, Any], phase: str) -> None:
        if phase == "M":
            self._metadata(event)
        elif phase in "BE":
            raise ValueError(phase)
        elif phase == "s":
            self._arrow_begins[event["pid"], event["id"]] = self.odd.tracks[event["pid"], event["tid"]]
        elif phase == "f" and 0 <= (start := float(event["ts"])) < MAX_TIME_US:
            self._arrow_ends[event["pid"], event["id"]] = self.odd.tracks[event["pid"], event["tid"]], start
        elif "tid" in event:
            _ = self.odd.tracks[event["pid"], event["tid"]]

    def _add_special(self, event: dict[str, Any], what: int, track: int, sequence: Any) -> None:
        """Take a slice of the CPU whose name says more than that it is an operator."""
        name, tables, args = event["name"], self._tables, event.get("args") or _NO_ARGS
        times = track, event["ts"], event["dur"]
        if what == _NODE:
            number = -1 if sequence is None else sequence
            tables.nodes.pending.append((*times, number, args.get("Fwd thread id", -1)))
        elif what == _SYNC:
            tables.syncs.pending.append((*times, self._sync_names[name]))
        elif what == _STEP:
            tables.steps.pending.append((*times, int(name[len(STEP) :])))
        else:
            annotated = collective_of_annotation(name)
            collective = annotated[0] if annotated else collective_of_operator(name, args.get("Collective name"))
            number = self._collective_names[collective or ""]
            if what == _CPU_COLLECTIVE:
                tables.cpu_collectives.pending.append((*times, number))
            else:
                tables.collectives.pending.append((*times, number, int(name.startswith(C10D))))
            if not annotated:
                tables.plain_ops.pending.append(times)

    def _add_work(self, event: dict[str, Any], kind: int, track: int) -> None:
        args, name = event.get("args") or _NO_ARGS, event["name"]
        collective_name = collective_of_kernel(name)
        collective = -1 if collective_name is None else self._collective_names[collective_name]
        if collective >= 0 and isinstance(operator := args.get("Collective name"), str):
            collective = self._collective_names[collective_of_operator(PARAM_COMMS, operator) or ""]
        # It ran, whatever its id is.
        correlation, external = _id(args.get("correlation")), _id(args.get("External id"))
        graph, node = _id(args.get("graph id") or -1), _id(args.get("graph node id") or -1)
        self._tables.work.pending.append(
            (track, event["ts"], event["dur"], kind, correlation, external, graph, node, collective)
        )

    def _add_rare(self, event: dict[str, Any], kind: int, track: int) -> None:
        tables, times = self._tables, (track, event["ts"], event["dur"])
        if kind == PYTHON and event["name"].startswith(MODULE):
            tables.modules.pending.append((*times, self._module_names[event["name"][len(MODULE) :]]))
        elif kind == WINDOW:
            tables.windows.pending.append(times)
        elif (phase := event.get("cat")) in PHASES and "fqn" in (args := event.get("args") or _NO_ARGS):
            name = self._call_names[restored_name((event["name"], args["fqn"], args["module_class"]))]
            tables.calls.pending.append((*times, name, PHASES.index(phase), _id(args["call"]), _id(args["step"])))
        else:
            tables.rest.pending.append(times)

    def _take_pending(self) -> None:
        """Move the rows of a chunk to the columns."""
        for name, table in vars(self._tables).items():
            if table.pending:
                first, last, timeless, early, no_numbers = table.take_pending()
                self.odd.malformed += timeless
                self._early += early
                self._no_numbers += no_numbers
                if name != "windows":
                    self._first, self._last = min(self._first, first), max(self._last, last)
        self._tables.rest.take_rows()
        self._pending = 0

    def _metadata(self, event: dict[str, Any]) -> None:
        if event["name"] == "thread_name":
            # The last of several names is the one that a thread gave itself.
            self._thread_names[event["pid"], event["tid"]] = str(event["args"]["name"])
        elif event["name"] == "process_name":
            self._process_names[event["pid"]] = str(event["args"]["name"])
        elif event["name"] == "thread_sort_index" and is_int64(index := event["args"]["sort_index"]):
            self._sort_indexes[event["pid"], event["tid"]] = index
        self.tids.add(int(event["tid"]))

    def events(self) -> ProfilerEvents:
        """Return the columns."""
        self._take_pending()
        tables: dict[str, Any] = {name: table.take_rows() for name, table in vars(self._tables).items()}
        syncs, windows, _ = (tables.pop(name) for name in ("syncs", "windows", "rest"))
        ends = microseconds_to_ns(np.array([self._first, self._last] if self._first <= self._last else [1.0, 0.0]))
        tracks = self.odd.tracks.known
        # What only a process has, and no device.
        of_cpu = ("ops", "plain_ops", "nodes", "launches", "modules", "calls", "regions")
        by_track = np.bincount(np.concatenate([tables[name].track for name in of_cpu]), minlength=len(tracks))
        pids = Counter[int | str]()
        for (pid, _), track in tracks.items():
            pids[pid] += int(by_track[track])
        sync_times: dict[str, list[tuple[int, int]]] = {}
        sync_names = list(self._sync_names)
        for name, start, end in zip(syncs.name.tolist(), syncs.start.tolist(), syncs.end.tolist(), strict=True):
            sync_times.setdefault(sync_names[name], []).append((start, end))
        return ProfilerEvents(
            **tables,
            tracks=list(tracks),
            thread_names=self._thread_names,
            process_names=self._process_names,
            sort_indexes=self._sort_indexes,
            collective_names=list(self._collective_names),
            region_names=list(self._region_names),
            module_names=list(self._module_names),
            call_names=list(self._call_names),
            syncs=sync_times,
            flows=pair_arrows(self._arrow_begins, self._arrow_ends),
            first=int(ends[0]),
            last=int(ends[1]),
            window=(int(windows.start.min()), int(windows.end.max())) if len(windows) else None,
            cpu_pids={pid: count for pid, count in pids.items() if count},
            tids=frozenset(self.tids | {tid for _, tid in tracks if isinstance(tid, int)}),
            malformed=self.odd.malformed + self._early + self._no_numbers,
            total=self._total,
        )


def _id(value: Any) -> int:
    """Return an id as it is; -1 for what is not an id."""
    number: int = value if is_int64(value) else -1
    return number


@functools.lru_cache(_MAX_CACHED_NAMES)
def _cpu_kind(name: str) -> int:
    """Return what a slice of the CPU is, by its name."""
    if name.startswith(SYNC):
        return _SYNC
    if name.startswith(NODE):
        return _NODE
    if name.startswith(STEP) and name[len(STEP) :].isascii() and name[len(STEP) :].isdigit():
        return _STEP
    if annotated := collective_of_annotation(name):
        return _CPU_COLLECTIVE if annotated[1] else _COLLECTIVE
    return _COLLECTIVE if collective_of_operator(name, None) else _ORDINARY


@functools.lru_cache(_MAX_CACHED_NAMES)
def slice_kind(category: object) -> int:
    """Return the kind of slices of a category."""
    is_api = isinstance(category, str) and category.endswith(("_runtime", "_driver"))
    return SLICE_KINDS.get(category, RUNTIME if is_api else OTHER)


@functools.lru_cache(_MAX_CACHED_NAMES)
def api_call(name: str) -> int:
    """Return what a call of the GPU's runtime or driver does, by its name (`cudaLaunchKernel`): an `ApiCall`."""
    return next((int(call) for pattern, call in _API_CALLS if pattern.match(name)), 0)


@functools.lru_cache(_MAX_CACHED_NAMES)
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
    """Return the collective that an operator launches; None for one that launches none.

    Args:
        name: of the operator: `record_param_comms` or `c10d::allreduce_`.
        collective_name: its arg `Collective name`, if it has one.
    """
    if name == PARAM_COMMS:
        return _collective(collective_name if isinstance(collective_name, str) else "")
    return _collective(name[len(C10D) :]) if name.startswith(C10D) else None


@functools.lru_cache(_MAX_CACHED_NAMES)
def _collective(text: str) -> str:
    letters = re.sub(r"[^a-z]", "", text.lower())
    return next((name for name in _COLLECTIVES if name.replace("_", "") in letters), UNNAMED_COLLECTIVE)
