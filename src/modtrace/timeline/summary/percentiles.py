"""Percentiles over steps: in how long a step each module is usually done."""

from collections.abc import Sequence

import numpy as np

from ..._typing import Int64Array


def percentiles_by_group(
    pieces: Sequence[tuple[Int64Array, Int64Array, Int64Array]], *, steps: Int64Array, groups: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return int64[groups] thrice: median, 95th and 10th percentile over the steps of what each group took in a step.

    Args:
        pieces: what `sum_by_group_and_step` returned of steps, those of each piece after those of the piece before.
        steps: the steps that count.
        groups: how many groups there are; one that is in no step gets 0.
    """
    kept = []
    for group, step, ns in pieces:
        counted = np.isin(step, steps)
        kept.append((np.searchsorted(group[counted], np.arange(groups + 1)), ns[counted]))
    p50, p95, p10 = np.zeros((3, groups), np.int64)
    for index in range(groups):
        sums = np.sort(np.concatenate([ns[first[index] : first[index + 1]] for first, ns in kept]))
        p50[index], p95[index], p10[index] = median(sums), nearest_rank(sums, 0.95), nearest_rank(sums, 0.1)
    return p50, p95, p10


def sum_by_group_and_step(
    group: Int64Array, step: Int64Array, ns: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Add up times per group and step; return group, step and ns, once for each pair, in their order.

    Args:
        group: int64[n].
        step: int64[n].
        ns: int64[n], what was spent there.
    """
    order = np.lexsort((step, group))
    group, step = group[order], step[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (np.diff(group) != 0) | (np.diff(step) != 0)
    first = np.flatnonzero(is_first)
    sums = np.add.reduceat(ns[order], first) if len(first) else np.zeros(0, np.int64)
    return group[first], step[first], sums


def median(values: Sequence[int] | Int64Array) -> int:
    """Return the middle value, or the whole mean of the middle two; 0 without values."""
    in_order, count = np.sort(values), len(values)
    return (int(in_order[(count - 1) // 2]) + int(in_order[count // 2])) // 2 if count else 0


def nearest_rank(values: Sequence[int] | Int64Array, fraction: float) -> int:
    """Return the least of the values that `fraction` of them do not exceed; 0 without values."""
    return int(np.sort(values)[max(int(np.ceil(len(values) * fraction)), 1) - 1]) if len(values) else 0
