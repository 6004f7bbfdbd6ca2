"""The times of all threads on one line, so that what each did costs no look at what the others did."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..._numbering import distinct
from ..._typing import AnyIntArray, Int64Array
from ..select import first_process_tracks
from ..time_intervals import shift_apart

if TYPE_CHECKING:
    from ..timeline import Timeline
    from .step_bounds import StepBounds


class ThreadLine:
    """The threads of the first process after each other in time: each has its times moved, and none touches another.

    Attributes:
        tids: int64[threads], ascending.
        of_track: int64[tracks], the index of its thread; -1 for a track of another process or of a device.
        slices: those of the timeline with their times moved, which means nothing for those on other tracks.
    """

    def __init__(self, timeline: Timeline, bounds: StepBounds) -> None:
        """Make room for all that the threads did, and for their steps; those of the process are steps of each."""
        slices, tracks = timeline.slices, timeline.tracks
        tid = np.array([track.tid for track in tracks], np.int64)
        own = first_process_tracks(timeline) & [track.device is None for track in tracks]
        self.tids = distinct(tid[own])
        self.of_track = np.where(own, np.searchsorted(self.tids, tid), -1)
        self._shift, self._begin, self.slices = np.zeros(1, np.int64), np.full(1, np.iinfo(np.int64).min), slices
        if len(self.tids) == 1:
            return
        thread = self.of_track[slices.track]
        rows = np.flatnonzero(thread >= 0)
        of_step, start, end = np.searchsorted(self.tids, bounds.tid), bounds.start, bounds.end
        if len(start) and bounds.tid[0] < 0:
            of_step = np.arange(len(self.tids))
            start, end = (np.full(len(self.tids), edge) for edge in (start.min(), end.max()))
        groups, count = np.append(thread[rows], of_step), len(self.tids)
        times = np.append(slices.start[rows], start), np.append(slices.end[rows], end)
        self._shift, self._begin = shift_apart(groups, *times, count)
        shift = self._shift[thread]
        self.slices = replace(slices, start=slices.start + shift, end=slices.end + shift)

    def move(self, thread: AnyIntArray, time: Int64Array) -> Int64Array:
        """Return where moments of threads are on the line; those out of a thread's reach where it begins or ends."""
        last = np.append(self._begin[1:] - 1, np.iinfo(np.int64).max)
        moved: Int64Array = np.clip(time + self._shift[thread], self._begin[thread], last[thread])
        return moved

    def back(self, moment: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the thread that each moment on the line is of, by index, and when that was."""
        thread = np.searchsorted(self._begin, moment, side="right") - 1
        return thread, moment - self._shift[thread]

    def number_between(self, edges: Int64Array, moment: Int64Array) -> Int64Array:
        """Number moments, later ones no lower: alike if they are of one thread, with no edge, a real time, between."""
        thread, time = self.back(moment)
        number: Int64Array = thread * (len(edges) + 1) + np.searchsorted(edges, time, side="right")
        return number

    def first_of_threads(self, moment: Int64Array) -> Int64Array:
        """Return the index of the first of ascending moments of each thread that has any."""
        first = np.searchsorted(moment, self._begin)
        return first[first < len(moment)]
