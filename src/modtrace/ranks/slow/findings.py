"""Who is late: what the steps of a part of a run say, and of all parts the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ..._typing import Float32Array, Int64Array
from ..rank_tables import CollectiveTable, SpanTable, StepTable, take
from .arrivals import Arrivals, arrivals
from .late_senders import late_senders
from .late_steps import Bounds, LateStep, late_steps
from .module_excess import module_excess, peers_of
from .often_late import NO_RANK, often_late
from .own_time import OwnTime
from .rank_events import rank_events
from .replay.replay import Replay
from .replay.what_if import without_excess
from .runs import median_of_runs, run_starts
from .step_finding import ModuleExcess, StepFinding, Verdict

__all__ = [
    "LateRank",
    "PartOfRun",
    "RankTables",
    "SlowRun",
    "find_late",
    "join_parts",
    "lateness_matrix",
    "step_durations",
]

_MODULES_PER_STEP = 3
_VERDICTS: tuple[Verdict, ...] = ("even", "cannot tell", "late")
"""What says more comes last."""


class RankTables(Protocol):
    """Where tables come from: a folder of recordings, or a dataset."""

    def bounds(self) -> Bounds:
        """Return how far the times of each rank are off."""

    def collectives(self, first: int, last: int) -> CollectiveTable:
        """Return the collectives of the steps from `first` to before `last`, of all ranks."""

    def spans(self, ranks: Sequence[int], first: int, last: int) -> SpanTable:
        """Return the spans of some ranks in the steps from `first` to before `last`."""

    def steps(self, first: int, last: int) -> StepTable:
        """Return when the steps from `first` to before `last` ended."""


class PartOfRun(NamedTuple):
    """What some steps say.

    Attributes:
        steps: each of them.
        ranks: the ranks that were there, ascending.
        lateness: float32[ranks, steps], the most that each rank was behind the median of the others, ns; NaN where it
            has no collective.
        saved: of each rank that was late in one of them, by how much shorter they would have been without its excess.
        saved_ns: the same without that of all these.
    """

    steps: list[StepFinding]
    ranks: Int64Array
    lateness: Float32Array
    saved: Mapping[int, int]
    saved_ns: int


class LateRank(NamedTuple):
    """A rank, over the whole run.

    Attributes:
        rank: its number.
        steps: in how many steps it was the late one.
        cost_ns: what that cost, all together.
        saved_ns: by how much shorter the run would be had it been like the median.
        is_slow: whether that is more often than chance has it; else it was late now and then.
        modules: where it was late: fully qualified name, phase, in how many steps, and ns; the worst first.
    """

    rank: int
    steps: int
    cost_ns: int
    saved_ns: int
    is_slow: bool
    modules: tuple[tuple[str, str, int, int], ...]


@dataclass(frozen=True)
class SlowRun:
    """Who was late in a run.

    Attributes:
        steps: what each step says, in order.
        ranks: how many ranks there are.
        late: the ranks that were late, by what they cost.
        duration_ns: of all steps together, as far as known.
        parts: what the picture shows.
    """

    steps: Sequence[StepFinding]
    ranks: int
    late: Sequence[LateRank]
    duration_ns: int
    parts: Sequence[PartOfRun]

    @property
    def saved_ns(self) -> int:
        """By how much shorter the run would be had nobody been late."""
        return sum(part.saved_ns for part in self.parts)


def find_late(tables: RankTables, first: int, last: int) -> PartOfRun:
    """Say who was late in the steps from `first` to before `last`. The same function runs wherever the part does."""
    # From the step before on: what a rank did until its first collective begins behind its last one.
    table = tables.collectives(first - 1, last)
    own_time = OwnTime(table)
    found = arrivals(table, own_time)
    chosen = found.step >= first
    found = Arrivals._make(column[chosen] for column in found)
    duration = step_durations(tables.steps(first - 1, last))
    in_steps = late_steps(found, tables.bounds())
    modules = _modules_of(found, in_steps, tables, own_time)
    by_step = {
        late.finding.step: late.finding._replace(modules=modules.get(late.finding.step, ())) for late in in_steps
    }
    events = rank_events(table, own_time)
    replay = Replay(events)
    without: dict[int, Int64Array] = {}
    for late in in_steps:
        if late.finding.verdict == "late":
            _add(without, late.finding.rank, without_excess(events, found, late.slower.tolist()))
    for finding, shorter in late_senders(table, own_time, replay, tables, first, last):
        if finding.step not in by_step or _weight(finding) > _weight(by_step[finding.step]):
            by_step[finding.step] = finding
            if finding.verdict == "late":
                _add(without, finding.rank, shorter)
    saved = {rank: replay.saved_by_step(shorter) for rank, shorter in without.items()}
    steps = [
        finding._replace(saved_ns=saved.get(finding.rank, {}).get(step, 0), duration_ns=duration.get(step, 0))
        if finding.verdict == "late"
        else finding._replace(duration_ns=duration.get(step, 0))
        for step, finding in sorted(by_step.items())
    ]
    each = {rank: sum(own.values()) for rank, own in saved.items()}
    together = sum(each.values())
    if len(without) > 1:
        together = sum(replay.saved_by_step(np.sum(list(without.values()), axis=0)).values())
    ranks = events.rank[run_starts(events.rank)]
    return PartOfRun(steps, ranks, _lateness(found, steps, ranks), each, together)


def _add(without: dict[int, Int64Array], rank: int, shorter: Int64Array) -> None:
    without[rank] = np.maximum(without[rank], shorter) if rank in without else shorter


def _weight(finding: StepFinding) -> tuple[int, int]:
    return _VERDICTS.index(finding.verdict), finding.cost_ns


def _lateness(found: Arrivals, steps: Sequence[StepFinding], ranks: Int64Array) -> Float32Array:
    """Return the most that each rank was behind in each step; of pipelines only of who was late in it."""
    arrived = set(found.step.tolist())
    late = [step for step in steps if step.step not in arrived and step.verdict == "late"]
    index = np.searchsorted(ranks, np.append(found.rank, [step.rank for step in late]).astype(np.int64))
    numbers = np.array([step.step for step in steps], np.int64)
    of_step = np.searchsorted(numbers, np.append(found.step, [step.step for step in late]).astype(np.int64))
    behind = np.append(found.lateness, [step.lateness_ns for step in late]).astype(np.float32)
    lateness = np.full((len(ranks), len(numbers)), -np.inf, np.float32)
    np.maximum.at(lateness, (index, of_step), behind)
    lateness[np.isinf(lateness)] = np.nan
    return lateness


def _modules_of(
    found: Arrivals, steps: Sequence[LateStep], tables: RankTables, own_time: OwnTime
) -> dict[int, tuple[ModuleExcess, ...]]:
    """Return for the late steps where their ranks took more; the spans are read once for each of these ranks."""
    by_rank: dict[int, list[tuple[LateStep, list[int]]]] = {}
    for late in steps:
        if late.finding.verdict == "late":
            by_rank.setdefault(late.finding.rank, []).append((late, peers_of(found, late)))
    modules = {}
    for rank, of_rank in by_rank.items():
        numbers = [late.finding.step for late, _ in of_rank]
        ranks = sorted({rank, *(peer for _, peers in of_rank for peer in peers)})
        spans = tables.spans(ranks, min(numbers) - 1, max(numbers) + 1)
        # In the order of steps, so that each finds its spans without looking at all.
        by_step = np.argsort(spans.step, kind="stable")
        for late, peers in of_rank:
            step = late.finding.step
            first, last = np.searchsorted(spans.step, [step - 1, step + 1], sorter=by_step)
            near = take(spans, np.sort(by_step[first:last]))
            modules[step] = tuple(module_excess(found, late, peers, near, own_time)[:_MODULES_PER_STEP])
    return modules


def join_parts(parts: Iterable[PartOfRun]) -> SlowRun:
    """Return what the parts of a run say together."""
    in_order = sorted((part for part in parts if part.steps), key=lambda part: part.steps[0].step)
    steps = [step for part in in_order for step in part.steps]
    ranks = len(np.unique(np.concatenate([part.ranks for part in in_order]))) if in_order else 0
    by_rank: dict[int, list[StepFinding]] = {}
    for step in steps:
        if step.verdict == "late":
            by_rank.setdefault(step.rank, []).append(step)
    slow = often_late([step.rank if step.verdict == "late" else NO_RANK for step in steps], ranks)
    saved = {rank: sum(part.saved.get(rank, 0) for part in in_order) for rank in by_rank}
    late = [_late_rank(rank, own, saved[rank], is_slow=rank in slow) for rank, own in by_rank.items()]
    late.sort(key=lambda one: (-one.cost_ns, one.rank))
    return SlowRun(steps, ranks, late, sum(step.duration_ns for step in steps), in_order)


def lateness_matrix(run: SlowRun) -> tuple[Float32Array, list[int], list[int]]:
    """Return by how much each rank was behind the median of the others, at most, in each step.

    Returns:
        float32[ranks, steps], ns, NaN where it is not known; the ranks; the steps.
    """
    ranks = np.unique(np.concatenate([part.ranks for part in run.parts])) if run.parts else np.empty(0, np.int64)
    steps = [step.step for part in run.parts for step in part.steps]
    matrix = np.full((len(ranks), len(steps)), np.nan, np.float32)
    column = 0
    for part in run.parts:
        width = part.lateness.shape[1]
        matrix[np.searchsorted(ranks, part.ranks), column : column + width] = part.lateness
        column += width
    return matrix, ranks.tolist(), steps


def _late_rank(rank: int, own: Sequence[StepFinding], saved_ns: int, *, is_slow: bool) -> LateRank:
    modules: dict[tuple[str, str], list[int]] = {}
    for step in own:
        if step.modules:
            worst = step.modules[0]
            modules.setdefault((worst.fqn, worst.phase), []).append(min(worst.excess_ns, step.cost_ns))
    rows = sorted(((*key, len(found), sum(found)) for key, found in modules.items()), key=lambda row: -row[3])
    return LateRank(rank, len(own), sum(step.cost_ns for step in own), saved_ns, is_slow, tuple(rows))


def step_durations(table: StepTable) -> dict[int, int]:
    """Return the median duration of each step over the ranks."""
    order = np.lexsort((table.step, table.rank))
    rank, step, end = table.rank[order], table.step[order], table.end[order]
    follows = (np.diff(rank) == 0) & (np.diff(step) == 1)
    step, duration = step[1:][follows], np.diff(end)[follows]
    order = np.lexsort((duration, step))
    begins = run_starts(step[order])
    medians = median_of_runs(duration[order], begins)
    return {number: int(median) for number, median in zip(step[order][begins].tolist(), medians.tolist(), strict=True)}
