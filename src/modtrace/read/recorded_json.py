"""The events of a recording in Chrome's JSON: in a file of its own, and among those of a trace of torch.profiler."""

import os
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from .._errors import TraceError
from .._numbering import Numbering
from .._typing import Int64Array
from ..formats.chrome_values import MAX_TIME_US, TrackKey, base_time_ns, is_track_key, microseconds_to_ns
from ..formats.escape import escaped
from ..formats.event_stream import EventStream
from ..formats.header import EDITED_FILE_ERRORS, WHAT_TO_DO, checked_header, is_int64, is_tid
from ..formats.limits import BIND_ID_OFFSET, MAX_CHROME_NS, MAX_TIME_NS
from ..formats.slice_args import CATEGORIES, LAUNCH_CATEGORY, PARTS_CATEGORY, FileSlice, is_usable
from ..formats.span_args import FLOW_CATEGORY, RESERVED_ARGS
from ..formats.trace_file import MERGED, TraceFile, gpu_work_in, with_annotated_ranges
from ..timeline import PHASES, Mark, Name, Timeline
from ..timeline.contents import TRACK_KINDS
from ..timeline.join import move_times
from .timeline_builder import ROW_PREFIX, SpanColumns, StreamSpan, add_stream_spans, build_timeline_from, stream_number

Event = dict[str, Any]

FIXED_ARGS = 4
"""How many args every span has."""

SEPARATOR = " · "
"""What stands between the kind of a track and its thread."""


def load_chrome(path: Path, source: TraceFile) -> Timeline:
    """Read the timeline out of Chrome's JSON.

    Raises:
        TraceError: it is no JSON, is cut off, or was not written by modtrace.
    """
    stream, reader = EventStream(source, strict=True), RecordedEvents()
    header = checked_header(path, stream.keys.get("otherData"))
    try:
        for chunk in stream.chunks():
            reader.take(chunk.events)
        base = stream.keys["baseTimeNanoseconds"]
        if type(base) is not int or abs(base) > MAX_TIME_NS:
            raise ValueError(f"baseTimeNanoseconds is {base!r}")
        return reader.timeline(header, base)
    except EDITED_FILE_ERRORS as error:
        raise TraceError(path, f"its events are not as modtrace writes them: {error!r}; {WHAT_TO_DO}") from error


def load_profile(path: str | os.PathLike[str]) -> Timeline:
    """Read the recording out of a merged trace, or make a timeline of what the profiler noted of modules.

    What cannot be known of the second is in the timeline's metadata, as `notes`.

    Raises:
        TraceError: it is no such trace, or nothing of it can be read.
    """
    from ..profiler.event_collector import EventCollector
    from ..profiler.overlay import overlay
    from ..profiler.stream_spans import with_stream_spans

    merged, collector = RecordedEvents(merged=True), EventCollector()
    with TraceFile(path) as file:
        stream = EventStream(file)
        for chunk in stream.chunks():
            merged.take(chunk.events)
            collector.add(chunk.events)
        base = base_time_ns(stream.keys, file.path)
        if merged or MERGED in stream.keys:
            metadata = stream.keys.get(MERGED)
            timeline = merged.merged_timeline(file.path, base, metadata)
            timeline = with_annotated_ranges(timeline, file.path, metadata)
            return replace(timeline, gpu_work=gpu_work_in(file.path, metadata))
        events = collector.events()
        made = overlay(None, events, stream.keys, file.path)
    timeline = move_times(with_stream_spans(made.timeline, events, made.devices), lambda time: time + base)
    return replace(timeline, metadata={**timeline.metadata, "notes": [*made.notes, *stream.notes()]})


