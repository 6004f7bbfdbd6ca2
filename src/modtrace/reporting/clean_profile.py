"""Copies a profiler's trace, plain or merged, for a report: only events and fields that are known to be harmless."""

import os
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from .._arrays import Float64Array, Int64Array
from ..formats.chrome_values import base_time_ns
from ..formats.event_stream import EventStream
from ..formats.event_table import METADATA, SLICE, EventTable
from ..formats.slice_args import FLOW_CATEGORY, FLOW_NAME
from ..formats.trace_file import MERGED, TraceFile
from ..profiler.event_collector import MODULE, STEP
from ..timeline import PHASES, Name
from .clean_timeline import REPORT_START_NS, IdNumbers
from .names import ReportNames

RawEvent = dict[str, Any]

_OPERATION_CATEGORIES = frozenset(
    {"cpu_op", "user_annotation", "gpu_user_annotation", "cpu_instant_event", "overhead", "Trace"}
)
_KERNEL_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_RUNTIME_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "cuda_sync"})
_FLOW_CATEGORIES = frozenset({"fwdbwd", "ac2g", "async_cpu_to_gpu", "async_gpu", FLOW_CATEGORY})
_SPAN_CATEGORIES = frozenset({*PHASES, "gpu"})

_NUMBER_ARGS = frozenset(
    [
        *("External id", "Sequence number", "Fwd thread id", "Ev Idx", "Record function id", "correlation", "cbid"),
        *("Python id", "Python parent id", "Python module id", "Input Dims", "Input Strides", "Op count"),
        *("queued", "device", "context", "stream", "grid", "block", "shared memory", "registers per thread", "bytes"),
        *("blocks per SM", "warps per SM", "est. achieved occupancy %", "memory bandwidth (GB/s)"),
        *("wait_on_stream", "wait_on_cuda_event_record_corr_id", "wait_on_cuda_event_id"),
        *("In msg nelems", "Out msg nelems", "In split size", "Out split size", "Group size", "Process Group Ranks"),
        *("Global rank start", "Global rank stride", "Process Group ID"),
        *("Bytes", "Device Type", "Device Id", "Total Allocated", "Total Reserved", "sort_index"),
        *("call", "step", "gpu_work", "complete", "link"),
    ]
)
"""Args whose numbers and lists of numbers are copied."""
_WORD_ARGS = {
    "cuda_sync_kind": re.compile(r"(?:Context|Stream|Event|Device|Unknown)[A-Za-z ]{0,20}"),
    "Collective name": re.compile(r"[a-z_]{1,40}"),
    "dtype": re.compile(r"[A-Za-z]+\d{0,2}"),
    "labels": re.compile(r"CPU|GPU \d+"),
}
"""Args whose words are copied, with the pattern of the words."""
_INPUT_TYPE = re.compile(
    r"|(?:unsigned |signed )?(?:char|short|int|long|long int|float|double|bool)"
    r"|Scalar|ScalarList|TensorList|GenericList|c10::\w+(?:<\w+>)?|nullptr \(uninitialized\)"
)
_DIGITS = re.compile(r"[\d\s,.\[\]()-]*")
_RUNTIME_CALL = re.compile(r"(?:cuda|cu|hip|nccl|nvtx)[A-Za-z0-9_]+|[A-Z][a-z]+(?: [A-Z][a-z]+){1,3}")
_PROFILER_EVENT = re.compile(
    r"PyTorch Profiler(?: \(\d+\))?|Record Window End|Iteration Start: PyTorch Profiler|\[memory\]"
)
_OVERHEAD_NAME = re.compile(r"[A-Z][A-Za-z]*(?: [A-Z][A-Za-z]*){0,4}")
_WORD_IDS = frozenset({"", "Spans", "Traces", "PyTorch Profiler", "Trace PyTorch Profiler"})
_THREAD_NAME = re.compile(r"thread (-?\d+) \((python[\d.]*|pt_\w+)\)|thread -?\d+|stream \d+ ?")
_THREAD_ID = re.compile(r"^thread (-?\d+)")
_TRACK_NAME = re.compile(r"(forward|backward|modules) · (.*)", re.DOTALL)


