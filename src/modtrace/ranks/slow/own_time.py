"""The own time of ranks, which stops while they wait; and which module's it was."""

import copy
from typing import NamedTuple

import numpy as np

from ..._typing import Int64Array
from ...timeline import PHASES
from ...timeline.decode.intervals import find_parents
from ...timeline.time_intervals import TimeIntervals, union_of
from ..rank_tables import CALL, CollectiveTable, SpanTable


class OwnTime:
    """Times of many ranks on one axis, and how much of them their ranks did not wait.

    Args:
        table: the collectives of all ranks. A rank waits in waits, and in calls that return when they are complete.

    Attributes:
        ranks: int64, the ranks, ascending.
    """

    def __init__(self, table: CollectiveTable) -> None:
        self.ranks = np.unique(table.rank).astype(np.int64)
        first, last = (int(table.start.min()), int(table.end.max())) if len(table.start) else (0, 0)
        # Moments before the first one, as the begin of a span, are on the axis too.
        self._length = 4 * (last - first + 1)
        self._zero = first - (last - first + 1)
        blocks = (table.kind != CALL) | (table.done >= 0) & (table.done <= table.end)
        start = self.place(table.rank[blocks], table.start[blocks])
        self._waits = union_of(start, self.place(table.rank[blocks], table.end[blocks]))

    def place(self, rank: Int64Array, time: Int64Array) -> Int64Array:
        """Return where times of ranks are on the axis; the order is by rank, then by time."""
        ranks = self.ranks
        has_gaps = len(ranks) and ranks[-1] - ranks[0] >= len(ranks)
        index = np.searchsorted(ranks, rank) if has_gaps else rank - ranks[:1]
        position: Int64Array = index * self._length + (time - self._zero)
        return position

    def of_rank(self, rank: int) -> "OwnTime":
        """Return the same for one rank alone, which is quicker to ask."""
        index = int(np.searchsorted(self.ranks, rank))
        first, last = np.searchsorted(self._waits.start, [index * self._length, (index + 1) * self._length])
        alone = copy.copy(self)
        alone._waits = TimeIntervals(self._waits.start[first:last], self._waits.end[first:last])
        return alone

    def until(self, place: Int64Array) -> Int64Array:
        """Return for places on the axis the own time until then, ns; only differences within one rank mean anything."""
        return place - self._waits.time_until(place)


class Segments(NamedTuple):
    """Parts of spans with nothing inside them; arrays of equal length.

    Attributes:
        owner: int64, the span, as an index of its table.
        key: int64, name × phases + phase.
        begin: int64, on the axis of `OwnTime`.
        end: int64.
        own: int64, own time in between, ns.
    """

    owner: Int64Array
    key: Int64Array
    begin: Int64Array
    end: Int64Array
    own: Int64Array


def segments_of(spans: SpanTable, own_time: OwnTime, rank: int) -> Segments:
    """Return the segments of a rank.

    Args:
        spans: the rank's alone.
        own_time: the axis.
        rank: its number.
    """
    count = len(spans.start)
    if not count:
        return Segments(*np.empty((5, 0), np.int64))
    parent = find_parents(spans.track.astype(np.int64), spans.depth.astype(np.int64))
    track = np.concatenate([spans.track, spans.track])
    time = np.concatenate([spans.start, spans.start + spans.duration])
    is_end = np.repeat([False, True], count)
    depth = np.concatenate([spans.depth, spans.depth])
    # At one moment ends come before begins, the inner ones first, and of begins the outer ones.
    order = np.lexsort((np.where(is_end, -depth, depth), ~is_end, time, track))
    owner = np.concatenate([np.arange(count), parent])[order]
    begin, track = time[order], track[order]
    end = np.append(begin[1:], 0)
    goes_on = np.append(track[1:] == track[:-1], False) & (owner >= 0) & (end > begin)
    owner, begin, end = owner[goes_on], begin[goes_on], end[goes_on]
    ranks = np.full(len(owner), rank, np.int64)
    key = spans.name[owner].astype(np.int64) * len(PHASES) + spans.phase[owner]
    begin, end, of_rank = own_time.place(ranks, begin), own_time.place(ranks, end), own_time.of_rank(rank)
    return Segments(owner, key, begin, end, of_rank.until(end) - of_rank.until(begin))