class RecordedEvents:
    """Takes the events of a recording in the order of the file.

    Args:
        merged: whether the trace is a merged one. Then the events of the profiler are among them, and what is not as
            modtrace writes it counts as nothing: a merged trace keeps the profiler's as they are.
    """

    def __init__(self, *, merged: bool = False) -> None:
        self._merged = merged
        self._rows = SpanColumns()
        self._lanes = Numbering[TrackKey]()
        self._ts = array("d")
        self._dur = array("d")
        self._phases = {phase: code for code, phase in enumerate(PHASES)}
        self._marks: list[tuple[float, str, str]] = []
        self._samples: dict[tuple[int | str, str, str], list[tuple[float, int]]] = {}
        self._slices: list[Event] = []
        self._row_names: dict[TrackKey, str] = {}

    def __len__(self) -> int:
        """How many spans were found."""
        return len(self._ts)

    def take(self, events: list[Any]) -> None:
        """Take the next events of the file.

        Raises:
            Exception: one of `EDITED_FILE_ERRORS`: an event of a file of its own is not as modtrace writes it.
        """
        spans: list[Event] = []
        flow_ends: list[tuple[int, int]] = []
        for event in filter(_is_ours, events) if self._merged else events:
            kind = event["ph"]
            if kind == "X" and event["cat"] in CATEGORIES:
                self._slices.append(event)
            elif kind == "X":
                spans.append(event)
            elif kind in ("s", "f") and event["cat"] not in (LAUNCH_CATEGORY, *CATEGORIES):
                # The writer puts an arrow's end right after its span.
                flow_ends.append((len(self._ts) + len(spans) - 1, event["id"]))
            elif kind == "i":
                self._marks.append((event["ts"], event["cat"], event["name"]))
            elif kind == "C" and event.get("cat") != PARTS_CATEGORY:
                for unit, value in event["args"].items():
                    if type(value) is not int:
                        raise ValueError(f"a sample of {event['name']} is {value!r}")
                    self._samples.setdefault((event["pid"], event["name"], unit), []).append((event["ts"], value))
            elif kind == "M" and self._merged:
                self._row_names[_row(event)] = event["args"]["name"]
        self._spans(spans)
        for row, link in flow_ends if len(self) else ():
            self._rows.link[row] = link

    def timeline(self, header: Mapping[str, Any], base: int) -> Timeline:
        """Return what has been read.

        Args:
            header: what the file says of the recording as a whole.
            base: Unix nanoseconds from which times count.
        """
        lanes = {(lane["pid"], lane["tid"]): index for index, lane in enumerate(header["lanes"])}
        rows: Any = self._rows
        rows.start, rows.end = self._times(base)
        self._ts, self._dur = array("d"), array("d")
        lane_of_row = np.array([lanes.get(row, -1) if self._merged else lanes[row] for row in self._lanes], np.int32)
        lane = lane_of_row[rows.take_out("lane")] if len(rows.start) else lane_of_row
        rows = rows.move_to(lane)
        moments = self._nanoseconds([ts for ts, _, _ in self._marks]) + base
        rows.marks = [
            Mark(time, kind, text) for time, (_, kind, text) in zip(moments.tolist(), self._marks, strict=True)
        ]
        self._add_counters(rows, header, base)
        starts, lengths = (self._nanoseconds([event[key] for event in self._slices]) for key in ("ts", "dur"))
        kinds = [header["tracks"][lane["track"]]["kind"] for lane in header["lanes"]]
        for event, begin, length in zip(self._slices, (base + starts).tolist(), lengths.tolist(), strict=True):
            row = _row(event)
            if self._merged and (row not in lanes or kinds[lanes[row]] != event["cat"]):
                continue
            file_slice = FileSlice(
                event["cat"], lanes[row], begin, begin + length, event["name"], event.get("args", {})
            )
            rows.slices += [file_slice] if not self._merged or is_usable(file_slice) else []
        return build_timeline_from(header, rows)

    def merged_timeline(self, path: str, base: int, merge_metadata: Any) -> Timeline:
        """Return the recording in a merged trace, and with it a track per GPU stream.

        Args:
            path: the trace, for errors.
            base: Unix nanoseconds from which the trace's times count.
            merge_metadata: what the trace says of how it was made; its header describes the recording as a whole. In a
                report there is none: there, or if it was edited, the rows' names are taken at their word.
        """
        try:
            header = checked_header(path, merge_metadata["header"], merged=True)
        except (TraceError, KeyError, TypeError):
            header = self._header_by_row_names()
        if header.get("begin_ns") is not None:
            header["begin_ns"] += base
        stream_spans = list(self._stream_spans(*self._times(base)))
        try:
            timeline = self.timeline(header, base)
        except EDITED_FILE_ERRORS as error:
            raise TraceError(path, f"its rows are not as modtrace writes them: {error!r}; {WHAT_TO_DO}") from error
        return add_stream_spans(timeline, stream_spans)

    def _add_counters(self, rows: SpanColumns, header: Mapping[str, Any], base: int) -> None:
        pids = [process["trace_pid"] for process in header["processes"]]
        numbers = {
            (pids[counter["process"]], escaped(counter["name"]), escaped(counter["unit"])): number
            for number, counter in enumerate(header["counters"])
        }
        for key, samples in self._samples.items():
            if key in numbers:
                times = self._nanoseconds([ts for ts, _ in samples]) + base
                rows.samples[numbers[key]] = (times.tolist(), [value for _, value in samples])
            elif not self._merged:
                pid, name, unit = key
                raise ValueError(f"the header knows no counter {name!r} of {unit!r} in process {pid}")

    def _stream_spans(self, start: Int64Array, end: Int64Array) -> Iterator[StreamSpan]:
        rows, names = self._rows, list(self._rows.names)
        keys = list(self._lanes)
        for index, lane in enumerate(rows.lane):
            pid, _ = keys[lane]
            row_name = self._row_names.get(keys[lane], "")
            if row_name.startswith(ROW_PREFIX):
                device = pid if isinstance(pid, int) else stream_number(pid)
                times = int(start[index]), int(end[index])
                name, phase = Name(*names[rows.name[index]]), PHASES[rows.phase[index]]
                call, step = rows.call[index], rows.step[index]
                yield StreamSpan(device, stream_number(row_name), *times, name, phase, call, step)

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

    def _spans(self, spans: list[Event]) -> None:
        rows, first = self._rows, len(self)
        args = [span["args"] for span in spans]
        rows.lane.extend([self._lanes[span["pid"], span["tid"]] for span in spans])
        rows.phase.extend([self._phases[span["cat"]] for span in spans])
        rows.name.extend(
            [
                rows.names[span["name"], span_args["fqn"], span_args["module_class"]]
                for span, span_args in zip(spans, args, strict=True)
            ]
        )
        rows.call.extend([span_args["call"] for span_args in args])
        rows.step.extend([span_args["step"] for span_args in args])
        rows.complete.extend([span_args.get("complete", True) is True for span_args in args])
        rows.link.extend(
            [
                span["bind_id"] - BIND_ID_OFFSET if "bind_id" in span else span_args.get("link", -1)
                for span, span_args in zip(spans, args, strict=True)
            ]
        )
        for row, span_args in enumerate(args, first):
            if len(span_args) > FIXED_ARGS:
                extra = {key: value for key, value in span_args.items() if key not in RESERVED_ARGS}
                if self._merged:
                    extra = {key: value for key, value in extra.items() if isinstance(value, str)}
                if not all(isinstance(value, str) for value in extra.values()):
                    raise ValueError(f"an argument in {extra!r} is no text")
                if extra:
                    rows.span_args[row] = extra
        self._ts.extend([span["ts"] for span in spans])
        self._dur.extend([span["dur"] for span in spans])

    def _times(self, base: int) -> tuple[Int64Array, Int64Array]:
        """Return when spans start and end, in Unix nanoseconds."""
        start = self._nanoseconds(self._ts) + base
        return start, start + self._nanoseconds(self._dur)

    def _nanoseconds(self, microseconds: "array[float] | list[float]") -> Int64Array:
        """Convert times as the writer has them: in a file of its own from 0 on, and no longer than it writes."""
        times = np.array(microseconds, np.float64)
        wrong = np.flatnonzero(~((times >= 0) & (times < MAX_CHROME_NS / 1000)))
        if len(wrong) and not self._merged:
            raise ValueError(f"a time is {microseconds[wrong[0]]!r} µs")
        return microseconds_to_ns(times)


