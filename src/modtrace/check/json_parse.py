"""The JSON of a Chrome trace: its events, or the byte at which it cannot be read."""

from __future__ import annotations

import json
from typing import Any

import orjson

from .model import Violation

__all__ = ["events_of"]


def events_of(data: bytes, violations: list[Violation]) -> list[Any]:
    """Return the raw events; none, and a violation, where there are none to be had."""
    try:
        return _events(orjson.loads(data), violations)
    except orjson.JSONDecodeError:
        pass  # what it refuses, Python's own parser may still read, and it tells where the fault is
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        violations.append(Violation("unreadable", f"byte {error.start}: not UTF-8"))
        text = data.decode(errors="replace")
        faults: list[Violation] = []  # their offsets are moved by what was replaced, and one is enough
    else:
        faults = violations
    return _events(_leniently(text, faults), violations)


def _leniently(text: str, faults: list[Violation]) -> Any:
    """Parse what viewers parse: NaN, control characters in strings, an array that is not closed."""
    try:
        return json.loads(text)
    except RecursionError:
        faults.append(Violation("unreadable", "nested too deeply"))
        return []
    except json.JSONDecodeError as error:
        first = error
    except ValueError:
        faults.append(Violation("unreadable", "a number in it has thousands of digits"))
        return []
    if text.lstrip().startswith("["):
        try:
            return json.loads(text.rstrip().removesuffix(",") + "]")
        except (ValueError, RecursionError):
            pass
    what = first.msg.removesuffix(" at").removesuffix(" starting")
    faults.append(Violation("unreadable", f"byte {len(text[: first.pos].encode())}: {what}"))
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return []


def _events(document: Any, violations: list[Violation]) -> list[Any]:
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if isinstance(events, list):
        return events
    violations.append(Violation("not-a-trace", "neither an array of events nor an object with traceEvents"))
    return []
