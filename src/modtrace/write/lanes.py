"""The lanes of a written trace: at least one for each track, and the processes that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .._typing import Int32Array, SignedIntArray
from ..formats.escape import escaped
from ..formats.limits import MAX_LEVELS_PER_ROW
from ..timeline import LargeTimeline, Process, Timeline
from ..timeline.contents import TRACK_KINDS
from ..timeline.nesting import depth_by_time, innermost_depths, outermost_first

MARKS_ROW = "steps and marks"
"""What the row of the timeline's marks is called."""


class Lane(NamedTuple):
    """What a viewer draws as one row: in JSON the slices of one pid and tid, in Perfetto's format those of a track.

    A track of the timeline has one lane, and more if its spans are deeper than a viewer draws. The header lists them.

    Attributes:
        track: index into the timeline's tracks.
        first_level: the depth of its outermost spans on the track: 0, 512, 1024 …
        name: what a viewer calls it.
        pid: of its process in the file; text only where a profiler's trace has text there.
        tid: its number in the file, unique there; not a thread's.
    """

    track: int
    first_level: int
    name: str
    pid: int | str
    tid: int


@dataclass(frozen=True)
class Lanes:
    """How the spans of a timeline are laid out in a file.

    Attributes:
        lanes: in the order in which they are to be seen: by process and thread, forward above backward
            above communication.
        of_span: int32[n], the lane of each span.
        of_row: int32, the lane of each row of each track: all tracks have equally many rows here.
        pids: the pid of each process in the file: the real one where it is free.
        marks: pid and tid for the row of steps and marks, which belong to no thread; in the first process, if any.
        sort_indexes: where each lane is sorted to among its process' rows in JSON, and behind them the row of marks;
            empty: in their order, marks before them.
    """

    lanes: Sequence[Lane]
    of_span: Int32Array
    of_row: Int32Array
    pids: dict[Process, int | str]
    marks: tuple[int | str, int]
    sort_indexes: Sequence[int] = ()

    @classmethod
    def from_timeline(cls, timeline: Timeline, large: LargeTimeline | None = None) -> Lanes:
        """Lay out a timeline whose spans nest on each track.

        Args:
            timeline: which one.
            large: the large timeline, if `timeline` is its `rest`; then there are lanes for all of its spans.
        """
        deepest = innermost_depths(timeline) if large is None else large.deepest
        rows_per_track = int(deepest.max(initial=0)) // MAX_LEVELS_PER_ROW + 1
        count = len(timeline.tracks) * rows_per_track
        used = (deepest[:, None] >= np.arange(rows_per_track) * MAX_LEVELS_PER_ROW).ravel()
        in_order = [track * rows_per_track + row for track in _in_view_order(timeline) for row in range(rows_per_track)]
        written = [key for key in in_order if used[key] or key % rows_per_track == 0]
        lane_of_key = np.zeros(count, np.int32)
        lane_of_key[written] = np.arange(len(written))

        ids = _IdAllocator()
        pids: dict[Process, int | str] = {process: ids.take(process.pid) for process in _processes(timeline)}
        names = timeline.track_names
        lanes = []
        for key_ in written:
            track, row = divmod(key_, rows_per_track)
            first_level = row * MAX_LEVELS_PER_ROW
            name = escaped(names[track]) + (f" · from level {first_level}" if first_level else "")
            lanes.append(Lane(track, first_level, name, pids[timeline.tracks[track].process], ids.take()))
        marks = (next(iter(pids.values())) if pids else ids.take(), ids.take())
        return cls(lanes, np.zeros(0, np.int32), lane_of_key, pids, marks).on(timeline)

    def on(self, timeline: Timeline) -> Lanes:
        """Return the lanes with the spans of another timeline, whose tracks are the same and whose depths have rows."""
        columns, rows_per_track = timeline.columns, len(self.of_row) // max(len(timeline.tracks), 1)
        row = depth_by_time(columns) // MAX_LEVELS_PER_ROW if rows_per_track > 1 else 0
        return replace(self, of_span=self.of_row[columns.track * rows_per_track + row])

    def by_piece(self, timeline: Timeline, large: LargeTimeline | None) -> Iterator[tuple[Timeline, Lanes]]:
        """Yield what holds the spans, each with its lanes: the timeline, or the pieces of a large one.

        Args:
            timeline: whose lanes these are.
            large: whose `rest` it is.
        """
        if large is None:
            yield timeline, self
        else:
            yield from ((piece, self.on(piece)) for piece in large.pieces())

    def at(self, pid: int | str, places: Sequence[tuple[int, int]]) -> Lanes:
        """Return the lanes as rows of one process of a trace.

        Args:
            pid: of the process in the trace, to which all of the timeline belongs.
            places: id and sort index of each lane, and behind them of the row of marks.
        """
        return replace(
            self,
            lanes=[lane._replace(pid=pid, tid=tid) for lane, (tid, _) in zip(self.lanes, places, strict=False)],
            pids=dict.fromkeys(self.pids, pid),
            marks=(pid, places[-1][0]),
            sort_indexes=[index for _, index in places],
        )

    def by_track(self) -> dict[int, int]:
        """Return for each track the lane that its outermost slices lie on."""
        return {lane.track: index for index, lane in enumerate(self.lanes) if not lane.first_level}

    @property
    def ids(self) -> list[tuple[int, int | str, int]]:
        """Of each lane the index of its track, and pid and tid in the file."""
        return [(lane.track, lane.pid, lane.tid) for lane in self.lanes]

    def spans_by_lane(self, timeline: Timeline) -> Iterator[SignedIntArray]:
        """Yield per lane the positions of its spans, by start and outermost first."""
        kind = np.int32 if len(self.of_span) < 1 << 31 else np.int64
        for lane in range(len(self.lanes)):
            rows = np.flatnonzero(self.of_span == lane).astype(kind)
            yield outermost_first(timeline.columns.start, timeline.columns.end, rows)


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


def _processes(timeline: Timeline) -> list[Process]:
    """Return all processes, by rank, then as they come."""
    processes = dict.fromkeys([track.process for track in timeline.tracks] + [c.process for c in timeline.counters])
    return sorted(processes, key=lambda process: (process.rank is None, process.rank or 0))


def _in_view_order(timeline: Timeline) -> list[int]:
    """Return the tracks by process, then thread as it comes, by their kinds; then GPUs and their streams."""
    processes = _processes(timeline)
    threads = list(dict.fromkeys((track.process, track.thread, track.tid) for track in timeline.tracks))
    return sorted(
        range(len(timeline.tracks)),
        key=lambda index: (
            processes.index((track := timeline.tracks[index]).process),
            -1 if track.device is None else track.device,
            threads.index((track.process, track.thread, track.tid)) if track.stream is None else track.stream,
            TRACK_KINDS.index(track.kind),
        ),
    )
