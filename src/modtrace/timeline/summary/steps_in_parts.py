"""What users get of steps in parts: each step, its parts, and what made it slow; and each part over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..._interrupts import cached_property
from ..._typing import AnyArray, Int64Array
from ..lazy_rows import LazyRows
from .parts import OTHER, order_parts
from .percentiles import median, nearest_rank
from .step_bounds import NO_STEPS, STEP, StepBounds


class PartTimes(NamedTuple):
    """One part of all steps; times are integer nanoseconds.

    Attributes:
        part: "data loading", "forward", "loss" (from the end of forward to the begin of backward, and in a loss module
            what is outside of the model that it calls), "backward", "recompute", "communication" (in which the thread
            of the step did nothing else), "optimizer", "gc", "compile", "saving", "evaluation", the name of a range of
            the user's, or "other".
        total_ns: in all whole steps together; the totals of all parts are the time of these steps. If no step is whole,
            all count.
        p50_ns: the median over these steps.
        p95_ns: what 95 % of them do not exceed.
        share: of the time of these steps, from 0 to 1.
    """

    part: str
    total_ns: int
    p50_ns: int
    p95_ns: int
    share: float


class SlowPart(NamedTuple):
    """The part that made a step slow.

    Attributes:
        part: its name.
        took_ns: what it took in the step.
        usual_ns: what it usually takes.
        range: its longest range; empty if there is none.
        module: the innermost module that took so much more; empty if none did.
    """

    part: str
    took_ns: int
    usual_ns: int
    range: str = ""
    module: str = ""


class StepParts(NamedTuple):
    """The parts of one step.

    Attributes:
        step: its number, from 0.
        parts: nanoseconds by part, without those that are 0; they add up to the duration of the step.
        cause: for a step that is much slower than others of its name, which part made it so, in a sentence; else None.
            Evaluation makes no step slow: the sentence is about the time without it.
        name: "step"; of a step that is a call or a range, what that is called.
        slow_by: the part that `cause` is about; None without one.
    """

    step: int
    parts: Mapping[str, int]
    cause: str | None = None
    name: str = STEP
    slow_by: SlowPart | None = None


@dataclass(frozen=True, eq=False)
class StepsInParts(LazyRows[StepParts]):
    """Steps in parts, as columns."""

    bounds: StepBounds = NO_STEPS
    ns: Int64Array = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # int64[steps, parts]
    parts: Sequence[str] = ()  # their names
    # By index the sentence that says why a step was slow, and the part; in order.
    causes: Mapping[int, tuple[str, SlowPart]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.bounds.number)

    @cached_property
    def index_of(self) -> dict[int, int]:
        """The index of each step by its number."""
        return {number: index for index, number in enumerate(self.bounds.number.tolist())}

    def take(self, rows: AnyArray | slice) -> StepsInParts:
        """Return some of the steps."""
        kept = enumerate(np.arange(len(self))[rows].tolist() if self.causes else ())
        causes = {index: self.causes[old] for index, old in kept if old in self.causes}
        return StepsInParts(self.bounds.take(rows), self.ns[rows], self.parts, causes)

    def _make(self, rows: slice) -> Iterator[StepParts]:
        each = zip(self.bounds.number[rows].tolist(), self.bounds.name[rows], self.ns[rows].tolist(), strict=True)
        for index, (number, name, row) in enumerate(each, rows.start):
            cause, slow_by = self.causes.get(index, (None, None))
            parts = {part: took for part, took in zip(self.parts, row, strict=True) if took}
            yield StepParts(number, parts, cause, name, slow_by)


def sum_up_parts(steps: StepsInParts) -> list[PartTimes]:
    """Return each part over some steps, in the order of `order_parts`.

    If the steps have several names, percentiles are of those that took most.
    """
    total, named = steps.ns.sum(axis=1), steps.bounds.by_name()
    took = {name: int(total[rows].sum()) for name, rows in named.items()}
    most = max(took.values(), default=0)
    usual = np.concatenate([np.zeros(0, np.int64), *(rows for name, rows in named.items() if took[name] == most)])
    is_used = [ns.any() or name == OTHER for name, ns in zip(steps.parts, steps.ns.T, strict=True)]
    times = []
    for part in order_parts(steps.parts, np.array(is_used)) if len(steps) else ():
        ns = steps.ns[:, part]
        share = int(ns.sum()) / int(total.sum()) if total.any() else 0.0
        p50_ns, p95_ns = median(ns[usual]), nearest_rank(ns[usual], 0.95)
        times.append(PartTimes(steps.parts[part], int(ns.sum()), p50_ns, p95_ns, share))
    return times
