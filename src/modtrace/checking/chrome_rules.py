"""Chrome's JSON: the rules for the fields of single events, and the layout of valid slices and flows."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .._arrays import Numbering
from ..formats.chrome_values import read_microseconds_array
from ..formats.event_table import BEGIN, END, FLOW_PHASE_NAMES, FLOW_PHASES, NEXT, SLICE, EventTable
from .track_layout import NEVER_NS, Fault, FlowEnds, SliceEvents, TrackKey, TrackLayout

_ORDINARY_PHASES = FLOW_PHASE_NAMES | {"X", "B", "E"}
_NUMBERS = {int, float}
_DEVICE_WORK = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_MAX_ORDINARY_US = 2**53 // 1000 - 1
_MAX_ID = 2**32 - 1
_PHASE_OF_WAYS = np.array([0, ord("f"), ord("s"), ord("t")], np.uint8)
"""The phase of an event of a flow, by whether the flow `ENDS` and `BEGINS` there."""


class ChromeEvents:
    """Checks single events; the layout of the valid ones is the input of the rules between events."""

    def __init__(self) -> None:
        self._table = EventTable()
        self._metadata_args: dict[tuple[str, str], object] = {}
        self._metadata_faults: list[Fault] = []
        self._event_faults: list[Fault] = []

    def add(self, raw_events: list[Any]) -> None:
        """Check the next events of the file, as parsed."""
        if not _are_ordinary(raw_events):
            for position, raw in enumerate(raw_events, len(self._table)):
                self._check(position, raw)
        self._table.add(raw_events)

    def faults(self) -> list[Fault]:
        """Return the faults: first of metadata on processes and threads, then of other events, each in file order."""
        return [*self._metadata_faults, *self._event_faults]

    def _check(self, position: int, raw: object) -> None:
        """Apply all rules for the fields of an event."""
        if not isinstance(raw, dict):
            message = f"{type(raw).__name__} instead of an object"
            self._event_faults.append(Fault("not-an-event", message, position))
            return
        if raw.get("ph") == "M":
            # If a process or thread has two names or sort indexes, viewers silently use the last one.
            name, args = str(raw.get("name")), raw.get("args")
            ids = [raw.get(field, 0) if _is_id(raw.get(field, 0)) else 0 for field in ("pid", "tid")]
            subject = raw.get("pid") if name.startswith("process_") else _shown_track(*ids)
            first_args = self._metadata_args.setdefault((name, repr(subject)), args)
            if first_args != args:
                message = f"{name} of {subject!r} is {args!r}, and was {first_args!r}"
                self._metadata_faults.append(Fault("duplicate-metadata", message, position))
        self._event_faults.extend(_field_faults(position, raw))

    def layout(self) -> TrackLayout:
        """Return the slices and flows of all events without a fault, or only with an id out of range.

        Viewers draw an event with an id out of range on another track.
        """
        table, names, tracks = self._table, Numbering[str](), Numbering[TrackKey]()
        _ = names[""]  # 0: no name
        phase = table.written_phase.copy()
        faulty = [fault.event for fault in self._event_faults if fault.rule != "id-out-of-range"]
        phase[np.array(faulty, np.int64)] = 0
        track = np.array([tracks[_shown_track(*ids)] for ids in table.tracks.known] or [0], np.int64)[table.track]
        kinds = [*table.kinds] or [(None, "")]
        name = np.array([names[str(name)] for _, name in kinds], np.int32)[table.kind]
        is_work = np.array([category in _DEVICE_WORK for category, _ in kinds], np.bool_)[table.kind]
        is_window = np.array([category == "Trace" for category, _ in kinds], np.bool_)[table.kind]
        rows = np.flatnonzero(np.isin(phase, [*map(ord, _ORDINARY_PHASES)]))
        time, duration = np.zeros((2, len(table)), np.int64)
        slices = rows[phase[rows] == SLICE]
        time[rows], duration[slices] = (
            read_microseconds_array(us) for us in (table.start_us[rows], table.duration_us[slices])
        )
        slice_rows = np.flatnonzero(np.isin(phase, (SLICE, BEGIN, END)))
        events = SliceEvents(track, phase, time, duration, np.arange(len(table)), name)
        work_rows = slices[is_work[slices]]
        work_rows = work_rows[np.argsort(track[work_rows], kind="stable")]
        work = np.stack([column[work_rows] for column in (track, time, time + duration, events.position, name)])
        window_ends = (time + duration)[slices[is_window[slices]]]
        flows = table.flows
        is_valid = np.isin(phase[flows.row], [*FLOW_PHASES, SLICE, BEGIN])
        row, flow, ways, binds = (column[is_valid] for column in flows)
        keys = [(key, number) for number, key in enumerate(table.flow_ids)]
        return TrackLayout(
            [*names],
            [*tracks],
            events.take(slice_rows),
            FlowEnds(row, time[row], track[row], flow, _PHASE_OF_WAYS[ways], binds == NEXT, keys=keys),
            work,
            int(window_ends.max()) if len(window_ends) else None,
        )


def _are_ordinary(events: list[Any]) -> bool:
    """Return whether all events obviously obey all rules; this is much faster than checking each event."""
    try:
        if not {event["ph"] for event in events} <= _ORDINARY_PHASES:
            return False
        times = [event["ts"] for event in events]
        times += [event["dur"] for event in events if event["ph"] == "X"]
        ids = [event["pid"] for event in events] + [event["tid"] for event in events]
        if not ({*map(type, times)} <= _NUMBERS and {*map(type, ids)} <= {int}):
            return False
        if not (min(times) >= 0 and max(times) < _MAX_ORDINARY_US and min(ids) >= 0 and max(ids) <= _MAX_ID):
            return False
        return all(type(event["id"]) in (int, str) for event in events if event["ph"] in FLOW_PHASE_NAMES)
    except (KeyError, TypeError):
        return False


def _shown_track(pid: int | str, tid: int | str) -> TrackKey:
    """Return the track on which Perfetto draws an event: ids out of range count as 0, thread 0 is the main thread."""
    pid, tid = (value if _is_id(value) else 0 for value in (pid, tid))
    return (pid, tid or pid)


def _field_faults(position: int, raw: dict[str, Any]) -> Iterator[Fault]:
    """Apply the rules for the fields of an event."""
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
    if phase in FLOW_PHASE_NAMES and "id" not in raw:
        yield Fault("missing-field", f"a flow's {phase} without id", position)
    elif phase in FLOW_PHASE_NAMES and not isinstance(raw["id"], str | int | float):
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
    elif not 0 <= number * 1000 <= NEVER_NS:
        yield Fault("time-out-of-range", f"{field} {value!r} is negative or beyond 2^63 ns", position)


def _parse_number(value: object) -> float | None:
    """Return a number as viewers read it, from a number or its text; None for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _is_id(value: object) -> bool:
    return isinstance(value, str) or (type(value) is int and 0 <= value <= _MAX_ID)
