"""The end of a timeline, where all of it would be too much."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .select import steps, window
from .timeline import Timeline

__all__ = ["Tail", "last_spans", "last_steps"]


class Tail(NamedTuple):
    """The end of a timeline.

    Attributes:
        timeline: what is left.
        description: which part that is (`the last 3 of 20 steps`).
    """

    timeline: Timeline
    description: str


def last_steps(timeline: Timeline, max_spans: int) -> Tail | None:
    """Return the last steps that together have at most `max_spans` spans; None where not even one step fits."""
    steps_held, counts = np.unique(timeline.columns.step, return_counts=True)
    fitting = int(np.count_nonzero(np.cumsum(counts[::-1]) <= max_spans))
    if not fitting or len(steps_held) < 2:
        return None
    which = "the last step" if fitting == 1 else f"the last {fitting} steps"
    return Tail(steps(timeline, int(steps_held[-fitting])), f"{which} of {len(steps_held)}")


def last_spans(timeline: Timeline, max_spans: int) -> Tail:
    """Return what lies behind the start of the first of the last `max_spans` spans; what was open then is cut there."""
    columns = timeline.columns
    start = int(columns.start[-max_spans]) if max_spans < len(columns) else int(columns.start[0])
    end = int(columns.end.max())
    kept_ms, whole_ms = (end - start) / 1e6, (end - int(columns.start[0])) / 1e6
    return Tail(window(timeline, start), f"the last {kept_ms:,.3f} ms of {whole_ms:,.3f} ms")
