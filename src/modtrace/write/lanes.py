"""The lanes of a written trace, one for each track, and their processes."""

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
"""The name of the row for the timeline's marks."""


class Lane(NamedTuple):
    """A viewer's row for a track of the timeline: in JSON a pid and tid, in Perfetto's format a track."""

    track: int  # index into the timeline's tracks
    name: str  # name in a viewer
    pid: int | str  # pid of its process in the file; a text only if a profiler's trace has a text
    tid: int  # number of the lane, unique in the file; not the id of a thread


class _IdAllocator:
    """Hands out unused numbers from 1 to 2³²−1."""

    def __init__(self) -> None:
        self._used: set[int] = set()
        self._next = 1

    def take(self, number: int = 0) -> int:
        """Return `number` if it is unused and in range, otherwise the lowest unused number."""
        if not 0 < number < 1 << 32 or number in self._used:
            while self._next in self._used:
                self._next += 1
            number = self._next
        self._used.add(number)
        return number


@dataclass(frozen=True)
class Lanes:
    """The layout of a timeline's spans in a file."""

    # From top to bottom: by process and thread, forward above backward above communication; lanes of later tracks last
    lanes: Sequence[Lane]
    lane_by_track: Int32Array  # int32[tracks], the index of each track's lane
    pids: dict[Process, int | str]  # pid of each process in the file: its own pid if that is unused
    # Pid (of the first process, if any) and tid of the row of steps and marks, which belong to no thread
    marks: tuple[int | str, int]
    sort_indexes: Sequence[int]  # sort index of each lane among its process's rows, then of the row of marks
    ids: _IdAllocator  # allocator of pids and tids

    @classmethod
    def from_timeline(cls, timeline: Timeline, earlier: Lanes | None = None) -> Lanes:
        """Lay out a timeline whose spans nest on each track; lanes in `earlier`, of an earlier part, stay unchanged."""
        ids = _IdAllocator() if earlier is None else earlier.ids
        lanes = [] if earlier is None else [*earlier.lanes]
        sort_indexes = [] if earlier is None else [*earlier.sort_indexes[:-1]]
        pids = {} if earlier is None else dict(earlier.pids)
        for process in _processes(timeline):
            if process not in pids:
                pids[process] = ids.take(process.pid)
        lane_of = {lane.track: index for index, lane in enumerate(lanes)}
        names, sort_index = timeline.track_names, 0
        for number, track in enumerate(_tracks_in_view_order(timeline)):
            if track not in lane_of:
                lane_of[track] = len(lanes)
                lanes.append(Lane(track, escaped(names[track]), pids[timeline.tracks[track].process], ids.take()))
                # Readers sort rows of one sort index by their ids, so a later lane comes right below its upper lane.
                sort_indexes.append(number if earlier is None else sort_index)
            sort_index = sort_indexes[lane_of[track]]
        lane_by_track = np.array([lane_of[track] for track in range(len(lanes))], np.int32)
        marks = (next(iter(pids.values())) if pids else ids.take(), ids.take()) if earlier is None else earlier.marks
        return cls(lanes, lane_by_track, pids, marks, [*sort_indexes, -1], ids)

    def at(self, pid_of: Callable[[Process], int | str], places: Sequence[tuple[int, int]]) -> Lanes:
        """Return the lanes with a trace's pids; `places` has the id and sort index of each lane, then of the marks."""
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
        """Yield the rows of each lane in `columns`, by start and outermost first."""
        dtype = np.int32 if len(columns) < 1 << 31 else np.int64
        order = np.argsort(columns.track, kind="stable").astype(dtype)
        bounds = np.searchsorted(columns.track[order], np.arange(len(self.lanes) + 1))
        for lane in self.lanes:
            rows = order[bounds[lane.track] : bounds[lane.track + 1]]
            yield outermost_first(columns.start, columns.end, rows)


def _processes(timeline: Timeline) -> list[Process]:
    """Return all processes by role and rank, otherwise in the order of the timeline."""
    return sorted(processes_of(timeline), key=lambda process: (process.rank is None, process.role, process.rank or 0))


def _tracks_in_view_order(timeline: Timeline) -> list[int]:
    """Return the indices of the tracks by process, thread and kind; GPUs and their streams follow the threads."""
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
