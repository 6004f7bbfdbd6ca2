"""The table of slices: one array per field with an entry per slice, and sparse columns for values of few slices."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from .._arrays import AnyArray, BoolArray, Int8Array, Int32Array, Int64Array, Numbering, distinct, number_values
from .nesting import nest_by_time

Value = int | str


@dataclass(frozen=True, slots=True)
class ArgColumn:
    """An arg that only some slices have."""

    rows: Int64Array  # rows of the slices that have it, ascending
    values: Int64Array  # numbers, or indexes into `texts`
    texts: Sequence[str] | None = None  # distinct texts; None if the values are numbers

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of_numbers(cls, rows: npt.ArrayLike, values: npt.ArrayLike) -> ArgColumn:
        """Return the column of numbers; the rows may be in any order."""
        row, value = np.asarray(rows, np.int64), np.asarray(values, np.int64)
        order = np.argsort(row, kind="stable")
        return cls(row[order], value[order])

    @classmethod
    def of_texts(cls, rows: npt.ArrayLike, texts: Iterable[str]) -> ArgColumn:
        """Return the column of texts, each stored once; the rows may be in any order."""
        numbers = Numbering[str]()
        column = cls.of_numbers(rows, [numbers[text] for text in texts])
        return cls(column.rows, column.values, [*numbers])

    def at(self, index: AnyArray | slice) -> ArgColumn:
        """Return the entries of the column at `index`."""
        return ArgColumn(self.rows[index], self.values[index], self.texts)

    def moved(self, new_row: Int64Array) -> ArgColumn:
        """Return the column with row `r` renumbered as `new_row[r]`; -1 leaves the slice out."""
        row = new_row[self.rows]
        index = np.flatnonzero(row >= 0)
        index = index[np.argsort(row[index], kind="stable")]
        return ArgColumn(row[index], self.values[index], self.texts)

    def with_texts(self, change: Callable[[str], str | None]) -> ArgColumn:
        """Return the column with changed texts, without the slices for which `change` returns None."""
        if self.texts is None:
            return self
        texts = [change(text) for text in self.texts]
        has_text = np.array([text is not None for text in texts] or [False], np.bool_)[self.values]
        return ArgColumn(self.rows[has_text], self.values[has_text], [text or "" for text in texts])

    def dense(self, count: int, missing: int = -1) -> Int64Array:
        """Return int64[count]: the value of each slice, `missing` for slices without one."""
        values = np.full(count, missing, np.int64)
        values[self.rows] = self.values
        return values

    def text(self, value: int) -> str:
        """Return the text of a value; empty for a negative one."""
        return (self.texts or ())[value] if value >= 0 else ""

    def numbers_or_texts(self) -> list[Value]:
        """Return the values as numbers or texts."""
        values: list[Value] = self.values.tolist()
        return values if self.texts is None else [self.texts[int(value)] for value in values]


NO_ARG = ArgColumn(np.zeros(0, np.int64), np.zeros(0, np.int64))
"""The column of an arg that no slice has."""

Args = Mapping[str, ArgColumn]
"""The args of slices by name; only names that a slice has."""


def take_args(args: Args, index: AnyArray | slice, count: int) -> Args:
    """Return the args of the slices at `index`, of `count` slices."""
    if not args:
        return args
    if isinstance(index, slice):
        first, last, step = index.indices(count)
        if step == 1:
            bounds = {name: np.searchsorted(column.rows, (first, max(first, last))) for name, column in args.items()}
            parts = {name: column.at(slice(*bounds[name])) for name, column in args.items()}
            shifted = {name: ArgColumn(part.rows - first, part.values, part.texts) for name, part in parts.items()}
            return without_empty(shifted)
    slice_rows = np.arange(count)[index]
    entry_of_row = np.full(count, -1, np.int64)
    new_args = {}
    for name, column in args.items():
        entry_of_row[column.rows] = np.arange(len(column))
        entries = entry_of_row[slice_rows]
        entry_of_row[column.rows] = -1
        rows = np.flatnonzero(entries >= 0)
        new_args[name] = ArgColumn(rows, column.values[entries[rows]], column.texts)
    return without_empty(new_args)


def join_args(parts: Sequence[tuple[int, Args]]) -> Args:
    """Return the args of concatenated tables, each given as (its first row in the result, its args)."""
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
    """Return the args with the column `name` changed, if it exists."""
    return without_empty({**args, name: change(args[name])}) if name in args else args


def without_empty(args: Args) -> Args:
    """Return the args without empty columns."""
    return {name: column for name, column in args.items() if len(column)}


def args_by_row(args: Args) -> dict[int, dict[str, Value]]:
    """Return the args of each slice that has any, by row."""
    by_row: dict[int, dict[str, Value]] = {}
    for name, column in args.items():
        for row, value in zip(column.rows.tolist(), column.numbers_or_texts(), strict=True):
            by_row.setdefault(row, {})[name] = value
    return dict(sorted(by_row.items()))


def distinct_args(args: Args) -> tuple[Int64Array, Int64Array, list[dict[str, Value]]]:
    """Return (rows, index, distinct): int64[n] slices with args, int64[n] index of their args in `distinct`."""
    if not args:
        return np.zeros(0, np.int64), np.zeros(0, np.int64), []
    rows, *next_rows = (column.rows for column in args.values())
    if any(not np.array_equal(rows, column_rows) for column_rows in next_rows):
        rows = distinct(np.concatenate([rows, *next_rows]))
    number, kinds = np.zeros(len(rows), np.int64), [dict[str, Value]()]
    for name, column in args.items():
        numbers, value_index = number_values(column.values)
        values = ArgColumn(numbers, numbers, column.texts).numbers_or_texts()
        key = number * (len(values) + 1)
        key[slice(None) if len(rows) == len(column) else np.searchsorted(rows, column.rows)] += value_index + 1
        keys, number = number_values(key)
        pairs = [divmod(pair, len(values) + 1) for pair in keys.tolist()]
        kinds = [kinds[old] | ({name: values[new - 1]} if new else {}) for old, new in pairs]
    return rows, number, kinds


Phase: TypeAlias = Literal["forward", "backward", "recompute"]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""The phase of a module's slice by its code in `Slices.phase`."""
FORWARD, BACKWARD, RECOMPUTE = range(3)