def _row(event: Event) -> TrackKey:
    return event["pid"], event["tid"]


def _is_ours(event: Any) -> bool:
    """Whether an event of a merged trace is one of the recording's, and as modtrace writes it."""
    try:
        kind, category = event["ph"], event.get("cat")
        if kind == "X":
            args = event.get("args", {})
            if category in PHASES:
                texts = (event["name"], args["fqn"], args["module_class"])
                numbers = (args["call"], args["step"], args.get("link", 0), event.get("bind_id", 0))
                if not (all(isinstance(text, str) for text in texts) and all(map(is_int64, numbers))):
                    return False
            elif category not in CATEGORIES or not isinstance(args, dict):
                return False
            return _is_row(event) and _is_time(event["ts"]) and _is_time(event["dur"]) and event["dur"] >= 0
        if kind == "M":
            return event["name"] == "thread_name" and _is_row(event) and isinstance(event["args"]["name"], str)
        if kind == "i":
            return category in ("step", "mark") and isinstance(event["name"], str) and _is_time(event["ts"])
        if kind == "C":
            samples = event["args"].values()
            return isinstance(event["name"], str) and _is_time(event["ts"]) and all(map(is_int64, samples))
        return kind in ("s", "f") and category == FLOW_CATEGORY and is_int64(event["id"])
    except (AttributeError, KeyError, TypeError):
        return False


def _is_row(event: Event) -> bool:
    return is_track_key(_row(event)) and is_tid(event["tid"])


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < MAX_TIME_US
