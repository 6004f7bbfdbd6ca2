"""Groups of equal values in columns: their numbers, begins and medians."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np

from .._numbering import begins_run
from .._typing import Float64Array, Int32Array, Int64Array

T = TypeVar("T", bound=Hashable)


def number_distinct(values: Sequence[T]) -> tuple[list[T], Int32Array]:
    """Return the different values in the order in which they appear, and int32[n]: which of these each value is."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return list(numbers), np.array([numbers[value] for value in values], np.int32)


def group_starts(*keys: Float64Array | Int64Array) -> Int64Array:
    """Return where the groups begin: neighbours whose keys are all equal."""
    return np.flatnonzero(begins_run(*keys))


def group_lengths(begins: Int64Array, count: int) -> Int64Array:
    """Return how many of the `count` entries each group has."""
    return np.diff(np.append(begins, count))


def medians_within(values: Float64Array | Int64Array, *keys: Int64Array) -> Float64Array:
    """Return for each value the median of those with the same keys; values are below 2**53."""
    order = np.lexsort((values, *keys))
    begins = group_starts(*(key[order] for key in keys))
    size = group_lengths(begins, len(values))
    low, high = values[order[begins + (size - 1) // 2]], values[order[begins + size // 2]]
    medians = np.empty(len(values))
    medians[order] = np.repeat(low + (high - low) / 2, size)
    return medians


def median_of_others(values: Int64Array, begins: Int64Array) -> Float64Array:
    """Return for each value, ascending in its group, the median of the others; below 2**53, which a double holds."""
    count = np.repeat(group_lengths(begins, len(values)), group_lengths(begins, len(values))) - 1
    low, high = _other(values, begins, (count - 1) // 2), _other(values, begins, count // 2)
    middle: Float64Array = low + (high - low) / 2
    return middle


def slowest_of_others(values: Int64Array, begins: Int64Array) -> Int64Array:
    """Return for each value, ascending in its group, the largest of the others, but for the largest eighth of many."""
    size = group_lengths(begins, len(values))
    return _other(values, begins, -(-7 * (np.repeat(size, size) - 1) // 8) - 1)


def _other(values: Int64Array, begins: Int64Array, index: Int64Array) -> Int64Array:
    """Return for each value the one at `index` among the other values of its group."""
    size = group_lengths(begins, len(values))
    begin = np.repeat(begins, size)
    own = np.arange(len(values)) - begin
    others: Int64Array = values[begin + index + (index >= own)]
    return others
