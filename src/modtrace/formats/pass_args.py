"""How a written trace holds whole backward passes: slices called `backward` on a row per thread, in both formats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..timeline import BackwardPass, Track
from ..timeline.contents import PASSES
from .slice_row import SliceRow

__all__ = ["SLICE_NAME", "pass_args", "passes_from_rows"]

SLICE_NAME = "backward"
"""What a slice is called."""


def pass_args(run: BackwardPass) -> dict[str, bool]:
    """Return the args of a pass' slice."""
    return {} if run.complete else {"complete": False}


def passes_from_rows(rows: Iterable[SliceRow], tracks: Sequence[Track]) -> list[BackwardPass]:
    """Return the passes that slices were written from.

    Args:
        rows: the slices.
        tracks: what their `track` points into.

    Raises:
        ValueError: one lies on a track of something else, or ends before it begins.
    """
    found = []
    for row in rows:
        track = tracks[row.track]
        if track.kind != PASSES or row.end < row.start:
            raise ValueError(f"a backward pass from {row.start} to {row.end} is on {track.name}")
        complete = bool(row.args.get("complete", True))
        found.append(BackwardPass(row.start, row.end, track.thread, track.tid, track.process, complete))
    return sorted(found, key=lambda run: (run.start_ns, -run.end_ns))
