"""Copy a profiler's trace, plain or merged, for a report: only events and fields that are known to be harmless."""

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
from ..profiler.result import MERGED
from ..profiler.trace.event_stream import EventStream
from ..profiler.trace.trace_file import TraceFile, base_time_ns
from .aliases import ReportNames
from .event_filter import EventFilter

__all__ = ["CleanProfile", "clean_profile"]

_STEP_PREFIX = "ProfilerStep#"
_DEVICE_NUMBER_KEYS = (
    *("id", "totalGlobalMem", "computeMajor", "computeMinor", "maxThreadsPerBlock", "maxThreadsPerMultiprocessor"),
    *("regsPerBlock", "regsPerMultiprocessor", "warpSize", "sharedMemPerBlock", "sharedMemPerMultiprocessor"),
    *("numSms", "sharedMemPerBlockOptin"),
)
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*\w*", re.ASCII)
_DEVICE_NAME = re.compile(r"(?:NVIDIA|Tesla|Quadro|GeForce|RTX|AMD|Instinct|Radeon|Intel)[\w -]{0,60}", re.ASCII)


@dataclass(frozen=True)
class CleanProfile:
    """The copy.

    Attributes:
        path: its file, JSON.
        base: Unix ns from which its times count.
        times: float64[events], µs from the base, ascending: when events begin.
        steps: float64[steps], µs from the base, ascending: when steps begin.
        end: µs from the base: when the last event ends.
        dropped: how many events were left out because they are not known to be harmless.
        notes: what was wrong with the file.
    """

    path: Path
    base: int
    times: Float64Array
    steps: Float64Array
    end: float
    dropped: int
    notes: list[str]


def clean_profile(
    path: str | os.PathLike[str], out: Path, names: ReportNames, since: float = float("-inf")
) -> CleanProfile:
    """Write the harmless part of a trace to `out`.

    Args:
        path: the trace.
        out: the JSON file to write.
        names: replaces texts.
        since: µs from the base; events that begin earlier are left out.

    Raises:
        TraceError: it cannot be read.
    """
    event_filter = EventFilter(names)
    times, steps = array("d"), array("d")
    end = float("-inf")
    with TraceFile(path) as source, out.open("wb") as file:
        stream = EventStream(source)
        file.write(b'{"traceEvents":[')
        separator = b""
        for chunk in stream.chunks():
            clean_events = []
            for event in map(event_filter, chunk.events):
                if event is None:
                    continue
                if event["ph"] != "M":
                    time = event.get("ts")
                    if time is None or time < since:
                        continue
                    times.append(time)
                    end = max(end, time + event.get("dur", 0))
                    if event.get("name", "").startswith(_STEP_PREFIX) and event.get("cat") == "user_annotation":
                        steps.append(time)
                clean_events.append(event)
            if clean_events:
                file.write(separator + orjson.dumps(clean_events)[1:-1])
                separator = b",\n"
        base = base_time_ns(stream.keys, source.path)
        # A merged trace is known by how it goes on behind its events.
        file.write(b"\n],\n" + orjson.dumps(_clean_keys(stream.keys, base))[1:])
    return CleanProfile(
        out,
        base,
        np.sort(times),
        np.sort(steps),
        end,
        event_filter.dropped,
        [re.sub(r"^byte \d+: ", "", note) for note in stream.notes],
    )


def _clean_keys(keys: dict[str, Any], base: int) -> dict[str, Any]:
    merged = keys.get(MERGED)
    clean: dict[str, Any] = {} if merged is None else {MERGED: _clean_merge_metadata(merged)}
    clean |= {"schemaVersion": 1, "displayTimeUnit": "ms"}
    if "baseTimeNanoseconds" in keys:
        clean["baseTimeNanoseconds"] = base
    devices = keys.get("deviceProperties")
    if isinstance(devices, list):
        clean["deviceProperties"] = [_clean_device(device) for device in devices if isinstance(device, dict)]
    distributed = keys.get("distributedInfo")
    if isinstance(distributed, dict):
        clean["distributedInfo"] = {
            key: distributed[key] for key in ("rank", "world_size") if type(distributed.get(key)) is int
        }
    return clean


def _clean_merge_metadata(merged: object) -> dict[str, Any]:
    version = merged.get("version") if isinstance(merged, dict) else None
    return {"version": version} if isinstance(version, str) and _VERSION.fullmatch(version) else {}


def _clean_device(device: dict[str, Any]) -> dict[str, Any]:
    clean = {key: device[key] for key in _DEVICE_NUMBER_KEYS if type(device.get(key)) is int}
    name = device.get("name")
    return clean | ({"name": name} if isinstance(name, str) and _DEVICE_NAME.fullmatch(name) else {})
