"""NumPy arrays: their types, numbering of values, runs and groups of equal values, and ranges."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Int8Array: TypeAlias = npt.NDArray[np.int8]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
UInt8Array: TypeAlias = npt.NDArray[np.uint8]
"""Also for bytes, such as text that is assembled column by column."""
UInt32Array: TypeAlias = npt.NDArray[np.uint32]
Float32Array: TypeAlias = npt.NDArray[np.float32]
Float64Array: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ObjectArray: TypeAlias = npt.NDArray[np.object_]
RecordArray: TypeAlias = npt.NDArray[np.void]
"""Records of a fixed number of bytes, each read and written as a whole."""

IndexArray: TypeAlias = npt.NDArray[np.intp]
"""Positions in another array, as `np.flatnonzero` and `np.argsort` return them."""
SignedIntArray: TypeAlias = npt.NDArray[np.signedinteger]
"""Positions or counts in any signed integer type."""
AnyIntArray: TypeAlias = npt.NDArray[np.integer]
AnyArray: TypeAlias = npt.NDArray[Any]

INT64_MIN = int(np.iinfo(np.int64).min)
"""Less than any time or number; represents an unknown start."""
INT64_MAX = int(np.iinfo(np.int64).max)
"""Greater than any time or number; represents an unknown end."""

_Key = TypeVar("_Key", bound=Hashable)


class Numbering(dict[_Key, int]):
    """Numbers each key at its first lookup; the keys are in the order of their numbers.

    Example:
        >>> numbers = Numbering[str]()
        >>> numbers["a"], numbers["b"], numbers["a"]
        (0, 1, 0)
    """

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self._first = first

    def __missing__(self, key: _Key) -> int:
        number = self[key] = len(self) + self._first
        return number


def order_in_groups(keys: Int64Array, shift: int) -> Int64Array:
    """Return the indices that stably sort `keys`; keys that share the bits above `shift` should be nearly sorted.

    Radix-sorting the few groups, and merging the sorted runs, each takes a third of the time of a sort.
    """
    group = keys >> shift
    rows = np.argsort(group.astype(np.min_scalar_type(int(group.max(initial=0)))), kind="stable")
    order: Int64Array = rows[np.argsort(keys[rows], kind="stable")]
    return order


def distinct(values: Int64Array) -> Int64Array:
    """Return the distinct values, ascending; `np.unique` hashes them, which is ten times as slow."""
    ordered = np.sort(values, kind="stable")
    return ordered[begins_run(ordered)]


def number_values(values: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the distinct values, ascending, and for each value its index among them."""
    if not len(values):
        return values, values
    low, high = int(values.min()), int(values.max())
    if high - low >= 4 * len(values):
        return np.unique(values, return_inverse=True)
    is_used = np.bincount(values - low) > 0
    return low + np.flatnonzero(is_used), (np.cumsum(is_used) - 1)[values - low]


def begins_run(*keys: AnyArray) -> BoolArray:
    """Return a mask of the rows that start a run; in a run, rows agree in all keys."""
    is_first = np.ones(len(keys[0]), np.bool_)
    is_first[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return is_first


def count_in_run(*keys: AnyArray) -> Int64Array:
    """Return the number of earlier rows in the run of each row, see `begins_run`."""
    index = np.arange(len(keys[0]))
    return index - np.maximum.accumulate(np.where(begins_run(*keys), index, 0))


def expand_ranges(start: IndexArray, end: IndexArray) -> tuple[IndexArray, IndexArray]:
    """Return the concatenation of range(start[i], end[i]) and, for each number, its i."""
    size = np.maximum(end - start, 0)
    range_index = np.repeat(np.arange(len(size)), size)
    return np.arange(len(range_index)) - (np.cumsum(size) - size - start)[range_index], range_index


def stack_parts(*parts: Sequence[AnyArray | int]) -> Int64Array:
    """Return int64[columns, rows], the concatenated parts; each part is a list of columns, or numbers for all rows."""
    return np.concatenate([np.stack(np.broadcast_arrays(*part)) for part in parts], axis=1).astype(np.int64, copy=False)


def sums_at(
    shape: int | tuple[int, ...], index: AnyIntArray | tuple[AnyIntArray, ...], values: AnyArray | int
) -> Int64Array:
    """Return int64[shape], at each index the sum of the values with this index."""
    sums = np.zeros(shape, np.int64)
    np.add.at(sums, index, values)
    return sums


def split_by(keys: AnyIntArray, rows: Int64Array | None = None) -> list[Int64Array]:
    """Return an array of rows per key, by ascending keys; without `rows` the indices of the key."""
    order = np.argsort(keys, kind="stable")
    ordered_rows = order if rows is None else rows[order]
    return np.split(ordered_rows, np.flatnonzero(np.diff(keys[order])) + 1) if len(keys) else []


def is_any(values: Int8Array, candidates: Iterable[int]) -> BoolArray:
    """Return a mask of the values that are among the candidates; many times faster than `np.isin`."""
    is_candidate = np.zeros(1 << 8, np.bool_)
    is_candidate[[*candidates]] = True
    return is_candidate.take(values.view(np.uint8))


T = TypeVar("T", bound=Hashable)


def number_distinct(values: Sequence[T]) -> tuple[list[T], Int32Array]:
    """Return the distinct values in order of appearance, and int32[n], the index of each value among them."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return list(numbers), np.array([numbers[value] for value in values], np.int32)


def group_starts(*keys: Float64Array | Int64Array) -> Int64Array:
    """Return the index of the first row of each group: neighbouring rows that agree in all keys."""
    return np.flatnonzero(begins_run(*keys))


def group_lengths(starts: Int64Array, count: int) -> Int64Array:
    """Return the length of each group; all groups together have `count` rows."""
    return np.diff(np.append(starts, count))


def medians_within(values: Float64Array | Int64Array, *keys: Int64Array) -> Float64Array:
    """Return the median of the values with the same keys, for each value; values are below 2**53."""
    order = np.lexsort((values, *keys))
    starts = group_starts(*(key[order] for key in keys))
    size = group_lengths(starts, len(values))
    low, high = values[order[starts + (size - 1) // 2]], values[order[starts + size // 2]]
    medians = np.empty(len(values))
    medians[order] = np.repeat(low + (high - low) / 2, size)
    return medians


def median_of_others(values: Int64Array, starts: Int64Array) -> Float64Array:
    """Return per value the median of the other values in its group; groups are sorted, values below 2**53 (doubles)."""
    size = group_lengths(starts, len(values))
    count = np.repeat(size, size) - 1
    low, high = _value_among_others(values, starts, (count - 1) // 2), _value_among_others(values, starts, count // 2)
    medians: Float64Array = low + (high - low) / 2
    return medians


def slowest_of_others(values: Int64Array, starts: Int64Array) -> Int64Array:
    """Return per value the largest other value in its sorted group, but without the largest eighth (rounded down)."""
    size = group_lengths(starts, len(values))
    return _value_among_others(values, starts, -(-7 * (np.repeat(size, size) - 1) // 8) - 1)


def _value_among_others(values: Int64Array, starts: Int64Array, index: Int64Array) -> Int64Array:
    """Return the value at `index` among the other values of the group, for each value."""
    size = group_lengths(starts, len(values))
    start = np.repeat(starts, size)
    position = np.arange(len(values)) - start
    result: Int64Array = values[start + index + (index >= position)]
    return result
