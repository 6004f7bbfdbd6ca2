"""Chrome's JSON: the rules on the fields of single events, and the slices and flows that are whole."""

import math
from collections.abc import Iterator
from typing import Any

from ..formats.chrome_values import read_microseconds
from .track_layout import Fault, TrackKey, TrackLayout

_CHECKED_PHASES = frozenset("XBEstf")
_FLOW_PHASES = frozenset("stf")
_DEVICE_WORK = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_BINDABLE_PHASES = frozenset("XB")
"""Events on which viewers read `bind_id`."""
_BIND_DIRECTIONS = ("flow_out", "flow_in")
_BIND_ID = "bind_id"
_MAX_TIME_NS = 2**63
_MAX_ORDINARY_US = 2**53 // 1000 - 1
"""Below this a double of µs times 1000 has no error that matters: it can be rounded without looking at it."""
_MAX_ID = 2**32 - 1


class ChromeEvents:
    """Checks events one by one and collects what the rules between events look at.

    Attributes:
        layout: slices and flows of the events so far. Events with a fault are left out, except those whose ids are out
            of range, which viewers draw elsewhere.
    """

    def __init__(self) -> None:
        self.layout = TrackLayout()
        self._position = 0
        self._metadata_args: dict[tuple[str, str], object] = {}
        self._metadata_faults: list[Fault] = []
        self._event_faults: list[Fault] = []

    def add(self, raw_events: list[Any]) -> None:
        """Check the next events of the file, as parsed."""
        position = self._position
        for raw in raw_events:
            if type(raw) is not dict or not self._add_ordinary(position, raw):
                self._add_any(position, raw)
            position += 1
        self._position = position

    def faults(self) -> list[Fault]:
        """Return what is wrong with the events: of names of processes and threads first, then in file order."""
        return [*self._metadata_faults, *self._event_faults]

    def _add_ordinary(self, position: int, raw: dict[str, Any]) -> bool:
        """Add the event if it obviously breaks no rule, as most do not; return whether it was added."""
        phase = raw.get("ph")
        if type(phase) is not str or phase not in _CHECKED_PHASES or _BIND_ID in raw:
            return False
        time, pid, tid, name = raw.get("ts"), raw.get("pid"), raw.get("tid"), raw.get("name", "")
        # Not isinstance: a bool is not a number here.
        if not (type(pid) is int and type(tid) is int and type(name) is str):
            return False
        if not (type(time) is float or type(time) is int):
            return False
        if not (0 <= pid <= _MAX_ID and 0 <= tid <= _MAX_ID and 0 <= time < _MAX_ORDINARY_US):
            return False
        if phase == "X":
            duration = raw.get("dur")
            if not (type(duration) is float or type(duration) is int) or not 0 <= duration < _MAX_ORDINARY_US:
                return False
        elif phase in _FLOW_PHASES and not (type(raw.get("id")) in (int, str) and type(raw.get("cat", "")) is str):
            return False
        self._draw(position, raw, phase, name, (pid, tid or pid), read_microseconds(time))
        return True

    def _add_any(self, position: int, raw: object) -> None:
        """Apply every rule on the fields of an event, and add it where it is drawn."""
        if not isinstance(raw, dict):
            message = f"{type(raw).__name__} instead of an object"
            self._event_faults.append(Fault("not-an-event", message, position))
            return
        if raw.get("ph") == "M":
            # A process or thread that is named or sorted twice, differently: viewers take the last one silently.
            kind, args = str(raw.get("name")), raw.get("args")
            subject = raw.get("pid") if kind.startswith("process_") else _track_key(raw)
            earlier = self._metadata_args.setdefault((kind, repr(subject)), args)
            if earlier != args:
                message = f"{kind} of {subject!r} is {args!r}, and was {earlier!r}"
                self._metadata_faults.append(Fault("duplicate-metadata", message, position))
        problems = list(_field_faults(position, raw))
        self._event_faults.extend(problems)
        if any(problem.rule != "id-out-of-range" for problem in problems):
            return
        if raw["ph"] not in _CHECKED_PHASES:
            return
        key, time = _track_key(raw), _to_ns(raw["ts"])
        self._draw(position, raw, raw["ph"], str(raw.get("name", "")), key, time)
        bind_id = _parse_bind_id(raw.get(_BIND_ID))
        outgoing, incoming = (raw.get(field) is True for field in _BIND_DIRECTIONS)
        if raw["ph"] in _BINDABLE_PHASES and bind_id is not None and (outgoing or incoming):
            # A flow end that the slice carries itself is at the slice's begin.
            flow_phase = "t" if outgoing and incoming else "s" if outgoing else "f"
            flows = self.layout.flows
            number = flows.keys[bind_id, _BIND_ID]
            flows.add(position, ord(flow_phase), self.layout.tracks[key].index, time, number)

    def _draw(self, position: int, raw: dict[str, Any], phase: str, name: str, key: TrackKey, time: int) -> None:
        """Add a slice, a half of one or an end of a flow to its track; time in ns."""
        layout = self.layout
        track = layout.tracks[key]
        if phase == "X":
            duration = _to_ns(raw["dur"])
            track.add_slice(time, duration, position, layout.names[name])
            if raw.get("cat") in _DEVICE_WORK and duration:
                layout.work.setdefault(key, []).append((time, -duration, position, name))
        elif phase in _FLOW_PHASES:
            number = layout.flows.keys[raw["id"], str(raw.get("cat", "")), name]
            # An end belongs to the slice around it if its `bp` says so, else to the next one.
            binds_next = phase == "f" and raw.get("bp") != "e"
            layout.flows.add(position, ord(phase), track.index, time, number, binds_next=binds_next)
        else:
            track.add_half(phase == "B", time, position, layout.names[name])


