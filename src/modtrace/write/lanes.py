"""The lanes of a written trace: one for each track, and the processes that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .._arrays import Int32Array, Numbering, SignedIntArray
from ..formats.limits import escaped
from ..formats.table_bytes import processes_of
from ..timeline import Process, Slices, Timeline
from ..timeline.contents import TRACK_KINDS
from ..timeline.nesting import outermost_first

MARKS_ROW = "steps and marks"
"""The name of the row of the timeline's marks."""


class Lane(NamedTuple):
    """A row of a viewer: in JSON the slices of one pid and tid, in Perfetto's format those of a track.

    Each track of the timeline has one.
    """

    track: int  # index into the timeline's tracks
    name: str  # its name in a viewer
    pid: int | str  # of its process in the file; text only where a profiler's trace has text there
    tid: int  # its number in the file, unique there; not a thread's


class _IdAllocator:
    """Hands out unused numbers from 1 to 2³²−1."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._next = 1

    def take(self, wanted: int = 0) -> int:
        """Return `wanted` where it is free and in range, else the lowest free number."""
        if not 0 < wanted < 1 << 32 or wanted in self._taken:
            while self._next in self._taken:
                self._next += 1
            wanted = self._next
        self._taken.add(wanted)
        return wanted


@dataclass(frozen=True)
class Lanes:
    """The layout of a timeline's spans in a file."""

    # From top to bottom: by process and thread, forward above backward above communication; those of later tracks last
    lanes: Sequence[Lane]
    of_track: Int32Array  # int32[tracks], the lane of each track
    pids: dict[Process, int | str]  # the pid of each process in the file: the real one where it is free
    # Pid and tid for the row of steps and marks, which belong to no thread; in the first process, if any
    marks: tuple[int | str, int]
    sort_indexes: Sequence[int]  # where each lane is sorted to among its process' rows, and after them the row of marks
    ids: _IdAllocator  # the ids that are free

    @classmethod
    def from_timeline(cls, timeline: Timeline, before: Lanes | None = None) -> Lanes:
        """Lay out a timeline whose spans nest on each track.

        The lanes of the first of its tracks that are in `before` stay as they are.
        """
        ids = _IdAllocator() if before is None else before.ids
        lanes = [] if before is None else [*before.lanes]
        sort_indexes = [] if before is None else [*before.sort_indexes[:-1]]
        pids = {} if before is None else dict(before.pids)
        for process in _processes(timeline):
            if process not in pids:
                pids[process] = ids.take(process.pid)
        lane_of = {lane.track: index for index, lane in enumerate(lanes)}
        names, place = timeline.track_names, 0
        for number, track in enumerate(_in_view_order(timeline)):
            if track not in lane_of:
                lane_of[track] = len(lanes)
                lanes.append(Lane(track, escaped(names[track]), pids[timeline.tracks[track].process], ids.take()))
                # Readers sort rows of one index by their ids, so a later one is right after the one above it.
                sort_indexes.append(number if before is None else place)
            place = sort_indexes[lane_of[track]]
        of_track = np.array([lane_of[track] for track in range(len(lanes))], np.int32)
        marks = (next(iter(pids.values())) if pids else ids.take(), ids.take()) if before is None else before.marks
        return cls(lanes, of_track, pids, marks, [*sort_indexes, -1], ids)

    def at(self, pid_of: Callable[[Process], int | str], places: Sequence[tuple[int, int]]) -> Lanes:
        """Return the lanes as rows of a trace: its pids, and id and sort index of each lane and of the marks."""
        pids = {pid: pid_of(process) for process, pid in self.pids.items()}
        return replace(
            self,
            lanes=[
                lane._replace(pid=pids[lane.pid], tid=tid) for lane, (tid, _) in zip(self.lanes, places, strict=False)
            ],
            pids={process: pids[pid] for process, pid in self.pids.items()},
            marks=(pids.get(self.marks[0], self.marks[0]), places[-1][0]),
            sort_indexes=[index for _, index in places],
        )

    def rows_by_lane(self, columns: Slices) -> Iterator[SignedIntArray]:
        """Yield per lane the positions of some of a timeline's slices, by start and outermost first."""
        kind = np.int32 if len(columns) < 1 << 31 else np.int64
        order = np.argsort(columns.track, kind="stable").astype(kind)
        bounds = np.searchsorted(columns.track[order], np.arange(len(self.lanes) + 1))
        for lane in self.lanes:
            rows = order[bounds[lane.track] : bounds[lane.track + 1]]
            yield outermost_first(columns.start, columns.end, rows)


def _processes(timeline: Timeline) -> list[Process]:
    """Return all processes, by role and rank, then as they come."""
    return sorted(processes_of(timeline), key=lambda process: (process.rank is None, process.role, process.rank or 0))


def _in_view_order(timeline: Timeline) -> list[int]:
    """Return the tracks by process, then thread as it comes, by their kinds; then GPUs and their streams."""
    processes = {process: number for number, process in enumerate(_processes(timeline))}
    threads = Numbering[object]()
    return sorted(
        range(len(timeline.tracks)),
        key=lambda index: (
            processes[(track := timeline.tracks[index]).process],
            -1 if track.device is None else track.device,
            threads[track.process, track.thread, track.tid] if track.stream is None else track.stream,
            TRACK_KINDS.index(track.kind),
        ),
    )
