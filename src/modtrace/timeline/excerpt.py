"""An excerpt of a timeline, if all of it would be too much: its end, or its slowest steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._typing import Float64Array, IndexArray, Int64Array
from .select import chosen_steps, steps, window
from .timeline import Timeline


class Excerpt(NamedTuple):
    """A part of a timeline.

    Attributes:
        timeline: what is left.
        description: which part that is (`the last 3 of 20 steps`).
    """

    timeline: Timeline
    description: str


def last_steps(timeline: Timeline, max_spans: int) -> Excerpt | None:
    """Return the last steps that together have at most `max_spans` spans; None where not even one step fits."""
    steps_held, counts = np.unique(timeline.columns.step, return_counts=True)
    fitting = int(np.count_nonzero(np.cumsum(counts[::-1]) <= max_spans))
    if not fitting or len(steps_held) < 2:
        return None
    which = "the last step" if fitting == 1 else f"the last {fitting} steps"
    return Excerpt(steps(timeline, int(steps_held[-fitting])), f"{which} of {len(steps_held)}")


def last_spans(timeline: Timeline, max_spans: int) -> Excerpt:
    """Return what lies behind the start of the first of the last `max_spans` spans; what was open then is cut there."""
    columns = timeline.columns
    start = int(columns.start[-max_spans]) if max_spans < len(columns) else int(columns.start[0])
    end = int(columns.end.max())
    kept_ms, whole_ms = (end - start) / 1e6, (end - int(columns.start[0])) / 1e6
    return Excerpt(window(timeline, start), f"the last {kept_ms:,.3f} ms of {whole_ms:,.3f} ms")


def slowest_steps(timeline: Timeline, max_spans: int) -> Excerpt | None:
    """Return the slowest steps that together have at most `max_spans` spans; None where not even one step fits."""
    columns = timeline.columns
    numbers, index, counts = np.unique(columns.step, return_inverse=True, return_counts=True)
    if len(numbers) < 2:
        return None
    start = np.full(len(numbers), np.iinfo(np.int64).max)
    end = np.full(len(numbers), np.iinfo(np.int64).min)
    np.minimum.at(start, index, columns.start)
    np.maximum.at(end, index, columns.end)
    chosen = choose_slowest(end - start, counts, max_spans)
    if not len(chosen):
        return None
    which = "the slowest step" if len(chosen) == 1 else f"the {len(chosen)} slowest steps"
    return Excerpt(chosen_steps(timeline, numbers[chosen]), f"{which} of {len(numbers)}")


def choose_slowest(durations: Int64Array | Float64Array, counts: Int64Array, max_count: int) -> IndexArray:
    """Return the indexes of the slowest steps that together have at most `max_count` spans, in order.

    Args:
        durations: of each step.
        counts: how many spans each step has.
        max_count: how many they may have together.
    """
    slowest_first = np.lexsort((-np.arange(len(durations)), -np.asarray(durations)))  # of equal ones the later first
    fitting = int(np.count_nonzero(np.cumsum(counts[slowest_first]) <= max_count))
    return np.sort(slowest_first[:fitting])
