"""Validate ring contents: drop malformed records and impossible times, and invent names for lost ids.

What comes out of here can be relied on: each id that an event uses has a record, each record has all its fields, and
the times of a thread never go back.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._typing import BoolArray, Int32Array
from .file import STACKS_SIGNAL
from .name_table import Record
from .slot_format import (
    CALL_ENTER_KINDS,
    CALL_EXIT_KINDS,
    COMMUNICATION_KINDS,
    KINDS_OF_OTHER_THREADS,
    NO_NAME,
    RANGE_KINDS,
    Events,
    Kind,
)

_CALL_KINDS = (*CALL_ENTER_KINDS, *CALL_EXIT_KINDS)
_TEXT_KINDS = (Kind.MARK, Kind.COUNTER, Kind.SHAPES, *COMMUNICATION_KINDS, *RANGE_KINDS)

_MAX_TIME_NS = 1 << 61
"""Times from here on are damage: sums of a few must fit 64 bits."""
_PIDS = range(1 << 31)
_TIMES_NS = range(_MAX_TIME_NS)
_FIELDS: Mapping[str, Mapping[str, type[str] | range]] = {
    "name": {"label": str, "fqn": str, "class": str},
    "text": {"text": str},
    "thread": {"name": str, "tid": _PIDS, "torch_thread_id": range(-1, 1 << 63)},
    "compiled": {"name": range(NO_NAME), "modules": str},
    "operator": {
        "number": range(1 << 63),
        "name": str,
        "device": str,
        "dtype": str,
        "flops": range(-1, 1 << 63),
    },
    "clock": {"clock": str},
    "offset": {
        "clock": str,
        "parent": str,
        "time": _TIMES_NS,
        "offset": range(-_MAX_TIME_NS, _MAX_TIME_NS),
        "bound": _TIMES_NS,
        "round_trip": _TIMES_NS,
    },
    "group": {"name": str, "ranks": str, "description": str},
    "anchor": {"monotonic": _TIMES_NS, "wall": _TIMES_NS},
    "stop": {},
}
"""The fields of each kind of record, and what each may be: a text, or an integer in a range."""
_METADATA_FIELDS: Mapping[str, type[str] | range] = {
    "pid": _PIDS,
    "rank": _PIDS,
    "program": str,
    STACKS_SIGNAL: range(1, 65),
}
"""What the metadata may say of the process; other fields are only shown."""
_KINDS_WITH_ID = ("name", "text", "thread")
_MAX_AHEAD = 64
"""By how much an id may be larger than twice the number of records so far."""


class SlotSnapshot(NamedTuple):
    """The slots that a ring held when it was read, and how many it had lost.

    Attributes:
        events: the whole events, in serial order.
        recorded: number of events written since the ring was made.
        overwritten: of these, those whose slots were used again, or that were not asked for.
        torn: of these, those whose slots were half written, or damaged.
    """

    events: Events
    recorded: int
    overwritten: int
    torn: int


def validate(
    slots: SlotSnapshot, records: Sequence[Record], metadata: Mapping[str, object]
) -> tuple[SlotSnapshot, list[Record], Mapping[str, object]]:
    """Return the slots, the records and the metadata of a ring without damaged ones.

    An id whose record is lost becomes the name "#id".
    """
    valid_records, id_counts = _valid_records(records)
    slots = _drop_impossible_times(slots, valid_records)
    events = slots.events
    has_name = np.isin(events.kind, _CALL_KINDS) | np.isin(events.kind, (Kind.CALL_BACKWARD, Kind.HELD, Kind.SAVED)) & (
        events.name != NO_NAME
    )
    has_text = np.isin(events.kind, _TEXT_KINDS)
    has_text &= ~np.isin(events.kind, COMMUNICATION_KINDS) | (events.name != NO_NAME)
    name, thread = events.name, events.thread
    name, lost = _renumber_unknown(name, has_name, id_counts["name"])
    valid_records += [{"kind": "name", "id": i, "label": f"#{old}", "fqn": f"#{old}", "class": "?"} for i, old in lost]
    name, lost = _renumber_unknown(name, has_text, id_counts["text"])
    valid_records += [{"kind": "text", "id": i, "text": f"#{old}"} for i, old in lost]
    thread, lost = _renumber_unknown(thread, np.ones(len(events), np.bool_), id_counts["thread"])
    valid_records += [
        {"kind": "thread", "id": i, "name": f"thread #{old}", "tid": old, "torch_thread_id": -1} for i, old in lost
    ]
    events = Events(events.serial, events.time, events.kind, thread, name, events.value)
    return slots._replace(events=events), valid_records, _valid_metadata(metadata)


def _valid_records(records: Sequence[Record]) -> tuple[list[Record], dict[str, int]]:
    """Return the records that have all their fields, and how many ids each kind has."""
    id_counts, counted = dict.fromkeys(_KINDS_WITH_ID, 0), dict.fromkeys(_KINDS_WITH_ID, 0)
    valid = []
    for record in records:
        kind = record.get("kind")
        fields = _FIELDS.get(kind) if isinstance(kind, str) else None
        if fields is None or not all(_is_allowed(record.get(field), allowed) for field, allowed in fields.items()):
            continue
        if kind in id_counts:
            # Ids are given in order, but of threads that note some at once any may come first, and one is missing where
            # an interrupt came. The bound limits what a damaged one costs.
            counted[kind] += 1
            if not _is_allowed(record.get("id"), range(2 * counted[kind] + _MAX_AHEAD)):
                continue
            id_counts[kind] = max(id_counts[kind], record["id"] + 1)
        valid.append(record)
    return valid, id_counts


def _is_allowed(value: Any, allowed: type[str] | range) -> bool:
    return type(value) is int and value in allowed if isinstance(allowed, range) else isinstance(value, allowed)


def _drop_impossible_times(slots: SlotSnapshot, records: Sequence[Record]) -> SlotSnapshot:
    """Count events with an impossible time as torn: before the recording, beyond all time, or back on their thread."""
    begin = next((record["monotonic"] for record in records if record["kind"] == "anchor"), 0)
    events = slots.events
    possible = (events.time >= begin) & (events.time < _MAX_TIME_NS)
    # What completes is written by other threads than the one it belongs to.
    index = np.flatnonzero(possible & ~np.isin(events.kind, KINDS_OF_OTHER_THREADS))
    index = index[np.argsort(events.thread[index], kind="stable")]
    goes_back = (np.diff(events.time[index]) < 0) & (np.diff(events.thread[index]) == 0)
    for thread in np.unique(events.thread[index[1:][goes_back]]).tolist():
        of_thread = index[events.thread[index] == thread]
        in_order = np.zeros(len(of_thread), np.bool_)
        in_order[_longest_nondecreasing(events.time[of_thread].tolist())] = True
        possible[of_thread[~in_order]] = False
    if possible.all():
        return slots
    dropped = int(np.count_nonzero(~possible))
    return slots._replace(events=events.take(possible), torn=slots.torn + dropped)


def _longest_nondecreasing(times: Sequence[int]) -> list[int]:
    """Return the positions of the longest nondecreasing subsequence, last first: all other times are damage."""
    smallest_end: list[int] = []  # by length - 1: the smallest time in which a subsequence of this length can end
    end_position: list[int] = []
    previous = [-1] * len(times)
    for position, time in enumerate(times):
        length = bisect.bisect_right(smallest_end, time)
        if length == len(smallest_end):
            smallest_end.append(time)
            end_position.append(position)
        else:
            smallest_end[length], end_position[length] = time, position
        previous[position] = end_position[length - 1] if length else -1
    longest = []
    position = end_position[-1] if end_position else -1
    while position >= 0:
        longest.append(position)
        position = previous[position]
    return longest


def _renumber_unknown(ids: Int32Array, used: BoolArray, known_count: int) -> tuple[Int32Array, list[tuple[int, int]]]:
    """Give the used ids that have no record new ones, which follow the known ones without gaps.

    Returns:
        All ids, and (new id, old id) of those that are new.
    """
    unknown = used & (ids >= known_count)
    lost = np.unique(ids[unknown])
    if not len(lost):
        return ids, []
    ids = ids.copy()
    ids[unknown] = known_count + np.searchsorted(lost, ids[unknown])
    return ids, list(enumerate(lost.tolist(), known_count))


def _valid_metadata(metadata: Mapping[str, object]) -> Mapping[str, object]:
    return {
        key: value
        for key, value in metadata.items()
        if key not in _METADATA_FIELDS or _is_allowed(value, _METADATA_FIELDS[key])
    }
