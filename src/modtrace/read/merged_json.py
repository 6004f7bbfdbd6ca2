"""The module tracks of a merged trace in JSON, above threads and above GPU streams, as a timeline again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from .._errors import TraceError
from .._typing import Int64Array
from ..formats.chrome_values import MAX_TIME_US, TrackKey, is_track_key, microseconds_to_ns
from ..formats.escape import escaped
from ..formats.header import EDITED_FILE_ERRORS, WHAT_TO_DO, checked_header, is_int64, is_tid
from ..formats.slice_args import CATEGORIES, PARTS_CATEGORY, FileSlice, is_usable
from ..formats.span_args import RESERVED_ARGS
from ..timeline import PHASES, RECOMPUTE, Mark, Name, Timeline
from ..timeline.contents import TRACK_KINDS
from .stream_rows import ROW_PREFIX, StreamSpan, add_stream_spans, stream_number
from .timeline_builder import SpanColumns, build_timeline_from

__all__ = ["MergedEvents"]

SEPARATOR = " · "
"""What stands between the kind of a track and its thread."""


class MergedEvents:
    """Takes a merged trace's events, in any order, and picks out what the recording added.

    Above the threads of the process they are the recording's spans; above the streams of a GPU, spans of the modules
    whose kernels ran there.
    """

    def __init__(self) -> None:
        self._columns = SpanColumns()
        self._where: list[TrackKey] = []
        self._start: list[float] = []
        self._duration: list[float] = []
        self._row_names: dict[TrackKey, str] = {}
        self._links: dict[tuple[int | str, str, int], int] = {}
        self._marks: list[tuple[float, str, str]] = []
        self._samples: dict[tuple[int | str, str, str], list[tuple[float, int]]] = {}
        self._slices: list[tuple[dict[str, Any], float, float]] = []

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
            self._span(event, PHASES.index(category))
        elif kind == "X" and category in CATEGORIES:
            self._slice(event)
        elif kind == "M" and event["name"] == "thread_name":
            self._row_names[_row(event)] = str(event["args"]["name"])
        elif kind == "i" and category in ("step", "mark"):
            self._marks.append((_time(event["ts"]), category, _text(event["name"])))
        elif kind == "C" and category != PARTS_CATEGORY:
            for unit, value in event["args"].items():
                counter = (event["pid"], _text(event["name"]), unit)
                self._samples.setdefault(counter, []).append((_time(event["ts"]), _int64(value)))

    def timeline(self, path: str, base: int, merge_metadata: Any) -> Timeline:
        """Return the recording, and with it a track per GPU stream.

        Args:
            path: the trace, for errors.
            base: Unix nanoseconds from which the trace's times count.
            merge_metadata: what the trace says of how it was made; its header describes the recording as a whole. Where
                there is none, or it was edited, the rows' names are taken at their word.
        """
        try:
            header = checked_header(path, merge_metadata["header"], merged=True)
        except (TraceError, KeyError, TypeError):
            header = self._header_by_row_names()
        if header.get("begin_ns") is not None:
            header["begin_ns"] += base
        lane_of_row = {(lane["pid"], lane["tid"]): index for index, lane in enumerate(header["lanes"])}
        pids = [process["trace_pid"] for process in header["processes"]]
        counters = [
            (pids[counter["process"]], escaped(counter["name"]), escaped(counter["unit"]))
            for counter in header["counters"]
        ]
        start = base + _nanoseconds(self._start)
        end = start + _nanoseconds(self._duration)
        kept = [index for index, row in enumerate(self._where) if row in lane_of_row]
        columns = self._columns
        chosen = SpanColumns(names=columns.names, lane=[lane_of_row[self._where[index]] for index in kept])
        for column in ("name", "phase", "call", "step", "complete", "link"):
            setattr(chosen, column, [getattr(columns, column)[index] for index in kept])
        chosen.span_args = {
            position: columns.span_args[index] for position, index in enumerate(kept) if index in columns.span_args
        }
        times = base + _nanoseconds([time for time, _, _ in self._marks])
        chosen.marks = [
            Mark(time, kind, text) for time, (_, kind, text) in zip(times.tolist(), self._marks, strict=True)
        ]
        for number, counter in enumerate(counters):
            samples = self._samples.get(counter, [])
            times = base + _nanoseconds([time for time, _ in samples])
            chosen.samples[number] = (times.tolist(), [value for _, value in samples])
        self._add_slices(chosen, header, lane_of_row, base)
        try:
            timeline = build_timeline_from(header, chosen, start[kept], end[kept])
        except EDITED_FILE_ERRORS as error:
            raise TraceError(path, f"its rows are not as modtrace writes them: {error!r}; {WHAT_TO_DO}") from error
        return add_stream_spans(timeline, list(self._stream_spans(start, end)))

    def _add_slices(
        self, chosen: SpanColumns, header: Mapping[str, Any], lane_of_row: Mapping[TrackKey, int], base: int
    ) -> None:
        """Take the slices that are on a row of their kind."""
        starts = base + _nanoseconds([start for _, start, _ in self._slices])
        ends = starts + _nanoseconds([duration for *_, duration in self._slices])
        for (event, *_), start, end in zip(self._slices, starts.tolist(), ends.tolist(), strict=True):
            lane = lane_of_row.get(_row(event))
            if lane is not None and header["tracks"][header["lanes"][lane]["track"]]["kind"] == event["cat"]:
                found = FileSlice(event["cat"], lane, start, end, event["name"], event.get("args", {}))
                chosen.slices += [found] if is_usable(found) else []

    def _stream_spans(self, start: Int64Array, end: Int64Array) -> Iterator[StreamSpan]:
        columns, names = self._columns, list(self._columns.names)
        for index, row in enumerate(self._where):
            row_name = self._row_names.get(row, "")
            if row_name.startswith(ROW_PREFIX):
                yield StreamSpan(
                    row[0] if isinstance(row[0], int) else stream_number(row[0]),
                    stream_number(row_name),
                    int(start[index]),
                    int(end[index]),
                    Name(*names[columns.name[index]]),
                    PHASES[columns.phase[index]],
                    columns.call[index],
                    columns.step[index],
                )

    def _header_by_row_names(self) -> dict[str, Any]:
        """Return what a header says, as far as names of rows tell it: `forward · MainThread`."""
        parted = {row: name.split(SEPARATOR, 1) for row, name in self._row_names.items() if SEPARATOR in name}
        tracks = {row: parts for row, parts in parted.items() if parts[0] in TRACK_KINDS}
        pids = list(dict.fromkeys([pid for pid, _ in tracks] + [pid for pid, _, _ in self._samples]))
        return {
            "processes": [
                {"pid": pid if isinstance(pid, int) else 0, "rank": None, "program": "python", "trace_pid": pid}
                for pid in pids
            ],
            "tracks": [
                {"kind": kind, "thread": thread, "tid": tid, "process": pids.index(pid)}
                for (pid, tid), (kind, thread) in tracks.items()
            ],
            "lanes": [{"track": index, "pid": pid, "tid": tid} for index, (pid, tid) in enumerate(tracks)],
            "counters": [{"name": name, "unit": unit, "process": pids.index(pid)} for pid, name, unit in self._samples],
            "stats": {},
            "metadata": {},
        }

    def _span(self, event: dict[str, Any], phase: int) -> None:
        columns, args = self._columns, event["args"]
        name = (_text(event["name"]), _text(args["fqn"]), _text(args["module_class"]))
        row, start, duration = _row(event), _time(event["ts"]), _time(event["dur"])
        call, step = _int64(args["call"]), _int64(args["step"])
        if duration < 0:
            return
        self._where.append(row)
        self._start.append(start)
        self._duration.append(duration)
        columns.phase.append(phase)
        columns.name.append(columns.names[name])
        columns.call.append(call)
        columns.step.append(step)
        columns.complete.append(args.get("complete", True) is True)
        key = (event["pid"], args["fqn"], call)
        columns.link.append(-1 if phase == RECOMPUTE else self._links.setdefault(key, len(self._links)))
        own = {key: text for key, text in args.items() if key not in RESERVED_ARGS and isinstance(text, str)}
        if own:
            columns.span_args[len(self._where) - 1] = own

    def _slice(self, event: dict[str, Any]) -> None:
        start, duration = _time(event["ts"]), _time(event["dur"])
        if _row(event) and duration >= 0 and isinstance(event.get("args", {}), dict):
            self._slices.append((event, start, duration))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _int64(value: Any) -> int:
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
