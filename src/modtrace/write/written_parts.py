"""The parts of a timeline that are written one after the other, so that all of it need not be in memory."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar

from .._terminal import is_terminal
from ..formats.table_bytes import TableWriter
from ..timeline import OnePiece, Pieces, Timeline
from ..timeline.summary.parts import DividedSteps, divide_piece, join_divided
from ..timeline.summary.step_bounds import OPTIMIZER
from .step_parts import PartCounter, count_parts, part_counters

BAR_DELAY_S = 1.0
"""Seconds for which a bar is not worth drawing."""

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
    """Yield all that is written of a timeline, which the table gets too; show how much that is, if it takes long."""
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
    """Yield what is written of a timeline, the last part with all that is known once all pieces have come.

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


def _show_progress(parts: Iterable[tuple[int, Part]], what: str, total: int | None) -> Iterator[Part]:
    """Pass on parts that have sizes; from the second second on, show on a terminal how much of `total` they are."""
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
                task = bar.add_task(what, total=total)
                bar.start()
            if bar is not None:
                bar.update(task, completed=done)
    finally:
        if bar is not None:
            bar.stop()
