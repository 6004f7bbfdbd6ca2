"""What was read from a file → what all else may rely on: no number without a name, no record that lacks a field."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._typing import BoolArray, Int32Array
from .name_table import Record
from .slot_format import CALLS_IN, CALLS_OUT, NO_NAME, Events, Kind
from .slots import Reading

__all__ = ["sound"]

_CALLS = (*CALLS_IN, *CALLS_OUT)
_WORDED = (Kind.MARK, Kind.COUNTER, Kind.SHAPES)

_LATEST = 1 << 61
"""Nanoseconds beyond which a time is damage: sums of a few must fit 64 bits."""
_PID = range(1 << 31)
_TIME = range(_LATEST)
_FIELDS: Mapping[str, Mapping[str, type[str] | range]] = {
    "name": {"label": str, "fqn": str, "class": str},
    "text": {"text": str},
    "thread": {"name": str, "tid": _PID, "torch": range(-1, 1 << 63)},
    "anchor": {"monotonic": _TIME, "wall": _TIME},
    "stop": {},
    "metadata": {},
}
_NUMBERED = ("name", "text", "thread")


def sound(
    reading: Reading, found: Sequence[Record], metadata: Mapping[str, object]
) -> tuple[Reading, list[Record], Mapping[str, object]]:
    """Leave out what is damaged, and let what a lost part of the name table had named be called by its number."""
    records, counts = _records(found)
    reading = _in_time(reading, records)
    events = reading.events
    named = np.isin(events.kind, _CALLS) | (events.kind == Kind.BACKWARD) & (events.name != NO_NAME)
    name, lost = _renumbered(events.name, named, counts["name"])
    records += [
        {"k": "name", "id": counts["name"] + at, "label": f"#{number}", "fqn": f"#{number}", "class": "?"}
        for at, number in enumerate(lost)
    ]
    name, lost = _renumbered(name, np.isin(events.kind, _WORDED), counts["text"])
    records += [{"k": "text", "id": counts["text"] + at, "text": f"#{number}"} for at, number in enumerate(lost)]
    thread, lost = _renumbered(events.thread, np.ones(len(events), np.bool_), counts["thread"])
    records += [
        {"k": "thread", "id": counts["thread"] + at, "name": f"thread #{number}", "tid": number, "torch": -1}
        for at, number in enumerate(lost)
    ]
    events = Events(events.serial, events.time, events.kind, thread, name, events.value)
    return reading._replace(events=events), records, _metadata(metadata)


def _records(found: Sequence[Record]) -> tuple[list[Record], dict[str, int]]:
    """Return the records that have all their fields, and how many numbers each kind has."""
    counts = dict.fromkeys(_NUMBERED, 0)
    records = []
    for record in found:
        kind = record.get("k")
        fields = _FIELDS.get(kind) if isinstance(kind, str) else None
        if fields is None or not all(_fits(record.get(field), allowed) for field, allowed in fields.items()):
            continue
        if kind in counts:
            # Numbers are given in order; only the last one of the threads comes again.
            if not _fits(record.get("id"), range(counts[kind] + 1)):
                continue
            counts[kind] = max(counts[kind], record["id"] + 1)
        records.append(record)
    return records, counts


def _fits(value: Any, allowed: type[str] | range) -> bool:
    return type(value) is int and value in allowed if isinstance(allowed, range) else isinstance(value, allowed)


def _in_time(reading: Reading, records: Sequence[Record]) -> Reading:
    """Count events with an impossible time as torn: before the recording, beyond all time, or back on their thread."""
    begin = next((record["monotonic"] for record in records if record["k"] == "anchor"), 0)
    events = reading.events
    possible = (events.time >= begin) & (events.time < _LATEST)
    at = np.flatnonzero(possible)
    at = at[np.argsort(events.thread[at], kind="stable")]
    back = (np.diff(events.time[at]) < 0) & (np.diff(events.thread[at]) == 0)
    for thread in np.unique(events.thread[at[1:][back]]).tolist():
        own = at[events.thread[at] == thread]
        rising = np.zeros(len(own), np.bool_)
        rising[_longest_rise(events.time[own].tolist())] = True
        possible[own[~rising]] = False
    if possible.all():
        return reading
    lost = int(np.count_nonzero(~possible))
    return reading._replace(events=events.take(possible), torn=reading.torn + lost)


def _longest_rise(times: Sequence[int]) -> list[int]:
    """Return the positions of the most numbers that stand in order: what is left of the others is damage."""
    ends: list[int] = []  # the least number in which a rise of each length can end
    places: list[int] = []
    before = [-1] * len(times)
    for at, time in enumerate(times):
        length = bisect.bisect_right(ends, time)
        if length == len(ends):
            ends.append(time)
            places.append(at)
        else:
            ends[length], places[length] = time, at
        before[at] = places[length - 1] if length else -1
    found = []
    at = places[-1] if places else -1
    while at >= 0:
        found.append(at)
        at = before[at]
    return found


def _renumbered(numbers: Int32Array, used: BoolArray, known: int) -> tuple[Int32Array, list[int]]:
    """Let the numbers that nothing is known of follow those that are known, without gaps."""
    unknown = used & (numbers >= known)
    lost = np.unique(numbers[unknown])
    if not len(lost):
        return numbers, []
    numbers = numbers.copy()
    numbers[unknown] = known + np.searchsorted(lost, numbers[unknown])
    return numbers, lost.tolist()


def _metadata(metadata: Mapping[str, object]) -> Mapping[str, object]:
    wanted: Mapping[str, type[str] | range] = {"pid": _PID, "rank": _PID, "program": str}
    return {key: value for key, value in metadata.items() if key not in wanted or _fits(value, wanted[key])}
