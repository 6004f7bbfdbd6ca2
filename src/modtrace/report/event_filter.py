"""Decide what a report may hold of each event in a profiler's trace: only keys, categories and texts that are known."""

from __future__ import annotations

import re
from typing import Any

from ..formats.span_args import FLOW_CATEGORY, FLOW_NAME
from ..timeline import PHASES, Name
from .aliases import ReportNames
from .identity import IdNumbers

__all__ = ["EventFilter"]

RawEvent = dict[str, Any]

_OPERATION_CATEGORIES = frozenset(
    {"cpu_op", "user_annotation", "gpu_user_annotation", "cpu_instant_event", "overhead", "Trace"}
)
_KERNEL_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_RUNTIME_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "cuda_sync"})
_FLOW_CATEGORIES = frozenset({"fwdbwd", "ac2g", "async_cpu_to_gpu", "async_gpu", FLOW_CATEGORY})
_SPAN_CATEGORIES = frozenset({*PHASES, "gpu"})
_MODULE_PREFIX = "nn.Module: "

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
"""Args that may hold numbers, or lists of numbers."""
_WORD_ARGS = {
    "cuda_sync_kind": re.compile(r"(?:Context|Stream|Event|Device|Unknown)[A-Za-z ]{0,20}"),
    "Collective name": re.compile(r"[a-z_]{1,40}"),
    "dtype": re.compile(r"[A-Za-z]+\d{0,2}"),
    "labels": re.compile(r"CPU|GPU \d+"),
}
"""Args that may hold a word, and which words."""
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
    """Returns what a report may hold of an event, or None: `event_filter(event)`.

    Args:
        names: replaces texts.
        ids: replaces ids of processes and threads.

    Attributes:
        dropped: how many events were left out so far.
    """

    def __init__(self, names: ReportNames, ids: IdNumbers) -> None:
        self.dropped = 0
        self._names = names
        self._ids = ids

    def __call__(self, event: object) -> RawEvent | None:
        """Return what a report may hold of an event."""
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
        for key in ("ts", "dur"):
            if type(event.get(key)) in (int, float):
                clean[key] = event[key]
        if phase == "M":
            return self._metadata(clean, event.get("name"), args)
        if phase in ("s", "t", "f"):
            return _clean_flow(clean, event, category)
        if phase == "C":
            return self._counter(clean, event.get("name"), args)
        if phase not in ("X", "i", "I") or not isinstance(event.get("name"), str):
            return None
        name = self._name(phase, category, event["name"], args)
        if name is None:
            return None
        clean |= {"name": name, "args": _clean_args(args) | self._module_args(category, args)}
        if category is not None:
            clean["cat"] = category
        if category in _SPAN_CATEGORIES:
            clean |= _clean_bound_flow(event)
        if phase != "X":
            clean["s"] = event.get("s") if event.get("s") in ("g", "p", "t") else "t"
        return clean

    def _name(self, phase: str, category: object, name: str, args: RawEvent) -> str | None:
        """Return the event's name for the report; None where its category or name is unknown."""
        if category in _SPAN_CATEGORIES:
            if "fqn" in args:
                return self._names.name(Name(name, str(args["fqn"]), str(args.get("module_class")))).label
            return "(no module)"
        if category in ("step", "mark"):
            return self._names.mark(name)
        if category == "python_function":
            # All others are named by source files, lines and functions.
            if not name.startswith(_MODULE_PREFIX):
                return None
            module_class, bar, number = name.removeprefix(_MODULE_PREFIX).rpartition("_")
            return (
                f"{_MODULE_PREFIX}{self._names.module_class(module_class)}{bar}{number}" if number.isdecimal() else None
            )
        if category in _OPERATION_CATEGORIES:
            known = _OVERHEAD_NAME if category == "overhead" else _PROFILER_EVENT
            if known.fullmatch(name):
                return name
            return self._names.operation(name) if category == "cpu_op" else self._names.annotation(name)
        if category in _KERNEL_CATEGORIES:
            return self._names.kernel(name)
        if category in _RUNTIME_CATEGORIES:
            return name if _RUNTIME_CALL.fullmatch(name) else "runtime call"
        return name if category is None and phase != "X" and _PROFILER_EVENT.fullmatch(name) else None

    def _module_args(self, category: object, args: RawEvent) -> RawEvent:
        if category not in _SPAN_CATEGORIES or "fqn" not in args:
            return {}
        fqn, module_class = self._names.module(str(args["fqn"]), str(args.get("module_class")))
        return {"fqn": fqn, "module_class": module_class}

    def _metadata(self, clean: RawEvent, name: object, args: RawEvent) -> RawEvent | None:
        if name == "process_name":
            clean_args: RawEvent = {"name": "python"}
        elif name == "thread_name":
            thread = str(args.get("name"))
            track = _TRACK_NAME.fullmatch(thread)
            if track:
                thread = f"{track[1]} · {self._thread(track[2])}"
            elif _THREAD_NAME.fullmatch(thread):
                thread = self._known_thread(thread)
            elif thread not in _WORD_IDS:
                thread = f"thread {clean.get('tid')}"
            clean_args = {"name": thread}
        elif name in ("process_labels", "process_sort_index", "thread_sort_index"):
            clean_args = _clean_args(args)
            if type(clean_args.get("sort_index")) is int:
                clean_args["sort_index"] = self._ids.number(clean_args["sort_index"])
        else:
            return None
        return clean | {"name": name, "args": clean_args}

    def _thread(self, thread: str) -> str:
        return self._known_thread(thread) if _THREAD_NAME.fullmatch(thread) else self._names.thread(thread)

    def _known_thread(self, thread: str) -> str:
        """Return a name that the profiler gave a thread, with the number of its id."""
        return _THREAD_ID.sub(lambda match: f"thread {self._ids.number(int(match[1]))}", thread)

    def _counter(self, clean: RawEvent, name: object, args: RawEvent) -> RawEvent:
        values = {self._names.counter(unit): value for unit, value in args.items() if type(value) in (int, float)}
        return clean | {"name": self._names.counter(str(name)), "args": values}


