"""The end of a timeline, where all of it would be too much."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import Timeline
from .select import steps, window

__all__ = ["Shortened", "last_spans", "last_steps"]


class Shortened(NamedTuple):
    """What is left of a timeline, and how to say what that is (`the last 3 of 20 steps`)."""

    timeline: Timeline
    what: str


def last_steps(timeline: Timeline, most: int) -> Shortened | None:
    """Return the last steps that together have at most `most` spans; None where not even one step fits."""
    numbers, counts = np.unique(timeline.columns.step, return_counts=True)
    fitting = int(np.count_nonzero(np.cumsum(counts[::-1]) <= most))
    if not fitting or len(numbers) < 2:
        return None
    which = "the last step" if fitting == 1 else f"the last {fitting} steps"
    return Shortened(steps(timeline, int(numbers[-fitting])), f"{which} of {len(numbers)}")


def last_spans(timeline: Timeline, most: int) -> Shortened:
    """Return what lies after the moment at which the last `most` spans begin; what was open then is cut there."""
    columns = timeline.columns
    start = int(columns.start[-most]) if most < len(columns) else int(columns.start[0])
    length, end = int(columns.end.max()) - start, int(columns.end.max())
    whole = end - int(columns.start[0])
    return Shortened(window(timeline, start), f"the last {length / 1e6:,.3f} ms of {whole / 1e6:,.3f} ms")
