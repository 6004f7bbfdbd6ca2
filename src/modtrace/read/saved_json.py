"""Chrome's JSON as modtrace wrote it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson

from .._errors import TraceError
from .._typing import Int64Array
from ..formats.escape import escaped
from ..formats.header import EDITED_FILE_ERRORS, WHAT_TO_DO, checked_header
from ..formats.limits import (
    BIND_ID_OFFSET,
    MAX_CHROME_NS,
    MAX_EVENT_BYTES,
    MAX_HEAD_BYTES,
    MAX_TIME_NS,
    MAX_WHOLE_BYTES,
    LimitError,
    check_nested_json,
)
from ..formats.slice_args import CATEGORIES, LAUNCH_CATEGORY, PARTS_CATEGORY, FileSlice
from ..formats.span_args import RESERVED_ARGS
from ..timeline import PHASES, Mark, Timeline
from .timeline_builder import SpanColumns, build_timeline_from

__all__ = ["load_chrome"]

Event = dict[str, Any]

BATCH_BYTES = 1 << 22
"""Bytes of JSON that are parsed at a time."""

FIXED_ARGS = 4
"""How many args every span has."""

OPENING = b'"traceEvents":[\n'


def load_chrome(path: Path, file: BinaryIO) -> Timeline:
    """Read the timeline out of Chrome's JSON.

    Raises:
        TraceError: it is no JSON, is cut off, or was not written by modtrace.
    """
    document, batches = _opened(path, file)
    header = checked_header(path, document.get("otherData"))
    reader = _Reader(header)
    try:
        for events in batches:
            reader.take(events)
        base = document["baseTimeNanoseconds"]
        if type(base) is not int or abs(base) > MAX_TIME_NS:
            raise ValueError(f"baseTimeNanoseconds is {base!r}")
        return reader.timeline(base)
    except EDITED_FILE_ERRORS as error:
        raise TraceError(path, f"its events are not as modtrace writes them: {error!r}; {WHAT_TO_DO}") from error


def _opened(path: Path, file: BinaryIO) -> tuple[Event, Iterator[list[Event]]]:
    """Return what stands before the events, and the events; a part at a time where each is on its own line."""
    head = file.readline(MAX_HEAD_BYTES)
    opening = file.readline(len(OPENING)) if head.endswith(b",\n") else b""
    if opening == OPENING:
        document = _parsed(path, head[:-2] + b"}", 0)
        return document, _lines(path, file, len(head) + len(opening))
    text = head + opening
    text += file.read(max(MAX_WHOLE_BYTES - len(text), 0))
    if len(text) >= MAX_WHOLE_BYTES:
        raise TraceError(
            path,
            f"it is not laid out in lines, as modtrace saves it, and has more than {MAX_WHOLE_BYTES >> 20} MiB; "
            f"{WHAT_TO_DO}",
        )
    document = _parsed(path, text, 0)
    if isinstance(document, list):
        document = {"traceEvents": document}
    return document, iter([document.get("traceEvents", [])])


def _lines(path: Path, file: BinaryIO, offset: int) -> Iterator[list[Event]]:
    ended = False
    while text := file.read(BATCH_BYTES):
        text += file.readline(MAX_EVENT_BYTES)
        length = len(text)
        if length >= BATCH_BYTES + MAX_EVENT_BYTES:
            raise TraceError(path, f"an event has more than {MAX_EVENT_BYTES >> 20} MiB; {WHAT_TO_DO}", offset)
        text = text.strip()
        if text == b"]}" or text.endswith(b"\n]}"):
            ended = True
            text = text[:-2].rstrip()
        if text:
            yield _parsed(path, b"[" + text.removesuffix(b",") + b"]", offset - 1, offset + length)
        offset += length
    if not ended:
        raise TraceError(path, "it is cut off; the events behind this byte are missing", offset)


def _parsed(path: Path, text: bytes, offset: int, end: int | None = None) -> Any:
    """Parse what stands at byte `at` of the file, up to `end`."""
    try:
        check_nested_json(text)
        return orjson.loads(text)
    except LimitError as error:
        raise TraceError(path, f"{error}; {WHAT_TO_DO}", max(offset, 0)) from None
    except orjson.JSONDecodeError as error:
        # The error counts characters.
        error_offset = offset + len(error.doc[: error.pos].encode())
        error_offset = error_offset if end is None else min(error_offset, end)
        raise TraceError(path, f"it is no whole JSON: {error.msg}", error_offset) from error


class _Reader:
    def __init__(self, header: Event) -> None:
        self._header = header
        self._rows = SpanColumns()
        self._ts = array("d")
        self._dur = array("d")
        self._lanes = {(lane["pid"], lane["tid"]): index for index, lane in enumerate(header["lanes"])}
        pids = [process["trace_pid"] for process in header["processes"]]
        self._counters = {
            (pids[counter["process"]], escaped(counter["name"]), escaped(counter["unit"])): index
            for index, counter in enumerate(header["counters"])
        }
        self._phases = {phase: code for code, phase in enumerate(PHASES)}
        self._marks: list[tuple[float, str, str]] = []
        self._samples: dict[int, list[tuple[float, int]]] = {}
        self._slices: list[Event] = []

    def take(self, events: list[Event]) -> None:
        """Take the next events of the file."""
        spans: list[Event] = []
        flow_ends: list[tuple[int, int]] = []
        for event in events:
            kind = event["ph"]
            if kind == "X" and event["cat"] in CATEGORIES:
                self._slices.append(event)
            elif kind == "X":
                spans.append(event)
            elif kind in ("s", "f") and event["cat"] not in (LAUNCH_CATEGORY, *CATEGORIES):
                # The writer puts an arrow's end right behind its span.
                flow_ends.append((len(self._ts) + len(spans) - 1, event["id"]))
            elif kind == "i":
                self._marks.append((event["ts"], event["cat"], event["name"]))
            elif kind == "C" and event.get("cat") != PARTS_CATEGORY:
                ((unit, value),) = event["args"].items()
                counter = self._counters.get((event["pid"], event["name"], unit), -1)
                if counter < 0:
                    raise ValueError(
                        f"the header knows no counter {event['name']!r} of {unit!r} in process {event['pid']}"
                    )
                if type(value) is not int:
                    raise ValueError(f"a sample of {event['name']} is {value!r}")
                self._samples.setdefault(counter, []).append((event["ts"], value))
        self._spans(spans)
        for row, link in flow_ends:
            self._rows.link[row] = link

    def timeline(self, base: int) -> Timeline:
        """Return what has been read, with times that count from `base`."""
        start = _nanoseconds(self._ts)
        rows = self._rows
        moments = _nanoseconds(array("d", (ts for ts, _, _ in self._marks)))
        for (_, kind, text), time in zip(self._marks, moments, strict=True):
            rows.marks.append(Mark(base + int(time), kind, text))
        for counter, samples in self._samples.items():
            times = (base + _nanoseconds(array("d", (ts for ts, _ in samples)))).tolist()
            rows.samples[counter] = (times, [value for _, value in samples])
        starts, lengths = (_nanoseconds(array("d", (event[key] for event in self._slices))) for key in ("ts", "dur"))
        for event, begin, length in zip(self._slices, starts.tolist(), lengths.tolist(), strict=True):
            lane = self._lanes[event["pid"], event["tid"]]
            times = (base + begin, base + begin + length)
            rows.slices.append(FileSlice(event["cat"], lane, *times, event["name"], event["args"]))
        return build_timeline_from(self._header, rows, base + start, base + start + _nanoseconds(self._dur))

    def _spans(self, spans: list[Event]) -> None:
        rows, first = self._rows, len(self._ts)
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
        rows.complete.extend([span_args.get("complete", True) for span_args in args])
        rows.link.extend(
            [
                span["bind_id"] - BIND_ID_OFFSET if "bind_id" in span else span_args.get("link", -1)
                for span, span_args in zip(spans, args, strict=True)
            ]
        )
        for row, span_args in enumerate(args, first):
            if len(span_args) > FIXED_ARGS:
                extra = {key: value for key, value in span_args.items() if key not in RESERVED_ARGS}
                if not all(isinstance(value, str) for value in extra.values()):
                    raise ValueError(f"an argument in {extra!r} is no text")
                if extra:
                    rows.span_args[row] = extra
        self._ts.extend([span["ts"] for span in spans])
        self._dur.extend([span["dur"] for span in spans])


def _nanoseconds(microseconds: array[float]) -> Int64Array:
    """Convert times as the writer has them: from 0 on, and no longer than it writes."""
    times = np.rint(np.array(microseconds, np.float64) * 1000)
    wrong = np.flatnonzero(~((times >= 0) & (times < MAX_CHROME_NS)))
    if len(wrong):
        raise ValueError(f"a time is {microseconds[wrong[0]]!r} µs")
    return times.astype(np.int64)