TrackKind: TypeAlias = Literal["forward", "backward", "backward pass", "ranges", "communication", "gpu"]
"""The kind of a track: the kind of its slices."""
COMMUNICATION: TrackKind = "communication"
PASSES: TrackKind = "backward pass"
RANGES: TrackKind = "ranges"


class SliceKind(NamedTuple):
    """A kind of slice."""

    word: str  # name of the kind
    # Kind of the tracks that its slices are on; empty for modules, which are on several kinds of tracks.
    track: TrackKind | Literal[""] = ""
    label: str = ""  # common name of its slices in a trace; empty if each has its own name


KINDS = (
    SliceKind("module"),
    SliceKind("collective", COMMUNICATION),
    SliceKind("wait", COMMUNICATION),
    SliceKind("backward pass", PASSES, "backward"),
    SliceKind("range", RANGES),
    SliceKind("garbage collection", RANGES, "garbage collection"),
)
"""The kinds of slices by their code in `Slices.kind`. Kinds with the same tracks are neighbours."""
MODULE, COLLECTIVE, WAIT, BACKWARD_PASS, RANGE, GARBAGE_COLLECTION = range(len(KINDS))

_BLOCK = np.cumsum([0, *(kind.track != last.track for last, kind in itertools.pairwise(KINDS))], dtype=np.int8)
"""The number of each kind's block of rows: one for modules, then one per kind of track."""


