"""A ring file → a timeline, with what a watcher knows of the whole run."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from .._errors import ModtraceError, TraceError
from ..formats.trace_file import FileKind, file_kind_by_head
from ..live.read_whole_run import read_whole_run
from ..ring import RingLog, read_ring, ring_serials
from ..timeline import OnePiece, Pieces, ReadRing, RingPieces, Timeline
from ..timeline.contents import WHOLE_RUN
from ..timeline.decode.window import build_around, build_last, find_last_steps
from ..timeline.summary import find_step_bounds, take_steps
from ..timeline.summary.step_bounds import CALL, OPTIMIZER
from . import read_timeline

Steps = tuple[int | None, int | None]
"""The first of some steps and the one after the last; None: from the first on, and to the last."""

SHOWN_EVENTS = 4_000_000
"""Events of a ring that are shown at once, if no steps are chosen: as many as a browser draws in a moment."""

_FIRST_LOOK = 1 << 14
"""Events of a ring's end that are read first, to see whether its last calls are among them."""
_BYTES_PER_EVENT = 250
"""What an event takes, about, where a ring is decoded as a whole."""


def load_ring(path: Path) -> Timeline:
    """Read a ring file; raises RingError if it is damaged beyond reading."""
    return _pieces(path, (_reader(path), ring_serials(path))).join()


def read_pieces(path: str | os.PathLike[str]) -> Pieces:
    """Do what `load` does; a ring file is read piece by piece."""
    return ring_pieces(path) or OnePiece(read_timeline(path))


def load_around(path: str | os.PathLike[str], steps: Steps | None, step_by: str | None = None) -> Timeline:
    """Do what `load` does; of a large ring file perhaps only for some training steps and a few beside them.

    Where steps are calls or ranges, all is read. Raises ModtraceError if a ring has too many events for the memory.
    """
    ring, timeline = _ring(path), None
    steps = steps if step_by in (None, OPTIMIZER) else None
    if ring is not None and steps is not None:
        timeline = build_around(*ring, *steps) or _last_calls(ring, *steps)
    if ring is not None and timeline is None and len(ring[1]) > SHOWN_EVENTS and steps != (None, None):
        pieces = _pieces(path, ring)
        if not pieces.cuts:
            raise too_large(path, len(ring[1]), "choose steps at its end, as in --steps -100:, or all with --steps :")
        return pieces.join()
    return read_timeline(path) if timeline is None else _with_whole_run(timeline, read_whole_run(Path(path)))


def too_large(path: str | os.PathLike[str], events: int, advice: str) -> ModtraceError:
    """Return the error about a ring that is too large to be read at once and cannot be read in pieces."""
    return ModtraceError(
        f"{os.fspath(path)}: only all of its {events:,} events together say what ran, which takes about "
        f"{events * _BYTES_PER_EVENT / 1e9:.0f} GB of memory; {advice}"
    )


def _last_calls(ring: tuple[ReadRing, range], first: int | None, last: int | None) -> Timeline | None:
    """Return the timeline of the end of a ring, if some of its last calls are asked for, and calls are its steps."""
    if first is None or first >= 0 or (last is not None and last >= 0):
        return None
    events = _FIRST_LOOK
    while (timeline := build_last(*ring, events)) is not None:
        bounds = find_step_bounds(timeline, None)
        if bounds.step_by != CALL:
            return None
        if len(bounds.number) > -first:
            return timeline
        events *= 8
    return None


def load_shown(
    path: str | os.PathLike[str], steps: Steps | None, pieces: RingPieces | None = None
) -> tuple[Timeline, list[str]]:
    """Return some steps of a file, else all, or the last ones of too long a ring; and what users should know of it.

    `pieces` are those of the ring, if they are known. Raises what `load` does, or TraceError if nothing ran in these.
    """
    notes, ring = list[str](), None if steps is not None else _ring(path)
    if ring is not None and len(ring[1]) > SHOWN_EVENTS:
        last_steps = find_last_steps(*ring, SHOWN_EVENTS)
        if last_steps is not None:
            begin, first = last_steps
            steps = first, None
            notes.append(
                f"This holds the steps from {first:,} on: the ring has {len(ring[1]):,} events, from step {begin:,} "
                "on. --steps A:B chooses other steps, and --steps : all."
            )
        elif (end := build_last(*ring, SHOWN_EVENTS)) is not None:
            note = f"This holds the last {SHOWN_EVENTS:,} events of {len(ring[1]):,}, in which nothing ends steps. "
            return _with_whole_run(end, read_whole_run(path)), [f"{note}--steps : shows all."]
    whole = pieces.join() if pieces is not None and steps is None else load_around(path, steps)
    timeline = whole if steps is None else take_steps(whole, *steps)
    if steps is not None and not len(timeline.slices):
        last = int(whole.slices.step.max(initial=-1))
        raise TraceError(
            path, f"it holds nothing of these steps; its last one is {last}" if last >= 0 else "it is empty"
        )
    return timeline, notes


def ring_pieces(path: str | os.PathLike[str]) -> RingPieces | None:
    """Return the pieces of a ring file, None for other files; raises RingError if it is damaged beyond reading."""
    ring = _ring(path)
    return None if ring is None else _pieces(path, ring)


def _ring(path: str | os.PathLike[str]) -> tuple[ReadRing, range] | None:
    """Return what reads a ring file, and the serial numbers in it; None for other files."""
    try:
        is_ring = file_kind_by_head(path) is FileKind.RING
    except (OSError, TraceError):
        return None  # `load` says what is wrong with it
    return (_reader(path), ring_serials(path)) if is_ring else None


def _pieces(path: str | os.PathLike[str], ring: tuple[ReadRing, range]) -> RingPieces:
    return RingPieces(*ring, change=partial(_with_whole_run, whole=read_whole_run(path)))


def _reader(path: str | os.PathLike[str]) -> ReadRing:
    log = RingLog()
    return lambda serials, without: read_ring(path, None, serials, without, log)


def _with_whole_run(timeline: Timeline, whole: Mapping[str, Any] | None) -> Timeline:
    known = timeline.metadata[WHOLE_RUN]
    if whole is None:
        return timeline
    is_all = not whole["missed_events"]
    seen = {field: whole[field] for field in ("steps", "spans") if is_all and known[field] is None}
    return replace(timeline, metadata={**timeline.metadata, WHOLE_RUN: known | seen})
