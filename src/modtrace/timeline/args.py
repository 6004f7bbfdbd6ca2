"""What only some slices have: a sparse column per name, of numbers or of texts.

An arg that few slices have costs nothing for the others, and millions of spans with the same text hold it once:

    rows    [3, 7, 9]       the slices that have it
    values  [0, 1, 0]       numbers, or indices into the texts
    texts   ["float32[8]", "float32[4]"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .._numbering import Numbering, distinct, number_values
from .._typing import AnyArray, Int64Array

Value = int | str


@dataclass(frozen=True, slots=True)
class ArgColumn:
    """An arg of some slices."""

    rows: Int64Array  # the slices that have it, ascending
    values: Int64Array  # numbers, or indices into `texts`
    texts: Sequence[str] | None = None  # what it can be; None if it is a number

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of_numbers(cls, rows: npt.ArrayLike, values: npt.ArrayLike) -> ArgColumn:
        """Return the column of numbers in any order of rows."""
        row, value = np.asarray(rows, np.int64), np.asarray(values, np.int64)
        order = np.argsort(row, kind="stable")
        return cls(row[order], value[order])

    @classmethod
    def of_texts(cls, rows: npt.ArrayLike, texts: Iterable[str]) -> ArgColumn:
        """Return the column of texts in any order of rows; it holds each text once."""
        numbers = Numbering[str]()
        column = cls.of_numbers(rows, [numbers[text] for text in texts])
        return cls(column.rows, column.values, [*numbers])

    def at(self, places: AnyArray | slice) -> ArgColumn:
        """Return a part of the column, by places in it."""
        return ArgColumn(self.rows[places], self.values[places], self.texts)

    def moved(self, new_row: Int64Array) -> ArgColumn:
        """Return the column of slices that have other numbers now; -1: the slice is left out."""
        row = new_row[self.rows]
        kept = np.flatnonzero(row >= 0)
        kept = kept[np.argsort(row[kept], kind="stable")]
        return ArgColumn(row[kept], self.values[kept], self.texts)

    def with_texts(self, change: Callable[[str], str | None]) -> ArgColumn:
        """Return the column with other texts, without the slices for which `change` returns None."""
        if self.texts is None:
            return self
        texts = [change(text) for text in self.texts]
        kept = np.array([text is not None for text in texts] or [False], np.bool_)[self.values]
        return ArgColumn(self.rows[kept], self.values[kept], [text or "" for text in texts])

    def dense(self, count: int, missing: int = -1) -> Int64Array:
        """Return int64[count]: the value of each slice, `missing` for those without."""
        values = np.full(count, missing, np.int64)
        values[self.rows] = self.values
        return values

    def text(self, value: int) -> str:
        """Return the text of a value; empty for a negative one."""
        return (self.texts or ())[value] if value >= 0 else ""

    def shown(self) -> list[Value]:
        """Return the values as numbers or texts."""
        values: list[Value] = self.values.tolist()
        return values if self.texts is None else [self.texts[int(value)] for value in values]


NO_ARG = ArgColumn(np.zeros(0, np.int64), np.zeros(0, np.int64))
"""The column of an arg that no slice has."""

Args = Mapping[str, ArgColumn]
"""The args of slices by name; a name without slices is left out."""


def take_args(args: Args, index: AnyArray | slice, count: int) -> Args:
    """Return the args of the slices at `index`, of `count` slices."""
    if not args:
        return args
    if isinstance(index, slice):
        first, last, step = index.indices(count)
        if step == 1:
            bounds = {name: np.searchsorted(column.rows, (first, max(first, last))) for name, column in args.items()}
            parts = {name: column.at(slice(*bounds[name])) for name, column in args.items()}
            moved = {name: ArgColumn(part.rows - first, part.values, part.texts) for name, part in parts.items()}
            return without_empty(moved)
    chosen = np.arange(count)[index]
    place = np.full(count, -1, np.int64)
    taken = {}
    for name, column in args.items():
        place[column.rows] = np.arange(len(column))
        of_chosen = place[chosen]
        place[column.rows] = -1
        rows = np.flatnonzero(of_chosen >= 0)
        taken[name] = ArgColumn(rows, column.values[of_chosen[rows]], column.texts)
    return without_empty(taken)


def join_args(parts: Sequence[tuple[int, Args]]) -> Args:
    """Return the args of tables that are put one after the other; each comes with its first row in the whole."""
    joined = {}
    for name in dict.fromkeys(name for _, args in parts for name in args):
        columns = [(first, args[name]) for first, args in parts if name in args]
        texts = Numbering[str]() if columns[0][1].texts is not None else None
        values = [column.values for _, column in columns]
        if texts is not None:
            codes = [np.array([texts[text] for text in column.texts or ()], np.int64) for _, column in columns]
            values = [code[value] for code, value in zip(codes, values, strict=True)]
        rows = np.concatenate([column.rows + first for first, column in columns])
        joined[name] = ArgColumn(rows, np.concatenate(values), None if texts is None else [*texts])
    return joined


def map_arg(args: Args, name: str, change: Callable[[ArgColumn], ArgColumn]) -> Args:
    """Return the args with another column in place of one, if there is one."""
    return without_empty({**args, name: change(args[name])}) if name in args else args


def without_empty(args: Args) -> Args:
    """Return the args that a slice has."""
    return {name: column for name, column in args.items() if len(column)}


def args_by_row(args: Args) -> dict[int, dict[str, Value]]:
    """Return the args of each slice that has any, by its row."""
    of_row: dict[int, dict[str, Value]] = {}
    for name, column in args.items():
        for row, value in zip(column.rows.tolist(), column.shown(), strict=True):
            of_row.setdefault(row, {})[name] = value
    return dict(sorted(of_row.items()))


def distinct_args(args: Args) -> tuple[Int64Array, Int64Array, list[dict[str, Value]]]:
    """Return which slices have args, which args each of these has, and these without repetitions.

    The first two are int64[n]; the second is an index into the third.
    """
    if not args:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), []
    rows, *others = (column.rows for column in args.values())
    if any(not np.array_equal(rows, other) for other in others):
        rows = distinct(np.concatenate([rows, *others]))
    number, kinds = np.zeros(len(rows), np.int64), [dict[str, Value]()]
    for name, column in args.items():
        known, of_column = number_values(column.values)
        shown = ArgColumn(known, known, column.texts).shown()
        key = number * (len(shown) + 1)
        key[slice(None) if len(rows) == len(column) else np.searchsorted(rows, column.rows)] += of_column + 1
        pairs, number = number_values(key)
        parted = [divmod(pair, len(shown) + 1) for pair in pairs.tolist()]
        kinds = [kinds[old] | ({name: shown[new - 1]} if new else {}) for old, new in parted]
    return rows, number, kinds