class EventFilter:
    """Filters events for a report: `event_filter(event)`."""

    def __init__(self, names: ReportNames, ids: IdNumbers) -> None:
        self.dropped = 0  # number of events left out so far
        self._names, self._ids = names, ids

    def __call__(self, event: object) -> RawEvent | None:
        """Return the harmless part of an event, or None."""
        clean = self._filter(event) if isinstance(event, dict) else None
        if clean is None:
            self.dropped += 1
        return clean

    def _filter(self, event: RawEvent) -> RawEvent | None:
        phase, category, args = event.get("ph"), event.get("cat"), event.get("args")
        args = args if isinstance(args, dict) else {}
        if category is not None and not isinstance(category, str):
            return None
        clean: RawEvent = {"ph": phase}
        for key in ("pid", "tid"):
            value = event.get(key)
            if type(value) is int:
                clean[key] = self._ids.number(value)
            elif isinstance(value, str) and value in _WORD_IDS:
                clean[key] = value
            elif key in event:
                return None
        clean |= {key: event[key] for key in ("ts", "dur") if type(event.get(key)) in (int, float)}
        if phase == "M":
            return self._metadata(clean, event.get("name"), args)
        if "ts" not in clean:
            return None
        if phase == "E":  # it needs no name: it ends the innermost slice of its track
            return clean
        if phase in ("s", "t", "f"):
            return _clean_arrow(clean, category, event)
        if phase == "C":
            return self._counter(clean, event.get("name"), args)
        return self._slice(clean, category, event, args) if phase in ("X", "B", "i", "I") else None

    def _slice(self, clean: RawEvent, category: str | None, event: RawEvent, args: RawEvent) -> RawEvent | None:
        """Add name, category and args to the clean fields of a slice or an instant; None if its name is unknown."""
        name, is_instant = event.get("name"), clean["ph"] in ("i", "I")
        label = self._name(category, name, args, is_instant=is_instant) if isinstance(name, str) else None
        if label is None:
            return None
        clean |= {"name": label, "args": _clean_args(args)}
        if category is not None:
            clean["cat"] = category
        if category in _SPAN_CATEGORIES:
            if "fqn" in args:
                fqn, module_class = self._names.module(str(args["fqn"]), str(args.get("module_class")))
                clean["args"] |= {"fqn": fqn, "module_class": module_class}
            if type(event.get("bind_id")) is int:  # a flow event would bind to another span
                clean["bind_id"] = event["bind_id"]
                clean |= {key: True for key in ("flow_out", "flow_in") if event.get(key) is True}
        if is_instant:
            clean["s"] = event.get("s") if event.get("s") in ("g", "p", "t") else "t"
        return clean

    def _name(self, category: str | None, name: str, args: RawEvent, *, is_instant: bool) -> str | None:
        """Return the event's name for the report; None if its category or name is unknown."""
        if category in _SPAN_CATEGORIES:
            if "fqn" in args:
                return self._names.name(Name(name, str(args["fqn"]), str(args.get("module_class")))).label
            return "(no module)"
        if category in ("step", "mark"):
            return self._names.mark(name)
        if category == "python_function":
            # The names of all other functions contain source files, lines and functions.
            if not name.startswith(MODULE):
                return None
            module_class, bar, number = name.removeprefix(MODULE).rpartition("_")
            return f"{MODULE}{self._names.module_class(module_class)}{bar}{number}" if number.isdecimal() else None
        if category in _OPERATION_CATEGORIES:
            if (_OVERHEAD_NAME if category == "overhead" else _PROFILER_EVENT).fullmatch(name):
                return name
            return self._names.operation(name) if category == "cpu_op" else self._names.annotation(name)
        if category in _KERNEL_CATEGORIES:
            return self._names.kernel(name)
        if category in _RUNTIME_CATEGORIES:
            return name if _RUNTIME_CALL.fullmatch(name) else "runtime call"
        return name if category is None and is_instant and _PROFILER_EVENT.fullmatch(name) else None

    def _metadata(self, clean: RawEvent, name: object, args: RawEvent) -> RawEvent | None:
        """Add name and args to the clean ids of a process's or thread's metadata; None if its name is unknown."""
        if name == "process_name":
            clean_args: RawEvent = {"name": "python"}
        elif name == "thread_name":
            thread = str(args.get("name"))
            if track := _TRACK_NAME.fullmatch(thread):
                thread = f"{track[1]} · {self._profiler_thread(track[2]) or self._names.thread(track[2])}"
            elif thread not in _WORD_IDS:
                thread = self._profiler_thread(thread) or f"thread {clean.get('tid')}"
            clean_args = {"name": thread}
        elif name in ("process_labels", "process_sort_index", "thread_sort_index"):
            clean_args = _clean_args(args)
            if type(clean_args.get("sort_index")) is int:
                clean_args["sort_index"] = self._ids.number(clean_args["sort_index"])
        else:
            return None
        return clean | {"name": name, "args": clean_args}

    def _profiler_thread(self, thread: str) -> str | None:
        """Return a thread's name, with its id replaced, if the profiler chose the name; otherwise None."""
        if not _THREAD_NAME.fullmatch(thread):
            return None
        return _THREAD_ID.sub(lambda match: f"thread {self._ids.number(int(match[1]))}", thread)

    def _counter(self, clean: RawEvent, name: object, args: RawEvent) -> RawEvent:
        values = {self._names.counter(unit): value for unit, value in args.items() if type(value) in (int, float)}
        return clean | {"name": self._names.counter(str(name)), "args": values}


