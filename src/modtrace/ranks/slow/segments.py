"""When which span of a rank was the innermost one of its track: what self times are made of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..._typing import Int64Array
from ...timeline import PHASES
from ...timeline.decode.intervals import find_parents
from ..rank_tables import SpanTable
from .own_time import OwnTime

__all__ = ["Segments", "segments_of"]


class Segments(NamedTuple):
    """Parts of spans with nothing inside them; arrays of equal length.

    Attributes:
        owner: int64, the span, as an index of its table.
        key: int64, name × phases + phase.
        begin: int64, on the axis of `OwnTime`.
        end: int64.
    """

    owner: Int64Array
    key: Int64Array
    begin: Int64Array
    end: Int64Array


def segments_of(spans: SpanTable, own_time: OwnTime, rank: int) -> Segments:
    """Return the segments of a rank.

    Args:
        spans: the rank's alone.
        own_time: the axis.
        rank: its number.
    """
    count = len(spans.start)
    if not count:
        return Segments(*(np.empty(0, np.int64) for _ in range(4)))
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
    return Segments(owner, key, own_time.place(ranks, begin), own_time.place(ranks, end))