class Arg:
    """The names of args, which only some slices have."""

    SHAPES = "shapes"  # shapes of a call's inputs
    COMPILED_MODULES = "compiled_modules"  # modules inside a call that torch.compile compiled
    COMPILED_UNKNOWN = "compiled_unknown"  # reason, with remedy, why its kernels have no modules in a merged trace
    FLOPS = "flops"  # FLOPs of the operators in a call; `UNKNOWN_FLOPS` if unknown
    BYTES_ACCESSED = "bytes_accessed"  # bytes of the inputs and outputs of these operators
    RECOMPUTE_FLOPS = "recompute_flops"  # in backward: FLOPs of functions (not modules) that a checkpoint ran again
    UNUSED_NODES = "unused_nodes"  # autograd nodes of a call that no pass ran; on the outermost such call
    OWN_NODES = "own_nodes"  # nodes that a call made outside inner calls, if at least `MANY_NODES`
    GENERATION = "generation"  # oldest generation that a garbage collection examined
    COLLECTED = "collected"  # number of objects that it freed
    TRIGGER = "trigger"  # its cause, one of `TRIGGERS`
    OPERATOR = "operator"  # operator of a collective, or of the collective waited for
    GROUP = "group"  # name of its process group
    PEER = "peer"  # rank at the other end of a send or a receive
    DEVICE = "device"  # type of the device that runs a collective
    COUNTER = "counter"  # number of a collective in its group
    NBYTES = "bytes"  # bytes of a collective: the larger of input and output
    DONE = "done"  # completion time of a collective, Unix nanoseconds


UNKNOWN_FLOPS = -1
MANY_NODES = 64
"""Minimum number of a call's nodes that counts as many; a hand-written attention makes 20."""
TRIGGERS = "unknown", "automatic", "gc.collect()"
ARGS = frozenset(value for name, value in vars(Arg).items() if name.isupper())

_NEUTRAL = {"name": -1, "phase": 0, "depth": 0, "parent": -1, "call": 0, "step": 0, "link": -1}
_NEUTRAL |= {"complete": True, "kind": MODULE}


