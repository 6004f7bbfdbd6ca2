"""Chrome's JSON: the rules on the fields of single events, and the slices and flows that are whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .json_parse import parse_events
from .model import CheckedEvent, TrackKey, Violation

__all__ = ["read_chrome"]

_CHECKED_PHASES = frozenset("XBEstf")
_FLOW_PHASES = frozenset("stf")
_BINDABLE_PHASES = frozenset("XB")
"""Events on which viewers read `bind_id`."""
_BIND_DIRECTIONS = ("flow_out", "flow_in")
_BIND_ID = "bind_id"
_MAX_TIME_NS = 2**63
_MAX_ID = 2**32 - 1


def read_chrome(data: bytes, violations: list[Violation]) -> list[CheckedEvent]:
    """Return the slices and flows of a Chrome trace.

    Args:
        data: the JSON text.
        violations: takes what is wrong with its events; events with a fault are left out of the result, except those
            whose ids are out of range, which viewers draw elsewhere.
    """
    raw_events = parse_events(data, violations)
    violations.extend(_conflicting_metadata(raw_events))
    events: list[CheckedEvent] = []
    null_time_seen = False
    for position, raw in enumerate(raw_events):
        if not isinstance(raw, dict):
            violations.append(Violation("not-an-event", f"{type(raw).__name__} instead of an object", position))
            continue
        problems = list(_field_violations(position, raw))
        if not null_time_seen and any(problem.rule == "null-time" for problem in problems):
            null_time_seen = True
            events_behind = len(raw_events) - position - 1
            problems = [
                problem._replace(message=f"{problem.message}; viewers lose the {events_behind} events behind it")
                if problem.rule == "null-time"
                else problem
                for problem in problems
            ]
        violations.extend(problems)
        if any(problem.rule != "id-out-of-range" for problem in problems):
            continue
        violations.extend(_bind_violations(position, raw))
        if raw["ph"] in _CHECKED_PHASES:
            events.append(_checked_event(position, raw))
            events.extend(_bound_flow_end(events[-1], raw))
    violations.extend(_clashing_bind_ids(events))
    return events


def _field_violations(position: int, raw: dict[str, Any]) -> Iterator[Violation]:
    """Apply the rules on the fields of one event."""
    phase = raw.get("ph")
    if not isinstance(phase, str):
        yield Violation("missing-field", "there is no ph", position)
        return
    for field in {"X": ("ts", "dur"), "M": ()}.get(phase, ("ts",)):
        yield from _time_violations(position, phase, field, raw)
    for field in ("pid", "tid"):
        if not _is_id(value := raw.get(field, 0)):
            yield Violation("id-out-of-range", f"{field} {value!r} is not within 0 to {_MAX_ID}", position)
    if phase in _FLOW_PHASES and "id" not in raw:
        yield Violation("missing-field", f"a flow's {phase} without id", position)
    elif phase in _FLOW_PHASES and not isinstance(raw["id"], str | int | float):
        yield Violation("missing-field", f"a flow's {phase} with {raw['id']!r} as id", position)


def _time_violations(position: int, phase: str, field: str, raw: dict[str, Any]) -> Iterator[Violation]:
    if field not in raw:
        yield Violation("missing-field", f"{phase} without {field}", position)
        return
    value = raw[field]
    if value is None:
        yield Violation("null-time", f"{field} is null", position)
        return
    number = _parse_number(value)
    if number is None:
        yield Violation("not-a-number", f"{field} is {value!r}", position)
    elif not 0 <= number * 1000 < _MAX_TIME_NS:
        yield Violation("time-out-of-range", f"{field} {value!r} is negative or beyond 2^63 ns", position)


def _bind_violations(position: int, raw: dict[str, Any]) -> Iterator[Violation]:
    """Apply the rules on a flow end that a slice carries itself (`bind_id`); the slice is drawn all the same."""
    directions = [field for field in _BIND_DIRECTIONS if raw.get(field) is True]
    not_boolean = [field for field in _BIND_DIRECTIONS if not isinstance(raw.get(field), bool | None)]
    if raw["ph"] not in _BINDABLE_PHASES:
        if directions:
            message = f"{directions[0]} on {raw['ph']}; viewers read it on X and B"
            yield Violation("flow-outside-slice", message, position)
        return
    for field in not_boolean:
        yield Violation("missing-field", f"{field} is {raw[field]!r}, which viewers do not take for true", position)
    if directions and _BIND_ID not in raw:
        yield Violation("missing-field", f"{directions[0]} without {_BIND_ID}", position)
    elif directions and _parse_bind_id(raw[_BIND_ID]) is None:
        yield Violation("missing-field", f"{_BIND_ID} {raw[_BIND_ID]!r} is no whole or hexadecimal number", position)
    elif _BIND_ID in raw and not directions and not not_boolean:
        yield Violation("missing-field", f"{_BIND_ID} without flow_out or flow_in", position)


def _bound_flow_end(slice_: CheckedEvent, raw: dict[str, Any]) -> Iterator[CheckedEvent]:
    """Yield the flow end that a slice carries itself; it lies where the slice begins."""
    bind_id = _parse_bind_id(raw.get(_BIND_ID))
    outgoing, incoming = (raw.get(field) is True for field in _BIND_DIRECTIONS)
    if slice_.phase in _BINDABLE_PHASES and bind_id is not None and (outgoing or incoming):
        phase = "t" if outgoing and incoming else "s" if outgoing else "f"
        yield slice_._replace(phase=phase, duration=0, flow=(bind_id, _BIND_ID))


def _parse_bind_id(value: object) -> int | None:
    """Return the number by which viewers know a bound flow: they read text as hexadecimal."""
    if isinstance(value, str):
        try:
            return int(value, 16)
        except ValueError:
            return None
    return value if type(value) is int else None


def _clashing_bind_ids(events: list[CheckedEvent]) -> Iterator[Violation]:
    """Find bind_ids that clash with flows that have events of their own: Perfetto numbers those from 0."""
    first_ends = {event.flow: event for event in reversed(events) if event.flow is not None}
    bound = {flow: event for flow, event in reversed(first_ends.items()) if len(flow) == 2}
    numbered_flows = len(first_ends) - len(bound)
    for (bind_id, _), event in bound.items():
        if bind_id in range(numbered_flows):
            message = (
                f"{_BIND_ID} {bind_id} is a number that Perfetto gives to one of the {numbered_flows} flows with an id"
            )
            yield Violation("duplicate-flow", message, event.position)


def _parse_number(value: object) -> float | None:
    """Return a time as viewers read it: a number, or text that holds one; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _checked_event(position: int, raw: dict[str, Any]) -> CheckedEvent:
    phase, name = raw["ph"], str(raw.get("name", ""))
    flow = (raw["id"], str(raw.get("cat", "")), name) if phase in _FLOW_PHASES else None
    return CheckedEvent(
        position,
        phase,
        _track_key(raw),
        _to_ns(raw["ts"]),
        _to_ns(raw["dur"]) if phase == "X" else 0,
        name,
        flow,
        "next" if phase == "f" and raw.get("bp") != "e" else "around",
    )


