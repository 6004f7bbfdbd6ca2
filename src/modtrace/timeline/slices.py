"""The table of slices: an array per field, an entry per slice of any kind, and sparse columns for what few have."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .._arrays import AnyArray, BoolArray, Int8Array, Int32Array, Int64Array, Numbering, distinct, number_values
from .nesting import nest_by_time

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
    rows, *further = (column.rows for column in args.values())
    if any(not np.array_equal(rows, column_rows) for column_rows in further):
        rows = distinct(np.concatenate([rows, *further]))
    number, kinds = np.zeros(len(rows), np.int64), [dict[str, Value]()]
    for name, column in args.items():
        numbers, of_column = number_values(column.values)
        shown = ArgColumn(numbers, numbers, column.texts).shown()
        key = number * (len(shown) + 1)
        key[slice(None) if len(rows) == len(column) else np.searchsorted(rows, column.rows)] += of_column + 1
        pairs, number = number_values(key)
        parted = [divmod(pair, len(shown) + 1) for pair in pairs.tolist()]
        kinds = [kinds[old] | ({name: shown[new - 1]} if new else {}) for old, new in parted]
    return rows, number, kinds


PHASES = ("forward", "backward", "recompute")
"""The phase of a module's slice by its code in `Slices.phase`."""
FORWARD, BACKWARD, RECOMPUTE = range(3)


class SliceKind(NamedTuple):
    """A kind of slice."""

    word: str  # what it is called
    # The kind of the tracks that its slices are on; empty for modules, whose tracks are of several kinds.
    track: str = ""
    label: str = ""  # the name of its slices in a trace; empty if each has a name of its own


KINDS = (
    SliceKind("module"),
    SliceKind("collective", "communication"),
    SliceKind("wait", "communication"),
    SliceKind("backward pass", "backward pass", "backward"),
    SliceKind("range", "ranges"),
    SliceKind("garbage collection", "ranges", "garbage collection"),
)
"""Each kind of slice, by its code in `Slices.kind`. Kinds with the same tracks are neighbours."""
MODULE, COLLECTIVE, WAIT, BACKWARD_PASS, RANGE, GARBAGE_COLLECTION = range(len(KINDS))

_BLOCK = np.cumsum([0, *(kind.track != before.track for before, kind in itertools.pairwise(KINDS))], dtype=np.int8)
"""The block of rows that each kind is in: one for modules, then one per kind of track."""


class Arg:
    """The names of args, which only some slices have."""

    SHAPES = "shapes"  # of a call's inputs
    COMPILED_MODULES = "compiled_modules"  # inside of what torch.compile made
    COMPILED_UNKNOWN = "compiled_unknown"  # why kernels in there have no modules in a merged trace, and what helps
    FLOPS = "flops"  # of the operators in a call; `UNKNOWN_FLOPS` where they are not known
    BYTES_ACCESSED = "bytes_accessed"  # of the inputs and outputs of the same operators
    RECOMPUTE_FLOPS = "recompute_flops"  # in backward: those of functions, no modules, that a checkpoint ran again
    UNUSED_NODES = "unused_nodes"  # of autograd that a call made and no pass ran: of such calls the outermost has it
    OWN_NODES = "own_nodes"  # that a call made itself, if these are many
    GENERATION = "generation"  # the oldest that a garbage collection looked at
    COLLECTED = "collected"  # how many objects it freed
    TRIGGER = "trigger"  # who began it, one of `TRIGGERS`
    OPERATOR = "operator"  # of a collective, or what a wait is for
    GROUP = "group"  # the name of its process group
    PEER = "peer"  # the rank at the other end of a send or a receive
    DEVICE = "device"  # the type of the device that runs a collective
    COUNTER = "counter"  # which collective of its group it is
    NBYTES = "bytes"  # of a collective: the larger of what went in and came out
    DONE = "done"  # when a collective was complete, Unix nanoseconds


