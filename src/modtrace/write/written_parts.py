"""The parts of a timeline that are written one after the other, and the parts of its steps for traces and the page."""

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
"""Maximum number of steps for which counters are written."""


class PartTable(NamedTuple):
    """The parts of each step; every nanosecond of a step belongs to exactly one part."""

    parts: Sequence[str]  # names of the parts, in display order
    share: Sequence[float]  # fraction of each part of the time of whole steps
    names: Sequence[str]  # names of the steps (`step 3`, `generate 3`)
    causes: Sequence[str | None]  # cause of a slow step, in one sentence; None for other steps
    start_ns: Int64Array  # int64[steps], Unix time
    end_ns: Int64Array  # int64[steps], Unix time
    is_whole: BoolArray  # bool[steps], False if a step's start was overwritten or its end not marked
    ns: Int64Array  # int64[steps, parts]


class PartCounter(NamedTuple):
    """The time of each step in one part, as a counter whose value is constant during a step."""

    name: str  # `step: data loading`
    # int64[n], Unix time: the start of each step, and the end of a step before a gap
    time_ns: Int64Array
    ns: Int64Array  # int64[n], nanoseconds


def part_table(timeline: Timeline, step_by: str | None = None) -> PartTable | None:
    """Return the parts of the steps of a timeline; None if it has no step."""
    divided = divide_piece(without_gpu(timeline), step_by)
    bounds, (parts, ns) = divided.bounds, _used_parts(divided)
    if not len(bounds.number):
        return None
    steps, part_ns = explain_steps(divided), ns[bounds.counted].sum(axis=0)
    shares = (part_ns / max(part_ns.sum(), 1)).tolist()
    names = [f"{name} {number}" for name, number in zip(bounds.name, bounds.number.tolist(), strict=True)]
    causes = [steps.causes[index][0] if index in steps.causes else None for index in range(len(steps))]
    return PartTable(parts, shares, names, causes, bounds.start_ns, bounds.end_ns, bounds.is_whole, ns)


def _used_parts(divided: DividedSteps) -> tuple[list[str], Int64Array]:
    """Return the parts that any step has (`PARTS`, ranges by name, `other`), and their ns, int64[steps, parts]."""
    indices = order_parts(divided.names, np.any(divided.ns > 0, axis=0))
    return [divided.names[part] for part in indices], divided.ns[:, indices]


def part_counters(timeline: Timeline) -> list[PartCounter]:
    """Return a counter for each part that any step has, in order.

    The list is empty if no step is whole, if there are more than `MAX_STEPS`, or if steps overlap, which calls of
    several threads do.
    """
    timeline = without_gpu(timeline)
    return count_parts(divide_piece(timeline, None)) if _is_drawn(find_step_bounds(timeline, None)) else []


def _is_drawn(bounds: StepBounds) -> bool:
    return not np.any(bounds.start_ns[1:] < bounds.end_ns[:-1]) and len(bounds.number) <= MAX_STEPS


def count_parts(divided: DividedSteps) -> list[PartCounter]:
    """Return the counters of `part_counters` for steps that are already divided."""
    bounds, (parts, ns) = divided.bounds, _used_parts(divided)
    if not _is_drawn(bounds) or not bounds.is_whole.any():
        return []
    is_last = np.append(bounds.end_ns[:-1] < bounds.start_ns[1:], True)
    time = np.concatenate([bounds.start_ns, bounds.end_ns[is_last]])
    order = np.argsort(time, kind="stable")
    zeros = np.zeros((np.count_nonzero(is_last), len(parts)), np.int64)
    columns = np.concatenate([ns, zeros])[order].T
    return [PartCounter(f"step: {part}", time[order], part_ns) for part, part_ns in zip(parts, columns, strict=True)]


BAR_DELAY_S = 1.0
"""Delay of the progress bar in seconds."""

Part = TypeVar("Part")


class WrittenPart(NamedTuple):
    """A part of a written timeline; each slice is in one part."""

    timeline: Timeline  # the modules of a piece; the last part has all other slices too
    step_parts: list[PartCounter] | None  # the counters of step parts; None except in the last part
    first_ns: int = 0  # earliest known time of the timeline, Unix ns


def written_parts(
    timeline: Timeline | Pieces,
    path: str | os.PathLike[str],
    table: TableWriter,
    write: Callable[[WrittenPart], Iterator[tuple[int, bytes]]],
) -> Iterator[bytes]:
    """Yield the bytes of a timeline, and add its parts to `table`; show a progress bar after a second."""
    pieces = OnePiece(timeline) if isinstance(timeline, Timeline) else timeline
    parts = parts_to_write(OnePiece(pieces.join()) if pieces.is_joined_to_write else pieces)
    first = next(parts)

    def all_bytes() -> Iterator[tuple[int, bytes]]:
        for part in itertools.chain([first], parts):
            table.add(part.timeline)
            yield from write(part)

    # The number of spans in later parts is unknown until they are decoded.
    total = None if first.step_parts is None else len(first.timeline.columns)
    yield from _show_progress(all_bytes(), f"writing {os.path.basename(path)}", total)


def parts_to_write(pieces: Pieces) -> Iterator[WrittenPart]:
    """Yield the parts of a timeline; the last part has all values that are known only after all pieces.

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
    last = pieces.rest()
    yield WrittenPart(last, count_parts(join_divided(divided)), min([*moments, *_first_moments(last)], default=0))


def first_moment(timeline: Timeline) -> int:
    """Return the earliest time in a timeline, in Unix nanoseconds; 0 for an empty one."""
    return min(_first_moments(timeline), default=0)


def _first_moments(timeline: Timeline) -> list[int]:
    slices = timeline.slices
    moments = [int(slices.start.min())] if len(slices) else []
    moments += [int(counter.time[0]) for counter in timeline.counters if len(counter.time)]
    return [*moments, *(mark.time_ns for mark in timeline.marks)]


def _show_progress(parts: Iterable[tuple[int, Part]], label: str, total: int | None) -> Iterator[Part]:
    """Yield the parts of (size, part) pairs; after a second, show the sum of sizes out of `total` on a terminal."""
    if not is_terminal(sys.stderr):
        yield from (part for _, part in parts)
        return
    start_s = time.monotonic()
    bar = None
    done = 0
    try:
        for size, part in parts:
            yield part
            done += size
            if bar is None and time.monotonic() - start_s > BAR_DELAY_S:
                # Importing rich takes longer than writing most files.
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