def _clean_flow(clean: RawEvent, event: RawEvent, category: object) -> RawEvent | None:
    flow_id = event.get("id")
    if category not in _FLOW_CATEGORIES or not (type(flow_id) is int or _is_number(flow_id)):
        return None
    name = category if event.get("name") == category else FLOW_NAME
    return clean | {"cat": category, "name": name, "id": flow_id} | ({"bp": "e"} if event.get("bp") == "e" else {})


def _clean_bound_flow(event: RawEvent) -> RawEvent:
    """Return the flow that a span carries itself, where a flow event would bind to another span."""
    if type(event.get("bind_id")) is not int:
        return {}
    return {"bind_id": event["bind_id"]} | {key: True for key in ("flow_out", "flow_in") if event.get(key) is True}


def _clean_args(args: RawEvent) -> RawEvent:
    clean: RawEvent = {}
    for key, value in args.items():
        if key in _NUMBER_ARGS:
            if _is_number(value):
                clean[key] = value
        elif key in _WORD_ARGS:
            if isinstance(value, str) and _WORD_ARGS[key].fullmatch(value):
                clean[key] = value
        elif key == "Input type" and isinstance(value, list):
            clean[key] = [kind if isinstance(kind, str) and _INPUT_TYPE.fullmatch(kind) else "other" for kind in value]
    return clean


def _is_number(value: object) -> bool:
    """Whether a value is a number, a list of numbers at any depth, or the text of such."""
    if isinstance(value, list):
        return all(map(_is_number, value))
    if isinstance(value, str):
        return _DIGITS.fullmatch(value) is not None
    return isinstance(value, int | float)
