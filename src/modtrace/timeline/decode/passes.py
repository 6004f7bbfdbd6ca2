"""Events → backward passes: from when to when each thread was inside of what runs a pass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..._typing import Int64Array
from ...ring import Events, Kind

__all__ = ["PassColumns", "pair_passes"]


class PassColumns(NamedTuple):
    """Backward passes in the order of their begins; int64 arrays of equal length.

    Attributes:
        thread: index into the name table's threads.
        begin: index of the event that begins it; -1 where that was overwritten.
        end: index of the event that ends it; -1 where it is not over.
    """

    thread: Int64Array
    begin: Int64Array
    end: Int64Array


def pair_passes(events: Events) -> PassColumns:
    """Pair the begins and ends of passes by their numbers."""
    edges = np.flatnonzero((events.kind == Kind.PASS_BEGIN) | (events.kind == Kind.PASS_END))
    number = events.value[edges]
    _, pass_of = np.unique(number, return_inverse=True)
    count = int(pass_of.max()) + 1 if len(edges) else 0
    first = np.full((2, count), len(events), np.int64)
    is_end = events.kind[edges] == Kind.PASS_END
    np.minimum.at(first, (is_end.astype(np.int64), pass_of), edges)
    begin, end = first
    # In a damaged file an end can stand before its begin.
    known = (begin < len(events)) | (end < len(events))
    end = np.where((begin < len(events)) & (end < begin), len(events), end)
    thread = np.full(count, -1, np.int64)
    thread[pass_of] = events.thread[edges]
    order = np.argsort(np.where(begin < len(events), begin, -1), kind="stable")
    order = order[known[order]]
    begin, end = (np.where(edge < len(events), edge, -1) for edge in (begin, end))
    return PassColumns(thread[order], begin[order], end[order])
