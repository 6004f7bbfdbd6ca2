"""Late ranks of a pipeline: simulated ranks send each other their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from modtrace._arrays import Int32Array
from modtrace.ranks.rank_tables import (
    Bounds,
    CollectiveTable,
    RangeTable,
    RankTables,
    SpanTable,
    StepTable,
    Table,
    join_tables,
    take,
)
from modtrace.ranks.slow.findings import find_late
from modtrace.ranks.slow.slow_run import join_parts
from modtrace.timeline import PHASES, Name
from tests.support.simulated_ranks import BEGIN, Job, Op, run, table_of

RANKS, STEPS, MICRO_BATCHES = 3, 8, 2
FORWARD_NS, BACKWARD_NS, BOUND_NS = 1_000, 2_000, 70


class Pipeline(RankTables):
    """GPipe on three ranks of one layer each; some take longer. Is where tables come from as well.

    Args:
        extra: of (step, rank, phase), by how much longer a micro-batch takes; of each module, the first ones' where
            there are fewer.
        one_clock: whether all ranks read the same clock.
        modules: how many modules a layer consists of, which take a part of its time each.
        uncounted: ranks whose run is one step.
    """

    def __init__(
        self,
        extra: dict[tuple[int, int, str], Sequence[int]],
        *,
        one_clock: bool = True,
        modules: int = 1,
        uncounted: Sequence[int] = (),
    ) -> None:
        self._modules = modules
        self.job = Job([[] for _ in range(RANKS)], [], [], [])
        self.computed: list[list[tuple[int, int, str]]] = [[] for _ in range(RANKS)]
        self._extra, self._one_clock, self._uncounted = extra, one_clock, uncounted
        for step in range(STEPS):
            keys = {
                (rank, phase, batch): self._message(step, [rank, rank + 1] if phase == "forward" else [rank, rank - 1])
                for phase in ("forward", "backward")
                for rank in range(RANKS)
                for batch in range(MICRO_BATCHES)
            }
            for rank in range(RANKS):
                for phase, before in (("forward", rank - 1), ("backward", rank + 1)):
                    for batch in range(MICRO_BATCHES):
                        if 0 <= before < RANKS:
                            key = keys[before, phase, batch]
                            self.job.programs[rank] += [Op(1, "call", key), Op(1, "wait", key)]
                        self._compute(step, rank, phase, keys[rank, phase, batch])
        table = table_of(self.job, with_done=False)
        self.table = table._replace(step=self._counted(table.rank, table.step))

    def _message(self, step: int, members: list[int]) -> int:
        inside = [rank for rank in members if 0 <= rank < RANKS]
        self.job.members.append(inside)
        self.job.transfer.append([1] * RANKS)
        assert self.job.steps is not None
        self.job.steps.append(step)
        return len(self.job.members) - 1

    def _compute(self, step: int, rank: int, phase: str, key: int) -> None:
        duration = FORWARD_NS if phase == "forward" else BACKWARD_NS
        duration += sum(self._extra.get((step, rank, phase), ()))
        self.job.programs[rank].append(Op(duration, "call", key))
        self.computed[rank].append((step, len(self.job.programs[rank]) - 1, phase))

    def _counted(self, rank: Int32Array, step: Int32Array) -> Int32Array:
        return np.where(np.isin(rank, self._uncounted), 0, step).astype(np.int32)

    def bounds(self) -> Bounds:
        return Bounds([(rank, BOUND_NS, "a" if self._one_clock else "abc"[rank]) for rank in range(RANKS)])

    def read(self, kind: type[Table], first: int, last: int, ranks: Sequence[int] | None = None) -> Table:
        if kind is CollectiveTable:
            return take(self.table, (self.table.step >= first) & (self.table.step < last))
        number, time = np.empty(0, np.int32), np.empty(0, np.int64)
        if kind is RangeTable:
            return kind([], number, number, number, number.astype(np.int8), time, time, number.astype(np.bool_))
        if kind is StepTable:
            return kind(number, number, time)
        spans: Any = self._spans(ranks or range(RANKS), first, last)
        return cast("Table", spans)

    def _spans(self, ranks: Sequence[int], first: int, last: int) -> SpanTable:
        times = run(self.job)
        parts = []
        for rank in ranks:
            rows, duration, start = [], [], []
            for step, op, phase_name in self.computed[rank]:
                own = list(self._extra.get((step, rank, phase_name), ()))
                usual = (FORWARD_NS if phase_name == "forward" else BACKWARD_NS) // self._modules
                begin = times[rank][op] - self.job.programs[rank][op].own
                for module in range(self._modules if first <= step < last else 0):
                    rows.append((step, module, phase_name))
                    duration.append(usual + (own[module] if module < len(own) else 0))
                    start.append(begin)
                    begin += duration[-1]
            phase = np.array([PHASES.index(row[2]) for row in rows], np.int8)
            step_of, zeros = np.array([row[0] for row in rows], np.int32), np.zeros(len(rows), np.int32)
            names = [
                Name("", f"Net.layers.{rank}" + f".part_{m}" * (self._modules > 1), "Layer")
                for m in range(self._modules)
            ]
            parts.append(
                SpanTable(
                    names,
                    zeros + rank,
                    self._counted(zeros + rank, step_of),
                    phase.astype(np.int32),
                    phase,
                    np.array([row[1] for row in rows], np.int32),
                    np.arange(len(rows)),
                    np.array(start, np.int64),
                    np.array(duration, np.int64),
                    np.array(duration, np.int64),
                    zeros,
                    *(np.full(len(rows), -1) for _ in range(3)),
                )
            )
        return join_tables(parts)

    def ends(self) -> list[int]:
        """Return the end of each step: the end of the last operation of any rank in it."""
        assert self.job.steps is not None
        ends = [BEGIN] * STEPS
        for program, times in zip(self.job.programs, run(self.job), strict=True):
            for op, time in zip(program, times, strict=True):
                ends[self.job.steps[op.key]] = max(ends[self.job.steps[op.key]], time)
        return ends


def test_a_balanced_pipeline_accuses_nobody() -> None:
    slow_run = join_parts([find_late(Pipeline({}), 0, STEPS)])

    assert [step.verdict for step in slow_run.steps] == ["even"] * STEPS
    assert (slow_run.ranks, slow_run.late, slow_run.saved_ns) == (RANKS, [], 0)


def test_the_stage_that_made_others_wait_is_named_with_its_module_and_what_it_cost() -> None:
    slow = Pipeline({(step, 1, "backward"): [300] for step in range(STEPS)})

    slow_run = join_parts([find_late(slow, 0, STEPS)])

    longer = [late - usual for late, usual in zip(slow.ends(), Pipeline({}).ends(), strict=True)]
    for step, saved in zip(slow_run.steps, np.diff(longer, prepend=0).tolist(), strict=True):
        assert (step.verdict, step.rank, step.cost_ns, step.saved_ns) == ("late", 1, MICRO_BATCHES * 300, saved)
        assert [module[:3] for module in step.modules] == [("Net.layers.1", "backward", MICRO_BATCHES * 300)]
    assert [(one.rank, one.saved_ns, one.is_slow) for one in slow_run.late] == [(1, longer[-1], True)]
    assert slow_run.saved_ns == longer[-1] > 0


def test_in_the_steps_in_which_a_stage_is_slow_it_is_named_and_in_no_other() -> None:
    slow = Pipeline({(2, 0, "forward"): [400], (4, 2, "forward"): [900]})

    slow_run = find_late(slow, 0, STEPS)

    named = [
        (step.step, step.rank, step.modules[0].fqn, step.cost_ns) for step in slow_run.steps if step.verdict == "late"
    ]
    assert named == [(2, 0, "Net.layers.0", 800), (4, 2, "Net.layers.2", 1_800)]


def test_a_stage_that_counts_no_steps_is_not_said_to_be_late_in_one() -> None:
    """Variation between its steps is unknown: all of its run is one step."""
    slow = Pipeline({(2, 0, "forward"): [400], (4, 2, "forward"): [900]}, uncounted=(2,))

    slow_run = find_late(slow, 0, STEPS)

    assert [(step.step, step.rank) for step in slow_run.steps if step.verdict == "late"] == [(2, 0)]


def test_a_wait_that_is_shorter_than_clocks_are_off_accuses_nobody() -> None:
    slow_run = find_late(Pipeline({(3, 1, "forward"): [30]}, one_clock=False), 0, STEPS)

    assert {step.verdict for step in slow_run.steps} <= {"even", "cannot tell", "late"}
    told = slow_run.steps[3]
    assert (told.verdict == "late") == (told.lateness_ns > 2 * BOUND_NS)


def test_a_variation_that_all_ranks_share_makes_no_rank_late() -> None:
    """Some of 20 modules take long in each step, as on a busy machine."""
    random = np.random.default_rng(0)
    extra = {
        (step, rank, phase): np.minimum(random.pareto(1.5, 20) * 2, 200).astype(int).tolist()
        for step in range(STEPS)
        for rank in range(RANKS)
        for phase in ("forward", "backward")
    }

    even = find_late(Pipeline(extra, modules=20), 0, STEPS)
    extra[3, 1, "forward"][7] += 3_000
    late = find_late(Pipeline(extra, modules=20), 0, STEPS)

    assert [step.step for step in even.steps if step.verdict == "late"] == []
    assert [(s.step, s.rank, s.modules[0].fqn) for s in late.steps if s.verdict == "late"] == [
        (3, 1, "Net.layers.1.part_7")
    ]
