"""A ring file → a timeline, with what a watcher knows of the run beyond it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ..ring import read_ring, ring_serials
from ..timeline import CrossedError, ReadRing, Timeline, build_in_pieces, build_timeline, find_pieces
from ..timeline.contents import WHOLE_RUN
from ..timeline.summary import GroupBy, Summary, summarize_pieces
from ..watching.read_whole_run import read_whole_run


def load_ring(path: Path) -> Timeline:
    """Read a ring file.

    Raises:
        RingError: it is damaged beyond reading.
    """
    timeline = build_in_pieces(_reader(path), ring_serials(path))
    return _with_whole_run(timeline or build_timeline(read_ring(path)), path)


def load_around(path: Path, steps: tuple[int | None, int | None]) -> Timeline | None:
    """Return some steps of a large ring and a few beside them, for `Timeline.steps` to choose from; None: load all.

    Raises:
        RingError: it is damaged beyond reading.
    """
    pieces = find_pieces(_reader(path), ring_serials(path))
    timeline = None if pieces is None else pieces.around(*steps)
    return None if timeline is None else _with_whole_run(timeline, path)


def summarize_ring(path: Path, by: GroupBy) -> Summary | None:
    """Return the summary of a large ring, one piece at a time; None if it is not large, or no optimizer ends its steps.

    Raises:
        RingError: it is damaged beyond reading.
    """
    pieces = find_pieces(_reader(path), ring_serials(path))
    if pieces is not None and len(pieces.others.step_ends.event):
        with suppress(CrossedError):
            return summarize_pieces((_with_whole_run(piece, path) for piece in pieces.timelines()), by)
    return None


def _reader(path: Path) -> ReadRing:
    return lambda serials, without: read_ring(path, None, serials, without)


def _with_whole_run(timeline: Timeline, path: Path) -> Timeline:
    known, whole = timeline.metadata[WHOLE_RUN], read_whole_run(path)
    if whole is None or not isinstance(known, dict):
        return timeline
    is_all = not whole["missed_events"]
    seen = {field: whole[field] for field in ("steps", "spans") if is_all and known[field] is None}
    return replace(timeline, metadata={**timeline.metadata, WHOLE_RUN: known | seen})