UNKNOWN_FLOPS = -1
MANY_NODES = 64
"""From how many on nodes of a call are many: an attention by hand makes 20."""
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
        name: int32, index into `Timeline.names`; -1 for a kind that has no names there.
        phase: int8, index into `PHASES`; 0 for a kind that has none.
        track: int32, index into `Timeline.tracks`.
        depth: int32, the number of slices around it on its track.
        parent: int64, index of the slice around it on its track, or -1.
        call: int64, which call of this module it is, from 0; 0 for other kinds.
        step: int64, the number of steps that had ended when it started.
        link: int64, what joins the slices of one call: a forward slice and the backward slices of the same call have
            the same link; -1 if there is nothing to join.
        complete: bool, False if its begin or end was overwritten or never came.
        kind: int8, index into `KINDS`.
        args: what only some slices have, by name; see `Arg`.
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
        """Return an arg of the slices; an empty column if none of them has it."""
        return self.args.get(name, NO_ARG)

    @classmethod
    def of(cls, args: Args | None = None, **arrays: npt.ArrayLike) -> Slices:
        """Build a table from anything array-like, cast to each field's type; needs a start, end and track.

        What is left out is neutral: without a kind the slices are modules, and all are complete. A scalar is for all.
        """
        given = {**_NEUTRAL, **arrays}
        columns = {name: np.asarray(given[name], dtype) for name, dtype in DTYPES.items()}
        count = len(columns["start"])
        columns = {name: column if column.ndim else np.full(count, column) for name, column in columns.items()}
        return cls(**columns, args=args or {})

    @classmethod
    def of_kind(
        cls, kind: npt.ArrayLike, start: npt.ArrayLike, args: Args | None = None, **arrays: npt.ArrayLike
    ) -> Slices:
        """Build a table of slices that are no modules, in start order, nested by their times; scalars are for all."""
        rows = cls.of(args, kind=kind, start=start, **arrays)
        return nest_by_time(rows.take(np.lexsort((-rows.end, rows.start))))

    @classmethod
    def empty(cls) -> Slices:
        """Return a table without slices."""
        return cls.of(None, **{name: [] for name in DTYPES})

    def take(self, index: AnyArray | slice) -> Slices:
        """Return the slices at `index` (indices, a mask or a range of rows), with `parent` left as it was."""
        args = take_args(self.args, index, len(self))
        return Slices(**{name: getattr(self, name)[index] for name in DTYPES}, args=args)

    def block_of(self, kind: int) -> slice:
        """Return the range of rows that the kind is in, together with the other kinds of its tracks."""
        # Without an array of all rows: this is asked for dozens of times.
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


def in_start_order(slices: Slices) -> Slices:
    """Sort by block, start and depth, and renumber `parent`, so that a parent is before its children."""
    if is_sorted(slices):
        return slices
    order = np.lexsort((slices.depth, slices.start, _BLOCK[slices.kind]))
    new_index = np.full(len(slices) + 1, -1, np.int64)
    new_index[order] = np.arange(len(order))
    ordered = slices.take(order)
    return replace(ordered, parent=new_index[ordered.parent])


def is_sorted(slices: Slices) -> bool:
    """Return whether slices are in the order that `in_start_order` gives them."""
    start, depth, block = slices.start, slices.depth, _BLOCK[slices.kind]
    later = (start[1:] > start[:-1]) | (start[1:] == start[:-1]) & (depth[1:] >= depth[:-1])
    return bool(np.all((block[1:] > block[:-1]) | (block[1:] == block[:-1]) & later))


def join_columns(parts: Sequence[Slices]) -> Slices:
    """Put slices after those of the parts before; only `parent` is renumbered, as names and tracks may be shared."""
    first, shifted = 0, []
    for part in parts:
        shifted.append(replace(part, parent=np.where(part.parent >= 0, part.parent + first, -1)))
        first += len(part)
    firsts = np.cumsum([0, *map(len, parts)]).tolist()
    args = join_args([(first, part.args) for first, part in zip(firsts, parts, strict=False)])
    columns = {name: np.concatenate([getattr(part, name) for part in shifted]) for name in DTYPES}
    return Slices(**columns, args=args)


def append_to(columns: dict[str, AnyArray], added: Mapping[str, AnyArray]) -> None:
    """Append columns to large ones that no other array shares, which grow in place: memory may not hold both."""
    for name, column in added.items():
        whole = columns.setdefault(name, np.empty(0, column.dtype))
        count = len(whole)
        whole.resize(count + len(column), refcheck=False)
        whole[count:] = column
