"""Parse the JSON of a Chrome trace: as a stream where it is good, else as leniently as viewers do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import orjson

from .._errors import TraceError
from ..formats.limits import LimitError, check_nested_json
from ..profiler.trace.event_stream import EventStream
from ..profiler.trace.trace_file import TraceFile
from .model import Violation

__all__ = ["NotStrictError", "parse_leniently", "stream_events"]


class NotStrictError(Exception):
    """No events can be read from the file as it is.

    Attributes:
        violation: what is wrong with it.
    """

    def __init__(self, message: str, rule: str = "unreadable") -> None:
        super().__init__(message)
        self.violation = Violation(rule, message)


def stream_events(source: TraceFile, notes: list[str]) -> Iterator[list[Any]]:
    """Yield a trace's events some at a time, in memory that does not grow with the file.

    Args:
        source: the trace.
        notes: takes what is wrong with the JSON, and was left out or repaired.

    Raises:
        NotStrictError: no events can be read.
    """
    try:
        stream = EventStream(source)
        for chunk in stream.chunks():
            yield chunk.events
    except TraceError as error:
        raise NotStrictError(str(error)) from error
    notes += stream.notes
    if stream.trailing_comma:
        notes.append("a comma follows the last event")


def parse_leniently(data: bytes, violations: list[Violation]) -> list[Any]:
    """Return a trace's raw events.

    Args:
        data: the JSON text.
        violations: takes what is wrong with the JSON; without any readable events the result is empty.
    """
    try:
        check_nested_json(data)
    except LimitError as error:
        violations.append(Violation("unreadable", str(error)))
        return []
    try:
        return _trace_events(orjson.loads(data), violations)
    except orjson.JSONDecodeError:
        pass  # Python's own parser accepts more (NaN, huge numbers), and its errors name the position
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        violations.append(Violation("unreadable", f"byte {error.start}: not UTF-8"))
        text = data.decode(errors="replace")
        parse_errors: list[Violation] = []  # discarded: replaced characters shift the offsets, and one error is enough
    else:
        parse_errors = violations
    return _trace_events(_parse_text(text, parse_errors), violations)


def _parse_text(text: str, errors: list[Violation]) -> Any:
    """Parse what viewers parse: NaN, control characters in strings, an array that is not closed."""
    try:
        return json.loads(text)
    except RecursionError:
        errors.append(Violation("unreadable", "nested too deeply"))
        return []
    except json.JSONDecodeError as error:
        first_error = error
    except ValueError:
        errors.append(Violation("unreadable", "a number in it has thousands of digits"))
        return []
    if text.lstrip().startswith("["):
        try:
            return json.loads(text.rstrip().removesuffix(",") + "]")
        except (ValueError, RecursionError):
            pass
    reason = first_error.msg.removesuffix(" at").removesuffix(" starting")
    errors.append(Violation("unreadable", f"byte {len(text[: first_error.pos].encode())}: {reason}"))
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return []


def _trace_events(document: Any, violations: list[Violation]) -> list[Any]:
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if isinstance(events, list):
        return events
    violations.append(Violation("not-a-trace", "neither an array of events nor an object with traceEvents"))
    return []