def _field_faults(position: int, raw: dict[str, Any]) -> Iterator[Fault]:
    """Apply the rules on the fields of one event."""
    phase = raw.get("ph")
    if not isinstance(phase, str):
        yield Fault("missing-field", "there is no ph", position)
        return
    for field in {"X": ("ts", "dur"), "M": ()}.get(phase, ("ts",)):
        yield from _time_faults(position, phase, field, raw)
    for field in ("pid", "tid"):
        if not _is_id(value := raw.get(field, 0)):
            yield Fault("id-out-of-range", f"{field} {value!r} is not within 0 to {_MAX_ID}", position)
    if phase == "C" and not isinstance(raw.get("args"), dict):
        yield Fault("missing-field", "C without args", position)
    elif phase == "C":
        for name, value in raw["args"].items():
            if _parse_number(value) is None:
                yield Fault("not-a-number", f"{name!r} of a counter is {value!r}", position)
    if phase in _FLOW_PHASES and "id" not in raw:
        yield Fault("missing-field", f"a flow's {phase} without id", position)
    elif phase in _FLOW_PHASES and not isinstance(raw["id"], str | int | float):
        yield Fault("missing-field", f"a flow's {phase} with {raw['id']!r} as id", position)


def _time_faults(position: int, phase: str, field: str, raw: dict[str, Any]) -> Iterator[Fault]:
    if field not in raw:
        yield Fault("missing-field", f"{phase} without {field}", position)
        return
    value = raw[field]
    if value is None:
        yield Fault("null-time", f"{field} is null; viewers lose the events after it", position)
        return
    number = _parse_number(value)
    if number is None:
        yield Fault("not-a-number", f"{field} is {value!r}", position)
    elif not 0 <= number * 1000 < _MAX_TIME_NS:
        yield Fault("time-out-of-range", f"{field} {value!r} is negative or beyond 2^63 ns", position)


def _parse_bind_id(value: object) -> int | None:
    """Return the number by which viewers know a bound flow: they read text as hexadecimal."""
    if isinstance(value, str):
        try:
            return int(value, 16)
        except ValueError:
            return None
    return value if type(value) is int else None


def _parse_number(value: object) -> float | None:
    """Return a time as viewers read it: a number, or text that holds one; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _track_key(raw: dict[str, Any]) -> TrackKey:
    """Return the track on which Perfetto draws it: ids out of range count as 0, thread 0 is the main thread."""
    pid, tid = (raw.get(field, 0) if _is_id(raw.get(field, 0)) else 0 for field in ("pid", "tid"))
    return (pid, tid or pid)


def _is_id(value: object) -> bool:
    return isinstance(value, str) or (type(value) is int and 0 <= value <= _MAX_ID)


def _to_ns(microseconds: Any) -> int:
    """Convert a number, or text that holds one, as Perfetto does."""
    return read_microseconds(float(microseconds) if isinstance(microseconds, str) else microseconds)
