"""The rows that a merged trace gets: above the threads of the process, and above the streams of the devices."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from ...timeline import Timeline, Track
from ...write.lanes import MARKS

__all__ = ["Row", "device_rows", "free_tids", "marks_row", "timeline_rows"]

_FIRST_TID = 4_040_000_000
"""Where our thread ids begin. The profiler writes thread ids as 32 bits with a sign, so that none is beyond 2**31; ours
fit into 32 bits without one, as the trace processor wants it."""


class Row(NamedTuple):
    """A row of slices.

    Attributes:
        pid: of the process or device, as it stands in the trace.
        tid: ours.
        name: what it is called.
        order: its `thread_sort_index`: negative, so that it lies above the profiler's.
    """

    pid: int | str
    tid: int
    name: str
    order: int


def free_tids(taken: Collection[int]) -> Iterator[int]:
    """Yield thread ids that are not taken."""
    return (tid for tid in itertools.count(_FIRST_TID) if tid not in taken)


def timeline_rows(timeline: Timeline, pid: int | str, tids: Iterator[int]) -> list[Row]:
    """Return a row for each track: by thread, forward above backward."""
    names = timeline.track_names
    order = _in_view_order(timeline)
    rank = {track: place for place, track in enumerate(order)}
    return [Row(pid, next(tids), names[track], rank[track] - len(order)) for track in range(len(names))]


def marks_row(timeline: Timeline, pid: int | str, tids: Iterator[int]) -> Row:
    """Return the row of steps and marks, above those of the tracks."""
    return Row(pid, next(tids), MARKS, -len(timeline.tracks) - 1)


def device_rows(
    used: Collection[int],
    keys: list[tuple[int | str, int | str]],
    names: Mapping[tuple[int | str, int | str], str],
    tids: Iterator[int],
) -> dict[int, Row]:
    """Return a row for each of the trace's tracks that has slices of ours above it."""
    return {
        track: Row(
            keys[track][0],
            next(tids),
            f"modules · {names.get(keys[track], f'stream {keys[track][1]}').strip()}",
            place - len(used),
        )
        for place, track in enumerate(sorted(used))
    }


def _in_view_order(timeline: Timeline) -> list[int]:
    threads: dict[int, int] = {}
    for track in timeline.tracks:
        threads.setdefault(track.tid, len(threads))

    def place(index: int) -> tuple[int, bool]:
        track: Track = timeline.tracks[index]
        return threads[track.tid], track.kind != "forward"

    return sorted(range(len(timeline.tracks)), key=place)
