"""Replace numbers that tell one run from all others: ids of processes and threads, and the time at which it began."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..timeline import Timeline
from ..timeline.rewrite import move_times, replace_processes

__all__ = ["REPORT_START_NS", "IdNumbers", "without_identity"]

REPORT_START_NS = 946_684_800_000_000_000
"""When every report begins: 2000-01-01 00:00 UTC, Unix ns."""

_MIN_OS_ID = 1024
"""Smaller ids stay: those of GPUs and streams in a profiler's trace, and of the first processes in a container."""
_MAX_OS_ID = 2**31 - 1
"""Larger ids stay: those of the rows that a merge adds."""
_FIRST_NUMBER = 100_001


class IdNumbers:
    """Numbers in place of ids of processes and threads, in the order in which these appear; equal for equal ids."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def number(self, os_id: int) -> int:
        """Return the number of an id; an id that is none of the operating system's stays."""
        if 0 <= os_id < _MIN_OS_ID or os_id > _MAX_OS_ID:
            return os_id
        return self._numbers.setdefault(os_id, _FIRST_NUMBER + len(self._numbers))


def without_identity(timeline: Timeline) -> Timeline:
    """Return the timeline with its start at `REPORT_START_NS`, and with numbers in place of process and thread ids."""
    columns = timeline.columns
    starts = [int(columns.start.min())] if len(columns) else []
    starts += [mark.time_ns for mark in timeline.marks]
    collectives = timeline.collectives
    starts += [int(collectives.start.min())] if len(collectives) else []
    starts += [run.start_ns for run in timeline.backward_passes]
    starts += [int(counter.time[0]) for counter in timeline.counters if len(counter.time)]
    shift = np.int64(REPORT_START_NS - min(starts, default=REPORT_START_NS))
    moved = move_times(timeline, lambda times: times + shift)
    ids = IdNumbers()
    moved = replace_processes(moved, lambda process: process._replace(pid=ids.number(process.pid)))
    return replace(
        moved,
        tracks=[track._replace(tid=ids.number(track.tid)) if track.device is None else track for track in moved.tracks],
        backward_passes=[run._replace(tid=ids.number(run.tid)) for run in moved.backward_passes],
    )
