"""The spans of a timeline as columns: one NumPy array per field, one entry per span."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from .._typing import AnyArray, BoolArray, Int8Array, Int32Array, Int64Array

__all__ = ["BACKWARD", "FORWARD", "PHASES", "RECOMPUTE", "Columns", "in_start_order", "join_columns", "sort_by_start"]

PHASES = ("forward", "backward", "recompute")
"""The phase of a span by its code in `Columns.phase`."""
FORWARD, BACKWARD, RECOMPUTE = range(3)


@dataclass(frozen=True, slots=True)
class Columns:
    """Spans in start order, a parent before its children; every array has one entry per span.

    Attributes:
        start: int64, nanoseconds since the Unix epoch.
        end: int64, nanoseconds; never less than `start`.
        name: int32, index into `Timeline.names`.
        phase: int8, index into `PHASES`.
        track: int32, index into `Timeline.tracks`.
        depth: int32, the number of spans around it on its track.
        parent: int64, index of the span around it on its track, or -1.
        call: int64, which call of this module it is, from 0.
        step: int64, the number of steps that had ended when it started.
        link: int64, what joins the spans of one call: a forward span and the backward spans of the same call have the
            same link; -1 where there is nothing to join.
        complete: bool, False where its enter or exit was overwritten or never came.
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

    def __len__(self) -> int:
        return len(self.start)

    @classmethod
    def of(cls, **arrays: npt.ArrayLike) -> Columns:
        """Build columns from anything array-like, cast to each field's type; all fields are required.

        Raises:
            KeyError: a field is missing.
        """
        return cls(**{field: np.asarray(arrays[field], dtype) for field, dtype in DTYPES.items()})

    @classmethod
    def empty(cls) -> Columns:
        """Columns of no span."""
        return cls.of(**{field: [] for field in DTYPES})

    def take(self, index: AnyArray) -> Columns:
        """Return the spans at `index` (indices or a mask), with `parent` left as it was."""
        return Columns(*(getattr(self, f.name)[index] for f in fields(self)))

    @property
    def nbytes(self) -> int:
        """How many bytes the arrays hold together."""
        return sum(getattr(self, f.name).nbytes for f in fields(self))


DTYPES: dict[str, type[np.generic]] = {
    "start": np.int64,
    "end": np.int64,
    "name": np.int32,
    "phase": np.int8,
    "track": np.int32,
    "depth": np.int32,
    "parent": np.int64,
    "call": np.int64,
    "step": np.int64,
    "link": np.int64,
    "complete": np.bool_,
}


def in_start_order(columns: Columns) -> Columns:
    """Sort by (start, depth) and renumber `parent`, so that a parent stands before its children."""
    return sort_by_start(columns)[0]


def sort_by_start(columns: Columns) -> tuple[Columns, Int64Array]:
    """Do what `in_start_order` does; return also the new index of each span, and behind these a -1 for no span."""
    order = np.lexsort((columns.depth, columns.start))
    new_index = np.empty(len(order) + 1, np.int64)
    new_index[order] = np.arange(len(order))
    new_index[-1] = -1
    ordered = columns.take(order)
    return replace(ordered, parent=new_index[ordered.parent]), new_index


def join_columns(parts: Sequence[Columns]) -> Columns:
    """Put spans behind those of the parts before; only `parent` is renumbered, as names and tracks may be shared."""
    first, shifted = 0, []
    for part in parts:
        shifted.append(replace(part, parent=np.where(part.parent >= 0, part.parent + first, -1)))
        first += len(part)
    return Columns(*(np.concatenate([getattr(part, field) for part in shifted]) for field in Columns.__slots__))
