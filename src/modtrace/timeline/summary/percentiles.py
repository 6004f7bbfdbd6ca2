"""Percentiles over steps: in how long a step each module is usually done."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..._numbering import begins_run
from ..._typing import AnyArray, Int64Array


class GroupTimes(NamedTuple):
    """What groups of modules took in steps: columns of equal length; `ns` are nanoseconds."""

    group: Int64Array
    step: Int64Array
    ns: Int64Array

    def take(self, rows: AnyArray | slice) -> "GroupTimes":
        """Return some of the rows."""
        return GroupTimes(*(column[rows] for column in self))


class Percentiles(NamedTuple):
    """Percentiles over the steps: what each group took in a step, int64[groups] nanoseconds."""

    p50: Int64Array
    p95: Int64Array
    p10: Int64Array


def join_times(pieces: Sequence[GroupTimes]) -> GroupTimes:
    """Return the rows of all pieces, one piece after the other."""
    return GroupTimes(*(np.concatenate(columns) for columns in zip(*pieces, strict=True)))


def percentiles_by_group(pieces: Sequence[GroupTimes], *, steps: Int64Array, groups: int) -> Percentiles:
    """Return the percentiles of what each group took in steps that count, 0 if in none; the pieces are in order."""
    kept = []
    for group, step, ns in pieces:
        counted = np.isin(step, steps)
        kept.append((np.searchsorted(group[counted], np.arange(groups + 1)), ns[counted]))
    p50, p95, p10 = np.zeros((3, groups), np.int64)
    for index in range(groups):
        sums = np.sort(np.concatenate([ns[first[index] : first[index + 1]] for first, ns in kept]))
        p50[index], p95[index], p10[index] = median(sums), nearest_rank(sums, 0.95), nearest_rank(sums, 0.1)
    return Percentiles(p50, p95, p10)


def sum_by_group_and_step(times: GroupTimes) -> GroupTimes:
    """Add up times per group and step; return one row for each pair, in their order."""
    group, step, ns = times.take(np.lexsort((times.step, times.group)))
    first = np.flatnonzero(begins_run(group, step))
    sums = np.add.reduceat(ns, first) if len(first) else np.zeros(0, np.int64)
    return GroupTimes(group[first], step[first], sums)


def median(values: Sequence[int] | Int64Array) -> int:
    """Return the middle value, or the whole mean of the middle two; 0 without values."""
    in_order, count = np.sort(values), len(values)
    return (int(in_order[(count - 1) // 2]) + int(in_order[count // 2])) // 2 if count else 0


def nearest_rank(values: Sequence[int] | Int64Array, fraction: float) -> int:
    """Return the least of the values that `fraction` of them do not exceed; 0 without values."""
    return int(np.sort(values)[max(int(np.ceil(len(values) * fraction)), 1) - 1]) if len(values) else 0
