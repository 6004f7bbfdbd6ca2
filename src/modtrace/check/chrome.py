"""Chrome's JSON: reading it as far as it can be read, and the rules on the fields of one event."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from . import document
from .event import Event, Track, Violation

__all__ = ["read"]

DRAWN = frozenset("XBEstf")
FLOWS = frozenset("stf")
LONGEST = 2**63
LARGEST_ID = 2**32 - 1


def read(data: bytes, violations: list[Violation]) -> list[Event]:
    """Return the slices and flows of a Chrome trace that are whole; what is wrong with the others is appended."""
    raw = document.events_of(data, violations)
    violations.extend(_conflicting_metadata(raw))
    events: list[Event] = []
    lost = False
    for position, event in enumerate(raw):
        if not isinstance(event, dict):
            violations.append(Violation("not-an-event", f"{type(event).__name__} instead of an object", position))
            continue
        problems = list(_faults(position, event))
        if not lost and any(problem.rule == "null-time" for problem in problems):
            lost = True
            behind = len(raw) - position - 1
            problems = [
                problem._replace(message=f"{problem.message}; viewers lose the {behind} events behind it")
                if problem.rule == "null-time"
                else problem
                for problem in problems
            ]
        violations.extend(problems)
        if all(problem.rule == "id-out-of-range" for problem in problems) and event["ph"] in DRAWN:
            events.append(_event(position, event))
    return events


def _faults(position: int, event: dict[str, Any]) -> Iterator[Violation]:
    """Rules on the fields of one event."""
    phase = event.get("ph")
    if not isinstance(phase, str):
        yield Violation("missing-field", "there is no ph", position)
        return
    for field in {"X": ("ts", "dur"), "M": ()}.get(phase, ("ts",)):
        yield from _time_faults(position, phase, field, event)
    for field in ("pid", "tid"):
        if not _is_id(value := event.get(field, 0)):
            yield Violation("id-out-of-range", f"{field} {value!r} is not within 0 to {LARGEST_ID}", position)
    if phase in FLOWS:
        yield from _id_faults(f"a flow's {phase}", "id", position, event)


def _id_faults(whose: str, field: str, position: int, event: dict[str, Any]) -> Iterator[Violation]:
    if field not in event:
        yield Violation("missing-field", f"{whose} without {field}", position)
    elif not isinstance(event[field], str | int | float):
        yield Violation("missing-field", f"{whose} with {event[field]!r} as {field}", position)


def _time_faults(position: int, phase: str, field: str, event: dict[str, Any]) -> Iterator[Violation]:
    if field not in event:
        yield Violation("missing-field", f"{phase} without {field}", position)
        return
    value = event[field]
    if value is None:
        yield Violation("null-time", f"{field} is null", position)
        return
    number = _number(value)
    if number is None:
        yield Violation("not-a-number", f"{field} is {value!r}", position)
    elif not 0 <= number * 1000 < LONGEST:
        yield Violation("time-out-of-range", f"{field} {value!r} is negative or beyond 2^63 ns", position)


def _number(value: object) -> float | None:
    """Return a time as viewers take it: numbers, and text that is one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _event(position: int, event: dict[str, Any]) -> Event:
    phase, name = event["ph"], str(event.get("name", ""))
    flow = (event["id"], str(event.get("cat", "")), name) if phase in FLOWS else None
    return Event(
        position,
        phase,
        _track(event),
        _nanoseconds(event["ts"]),
        _nanoseconds(event["dur"]) if phase == "X" else 0,
        name,
        flow,
        "next" if phase == "f" and event.get("bp") != "e" else "around",
    )


def _track(event: dict[str, Any]) -> Track:
    """Return the track on which Perfetto draws it: ids out of range are 0, and thread 0 is the process' main thread."""
    pid, tid = (event.get(field, 0) if _is_id(event.get(field, 0)) else 0 for field in ("pid", "tid"))
    return (pid, tid or pid)


def _is_id(value: object) -> bool:
    return isinstance(value, str) or (type(value) is int and 0 <= value <= LARGEST_ID)


def _nanoseconds(value: int | float | str) -> int:
    """Convert as Perfetto does: whole microseconds exactly, others as doubles, to the nearest nanosecond."""
    number = float(value)
    if isinstance(value, int) or number.is_integer():
        return int(value if isinstance(value, int) else number) * 1000
    return math.floor(number * 1000 + 0.5)


def _conflicting_metadata(raw: list[Any]) -> Iterator[Violation]:
    """Find processes and threads that are named or sorted twice, differently: the last one wins in silence."""
    known: dict[tuple[object, ...], object] = {}
    for position, event in enumerate(raw):
        if not isinstance(event, dict) or event.get("ph") != "M":
            continue
        what = str(event.get("name"))
        whose = event.get("pid") if what.startswith("process_") else _track(event)
        key = (what, repr(whose))
        said = event.get("args")
        if known.setdefault(key, said) != said:
            yield Violation("duplicate-metadata", f"{what} of {whose!r} is {said!r}, and was {known[key]!r}", position)
