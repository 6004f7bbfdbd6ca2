"""Rows that a merge adds above the streams of the devices, and ids for all rows that it adds."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import NamedTuple

from ...formats.escape import escaped
from ..trace.event_columns import TrackKey

__all__ = ["DeviceRow", "RowPlaces", "device_rows"]

_FIRST_RESERVED_TID = 4_040_000_000
"""Thread ids from here on no profiler uses: it writes them as 32 bits with a sign, so that none is beyond 2**31. They
fit into 32 bits without one, as the trace processor wants it."""


class DeviceRow(NamedTuple):
    """A row of spans above a stream.

    Attributes:
        pid: of the device, as it stands in the trace.
        tid: ours.
        name: what it is called, escaped.
        sort_index: just before that of the stream.
    """

    pid: int | str
    tid: int
    name: str
    sort_index: int


class RowPlaces:
    """Finds ids for the rows that a merge adds, and places right above rows of the profiler.

    Viewers show the id of a thread behind its name, so ids are as small as can be. They sort the rows of a process by
    their indexes, and those of equal index by their ids, the main thread first.

    Args:
        taken: ids of threads and processes that the trace uses.
        sort_indexes: of the profiler's rows, by pid and tid.
    """

    def __init__(self, taken: Collection[int], sort_indexes: Mapping[TrackKey, int]) -> None:
        reserved = (tid for tid in itertools.count(_FIRST_RESERVED_TID) if tid not in taken)
        small = (tid for tid in itertools.count(1) if tid not in taken)
        self._reserved, self._small = reserved, small
        self._indexes = sort_indexes
        self._occupied = {(pid, index) for (pid, tid), index in sort_indexes.items() if tid != pid}

    def above(self, pid: int | str, tid: int | str) -> tuple[int, int]:
        """Return id and sort index for a row right above the profiler's row of a thread or stream."""
        index = self._indexes.get((pid, tid))
        if index is None:
            return next(self._small), self._first(pid) - 1
        # Behind a row of that very index comes what has a greater id.
        return next(self._reserved if (pid, index - 1) in self._occupied else self._small), index - 1

    def top(self, pid: int | str) -> tuple[int, int]:
        """Return id and sort index for a row above all others of a process."""
        return next(self._small), self._first(pid) - 2

    def _first(self, pid: int | str) -> int:
        return min((index for (of_pid, _), index in self._indexes.items() if of_pid == pid), default=0)


def device_rows(
    used: Collection[int], keys: list[TrackKey], names: Mapping[TrackKey, str], places: RowPlaces
) -> dict[int, DeviceRow]:
    """Return a row for each of the trace's tracks that has module spans above it.

    Args:
        used: indices of these tracks.
        keys: pid and tid of each track of the trace.
        names: what the profiler calls them.
        places: where rows go.
    """
    rows: dict[int, DeviceRow] = {}
    for track in sorted(used):
        pid, stream = keys[track]
        tid, sort_index = places.above(pid, stream)
        name = escaped(f"modules · {names.get(keys[track], f'stream {stream}').strip()}")
        rows[track] = DeviceRow(pid, tid, name, sort_index)
    return rows
