"""The module tracks of a merged trace in JSON, as a timeline again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from .._typing import Int64Array
from ..formats.header import is_int64, is_tid
from ..profiler.trace.event_columns import MAX_TIME_US, TrackKey, is_track_key, microseconds_to_ns
from ..timeline import PHASES, RECOMPUTE, Mark, Timeline
from .timeline_builder import SpanColumns, build_timeline_from

__all__ = ["MergedEvents"]

SEPARATOR = " · "
"""What stands between the kind of a track and its thread."""


class MergedEvents:
    """Takes a merged trace's events, in any order, and picks out what the recording added.

    The arguments that a recording may note beside the fixed fields are not in a merged trace.
    """

    def __init__(self) -> None:
        self._rows = SpanColumns()
        self._where: list[TrackKey] = []
        self._start: list[float] = []
        self._duration: list[float] = []
        self._names: dict[TrackKey, str] = {}
        self._links: dict[tuple[int | str, str, int], int] = {}
        self._marks: list[tuple[float, str, str]] = []
        self._samples: dict[tuple[int | str, str, str], list[tuple[float, int]]] = {}

    def __len__(self) -> int:
        """How many spans were found."""
        return len(self._start)

    def add(self, events: Iterable[Any]) -> None:
        """Take some events; what is malformed counts as nothing: a merged trace keeps the profiler's as they are."""
        for event in events:
            with contextlib.suppress(AttributeError, KeyError, TypeError):
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        kind, category = event["ph"], event.get("cat")
        if kind == "X" and category in PHASES and "fqn" in event.get("args", ()):
            self._slice(event, PHASES.index(category))
        elif kind == "M" and event["name"] == "thread_name":
            self._names[_row(event)] = str(event["args"]["name"])
        elif kind == "i" and category in ("step", "mark"):
            self._marks.append((_time(event["ts"]), category, _text(event["name"])))
        elif kind == "C":
            for unit, value in event["args"].items():
                counter = (event["pid"], _text(event["name"]), unit)
                self._samples.setdefault(counter, []).append((_time(event["ts"]), _whole(value)))

    def timeline(self, base: int) -> Timeline:
        """Return what lies above threads; what lies above the streams of a device is no span.

        Args:
            base: Unix nanoseconds from which the trace's times count.
        """
        parted = {key: name.split(SEPARATOR, 1) for key, name in self._names.items() if SEPARATOR in name}
        tracks = {key: said for key, said in parted.items() if said[0] in ("forward", "backward")}
        number = {key: index for index, key in enumerate(tracks)}
        kept = [at for at, key in enumerate(self._where) if key in number]
        rows = self._rows
        chosen = SpanColumns(names=rows.names, lane=[number[self._where[at]] for at in kept])
        for column in ("name", "phase", "call", "step", "complete", "link"):
            setattr(chosen, column, [getattr(rows, column)[at] for at in kept])
        times = base + _nanoseconds([time for time, _, _ in self._marks])
        chosen.marks = [
            Mark(time, kind, text) for time, (_, kind, text) in zip(times.tolist(), self._marks, strict=True)
        ]
        for counter, samples in enumerate(self._samples.values()):
            times = base + _nanoseconds([time for time, _ in samples])
            chosen.samples[counter] = (times.tolist(), [value for _, value in samples])
        start = base + _nanoseconds(self._start)[kept]
        pids = list(dict.fromkeys([pid for pid, _ in tracks] + [pid for pid, _, _ in self._samples]))
        header = {
            "processes": [
                {"pid": pid if isinstance(pid, int) else 0, "rank": None, "program": "python"} for pid in pids
            ],
            "tracks": [
                {"kind": kind, "thread": thread, "tid": tid, "process": pids.index(pid)}
                for (pid, tid), (kind, thread) in tracks.items()
            ],
            "lanes": [{"track": index} for index in range(len(tracks))],
            "counters": [{"name": name, "unit": unit, "process": pids.index(pid)} for pid, name, unit in self._samples],
            "stats": {},
            "metadata": {},
            "escaped_originals": {},
        }
        return build_timeline_from(header, chosen, start, start + _nanoseconds(self._duration)[kept])

    def _slice(self, event: dict[str, Any], phase: int) -> None:
        rows, said = self._rows, event["args"]
        name = (_text(event["name"]), _text(said["fqn"]), _text(said["module_class"]))
        row, start, duration = _row(event), _time(event["ts"]), _time(event["dur"])
        call, step = _whole(said["call"]), _whole(said["step"])
        if duration < 0:
            return
        self._where.append(row)
        self._start.append(start)
        self._duration.append(duration)
        rows.phase.append(phase)
        rows.name.append(rows.names.setdefault(name, len(rows.names)))
        rows.call.append(call)
        rows.step.append(step)
        rows.complete.append(said.get("complete", True) is True)
        key = (event["pid"], said["fqn"], call)
        rows.link.append(-1 if phase == RECOMPUTE else self._links.setdefault(key, len(self._links)))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _whole(value: Any) -> int:
    if not is_int64(value):
        raise TypeError(value)
    return int(value)


def _time(value: Any) -> float:
    if not isinstance(value, int | float) or not abs(value) < MAX_TIME_US:
        raise TypeError(value)
    return value


def _row(event: dict[str, Any]) -> TrackKey:
    row = (event["pid"], event["tid"])
    if not is_track_key(row) or not is_tid(row[1]):
        raise TypeError(row)
    return row


def _nanoseconds(microseconds: list[float]) -> Int64Array:
    return microseconds_to_ns(np.array(microseconds, np.float64))
