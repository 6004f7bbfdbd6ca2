"""What each step was spent on, as the page and traces show it beside the slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .._typing import BoolArray, Int64Array
from ..timeline import Timeline
from ..timeline.select import without_gpu
from ..timeline.summary import find_step_bounds
from ..timeline.summary.parts import DividedSteps, divide_piece, order_parts
from ..timeline.summary.slow_steps import explain_steps
from ..timeline.summary.step_bounds import StepBounds

COUNTER_UNIT = "ms"
"""Of the values that viewers show."""
MAX_STEPS = 1 << 15
"""With more steps no counters are written."""


class PartTable(NamedTuple):
    """What each step was spent on; every nanosecond of a step is of exactly one part."""

    parts: Sequence[str]  # their names, in the order in which they are shown
    share: Sequence[float]  # of each part, its fraction of the time of the whole steps
    names: Sequence[str]  # of each step (`step 3`, `generate 3`)
    causes: Sequence[str | None]  # why a step was slow, in one sentence; None if it was not
    start: Int64Array  # int64[steps], Unix nanoseconds
    end: Int64Array  # int64[steps], Unix nanoseconds
    whole: BoolArray  # bool[steps], False if a step's beginning was overwritten or its end not marked
    ns: Int64Array  # int64[steps, parts]


class PartCounter(NamedTuple):
    """How long the steps were in one part, as a value that holds from one moment to the next."""

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
