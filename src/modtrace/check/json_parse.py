"""Parse the JSON of a Chrome trace as leniently as viewers do, and report the byte at which it is broken."""

from __future__ import annotations

import json
from typing import Any

import orjson

from .model import Violation

__all__ = ["parse_events"]


def parse_events(data: bytes, violations: list[Violation]) -> list[Any]:
    """Return the trace's raw events.

    Args:
        data: the JSON text.
        violations: takes what is wrong with the JSON; without any readable events the result is empty.
    """
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
    return _trace_events(_parse_leniently(text, parse_errors), violations)


def _parse_leniently(text: str, errors: list[Violation]) -> Any:
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
