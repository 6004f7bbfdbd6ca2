"""What each step was spent on, as the page and traces show it beside the slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .._typing import BoolArray, Int64Array
from ..timeline import Timeline
from ..timeline.select import without_gpu
from ..timeline.summary import find_step_bounds
from ..timeline.summary.parts import DividedSteps, divide_piece, explain_steps, sum_up_parts
from ..timeline.summary.step_bounds import StepBounds

COUNTER_UNIT = "ms"
MAX_STEPS = 1 << 15


class PartTable(NamedTuple):
    """What each step was spent on; every nanosecond of a step is of exactly one part.

    Attributes:
        parts: their names, in the order in which they are shown.
        share: of each part, its fraction of the time of the whole steps.
        names: of each step (`step 3`, `generate 3`).
        causes: why a step was slow, in one sentence; None if it was not.
        start: int64[steps], Unix nanoseconds.
        end: int64[steps], Unix nanoseconds.
        whole: bool[steps], False if a step's beginning was overwritten or its end not marked.
        ns: int64[steps, parts].
    """

    parts: Sequence[str]
    share: Sequence[float]
    names: Sequence[str]
    causes: Sequence[str | None]
    start: Int64Array
    end: Int64Array
    whole: BoolArray
    ns: Int64Array


class PartCounter(NamedTuple):
    """How long the steps were in one part, as a value that holds from one moment to the next.

    Attributes:
        name: `step: data loading`.
        time: int64[n], Unix nanoseconds: where each step begins, and where one ends that no other follows at once.
        ns: int64[n], nanoseconds.
    """

    name: str
    time: Int64Array
    ns: Int64Array


def part_table(timeline: Timeline, step_by: str | None = None) -> PartTable | None:
    """Return what the steps of a timeline were spent on; None if it has no step.

    Args:
        timeline: whose steps.
        step_by: what a step is; see `Timeline.summary`.
    """
    timeline = without_gpu(timeline)
    return _table(divide_piece(timeline, step_by))


def _table(divided: DividedSteps) -> PartTable | None:
    steps, bounds = explain_steps(divided), divided.bounds
    if not steps:
        return None
    counted = [step for step, counts in zip(steps, bounds.counted.tolist(), strict=True) if counts]
    share_of = {total.part: total.share for total in sum_up_parts(counted)}
    parts = [total.part for total in sum_up_parts(steps) if total.total_ns]
    shares = [share_of.get(part, 0.0) for part in parts]
    names, causes = [f"{step.name} {step.step}" for step in steps], [step.cause for step in steps]
    ns = np.array([[step.parts.get(part, 0) for part in parts] for step in steps], np.int64).reshape(len(steps), -1)
    return PartTable(parts, shares, names, causes, bounds.start, bounds.end, bounds.whole, ns)


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
    table = _table(divided) if _is_drawn(divided.bounds) else None
    if table is None or not table.whole.any():
        return []
    is_last = np.append(table.end[:-1] < table.start[1:], True)
    time = np.concatenate([table.start, table.end[is_last]])
    order = np.argsort(time, kind="stable")
    none = np.zeros((np.count_nonzero(is_last), len(table.parts)), np.int64)
    columns = np.concatenate([table.ns, none])[order].T
    return [PartCounter(f"step: {part}", time[order], ns) for part, ns in zip(table.parts, columns, strict=True)]
