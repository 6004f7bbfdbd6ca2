"""Copy a profiler's trace, plain or merged, for a report: only events and fields that are known to be harmless."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from .._typing import Float64Array
from ..profiler.result import MERGED
from ..profiler.trace.event_stream import EventStream
from ..profiler.trace.trace_file import TraceFile, base_time_ns
from .aliases import ReportNames
from .event_filter import EventFilter
from .identity import REPORT_START_NS, IdNumbers

__all__ = ["CleanProfile", "clean_profile", "cut_profile"]

_STEP_PREFIX = "ProfilerStep#"
_DEVICE_NUMBER_KEYS = (
    *("id", "totalGlobalMem", "computeMajor", "computeMinor", "maxThreadsPerBlock", "maxThreadsPerMultiprocessor"),
    *("regsPerBlock", "regsPerMultiprocessor", "warpSize", "sharedMemPerBlock", "sharedMemPerMultiprocessor"),
    *("numSms", "sharedMemPerBlockOptin"),
)
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*\w*", re.ASCII)
_DEVICE_NAME = re.compile(r"(?:NVIDIA|Tesla|Quadro|GeForce|RTX|AMD|Instinct|Radeon|Intel)[\w -]{0,60}", re.ASCII)


_BEFORE_FIRST_US = 86_400_000_000
"""What the time of the first event in the file becomes, µs: events need not be in the order of their times."""


@dataclass(frozen=True)
class CleanProfile:
    """The copy; its times begin near `REPORT_START_NS`.

    Attributes:
        path: its file, JSON.
        base: Unix ns from which its times count.
        times: float64[events], µs from the base, ascending: when events begin.
        steps: float64[steps], µs from the base, ascending: when steps begin.
        step_durations: float64[steps], µs.
        end: µs from the base: when the last event ends.
        dropped: how many events were left out because they are not known to be harmless.
        notes: what was wrong with the file.
    """

    path: Path
    base: int
    times: Float64Array
    steps: Float64Array
    step_durations: Float64Array
    end: float
    dropped: int
    notes: list[str]


def clean_profile(path: str | os.PathLike[str], out: Path, names: ReportNames) -> CleanProfile:
    """Write the harmless part of a trace to `out`, with other times and ids of processes.

    Args:
        path: the trace.
        out: the JSON file to write.
        names: replaces texts.

    Raises:
        TraceError: it cannot be read.
    """
    event_filter = EventFilter(names, IdNumbers())
    times, steps, durations = array("d"), array("d"), array("d")
    end = float("-inf")
    shift: int | None = None
    with TraceFile(path) as source, out.open("wb") as file:
        stream = EventStream(source)
        writer = _EventWriter(file)
        for chunk in stream.chunks():
            clean_events = []
            for event in map(event_filter, chunk.events):
                if event is None:
                    continue
                if event["ph"] != "M":
                    if "ts" not in event:
                        continue
                    if shift is None:
                        shift = int(event["ts"]) - _BEFORE_FIRST_US
                    time = event["ts"] = event["ts"] - shift
                    times.append(time)
                    end = max(end, time + event.get("dur", 0))
                    if event.get("name", "").startswith(_STEP_PREFIX) and event.get("cat") == "user_annotation":
                        steps.append(time)
                        durations.append(event.get("dur", 0))
                clean_events.append(event)
            writer.write(clean_events)
        base_time_ns(stream.keys, source.path)  # refuses what is no time
        base = REPORT_START_NS - _BEFORE_FIRST_US * 1000
        writer.close(_clean_keys(stream.keys, base))
    order = np.argsort(steps, kind="stable")
    notes = [re.sub(r"^byte \d+: ", "", note) for note in stream.notes]
    step_starts, step_durations = np.asarray(steps)[order], np.asarray(durations)[order]
    return CleanProfile(out, base, np.sort(times), step_starts, step_durations, end, event_filter.dropped, notes)


def cut_profile(profile: CleanProfile, out: Path, windows: Sequence[tuple[float, float]]) -> None:
    """Write the events of a clean trace that begin within some windows.

    Args:
        profile: the clean trace.
        out: the JSON file to write.
        windows: start and end, µs from the base; the end is not part of it.
    """
    starts, ends = (np.array(bounds) for bounds in zip(*sorted(windows), strict=True))
    with TraceFile(profile.path) as source, out.open("wb") as file:
        stream = EventStream(source)
        writer = _EventWriter(file)
        for chunk in stream.chunks():
            times = np.array([event.get("ts", np.nan) for event in chunk.events], np.float64)
            window = np.searchsorted(starts, times, side="right") - 1
            within = np.isnan(times) | (window >= 0) & (times < ends[window])
            writer.write([event for event, keep in zip(chunk.events, within.tolist(), strict=True) if keep])
        writer.close(stream.keys)


class _EventWriter:
    """Writes a trace some events at a time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._separator = b""
        file.write(b'{"traceEvents":[')

    def write(self, events: list[Any]) -> None:
        if events:
            self._file.write(self._separator + orjson.dumps(events)[1:-1])
            self._separator = b",\n"

    def close(self, keys: dict[str, Any]) -> None:
        # A merged trace is known by how it goes on behind its events.
        self._file.write(b"\n],\n" + orjson.dumps(keys)[1:])


def _clean_keys(keys: dict[str, Any], base: int) -> dict[str, Any]:
    merged = keys.get(MERGED)
    clean: dict[str, Any] = {} if merged is None else {MERGED: _clean_merge_metadata(merged)}
    clean |= {"schemaVersion": 1, "displayTimeUnit": "ms"}
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
