"""What merging needs to know of a profiler trace, gathered from its events into columns.

Times are integer nanoseconds from the trace's own base. They are read as doubles, like every reader of JSON does: in a
trace of before torch 2.4, which counts from 1970, they come in steps of 250 ns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..._typing import AnyArray, Float64Array, Int64Array
from .trace_file import MAX_TIME_NS

__all__ = [
    "MAX_TIME_US",
    "SYNC",
    "EventCollector",
    "ProfilerEvents",
    "SliceColumns",
    "TrackKey",
    "is_track_key",
    "microseconds_to_ns",
]

TrackKey = tuple[int | str, int | str]
"""pid and tid as they stand in the trace."""

SYNC = "modtrace.sync#"
STEP = "ProfilerStep#"
NODE = "autograd::engine::evaluate_function: "
MODULE = "nn.Module: "
_GPU = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


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
        ops: forward operations with a sequence number (`value`).
        plain_ops: operations without a sequence number: nothing asked for their gradient, or autograd called them.
        nodes: `evaluate_function` slices; `value` the sequence number or -1, `other` the forward thread's id.
        launches: runtime calls; `value` the correlation id.
        work: kernels, memcpys and memsets; `value` the correlation id or -1, `other` 0, 1 or 2.
        modules: `nn.Module:` slices; `value` index into `module_names`, `other` the "Python module id".
        steps: `ProfilerStep#` ranges of the CPU; `value` the step.
        module_names: what follows `nn.Module: `.
        syncs: start and end in ns from the base, by the sync mark's name; a name may occur more than once.
        flows: (forward thread's track, backward node's track, node's start) of each forward-backward arrow.
        first: ns from the base where the slices begin; `first > last` where there is none.
        last: where they end.
        cpu_pids: number of CPU slices by pid.
        tids: all thread ids that are numbers.
        zero_times: slices at time 0, which no profiler means.
        total: number of events.
    """

    tracks: list[TrackKey]
    thread_names: dict[TrackKey, str]
    process_names: dict[int | str, str]
    ops: SliceColumns
    plain_ops: SliceColumns
    nodes: SliceColumns
    launches: SliceColumns
    work: SliceColumns
    modules: SliceColumns
    steps: SliceColumns
    module_names: list[str]
    syncs: dict[str, list[tuple[int, int]]]
    flows: SliceColumns
    first: int
    last: int
    cpu_pids: dict[int | str, int]
    tids: frozenset[int]
    zero_times: int
    total: int


class _GrowingColumns:
    """Growing columns of one kind."""

    __slots__ = ("duration", "other", "start", "track", "value")

    def __init__(self) -> None:
        self.track, self.value, self.other = array("i"), array("q"), array("q")
        self.start, self.duration = array("d"), array("d")

    def rows(self) -> SliceColumns:
        start, duration = np.array(self.start, np.float64), np.array(self.duration, np.float64)
        return SliceColumns(
            np.array(self.track, np.int64),
            microseconds_to_ns(start),
            microseconds_to_ns(duration),
            np.array(self.value, np.int64),
            np.array(self.other, np.int64),
        )


