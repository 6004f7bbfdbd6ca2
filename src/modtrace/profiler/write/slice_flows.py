"""The profiler's flows, between the slices that it draws them from and to.

A slice of a Perfetto trace names its flows. In the profiler's JSON an end of a flow is an event of its own, written
behind its slice and beginning when it does. Of many flows the profiler writes one end only, and some end before they
begin: readers of its JSON draw neither, so these are left out here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

from ..._typing import Float64Array, Int64Array
from ...formats.perfetto_ids import PROFILER_FLOW

__all__ = ["FlowEndsOfTrack", "SliceFlows"]


class FlowEndsOfTrack(NamedTuple):
    """The flows that begin or end at slices of one track; columns of equal length.

    Attributes:
        slice: int64[n], index of the slice on its track, ascending.
        flow: int64[n], number of the flow.
    """

    slice: Int64Array
    flow: Int64Array

    def added_to(self, fields: Sequence[bytes]) -> list[bytes]:
        """Return the fields of the track's slices with those that name their flows."""
        found = list(fields)
        ids = self.flow + PROFILER_FLOW
        first = np.flatnonzero(np.diff(self.slice, prepend=-1)).tolist()
        for begin, end in pairwise([*first, len(ids)]):
            found[self.slice[begin]] += TrackEvent(flow_ids=ids[begin:end].tolist()).SerializeToString()
        return found


@dataclass
class SliceFlows:
    """Takes the ends of flows in file order; columns of equal length."""

    _flow: array[int] = field(default_factory=lambda: array("q"))
    _ends: bytearray = field(default_factory=bytearray)
    _time: array[float] = field(default_factory=lambda: array("d"))
    _track: array[int] = field(default_factory=lambda: array("q"))
    _slices_before: array[int] = field(default_factory=lambda: array("q"))

    def add(self, flow: int, time: float, track: int, slices_before: int, *, ends: bool) -> None:
        """Take the begin or the end of a flow.

        Args:
            flow: number of the flow.
            time: µs from the trace's base.
            track: index of its track.
            slices_before: how many slices of that track stand before it in the file.
            ends: whether the flow ends here.
        """
        self._flow.append(flow)
        self._ends.append(ends)
        self._time.append(time)
        self._track.append(track)
        self._slices_before.append(slices_before)

    def by_track(self, starts: Sequence[array[float]]) -> Iterator[FlowEndsOfTrack]:
        """Yield for each track the flows of its slices: those flows that lead from a slice to one.

        A number may come again for another flow, once the flow before has ended; here each has one of its own, from 1.

        Args:
            starts: when the slices of each track begin, µs from the trace's base, in file order.
        """
        slice_ = self._slices(starts)
        begins, ends = self._pairs(slice_)
        rows = np.concatenate([begins, ends])
        flow = np.tile(np.arange(1, len(begins) + 1), 2)
        track = np.frombuffer(self._track, np.int64)[rows]
        order = np.lexsort((flow, slice_[rows], track))
        bounds = np.searchsorted(track[order], np.arange(len(starts) + 1))
        for begin, end in pairwise(bounds.tolist()):
            of_track = order[begin:end]
            yield FlowEndsOfTrack(slice_[rows[of_track]], flow[of_track])

    def _slices(self, starts: Sequence[array[float]]) -> Int64Array:
        """Return the slice that each end belongs to, by its index on its track; -1 for none."""
        track, time = np.frombuffer(self._track, np.int64), np.frombuffer(self._time, np.float64)
        before = np.frombuffer(self._slices_before, np.int64)
        found = np.full(len(track), -1, np.int64)
        order = np.argsort(track, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(track[order])) + 1):
            if len(rows):
                start = np.frombuffer(starts[track[rows[0]]], np.float64)
                found[rows] = _last_begun_at(start, time[rows], before[rows])
        return found

    def _pairs(self, slice_: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the rows of the begins and of the ends of the flows that are drawn."""
        flow, time = np.frombuffer(self._flow, np.int64), np.frombuffer(self._time, np.float64)
        bound = np.flatnonzero(slice_ >= 0)
        rows = bound[np.lexsort((time[bound], flow[bound]))]  # in file order where they are of one time
        is_end = np.frombuffer(self._ends, np.bool_)[rows]
        follows = np.append(False, flow[rows][1:] == flow[rows][:-1])
        follows_begin = follows & np.append(True, ~is_end[:-1])
        # A begin of what has begun already is none.
        first_begins = np.maximum.accumulate(np.where(~is_end & ~follows_begin, np.arange(len(rows)), 0))
        ends = np.flatnonzero(is_end & follows_begin)
        return rows[first_begins[ends]], rows[ends]


def _last_begun_at(start: Float64Array, time: Float64Array, before: Int64Array) -> Int64Array:
    """Return the last of the first so many slices that begins at each time, else the first of all; -1 for none."""
    if not len(start):
        return np.full(len(time), -1, np.int64)
    times, moment = np.unique(start, return_inverse=True)
    # Slices by moment, and of one moment in file order.
    code = np.sort(moment * len(start) + np.arange(len(start)))
    asked = np.minimum(np.searchsorted(times, time), len(times) - 1)
    first, last = (np.searchsorted(code, asked * len(start) + position) for position in (0, before))
    found: Int64Array = np.where(times[asked] == time, code[np.maximum(last - 1, first)] % len(start), -1)
    return found
