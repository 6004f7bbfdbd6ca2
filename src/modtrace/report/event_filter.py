"""The events of a profiler's trace of which every key, category and text is known; all others are left out."""

from __future__ import annotations

import re
from typing import Any

from ..timeline import PHASES, Name
from .aliases import Names

__all__ = ["Cleaner"]

Event = dict[str, Any]

_OPERATIONS = frozenset({"cpu_op", "user_annotation", "gpu_user_annotation", "cpu_instant_event", "overhead", "Trace"})
_KERNELS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "cuda_sync"})
_FLOWS = frozenset({"fwdbwd", "ac2g", "async_cpu_to_gpu", "async_gpu", "modtrace"})
_OURS = frozenset({*PHASES, "gpu"})
_MODULE = "nn.Module: "

_NUMBERS = frozenset(
    [
        *("External id", "Sequence number", "Fwd thread id", "Ev Idx", "Record function id", "correlation", "cbid"),
        *("Python id", "Python parent id", "Python module id", "Input Dims", "Input Strides", "Op count"),
        *("queued", "device", "context", "stream", "grid", "block", "shared memory", "registers per thread", "bytes"),
        *("blocks per SM", "warps per SM", "est. achieved occupancy %", "memory bandwidth (GB/s)"),
        *("wait_on_stream", "wait_on_cuda_event_record_corr_id", "wait_on_cuda_event_id"),
        *("In msg nelems", "Out msg nelems", "In split size", "Out split size", "Group size", "Process Group Ranks"),
        *("Global rank start", "Global rank stride", "Process Group ID"),
        *("Bytes", "Device Type", "Device Id", "Total Allocated", "Total Reserved", "sort_index"),
        *("call", "step", "gpu_work", "incomplete"),
    ]
)
"""The args that may hold numbers, or lists of numbers."""
_WORDS = {
    "cuda_sync_kind": re.compile(r"(?:Context|Stream|Event|Device|Unknown)[A-Za-z ]{0,20}"),
    "Collective name": re.compile(r"[a-z_]{1,40}"),
    "dtype": re.compile(r"[A-Za-z]+\d{0,2}"),
    "labels": re.compile(r"CPU|GPU \d+"),
}
"""The args that may hold a word, and which."""
_TYPE = re.compile(
    r"|(?:unsigned |signed )?(?:char|short|int|long|long int|float|double|bool)"
    r"|Scalar|ScalarList|TensorList|GenericList|c10::\w+(?:<\w+>)?|nullptr \(uninitialized\)"
)
_DIGITS = re.compile(r"[\d\s,.\[\]()-]*")
_CALL = re.compile(r"(?:cuda|cu|hip|nccl|nvtx)[A-Za-z0-9_]+|[A-Z][a-z]+(?: [A-Z][a-z]+){1,3}")
_PROFILER = re.compile(r"PyTorch Profiler(?: \(\d+\))?|Record Window End|Iteration Start: PyTorch Profiler|\[memory\]")
_OVERHEAD = re.compile(r"[A-Z][A-Za-z]*(?: [A-Z][A-Za-z]*){0,4}")
_PLACES = frozenset({"", "Spans", "Traces", "PyTorch Profiler", "Trace PyTorch Profiler"})
_THREAD = re.compile(r"thread (-?\d+) \((python[\d.]*|pt_\w+)\)|thread -?\d+|stream \d+ ?")
_TRACK = re.compile(r"(forward|backward|modules) · (.*)", re.DOTALL)


