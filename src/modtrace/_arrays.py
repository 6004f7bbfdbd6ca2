"""NumPy arrays: types named by what one holds, numbers for values, runs and groups of equal ones, and ranges."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Int8Array: TypeAlias = npt.NDArray[np.int8]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
UInt8Array: TypeAlias = npt.NDArray[np.uint8]
"""Also for bytes: text that is put together column by column."""
UInt32Array: TypeAlias = npt.NDArray[np.uint32]
Float32Array: TypeAlias = npt.NDArray[np.float32]
Float64Array: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
ObjectArray: TypeAlias = npt.NDArray[np.object_]
RecordArray: TypeAlias = npt.NDArray[np.void]
"""Items of a fixed number of bytes, read and written whole."""

IndexArray: TypeAlias = npt.NDArray[np.intp]
"""Positions in another array, as `np.flatnonzero` and `np.argsort` return them."""
SignedIntArray: TypeAlias = npt.NDArray[np.signedinteger]
"""Positions or counts in any signed integer type."""
AnyIntArray: TypeAlias = npt.NDArray[np.integer]
AnyArray: TypeAlias = npt.NDArray[Any]

INT64_MIN = int(np.iinfo(np.int64).min)
"""Before all times and numbers: the begin of what has none."""
INT64_MAX = int(np.iinfo(np.int64).max)
"""After all times and numbers: the end of what has none."""

_Key = TypeVar("_Key", bound=Hashable)


class Numbering(dict[_Key, int]):
    """Numbers each key when it is first asked for; the keys are in the order of their numbers.

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
    """Return the stable order of keys of which those with the same bits above `shift` are nearly in order.

    Few groups are sorted by their digits, and runs are merged, each in a third of the time that sorting takes.
    """
    group = keys >> shift
    rows = np.argsort(group.astype(np.min_scalar_type(int(group.max(initial=0)))), kind="stable")
    order: Int64Array = rows[np.argsort(keys[rows], kind="stable")]
    return order


def distinct(values: Int64Array) -> Int64Array:
    """Return the different values, ascending; `np.unique` hashes them, which takes ten times as long."""
    ordered = np.sort(values, kind="stable")
    return ordered[begins_run(ordered)]


def number_values(values: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the different values, ascending, and for each value its place among them."""
    if not len(values):
        return values, values
    low, high = int(values.min()), int(values.max())
    if high - low >= 4 * len(values):
        return np.unique(values, return_inverse=True)
    is_used = np.bincount(values - low) > 0
    return low + np.flatnonzero(is_used), (np.cumsum(is_used) - 1)[values - low]


def begins_run(*keys: AnyArray) -> BoolArray:
    """Return which rows begin a run of rows whose keys are all equal."""
    begins = np.ones(len(keys[0]), np.bool_)
    begins[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return begins


def count_in_run(*keys: AnyArray) -> Int64Array:
    """Return for each row how many before it are in its run, see `begins_run`."""
    place = np.arange(len(keys[0]))
    return place - np.maximum.accumulate(np.where(begins_run(*keys), place, 0))


def expand_ranges(begin: IndexArray, end: IndexArray) -> tuple[IndexArray, IndexArray]:
    """Return the numbers from each begin to before its end, one range after the other, and which range each is of."""
    size = np.maximum(end - begin, 0)
    of_range = np.repeat(np.arange(len(size)), size)
    return np.arange(len(of_range)) - (np.cumsum(size) - size - begin)[of_range], of_range


def stack_parts(*parts: Sequence[AnyArray | int]) -> Int64Array:
    """Return int64[columns, rows] of parts one after the other; each has its columns, numbers are for all its rows."""
    return np.concatenate([np.stack(np.broadcast_arrays(*part)) for part in parts], axis=1).astype(np.int64, copy=False)


def sums_at(
    shape: int | tuple[int, ...], index: AnyIntArray | tuple[AnyIntArray, ...], values: AnyArray | int
) -> Int64Array:
    """Return int64[shape], at each index the sum of the values that have it."""
    sums = np.zeros(shape, np.int64)
    np.add.at(sums, index, values)
    return sums


def split_by(keys: AnyIntArray, rows: Int64Array | None = None) -> list[Int64Array]:
    """Return the rows of each key, ascending, in their order; without `rows` the places of the keys."""
    order = np.argsort(keys, kind="stable")
    in_order = order if rows is None else rows[order]
    return np.split(in_order, np.flatnonzero(np.diff(keys[order])) + 1) if len(keys) else []


def is_any(values: Int8Array, wanted: Iterable[int]) -> BoolArray:
    """Return which values are one of the wanted; many times faster than `np.isin`."""
    is_wanted = np.zeros(1 << 8, np.bool_)
    is_wanted[[*wanted]] = True
    return is_wanted.take(values.view(np.uint8))


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
    place = np.arange(len(values)) - begin
    picked: Int64Array = values[begin + index + (index >= place)]
    return picked
