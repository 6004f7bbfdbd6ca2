"""The table of slices: one NumPy array per field, one entry per slice, whatever kind of slice it is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .._typing import AnyArray, BoolArray, Int8Array, Int32Array, Int64Array
from .nesting import nest_by_time

PHASES = ("forward", "backward", "recompute")
"""The phase of a module's slice by its code in `Slices.phase`."""
FORWARD, BACKWARD, RECOMPUTE = range(3)


class SliceKind(NamedTuple):
    """What a slice can be.

    Attributes:
        word: what it is called.
        track: the kind of the tracks that its slices are on; empty for modules, whose tracks are of several kinds.
        label: the name of its slices in a trace; empty if each has a name of its own.
    """

    word: str
    track: str = ""
    label: str = ""


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


_NEUTRAL = {"name": -1, "phase": 0, "depth": 0, "parent": -1, "call": 0, "step": 0, "link": -1}
_NEUTRAL |= {"complete": True, "kind": MODULE, "detail": -1}


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
        detail: int32, index into the side table of its kind; -1 for a kind without one.
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
    detail: Int32Array

    def __len__(self) -> int:
        return len(self.start)

    @classmethod
    def of(cls, **arrays: npt.ArrayLike) -> Slices:
        """Build a table from anything array-like, cast to each field's type.

        What is left out is neutral: without a kind the slices are modules, and all are complete. A scalar is for all.

        Raises:
            KeyError: there is no start, end or track.
        """
        given = {**_NEUTRAL, **arrays}
        columns = {field: np.asarray(given[field], dtype) for field, dtype in DTYPES.items()}
        count = len(columns["start"])
        return cls(**{name: column if column.ndim else np.full(count, column) for name, column in columns.items()})

    @classmethod
    def of_kind(cls, kind: npt.ArrayLike, start: npt.ArrayLike, **arrays: npt.ArrayLike) -> Slices:
        """Build a table of slices that are no modules, in start order and nested by their times.

        Args:
            kind: index into `KINDS`, of each slice or of all.
            start: of each slice.
            **arrays: `end` and `track`, and any other field; scalars are for all slices.
        """
        rows = cls.of(kind=kind, start=start, **arrays)
        return nest_by_time(rows.take(np.lexsort((-rows.end, rows.start))))

    @classmethod
    def empty(cls) -> Slices:
        """Return a table without slices."""
        return cls.of(**{field: [] for field in DTYPES})

    def take(self, index: AnyArray | slice) -> Slices:
        """Return the slices at `index` (indices, a mask or a range of rows), with `parent` left as it was."""
        return Slices(*(getattr(self, f.name)[index] for f in fields(self)))

    def block_of(self, kind: int) -> slice:
        """Return the range of rows that the kind is in, together with the other kinds of its tracks."""
        block = _BLOCK[self.kind]
        return slice(int(np.searchsorted(block, _BLOCK[kind])), int(np.searchsorted(block, _BLOCK[kind], "right")))

    @property
    def nbytes(self) -> int:
        """How many bytes the arrays hold together."""
        return sum(getattr(self, f.name).nbytes for f in fields(self))


Columns = Slices

DTYPES: dict[str, type[np.generic]] = {
    # `Int64Array` → `np.int64`
    field.name: np.dtype(str(field.type).removesuffix("Array").lower()).type
    for field in fields(Slices)
}


def in_start_order(slices: Slices) -> Slices:
    """Sort by block, start and depth, and renumber `parent`, so that a parent is before its children."""
    return sort_by_start(slices)[0]


def sort_by_start(slices: Slices) -> tuple[Slices, Int64Array]:
    """Do what `in_start_order` does; return also the new index of each slice, and after these a -1 for no slice."""
    new_index = np.arange(-1, len(slices))
    new_index = np.append(new_index[1:], -1)
    if is_sorted(slices):
        return slices, new_index
    order = np.lexsort((slices.depth, slices.start, _BLOCK[slices.kind]))
    new_index[order] = np.arange(len(order))
    ordered = slices.take(order)
    return replace(ordered, parent=new_index[ordered.parent]), new_index


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
    return Slices(*(np.concatenate([getattr(part, field) for part in shifted]) for field in DTYPES))


def append_to(columns: dict[str, AnyArray], more: Mapping[str, AnyArray]) -> None:
    """Append columns to large ones, which grow in place: both together may not fit into memory twice.

    Args:
        columns: that no other array shares; without any, they become copies of `more`.
        more: with the same fields.
    """
    for field, column in more.items():
        whole = columns.setdefault(field, np.empty(0, column.dtype))
        count = len(whole)
        whole.resize(count + len(column), refcheck=False)
        whole[count:] = column