class Cleaner:
    """Makes a clean event of an event; None where it has no place in a report.

    Args:
        names: what things are called.

    Attributes:
        dropped: how many events had none.
    """

    def __init__(self, names: Names) -> None:
        self.dropped = 0
        self._names = names

    def __call__(self, event: object) -> Event | None:
        """Return what a report may hold of an event."""
        clean = self._clean(event) if isinstance(event, dict) else None
        if clean is None:
            self.dropped += 1
        return clean

    def _clean(self, event: Event) -> Event | None:
        kind, category, said = event.get("ph"), event.get("cat"), event.get("args")
        args = said if isinstance(said, dict) else {}
        clean: Event = {"ph": kind}
        for key in ("pid", "tid"):
            place = event.get(key)
            if type(place) is int or (isinstance(place, str) and place in _PLACES):
                clean[key] = place
            elif key in event:
                return None
        for key in ("ts", "dur"):
            if type(event.get(key)) in (int, float):
                clean[key] = event[key]
        if kind == "M":
            return self._metadata(clean, event.get("name"), args)
        if kind in ("s", "t", "f"):
            return _flow(clean, event, category)
        if kind == "C":
            return self._counter(clean, event.get("name"), args)
        if kind not in ("X", "i", "I") or not isinstance(event.get("name"), str):
            return None
        name = self._name(kind, category, event["name"], args)
        if name is None:
            return None
        clean |= {"name": name, "args": _arguments(args) | self._module(category, args)}
        if category is not None:
            clean["cat"] = category
        if kind != "X":
            clean["s"] = event.get("s") if event.get("s") in ("g", "p", "t") else "t"
        return clean

    def _name(self, kind: str, category: object, name: str, args: Event) -> str | None:
        """Return what the event is to be called; None where its category is unknown."""
        if category in _OURS:
            if "fqn" in args:
                return self._names.name(Name(name, str(args["fqn"]), str(args.get("module_class")))).label
            return "(no module)"
        if category in ("step", "mark"):
            return self._names.mark(name)
        if category == "python_function":
            # All others are named by the source: files, lines and functions.
            if not name.startswith(_MODULE):
                return None
            module_class, bar, number = name.removeprefix(_MODULE).rpartition("_")
            return f"{_MODULE}{self._names.module_class(module_class)}{bar}{number}" if number.isdecimal() else None
        if category in _OPERATIONS:
            known = _OVERHEAD if category == "overhead" else _PROFILER
            return name if known.fullmatch(name) else self._names.operation(name)
        if category in _KERNELS:
            return self._names.kernel(name)
        if category in _CALLS:
            return name if _CALL.fullmatch(name) else "runtime call"
        return name if category is None and kind != "X" and _PROFILER.fullmatch(name) else None

    def _module(self, category: object, args: Event) -> Event:
        if category not in _OURS or "fqn" not in args:
            return {}
        module_class = self._names.module_class(str(args.get("module_class")))
        return {"fqn": self._names.fqn(str(args["fqn"])), "module_class": module_class}

    def _metadata(self, clean: Event, name: object, args: Event) -> Event | None:
        if name == "process_name":
            said: Event = {"name": "python"}
        elif name == "thread_name":
            thread = str(args.get("name"))
            track = _TRACK.fullmatch(thread)
            if track:
                thread = f"{track[1]} · {self._thread(track[2])}"
            elif not _THREAD.fullmatch(thread):
                thread = thread if thread in _PLACES else f"thread {clean.get('tid')}"
            said = {"name": thread}
        elif name in ("process_labels", "process_sort_index", "thread_sort_index"):
            said = _arguments(args)
        else:
            return None
        return clean | {"name": name, "args": said}

    def _thread(self, thread: str) -> str:
        return thread if _THREAD.fullmatch(thread) else self._names.thread(thread)

    def _counter(self, clean: Event, name: object, args: Event) -> Event:
        values = {self._names.counter(unit): value for unit, value in args.items() if type(value) in (int, float)}
        return clean | {"name": self._names.counter(str(name)), "args": values}


def _flow(clean: Event, event: Event, category: object) -> Event | None:
    identity = event.get("id")
    if category not in _FLOWS or not (type(identity) is int or _is_number(identity)):
        return None
    name = category if event.get("name") == category else "backward"
    return clean | {"cat": category, "name": name, "id": identity} | ({"bp": "e"} if event.get("bp") == "e" else {})


def _arguments(args: Event) -> Event:
    clean: Event = {}
    for key, value in args.items():
        if key in _NUMBERS:
            if _is_number(value):
                clean[key] = value
        elif key in _WORDS:
            if isinstance(value, str) and _WORDS[key].fullmatch(value):
                clean[key] = value
        elif key == "Input type" and isinstance(value, list):
            clean[key] = [kind if isinstance(kind, str) and _TYPE.fullmatch(kind) else "other" for kind in value]
    return clean


def _is_number(value: object) -> bool:
    """Whether a value is a number, a list of numbers at any depth, or the text of such."""
    if isinstance(value, list):
        return all(map(_is_number, value))
    if isinstance(value, str):
        return _DIGITS.fullmatch(value) is not None
    return isinstance(value, int | float)
