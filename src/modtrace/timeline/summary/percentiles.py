"""Percentiles over steps: in how long a step each module is usually done."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..._typing import Int64Array


def median_and_p95_by_group(
    group: Int64Array,
    step: Int64Array,
    ns: Int64Array,
    *,
    whole_steps: Sequence[int],
    groups: int,
) -> tuple[Int64Array, Int64Array]:
    """Add up times per group and step, and return int64[groups] twice: median and 95th percentile over the steps.

    Args:
        group: int64[n], below `groups`.
        step: int64[n].
        ns: int64[n], what was spent there.
        whole_steps: the steps that count; none given: all.
        groups: how many groups there are; one that is in no step gets 0.
    """
    if whole_steps:
        counted = np.isin(step, whole_steps)
        group, step, ns = group[counted], step[counted], ns[counted]
    order = np.lexsort((step, group))
    group, step = group[order], step[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (np.diff(group) != 0) | (np.diff(step) != 0)
    first = np.flatnonzero(is_first)
    sums = np.add.reduceat(ns[order], first) if len(first) else np.zeros(0, np.int64)
    group = group[first]
    sums = sums[np.lexsort((sums, group))]
    count = np.bincount(group, minlength=groups)
    start = np.cumsum(count) - count
    has_any = count > 0
    start, count = start[has_any], count[has_any]
    p50, p95 = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    p50[has_any] = (sums[start + (count - 1) // 2] + sums[start + count // 2]) // 2
    p95[has_any] = sums[start + np.ceil(count * 0.95).astype(np.int64) - 1]
    return p50, p95


def median(values: Sequence[int]) -> int:
    """Return the middle value, or the whole mean of the middle two; 0 without values."""
    if not values:
        return 0
    in_order = sorted(values)
    return (in_order[(len(values) - 1) // 2] + in_order[len(values) // 2]) // 2


def nearest_rank(values: Sequence[int], fraction: float) -> int:
    """Return the least of the values that `fraction` of them do not exceed; 0 without values."""
    if not values:
        return 0
    return sorted(values)[max(int(np.ceil(len(values) * fraction)), 1) - 1]