def _clean_arrow(clean: RawEvent, category: str | None, event: RawEvent) -> RawEvent | None:
    """Add category, name and id to the clean fields of an arrow's end; None if they are unknown."""
    arrow_id = event.get("id")
    if category not in _FLOW_CATEGORIES or not (type(arrow_id) is int or _is_number(arrow_id)):
        return None
    name = category if event.get("name") == category else FLOW_NAME
    return {**clean, "cat": category, "name": name, "id": arrow_id, **({"bp": "e"} if event.get("bp") == "e" else {})}


def _clean_args(args: RawEvent) -> RawEvent:
    """Return the args of an event that are known to be harmless."""
    clean: RawEvent = {}
    for key, value in args.items():
        if key in _NUMBER_ARGS:
            if type(value) is int or _is_number(value):  # most values are int
                clean[key] = value
        elif key in _WORD_ARGS:
            if isinstance(value, str) and _WORD_ARGS[key].fullmatch(value):
                clean[key] = value
        elif key == "Input type" and isinstance(value, list):
            clean[key] = [kind if isinstance(kind, str) and _INPUT_TYPE.fullmatch(kind) else "other" for kind in value]
    return clean


def _is_number(value: object) -> bool:
    """Return whether a value is a number, a nested list of numbers, or the text of either."""
    if isinstance(value, list):
        return all(map(_is_number, value))
    if isinstance(value, str):
        return _DIGITS.fullmatch(value) is not None
    return isinstance(value, int | float)


_DEVICE_NUMBER_KEYS = (
    *("id", "totalGlobalMem", "computeMajor", "computeMinor", "maxThreadsPerBlock", "maxThreadsPerMultiprocessor"),
    *("regsPerBlock", "regsPerMultiprocessor", "warpSize", "sharedMemPerBlock", "sharedMemPerMultiprocessor"),
    *("numSms", "sharedMemPerBlockOptin"),
)
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*\w*", re.ASCII)
_DEVICE_NAME = re.compile(r"(?:NVIDIA|Tesla|Quadro|GeForce|RTX|AMD|Instinct|Radeon|Intel)[\w -]{0,60}", re.ASCII)

_FIRST_TIME_US = 86_400_000_000
"""New time in µs of the first event in the file; it is large since later events in the file may have earlier times."""


@dataclass(frozen=True)
class CleanProfile:
    """The clean copy of a profiler's trace; its times start near `REPORT_START_NS`."""

    path: Path  # the copy, in JSON
    base_ns: int  # Unix ns from which times count
    start_us: Float64Array  # float64[events], starts of events in µs from the base, ascending
    step_start_us: Float64Array  # float64[steps], starts of steps in µs from the base, ascending
    step_duration_us: Float64Array  # float64[steps], durations in µs
    end_us: float  # end of the last event in µs from the base
    # float64[lines], µs from the base: a line belongs to the window around this time; NaN: to all windows.
    window_time_us: Float64Array
    notes: list[str]  # notes on events left out


