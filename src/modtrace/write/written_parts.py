"""The parts of a timeline that are written one after the other, and the parts of its steps, as traces show them."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from .._arrays import BoolArray, Int64Array
from .._tables import is_terminal
from ..formats.table_bytes import TableWriter
from ..timeline import OnePiece, Pieces, Timeline
from ..timeline.select import without_gpu
from ..timeline.summary import find_step_bounds
from ..timeline.summary.parts import DividedSteps, divide_piece, join_divided, order_parts
from ..timeline.summary.slow_steps import explain_steps
from ..timeline.summary.step_bounds import OPTIMIZER, StepBounds

COUNTER_UNIT = "ms"
"""The unit of the values in viewers."""
MAX_STEPS = 1 << 15
"""The largest number of steps for which counters are written."""


class PartTable(NamedTuple):
    """The parts of each step; every nanosecond of a step is of exactly one part."""

    parts: Sequence[str]  # their names, in the order in which they are shown
    share: Sequence[float]  # of each part, its fraction of the time of the whole steps
    names: Sequence[str]  # of each step (`step 3`, `generate 3`)
    causes: Sequence[str | None]  # why a step was slow, in one sentence; None if it was not
    start: Int64Array  # int64[steps], Unix nanoseconds
    end: Int64Array  # int64[steps], Unix nanoseconds
    whole: BoolArray  # bool[steps], False if a step's beginning was overwritten or its end not marked
    ns: Int64Array  # int64[steps, parts]


class PartCounter(NamedTuple):
    """The time of steps in one part, as a value that holds from one moment to the next."""

    name: str  # `step: data loading`
    # Int64[n], Unix nanoseconds: where each step begins, and where one ends that no other follows at once
    time: Int64Array
    ns: Int64Array  # int64[n], nanoseconds


def part_table(timeline: Timeline, step_by: str | None = None) -> PartTable | None:
    """Return what the steps of a timeline were spent on; None if it has no step."""
    divided = divide_piece(without_gpu(timeline), step_by)
    bounds, (parts, ns) = divided.bounds, _shown_parts(divided)
    if not len(bounds.number):
        return None
    steps, counted = explain_steps(divided), ns[bounds.counted].sum(axis=0)
    shares = (counted / max(counted.sum(), 1)).tolist()
    names = [f"{name} {number}" for name, number in zip(bounds.name, bounds.number.tolist(), strict=True)]
    causes = [steps.causes[index][0] if index in steps.causes else None for index in range(len(steps))]
    return PartTable(parts, shares, names, causes, bounds.start, bounds.end, bounds.whole, ns)


def _shown_parts(divided: DividedSteps) -> tuple[list[str], Int64Array]:
    """Return the parts that any step has, as in `PARTS`, then ranges by name, then `other`; int64[steps, parts]."""
    used = order_parts(divided.names, np.any(divided.ns > 0, axis=0))
    return [divided.names[part] for part in used], divided.ns[:, used]


def part_counters(timeline: Timeline) -> list[PartCounter]:
    """Return a counter per part that any step has, in order.

    There is none if no step is whole, if there are more than `MAX_STEPS`, or if steps overlap, as calls of several
    threads do.
    """
    timeline = without_gpu(timeline)
    return count_parts(divide_piece(timeline, None)) if _is_drawn(find_step_bounds(timeline, None)) else []


def _is_drawn(bounds: StepBounds) -> bool:
    return not np.any(bounds.start[1:] < bounds.end[:-1]) and len(bounds.number) <= MAX_STEPS


def count_parts(divided: DividedSteps) -> list[PartCounter]:
    """Return what `part_counters` does of steps that are divided already."""
    bounds, (parts, ns) = divided.bounds, _shown_parts(divided)
    if not _is_drawn(bounds) or not bounds.whole.any():
        return []
    is_last = np.append(bounds.end[:-1] < bounds.start[1:], True)
    time = np.concatenate([bounds.start, bounds.end[is_last]])
    order = np.argsort(time, kind="stable")
    none = np.zeros((np.count_nonzero(is_last), len(parts)), np.int64)
    columns = np.concatenate([ns, none])[order].T
    return [PartCounter(f"step: {part}", time[order], of_part) for part, of_part in zip(parts, columns, strict=True)]


BAR_DELAY_S = 1.0
"""The seconds after which a bar is drawn."""

Part = TypeVar("Part")


class WrittenPart(NamedTuple):
    """A part of what is written; no two have a slice in common."""

    timeline: Timeline  # the modules of a piece; in the last part all else too
    step_parts: list[PartCounter] | None  # what the steps were spent on; None but in the last part
    first_ns: int = 0  # the first moment that is known of the timeline


def written_parts(
    timeline: Timeline | Pieces,
    path: str | os.PathLike[str],
    table: TableWriter,
    write: Callable[[WrittenPart], Iterator[tuple[int, bytes]]],
) -> Iterator[bytes]:
    """Yield the bytes of a timeline, whose parts the table gets too; show the progress if it takes long."""
    pieces = OnePiece(timeline) if isinstance(timeline, Timeline) else timeline
    parts = parts_to_write(OnePiece(pieces.join()) if pieces.is_joined_to_write else pieces)
    first = next(parts)

    def all_bytes() -> Iterator[tuple[int, bytes]]:
        for part in itertools.chain([first], parts):
            table.add(part.timeline)
            yield from write(part)

    # How many spans are in parts that are still to be decoded is not known.
    total = None if first.step_parts is None else len(first.timeline.columns)
    yield from _show_progress(all_bytes(), f"writing {os.path.basename(path)}", total)


def parts_to_write(pieces: Pieces) -> Iterator[WrittenPart]:
    """Yield the parts of a timeline; the last one has all values that are known once all pieces have come.

    pieces   modules and ranges of step 0 … 99 | … of step 100 … 199
    parts    modules of step 0 … 99 | modules of step 100 … 199 | all ranges, marks, counters, stats
    """
    divided, moments = list[DividedSteps](), list[int]()
    for piece in pieces:
        if pieces.is_single:
            yield WrittenPart(piece, part_counters(piece), first_moment(piece))
            return
        divided.append(divide_piece(piece, OPTIMIZER))
        moments += _first_moments(piece)
        if len(piece.columns):
            tracks = piece.tracks[: int(piece.columns.track.max()) + 1]
            part = replace(piece, slices=piece.columns, tracks=tracks, marks=[], counters=[])
            yield WrittenPart(part, None, min(moments))
    rest = pieces.rest()
    yield WrittenPart(rest, count_parts(join_divided(divided)), min([*moments, *_first_moments(rest)], default=0))


def first_moment(timeline: Timeline) -> int:
    """Return the earliest time in a timeline, in Unix nanoseconds; 0 for an empty one."""
    return min(_first_moments(timeline), default=0)


def _first_moments(timeline: Timeline) -> list[int]:
    slices = timeline.slices
    moments = [int(slices.start.min())] if len(slices) else []
    moments += [int(counter.time[0]) for counter in timeline.counters if len(counter.time)]
    return [*moments, *(mark.time_ns for mark in timeline.marks)]


def _show_progress(parts: Iterable[tuple[int, Part]], label: str, total: int | None) -> Iterator[Part]:
    """Yield parts, which come with their sizes; after a second, show on a terminal how much of `total` they are."""
    if not is_terminal(sys.stderr):
        yield from (part for _, part in parts)
        return
    started = time.monotonic()
    bar = None
    done = 0
    try:
        for size, part in parts:
            yield part
            done += size
            if bar is None and time.monotonic() - started > BAR_DELAY_S:
                # rich takes longer to import than most files to write
                from rich.console import Console
                from rich.progress import Progress

                bar = Progress(console=Console(stderr=True), transient=True)
                task = bar.add_task(label, total=total)
                bar.start()
            if bar is not None:
                bar.update(task, completed=done)
    finally:
        if bar is not None:
            bar.stop()
