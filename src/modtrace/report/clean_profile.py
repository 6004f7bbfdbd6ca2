"""A profiler's trace, plain or merged, as it goes into a report: only what is known, only from some moment on."""

from __future__ import annotations

import os
import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from .._typing import Float64Array
from ..profiler.trace.event_stream import EventStream
from ..profiler.trace.trace_file import TraceFile, base_time_ns
from .aliases import Names
from .event_filter import Cleaner

__all__ = ["CleanProfile", "clean_profile"]

_STEP = "ProfilerStep#"
_DEVICE_NUMBERS = (
    *("id", "totalGlobalMem", "computeMajor", "computeMinor", "maxThreadsPerBlock", "maxThreadsPerMultiprocessor"),
    *("regsPerBlock", "regsPerMultiprocessor", "warpSize", "sharedMemPerBlock", "sharedMemPerMultiprocessor"),
    *("numSms", "sharedMemPerBlockOptin"),
)
_DEVICE = re.compile(r"(?:NVIDIA|Tesla|Quadro|GeForce|RTX|AMD|Instinct|Radeon|Intel)[\w -]{0,60}", re.ASCII)


@dataclass(frozen=True)
class CleanProfile:
    """A profiler's trace without what is private.

    Attributes:
        path: where it lies: JSON.
        base: Unix nanoseconds from which its times count.
        times: float64, µs from the base, ascending: when its events begin.
        steps: float64, µs, ascending: when its steps begin.
        end: µs: when its last event ends.
        dropped: how many events were left out.
        notes: what was wrong with the file.
    """

    path: Path
    base: int
    times: Float64Array
    steps: Float64Array
    end: float
    dropped: int
    notes: list[str]


def clean_profile(path: str | os.PathLike[str], out: Path, names: Names, since: float = float("-inf")) -> CleanProfile:
    """Write what is known in a trace to `out`.

    Args:
        path: the trace.
        out: JSON.
        names: what things are called.
        since: µs; events that begin before are left out.

    Raises:
        TraceError: it cannot be read.
    """
    clean = Cleaner(names)
    times, steps = array("d"), array("d")
    end = float("-inf")
    with TraceFile(path) as source, out.open("wb") as file:
        stream = EventStream(source)
        file.write(b'{"traceEvents":[')
        comma = b""
        for chunk in stream.chunks():
            kept = []
            for event in map(clean, chunk.events):
                if event is None:
                    continue
                if event["ph"] != "M":
                    time = event.get("ts")
                    if time is None or time < since:
                        continue
                    times.append(time)
                    end = max(end, time + event.get("dur", 0))
                    if event.get("name", "").startswith(_STEP) and event.get("cat") == "user_annotation":
                        steps.append(time)
                kept.append(event)
            if kept:
                file.write(comma + orjson.dumps(kept)[1:-1])
                comma = b",\n"
        base = base_time_ns(stream.keys, source.path)
        file.write(b"]," + orjson.dumps(_keys(stream.keys, base))[1:])
    return CleanProfile(
        out,
        base,
        np.sort(times),
        np.sort(steps),
        end,
        clean.dropped,
        [re.sub(r"^byte \d+: ", "", note) for note in stream.notes],
    )


def _keys(keys: dict[str, Any], base: int) -> dict[str, Any]:
    said: dict[str, Any] = {"schemaVersion": 1, "displayTimeUnit": "ms"}
    if "baseTimeNanoseconds" in keys:
        said["baseTimeNanoseconds"] = base
    devices = keys.get("deviceProperties")
    if isinstance(devices, list):
        said["deviceProperties"] = [_device(device) for device in devices if isinstance(device, dict)]
    distributed = keys.get("distributedInfo")
    if isinstance(distributed, dict):
        said["distributedInfo"] = {
            key: distributed[key] for key in ("rank", "world_size") if type(distributed.get(key)) is int
        }
    return said


def _device(device: dict[str, Any]) -> dict[str, Any]:
    said = {key: device[key] for key in _DEVICE_NUMBERS if type(device.get(key)) is int}
    name = device.get("name")
    return said | ({"name": name} if isinstance(name, str) and _DEVICE.fullmatch(name) else {})