def _track_key(raw: dict[str, Any]) -> TrackKey:
    """Return the track on which Perfetto draws it: ids out of range count as 0, thread 0 is the main thread."""
    pid, tid = (raw.get(field, 0) if _is_id(raw.get(field, 0)) else 0 for field in ("pid", "tid"))
    return (pid, tid or pid)


def _is_id(value: object) -> bool:
    return isinstance(value, str) or (type(value) is int and 0 <= value <= _MAX_ID)


def _to_ns(microseconds: int | float | str) -> int:
    """Convert as Perfetto does: whole microseconds exactly, others as doubles, to the nearest nanosecond."""
    number = float(microseconds)
    if isinstance(microseconds, int) or number.is_integer():
        return int(microseconds if isinstance(microseconds, int) else number) * 1000
    return math.floor(number * 1000 + 0.5)


def _conflicting_metadata(raw_events: list[Any]) -> Iterator[Violation]:
    """Find processes and threads that are named or sorted twice, differently: viewers take the last one silently."""
    seen_args: dict[tuple[str, str], object] = {}
    for position, raw in enumerate(raw_events):
        if not isinstance(raw, dict) or raw.get("ph") != "M":
            continue
        kind = str(raw.get("name"))
        subject = raw.get("pid") if kind.startswith("process_") else _track_key(raw)
        key = (kind, repr(subject))
        args = raw.get("args")
        if seen_args.setdefault(key, args) != args:
            message = f"{kind} of {subject!r} is {args!r}, and was {seen_args[key]!r}"
            yield Violation("duplicate-metadata", message, position)
