"""Chrome's JSON: reading it as far as it can be read, and the rules on the fields of one event."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from . import json_parse as document
from .model import Event, Track, Violation

__all__ = ["read"]

DRAWN = frozenset("XBEstf")
FLOWS = frozenset("stf")
BINDABLE = frozenset("XB")
DIRECTIONS = ("flow_out", "flow_in")
BIND_ID = "bind_id"
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
        if any(problem.rule != "id-out-of-range" for problem in problems):
            continue
        violations.extend(_bind_faults(position, event))
        if event["ph"] in DRAWN:
            events.append(_event(position, event))
            events.extend(_bound(events[-1], event))
    violations.extend(_taken_numbers(events))
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
    if phase in FLOWS and "id" not in event:
        yield Violation("missing-field", f"a flow's {phase} without id", position)
    elif phase in FLOWS and not isinstance(event["id"], str | int | float):
        yield Violation("missing-field", f"a flow's {phase} with {event['id']!r} as id", position)


def _bind_faults(position: int, event: dict[str, Any]) -> Iterator[Violation]:
    """Rules on flows that a slice carries itself; it is drawn all the same."""
    said = [name for name in DIRECTIONS if event.get(name) is True]
    odd = [name for name in DIRECTIONS if not isinstance(event.get(name), bool | None)]
    if event["ph"] not in BINDABLE:
        if said:
            yield Violation("flow-outside-slice", f"{said[0]} on {event['ph']}; viewers read it on X and B", position)
        return
    for name in odd:
        yield Violation("missing-field", f"{name} is {event[name]!r}, which viewers do not take for true", position)
    if said and BIND_ID not in event:
        yield Violation("missing-field", f"{said[0]} without {BIND_ID}", position)
    elif said and _bind_number(event[BIND_ID]) is None:
        yield Violation("missing-field", f"{BIND_ID} {event[BIND_ID]!r} is no whole or hexadecimal number", position)
    elif BIND_ID in event and not said and not odd:
        yield Violation("missing-field", f"{BIND_ID} without flow_out or flow_in", position)


def _bound(slice_: Event, event: dict[str, Any]) -> Iterator[Event]:
    """Yield the end of the flow that a slice carries itself; it lies where the slice begins."""
    number = _bind_number(event.get(BIND_ID))
    leaves, arrives = (event.get(name) is True for name in DIRECTIONS)
    if slice_.phase in BINDABLE and number is not None and (leaves or arrives):
        phase = "t" if leaves and arrives else "s" if leaves else "f"
        yield slice_._replace(phase=phase, duration=0, flow=(number, BIND_ID))


def _bind_number(value: object) -> int | None:
    """Return the number that viewers know a flow by: text is hexadecimal."""
    if isinstance(value, str):
        try:
            return int(value, 16)
        except ValueError:
            return None
    return value if type(value) is int else None


def _taken_numbers(events: list[Event]) -> Iterator[Violation]:
    """Find flows of slices with a number that Perfetto gives, from 0, to flows that have events of their own."""
    flows = {event.flow: event for event in reversed(events) if event.flow is not None}
    bound = {flow: event for flow, event in reversed(flows.items()) if len(flow) == 2}
    own = len(flows) - len(bound)
    for (number, _), event in bound.items():
        if number in range(own):
            message = f"{BIND_ID} {number} is a number that Perfetto gives to one of the {own} flows with an id"
            yield Violation("duplicate-flow", message, event.position)


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
