"""The rows of a written trace: at least one for each track, and the processes that they belong to."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._typing import Int32Array, SignedIntArray
from ..formats.escape import Originals, shown
from ..timeline import Process, Timeline
from ..timeline.nesting import nested, outermost_first

__all__ = ["BAND", "MARKS", "Lane", "Lanes"]

BAND = 512
"""Levels of a row: the trace processor drops, silently, what lies deeper; deeper spans get a row of their own."""


MARKS = "steps and marks"
"""What the row of the timeline's marks is called."""


class Lane(NamedTuple):
    """One row.

    Attributes:
        track: index into the timeline's tracks.
        band: which 512 levels of the track these are, from 0.
        name: what the row is called.
        pid: of its process in the file, unique there.
        tid: of the row in the file, unique there; not a thread's.
    """

    track: int
    band: int
    name: str
    pid: int
    tid: int


@dataclass(frozen=True)
class Lanes:
    """How a timeline is laid out in a file.

    Attributes:
        lanes: in the order in which they are to be seen: by process and thread, forward above backward.
        of_span: int32, the lane of each span.
        pids: of each process in the file: the real one where it is free.
        marks: pid and tid for the row of steps and marks, which belong to no thread; in the first process, if any.
    """

    lanes: Sequence[Lane]
    of_span: Int32Array
    pids: dict[Process, int]
    marks: tuple[int, int]

    @classmethod
    def of(cls, timeline: Timeline, originals: Originals, taken: Collection[int] = ()) -> Lanes:
        """Lay out a timeline. `taken` are numbers that the file already uses as pid or tid."""
        columns = timeline.columns
        depth = nested(columns).depth if np.any(columns.start == columns.end) else columns.depth
        bands = int(depth.max(initial=0)) // BAND + 1
        key = columns.track if bands == 1 else columns.track * bands + depth // BAND
        count = len(timeline.tracks) * bands
        used = np.bincount(key, minlength=count) > 0
        seen = [track * bands + band for track in _in_view_order(timeline) for band in range(bands)]
        shown_keys = [key for key in seen if used[key] or key % bands == 0]
        number = np.zeros(count, np.int32)
        number[shown_keys] = np.arange(len(shown_keys))

        free = _Free({*taken})
        pids = {process: free.take(process.pid) for process in _processes(timeline)}
        names = timeline.track_names
        lanes = [
            Lane(
                key // bands,
                key % bands,
                _lane_name(shown(names[key // bands], originals), key % bands),
                pids[timeline.tracks[key // bands].process],
                free.take(),
            )
            for key in shown_keys
        ]
        marks = (next(iter(pids.values())) if pids else free.take(), free.take())
        return cls(lanes, number[key], pids, marks)

    def rows(self, timeline: Timeline) -> Iterator[SignedIntArray]:
        """Yield per lane the positions of its spans, by start and outermost first."""
        kind = np.int32 if len(self.of_span) < 1 << 31 else np.int64
        for lane in range(len(self.lanes)):
            yield outermost_first(timeline.columns, np.flatnonzero(self.of_span == lane).astype(kind))


class _Free:
    """Hands out numbers from 1 to 2³²−1 that nobody has yet."""

    def __init__(self, taken: set[int]) -> None:
        self._taken = taken
        self._next = 1

    def take(self, wish: int = 0) -> int:
        if not 0 < wish < 1 << 32 or wish in self._taken:
            while self._next in self._taken:
                self._next += 1
            wish = self._next
        self._taken.add(wish)
        return wish


def _processes(timeline: Timeline) -> list[Process]:
    """Return all processes, by rank, then as they come."""
    found = dict.fromkeys([track.process for track in timeline.tracks] + [c.process for c in timeline.counters])
    return sorted(found, key=lambda process: (process.rank is None, process.rank or 0))


def _in_view_order(timeline: Timeline) -> list[int]:
    """Return the tracks by process, then thread as it comes, forward before backward."""
    processes = _processes(timeline)
    threads = list(dict.fromkeys((track.process, track.thread, track.tid) for track in timeline.tracks))
    return sorted(
        range(len(timeline.tracks)),
        key=lambda index: (
            processes.index((track := timeline.tracks[index]).process),
            threads.index((track.process, track.thread, track.tid)),
            track.kind != "forward",
        ),
    )


def _lane_name(name: str, band: int) -> str:
    return name if band == 0 else f"{name} · from level {band * BAND}"