def clean_profile(path: str | os.PathLike[str], out: Path, names: ReportNames) -> CleanProfile:
    """Write the harmless part of a trace to `out`, with shifted times and replaced ids of processes."""
    event_filter, table = EventFilter(names, IdNumbers()), EventTable()
    rows, shift = array("q"), None
    with TraceFile(path) as source, out.open("wb") as file:
        stream = EventStream(source)
        writer = _EventWriter(file)
        for chunk in stream.chunks():
            first_row, events = len(table), [*map(event_filter, table.add(chunk.events))]
            rows.extend(row for row, event in enumerate(events, first_row) if event is not None)
            clean_events = [event for event in events if event is not None]
            for event in clean_events:
                if event["ph"] != "M":
                    shift = int(event["ts"]) - _FIRST_TIME_US if shift is None else shift
                    event["ts"] -= shift
            writer.write(clean_events)
        base_time_ns(stream.keys, source.path)  # raises if it is not a time
        base = REPORT_START_NS - _FIRST_TIME_US * 1000
        writer.close(_clean_keys(stream.keys, base))
    notes = stream.notes()
    if dropped := event_filter.dropped:
        notes.append(f"{dropped:,} events of the profiler's trace were left out: they are not known to be harmless")
    return CleanProfile(out, base, *_times(table, np.array(rows, np.int64), shift or 0), notes)


def _times(
    table: EventTable, rows: Int64Array, shift: int
) -> tuple[Float64Array, Float64Array, Float64Array, float, Float64Array]:
    """Return the times of a `CleanProfile` in its order, for `rows` moved back by `shift` µs."""
    time, phase = table.start_us - shift, table.phase
    duration = np.where(phase == SLICE, table.duration_us, 0)
    is_step = [kind == "user_annotation" and str(name).startswith(STEP) for kind, name in table.kinds]
    steps = rows[np.array(is_step or [False], np.bool_)[table.kind[rows]]]
    steps = steps[np.argsort(time[steps], kind="stable")]
    events = rows[table.written_phase[rows] != METADATA]
    window_time = np.where(table.written_phase == METADATA, np.nan, time)
    begins, ends = table.pairs
    window_time[ends] = time[begins]
    end = float((time + duration)[events].max(initial=-np.inf))
    return np.sort(time[events]), time[steps], duration[steps], end, window_time[rows]


def cut_profile(profile: CleanProfile, out: Path, windows: Sequence[tuple[float, float]]) -> None:
    """Write the events of a clean trace that start in one of the windows, (start, end) in µs from the base."""
    starts, ends = (np.array(bounds) for bounds in zip(*sorted(windows), strict=True))
    time = profile.window_time_us
    window = np.searchsorted(starts, time, side="right") - 1
    in_window = iter((np.isnan(time) | (window >= 0) & (time < ends[window])).tolist())
    with TraceFile(profile.path) as source, out.open("wb") as file:
        stream = EventStream(source)
        writer = _EventWriter(file)
        for chunk in stream.chunks():
            writer.write([event for event, is_inside in zip(chunk.events, in_window, strict=False) if is_inside])
        writer.close(stream.keys)


class _EventWriter:
    """Writes a trace chunk by chunk."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._separator = b""
        file.write(b'{"traceEvents":[')

    def write(self, events: list[Any]) -> None:
        if events:
            self._file.write(self._separator + orjson.dumps(events)[1:-1])
            self._separator = b",\n"

    def close(self, keys: dict[str, Any]) -> None:
        # Readers recognize a merged trace by the bytes right after its events.
        self._file.write(b"\n],\n" + orjson.dumps(keys)[1:])


def _clean_keys(keys: dict[str, Any], base: int) -> dict[str, Any]:
    """Return the harmless top-level keys of a trace whose times count from `base`, Unix ns."""
    metadata, devices, distributed = keys.get(MERGED), keys.get("deviceProperties"), keys.get("distributedInfo")
    clean: dict[str, Any] = {}
    if metadata is not None:
        version = metadata.get("version") if isinstance(metadata, dict) else None
        is_version = isinstance(version, str) and _VERSION.fullmatch(version)
        clean[MERGED] = {"version": version} if is_version else {}
    clean |= {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base}
    if isinstance(devices, list):
        clean["deviceProperties"] = [_clean_device(device) for device in devices if isinstance(device, dict)]
    if isinstance(distributed, dict):
        clean["distributedInfo"] = _int_values(distributed, ("rank", "world_size"))
    return clean


def _clean_device(device: dict[str, Any]) -> dict[str, Any]:
    clean, name = _int_values(device, _DEVICE_NUMBER_KEYS), device.get("name")
    return clean | ({"name": name} if isinstance(name, str) and _DEVICE_NAME.fullmatch(name) else {})


def _int_values(values: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: values[key] for key in keys if type(values.get(key)) is int}
