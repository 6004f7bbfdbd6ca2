"""Rows that a merge adds above the streams of the devices, and ids for all rows that it adds."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from ...formats.escape import escaped
from ..trace.event_columns import TrackKey

__all__ = ["DeviceRow", "device_rows", "unused_tids"]

_FIRST_TID = 4_040_000_000
"""Where our thread ids begin. The profiler writes thread ids as 32 bits with a sign, so that none is beyond 2**31; ours
fit into 32 bits without one, as the trace processor wants it."""


class DeviceRow(NamedTuple):
    """A row of spans above a stream.

    Attributes:
        pid: of the device, as it stands in the trace.
        tid: ours.
        name: what it is called, escaped.
        sort_index: negative, so that it lies above the profiler's.
    """

    pid: int | str
    tid: int
    name: str
    sort_index: int


def unused_tids(taken: Collection[int]) -> Iterator[int]:
    """Yield thread ids that are not taken."""
    return (tid for tid in itertools.count(_FIRST_TID) if tid not in taken)


def device_rows(
    used: Collection[int], keys: list[TrackKey], names: Mapping[TrackKey, str], tids: Iterator[int]
) -> dict[int, DeviceRow]:
    """Return a row for each of the trace's tracks that has module spans above it.

    Args:
        used: indices of these tracks.
        keys: pid and tid of each track of the trace.
        names: what the profiler calls them.
        tids: see `unused_tids`.
    """
    return {
        track: DeviceRow(
            keys[track][0],
            next(tids),
            escaped(f"modules · {names.get(keys[track], f'stream {keys[track][1]}').strip()}"),
            index - len(used),
        )
        for index, track in enumerate(sorted(used))
    }
