"""What findings are made of beside the rows of a summary, as arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...._interrupts import cached_property
from ...._typing import AnyArray, Int64Array
from ...contents import MEMORY, OPTIMIZERS
from ..module_rows import ModuleTimes, outer_modules
from ..parts import DividedSteps
from ..step_bounds import OPTIMIZER

if TYPE_CHECKING:
    from ..module_summary import Summary


class Measured:
    """A summary before it is sorted or shortened, and what its steps and calls are.

    Attributes:
        summary: its rows are of all modules.
        low_ns: int64[rows], what a module takes at least in 9 of 10 steps: a busy machine stops threads so often, and
            in the same code, that medians differ.
        runs: int64[3, rows], of whole steps, without evaluations and what runs in backward: calls of each module, those
            with a backward, and nanoseconds of those without.
        collections: int64[2, generations], how many garbage collections of each there were, and what they freed.
        memory: what the recording says of memory, see `MEMORY`; empty if nothing.
        optimizers: what it says of optimizers, see `OPTIMIZERS`.
        number: int64[steps], the number of each counted step.
        ns: int64[steps, parts].
        parts: their names.
        other_ns: what of the part `other` follows each part, in all steps.
        duration_ns: int64[steps], without evaluations.
        whole_ns: of these steps together, with evaluations.
    """

    def __init__(
        self,
        summary: Summary,
        divided: DividedSteps,
        low_ns: Int64Array,
        runs: Int64Array,
        collections: Int64Array,
        metadata: Mapping[str, object],
    ) -> None:
        self.summary, self.low_ns, self.runs, self.collections = summary, low_ns, runs, collections
        memory, optimizers = metadata.get(MEMORY), metadata.get(OPTIMIZERS)
        self.memory: Mapping[str, Any] = memory if isinstance(memory, dict) else {}
        noted = optimizers if isinstance(optimizers, list) else []
        self.optimizers: list[dict[str, Any]] = [one for one in noted if isinstance(one, dict)]
        counted, self.parts = np.flatnonzero(divided.bounds.counted), list(divided.names)
        self.number, self.ns = divided.bounds.number[counted], divided.ns[counted]
        self.other_ns = dict(zip(self.parts, divided.other_ns.tolist(), strict=True))
        self.duration_ns = self.ns.sum(axis=1) - self.of_part("evaluation")
        self.whole_ns = int(self.ns.sum())
        self.trains = divided.bounds.step_by == OPTIMIZER and bool(runs[1].any())

    @property
    def rows(self) -> Sequence[ModuleTimes]:
        """The rows of the summary."""
        return self.summary.rows

    @property
    def steps(self) -> int:
        """How many steps count."""
        return len(self.number)

    @cached_property
    def usual_ns(self) -> float:
        """The median of the steps, in nanoseconds."""
        return float(np.median(self.duration_ns)) if self.steps else 0.0

    @cached_property
    def calls(self) -> AnyArray:
        """float64[rows], how often each module runs in a step."""
        return np.asarray(self.runs[0] / max(self.steps, 1))

    @cached_property
    def step_ns(self) -> Int64Array:
        """int64[rows], the median of what each module takes in a step."""
        return np.array([row.step_p50_ns for row in self.rows], np.int64)

    @cached_property
    def outer(self) -> dict[str, list[str]]:
        """The modules around each, the innermost first."""
        return outer_modules([row.fqn for row in self.rows])

    def of_part(self, part: str) -> Int64Array:
        """Return int64[steps], what a part takes in each step."""
        known = part in self.parts
        return self.ns[:, self.parts.index(part)] if known else np.zeros(self.steps, np.int64)

    def share(self, ns: float) -> float:
        """Return which share of all steps so much is, if each step has it."""
        return float(ns) * self.steps / self.whole_ns if self.whole_ns else 0.0

    def ranges_of(self, part: str) -> list[Any]:
        """Return the ranges of a part, the longest total first."""
        return [each for each in self.summary.ranges if each.part == part]
