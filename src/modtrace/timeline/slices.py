"""The table of slices: one NumPy array per field, one entry per slice, whatever kind of slice it is."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .._typing import AnyArray, BoolArray, Int8Array, Int32Array, Int64Array
from .args import NO_ARG, ArgColumn, Args, join_args, take_args
from .nesting import nest_by_time

PHASES = ("forward", "backward", "recompute")
"""The phase of a module's slice by its code in `Slices.phase`."""
FORWARD, BACKWARD, RECOMPUTE = range(3)


class SliceKind(NamedTuple):
    """What a slice can be."""

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
    """What only some slices have, by the name of the arg."""

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
        """How many bytes the arrays hold together."""
        own: int = sum(getattr(self, name).nbytes for name in DTYPES)
        return own + sum(column.rows.nbytes + column.values.nbytes for column in self.args.values())


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


def append_to(columns: dict[str, AnyArray], more: Mapping[str, AnyArray]) -> None:
    """Append columns to large ones that no other array shares, which grow in place: memory may not hold both."""
    for name, column in more.items():
        whole = columns.setdefault(name, np.empty(0, column.dtype))
        count = len(whole)
        whole.resize(count + len(column), refcheck=False)
        whole[count:] = column
