"""When ranks arrive at collectives, how long they ran until then, and by how much that is more than of other ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..._typing import BoolArray, Int64Array
from ..rank_tables import CALL, CollectiveTable
from ..sync_points import is_synchronizing
from .own_time import OwnTime
from .runs import median_of_others, run_lengths, run_starts

__all__ = ["Arrivals", "arrivals"]


class Arrivals(NamedTuple):
    """Calls of synchronizing collectives by at least two ranks, by collective and then by time; one entry per call.

    Attributes:
        collective: int64, which collective it is, from 0, by group and counter.
        rank: int64.
        step: int64, the same for all calls of one collective.
        position: int64, which call of its rank in its step it is, from 0, the same for all calls of one collective.
        time: int64, when it was called, Unix ns.
        place: int64, the same on the axis of `OwnTime`.
        place_before: int64, of the same rank's call before; -1 where there is none.
        own: int64, own time between the two, ns; -1 where there is none before.
        excess: int64, by how much `own` is more than the median of the other ranks', ns; 0 where it is not known.
        lateness: int64, by how much the call was later than the median of the other ranks' calls, ns.
        is_last: bool, whether it is the last call of its collective.
        size: int64, how many ranks called it.
    """

    collective: Int64Array
    rank: Int64Array
    step: Int64Array
    position: Int64Array
    time: Int64Array
    place: Int64Array
    place_before: Int64Array
    own: Int64Array
    excess: Int64Array
    lateness: Int64Array
    is_last: BoolArray
    size: Int64Array


def arrivals(table: CollectiveTable, own_time: OwnTime) -> Arrivals:
    """Return the arrivals of all ranks.

    Args:
        table: the collectives of all ranks.
        own_time: their own time.
    """
    synchronizes = np.array([is_synchronizing(operator) for operator in table.operators], np.bool_)
    rows = np.flatnonzero((table.kind == CALL) & (table.counter >= 0) & synchronizes[table.operator])
    place = own_time.place(table.rank[rows].astype(np.int64), table.start[rows])
    order = np.argsort(place, kind="stable")
    rows, place = rows[order], place[order]
    rank, step = table.rank[rows].astype(np.int64), table.step[rows].astype(np.int64)
    before, own = np.full(len(rows), -1), np.full(len(rows), -1)
    before[1:], own[1:] = place[:-1], np.diff(own_time.until(place))
    first_of_rank = run_starts(rank)
    before[first_of_rank] = own[first_of_rank] = -1
    position = _position(rank, step)
    key = table.group[rows].astype(np.int64) << 40 | table.counter[rows]
    _, collective, count = np.unique(key, return_inverse=True, return_counts=True)
    both = count[collective] > 1
    rows, rank, step, position, place, before, own, collective = (
        values[both] for values in (rows, rank, step, position, place, before, own, collective)
    )
    time = table.start[rows]
    order = np.lexsort((time, collective))
    rank, step, position, place, before, own, collective, time = (
        values[order] for values in (rank, step, position, place, before, own, collective, time)
    )
    begins = run_starts(collective)
    size = run_lengths(begins, len(collective))
    of_row = np.repeat(np.arange(len(begins)), size)
    last = begins + size - 1
    is_last = np.zeros(len(time), np.bool_)
    is_last[last] = True
    step, position = (np.minimum.reduceat(values, begins)[of_row] for values in (step, position))
    excess = _excess(own, begins, of_row)
    # From the first call of all on: a double does not hold Unix nanoseconds.
    since = time - time.min(initial=np.iinfo(np.int64).max)
    lateness = np.rint(since - median_of_others(since, begins)).astype(np.int64)
    return Arrivals(of_row, rank, step, position, time, place, before, own, excess, lateness, is_last, size[of_row])


def _excess(own: Int64Array, begins: Int64Array, of_row: Int64Array) -> Int64Array:
    order = np.lexsort((own, of_row))
    excess = np.zeros(len(own), np.int64)
    excess[order] = np.rint(own[order] - median_of_others(own[order], begins)).astype(np.int64)
    # Where one rank's call before is not there, nothing says what it did.
    known = np.minimum.reduceat(own, begins) >= 0
    return np.where(known[of_row], excess, 0)


def _position(rank: Int64Array, step: Int64Array) -> Int64Array:
    """Return which row of its rank and step each is, for rows in order of rank and time."""
    begins = run_starts(rank, step)
    return np.arange(len(rank)) - np.repeat(begins, run_lengths(begins, len(rank)))
