"""Percentiles over steps: in how long a step each module is usually done."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..._typing import Int64Array

__all__ = ["nearest_rank", "percentiles_by_group"]


def percentiles_by_group(
    group: Int64Array,
    step: Int64Array,
    ns: Int64Array,
    *,
    whole_steps: Sequence[int],
    groups: int,
    fractions: Sequence[float],
) -> list[Int64Array]:
    """Add up times per group and step, and return for each fraction int64[groups]: its percentile over the steps.

    Args:
        group: int64[n], below `groups`.
        step: int64[n].
        ns: int64[n], what was spent there.
        whole_steps: the steps that count; none given: all.
        groups: how many groups there are; those that are in no step get 0.
        fractions: from 0 to 1.
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
    results = []
    for fraction in fractions:
        found = np.zeros(groups, np.int64)
        has_any = count > 0
        rank = np.maximum(np.ceil(count * fraction).astype(np.int64), 1)
        found[has_any] = sums[(start + rank - 1)[has_any]]
        results.append(found)
    return results


def nearest_rank(values: Sequence[int], fraction: float) -> int:
    """Return the least of the values that `fraction` of them do not exceed; 0 where there are none."""
    if not values:
        return 0
    return sorted(values)[max(int(np.ceil(len(values) * fraction)), 1) - 1]
