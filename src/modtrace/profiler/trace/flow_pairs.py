"""The profiler's arrows from forward operations to backward nodes: their two ends, paired by process and id."""

from __future__ import annotations

from typing import Any

import numpy as np

from .event_columns import MAX_TIME_US, SliceColumns, microseconds_to_ns

__all__ = ["FlowPairs"]


class FlowPairs:
    """Takes the ends of arrows, in any order."""

    def __init__(self) -> None:
        self._begins: dict[Any, int] = {}
        self._ends: dict[Any, tuple[int, float]] = {}

    def add_begin(self, flow: Any, track: int) -> None:
        """Take the begin of an arrow."""
        self._begins[flow] = track

    def add_end(self, flow: Any, track: int, start: float) -> None:
        """Take the end of an arrow; `start` in µs."""
        if 0 <= start < MAX_TIME_US:
            self._ends[flow] = (track, start)

    def columns(self) -> SliceColumns:
        """Return a row for each arrow that has both: the track and the time of its end, `value` its begin's track."""
        rows = [
            (track, start, self._begins[flow]) for flow, (track, start) in self._ends.items() if flow in self._begins
        ]
        start = microseconds_to_ns(np.array([start for _, start, _ in rows], np.float64))
        track, begin = np.array([(track, begin) for track, _, begin in rows], np.int64).reshape(-1, 2).T
        zeros = np.zeros(len(rows), np.int64)
        return SliceColumns(track, start, zeros, begin, zeros)