@dataclass(frozen=True, slots=True)
class Slices:
    """Slices of all kinds; every array has one entry per slice.

    The rows are in blocks: modules first, then the kinds of each kind of track. A block is in start order, with a
    parent before its children. A slice and the slices in it are of the same block.

    Attributes:
        start: int64, nanoseconds since the Unix epoch.
        end: int64, nanoseconds; never less than `start`.
        name: int32, index into `Timeline.names`; -1 for kinds without names there.
        phase: int8, index into `PHASES`; 0 for kinds without phases.
        track: int32, index into `Timeline.tracks`.
        depth: int32, the number of slices around it on its track.
        parent: int64, index of the slice around it on its track; -1 if there is none.
        call: int64, number of the module's call, from 0; 0 for other kinds.
        step: int64, the number of steps that had ended when it started.
        link: int64, equal for the forward slice and the backward slices of one call; -1 if there is only one slice.
        complete: bool, False if its start or end was overwritten or never came.
        kind: int8, index into `KINDS`.
        args: values that only some slices have, by name; see `Arg`.
    """

    start: Int64Array
    end: Int64Array
    name: Int32Array
    phase: Int8Array
    track: Int32Array
    depth: Int32Array
    parent: Int64Array
    call: Int64Array
    step: Int64Array
    link: Int64Array
    complete: BoolArray
    kind: Int8Array
    args: Args = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.start)

    def arg(self, name: str) -> ArgColumn:
        """Return an arg of the slices; an empty column if no slice has it."""
        return self.args.get(name, NO_ARG)

    @classmethod
    def of(cls, args: Args | None = None, **arrays: npt.ArrayLike) -> Slices:
        """Build a table from array-like columns, cast to each field's type; needs start, end and track.

        Missing columns get neutral values: the slices are complete, and modules. A scalar is for all slices.
        """
        values = {**_NEUTRAL, **arrays}
        columns = {name: np.asarray(values[name], dtype) for name, dtype in DTYPES.items()}
        count = len(columns["start"])
        columns = {name: column if column.ndim else np.full(count, column) for name, column in columns.items()}
        return cls(**columns, args=args or {})

    @classmethod
    def of_kind(
        cls, kind: npt.ArrayLike, start: npt.ArrayLike, args: Args | None = None, **arrays: npt.ArrayLike
    ) -> Slices:
        """Build a table of slices other than modules, in start order, nested by their times; scalars are for all."""
        rows = cls.of(args, kind=kind, start=start, **arrays)
        return nest_by_time(rows.take(np.lexsort((-rows.end, rows.start))))

    @classmethod
    def empty(cls) -> Slices:
        """Return a table without slices."""
        return cls.of(None, **{name: [] for name in DTYPES})

    def take(self, index: AnyArray | slice) -> Slices:
        """Return the slices at `index` (indexes, a mask or a range of rows), with `parent` unchanged."""
        args = take_args(self.args, index, len(self))
        return Slices(**{name: getattr(self, name)[index] for name in DTYPES}, args=args)

    def block_of(self, kind: int) -> slice:
        """Return the range of rows that contains the kind and the other kinds of its tracks."""
        # Without an array of all rows, because it is called dozens of times.
        block_at = partial(bisect_left, self.kind, key=_BLOCK.__getitem__)
        return slice(block_at(_BLOCK[kind]), block_at(_BLOCK[kind] + 1))

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays together."""
        columns: int = sum(getattr(self, name).nbytes for name in DTYPES)
        return columns + sum(column.rows.nbytes + column.values.nbytes for column in self.args.values())


DTYPES: dict[str, type[np.generic]] = {
    # `Int64Array` → `np.int64`
    name: np.dtype(kind.removesuffix("Array").lower()).type
    for name, kind in Slices.__annotations__.items()
    if kind.endswith("Array")
}
"""The type of each column that all slices have."""


def sort_by_start(slices: Slices) -> Slices:
    """Sort by block, start and depth, and renumber `parent`; parents then come before their children."""
    if is_sorted(slices):
        return slices
    order = np.lexsort((slices.depth, slices.start, _BLOCK[slices.kind]))
    new_index = np.full(len(slices) + 1, -1, np.int64)
    new_index[order] = np.arange(len(order))
    ordered = slices.take(order)
    return replace(ordered, parent=new_index[ordered.parent])


def is_sorted(slices: Slices) -> bool:
    """Return whether slices are in the order that `sort_by_start` gives them."""
    start, depth, block = slices.start, slices.depth, _BLOCK[slices.kind]
    later = (start[1:] > start[:-1]) | (start[1:] == start[:-1]) & (depth[1:] >= depth[:-1])
    return bool(np.all((block[1:] > block[:-1]) | (block[1:] == block[:-1]) & later))


def join_columns(parts: Sequence[Slices]) -> Slices:
    """Concatenate tables; only `parent` is renumbered, because the parts may share names and tracks."""
    first, shifted = 0, []
    for part in parts:
        shifted.append(replace(part, parent=np.where(part.parent >= 0, part.parent + first, -1)))
        first += len(part)
    firsts = np.cumsum([0, *map(len, parts)]).tolist()
    args = join_args([(first, part.args) for first, part in zip(firsts, parts, strict=False)])
    columns = {name: np.concatenate([getattr(part, name) for part in shifted]) for name in DTYPES}
    return Slices(**columns, args=args)


def append_to(columns: dict[str, AnyArray], new_columns: Mapping[str, AnyArray]) -> None:
    """Append to large columns in place, because memory may not hold a copy; no other array may share their memory."""
    for name, new_column in new_columns.items():
        column = columns.setdefault(name, np.empty(0, new_column.dtype))
        count = len(column)
        column.resize(count + len(new_column), refcheck=False)
        column[count:] = new_column