@dataclass
class EventCollector:
    """Takes chunks of parsed events; `events()` at the end."""

    tracks: dict[TrackKey, int] = field(default_factory=dict)
    thread_names: dict[TrackKey, str] = field(default_factory=dict)
    process_names: dict[int | str, str] = field(default_factory=dict)
    ops: _GrowingColumns = field(default_factory=_GrowingColumns)
    plain_ops: _GrowingColumns = field(default_factory=_GrowingColumns)
    nodes: _GrowingColumns = field(default_factory=_GrowingColumns)
    launches: _GrowingColumns = field(default_factory=_GrowingColumns)
    work: _GrowingColumns = field(default_factory=_GrowingColumns)
    modules: _GrowingColumns = field(default_factory=_GrowingColumns)
    steps: _GrowingColumns = field(default_factory=_GrowingColumns)
    module_names: dict[str, int] = field(default_factory=dict)
    syncs: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    cpu_pids: dict[int | str, int] = field(default_factory=dict)
    tids: set[int] = field(default_factory=set)
    first: float = float("inf")
    last: float = float("-inf")
    zero_times: int = 0
    total: int = 0
    _begins: dict[Any, int] = field(default_factory=dict)
    _ends: dict[Any, tuple[int, float]] = field(default_factory=dict)

    def add(self, events: Iterable[Any]) -> None:
        """Take note of a chunk's events; what is malformed counts as nothing."""
        for event in events:
            self.total += 1
            try:
                phase = event["ph"]
                if phase == "X":
                    self._slice(event)
                elif phase == "M":
                    self._metadata(event)
                elif phase in "sf" and event.get("cat") == "fwdbwd":
                    self._flow(event, phase)
                elif "tid" in event:
                    self._track(event)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                continue

    def _track(self, event: dict[str, Any]) -> int:
        key = (event["pid"], event["tid"])
        track = self.tracks.get(key)
        if track is None:
            if not is_track_key(key):
                raise TypeError(key)
            track = self.tracks[key] = len(self.tracks)
        return track

    def _slice(self, event: dict[str, Any]) -> None:
        track = self._track(event)
        start, duration = float(event["ts"]), float(event["dur"])
        category = event.get("cat")
        if not (start > 0 and duration >= 0 and start + duration < MAX_TIME_US):
            self.zero_times += start == 0
            return
        if category == "Trace":
            return
        if start < self.first:
            self.first = start
        if start + duration > self.last:
            self.last = start + duration
        args = event.get("args") or {}
        if category == "cpu_op" or category == "user_annotation":
            self._cpu(event["name"], category, track, start, duration, args)
        elif category in _GPU:
            kind = 0 if category == "kernel" else 1 if category == "gpu_memcpy" else 2
            _append(self.work, track, start, duration, args.get("correlation", -1), kind)
        elif category == "python_function":
            name = event["name"]
            if name.startswith(MODULE):
                index = self.module_names.setdefault(name[len(MODULE) :], len(self.module_names))
                _append(self.modules, track, start, duration, index, args.get("Python module id", -1))
        elif category is not None and category.endswith(("_runtime", "_driver")):
            correlation = args.get("correlation")
            if correlation is not None:
                _append(self.launches, track, start, duration, correlation, 0)

    def _cpu(self, name: str, category: str, track: int, start: float, duration: float, args: dict[str, Any]) -> None:
        sequence = args.get("Sequence number")
        if name.startswith(NODE):
            _append(
                self.nodes, track, start, duration, -1 if sequence is None else sequence, args.get("Fwd thread id", -1)
            )
        elif sequence is not None:
            if not args.get("Fwd thread id"):
                _append(self.ops, track, start, duration, sequence, 0)
        elif name.startswith(SYNC):
            self.syncs.setdefault(name, []).append((start, start + duration))
        elif category == "user_annotation" and name.startswith(STEP):
            _append(self.steps, track, start, duration, int(name[len(STEP) :]), 0)
        elif category == "cpu_op":
            _append(self.plain_ops, track, start, duration, -1, 0)

    def _metadata(self, event: dict[str, Any]) -> None:
        if event["name"] == "thread_name":
            # The last of several names is the one that a thread gave itself.
            self.thread_names[event["pid"], event["tid"]] = str(event["args"]["name"])
        elif event["name"] == "process_name":
            self.process_names[event["pid"]] = str(event["args"]["name"])
        self.tids.add(int(event["tid"]))

    def _flow(self, event: dict[str, Any], phase: str) -> None:
        if phase == "s":
            self._begins[event["id"]] = self._track(event)
        else:
            start = float(event["ts"])
            if 0 <= start < MAX_TIME_US:
                self._ends[event["id"]] = (self._track(event), start)

    def events(self) -> ProfilerEvents:
        """Return the columns."""
        flows = _GrowingColumns()
        for identity, (track, start) in self._ends.items():
            begin = self._begins.get(identity)
            if begin is not None:
                _append(flows, track, start, 0.0, begin, 0)
        ends = microseconds_to_ns(np.array([self.first, self.last] if self.first <= self.last else [1.0, 0.0]))
        by_track = np.bincount(
            np.concatenate([np.array(c.track, np.int64) for c in (self.ops, self.nodes, self.launches, self.modules)]),
            minlength=len(self.tracks),
        )
        pids: dict[int | str, int] = {}
        for (pid, _), track in self.tracks.items():
            pids[pid] = pids.get(pid, 0) + int(by_track[track])
        return ProfilerEvents(
            tracks=list(self.tracks),
            thread_names=self.thread_names,
            process_names=self.process_names,
            ops=self.ops.rows(),
            plain_ops=self.plain_ops.rows(),
            nodes=self.nodes.rows(),
            launches=self.launches.rows(),
            work=self.work.rows(),
            modules=self.modules.rows(),
            steps=self.steps.rows(),
            module_names=list(self.module_names),
            syncs={
                name: [(int(a), int(b)) for a, b in microseconds_to_ns(np.array(times)).tolist()]
                for name, times in self.syncs.items()
            },
            flows=flows.rows(),
            first=int(ends[0]),
            last=int(ends[1]),
            cpu_pids={pid: count for pid, count in pids.items() if count},
            tids=frozenset(self.tids | {tid for _, tid in self.tracks if isinstance(tid, int)}),
            zero_times=self.zero_times,
            total=self.total,
        )


def _append(columns: _GrowingColumns, track: int, start: float, duration: float, value: int, other: int) -> None:
    # What a trace says may be no whole number of 64 bits: then there must be no part of a row.
    columns.value.append(value)
    try:
        columns.other.append(other)
    except (TypeError, OverflowError):
        columns.value.pop()
        raise
    columns.track.append(track)
    columns.start.append(start)
    columns.duration.append(duration)
