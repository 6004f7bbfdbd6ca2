"""Who is late in a pipeline: which rank came late to its messages, because its modules took more than their like.

Ranks of a pipeline do not do the same, and each waits for others in any case. So a rank's modules are compared with the
slowest of their like on other ranks, and late is who would have saved something without that, by a replay.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from ..._typing import BoolArray, Int64Array
from ...timeline import PHASES
from ..rank_tables import CALL, WAIT, CollectiveTable, SpanTable
from .late_steps import COUNTED_NOISES, MIN_NOISES, Bounds, noise_limit
from .like_modules import ModuleTimes, module_times
from .own_time import OwnTime
from .rank_events import RankEvents, message_ends, shared_keys
from .replay.replay import Replay
from .replay.what_if import shorten
from .segments import segments_of
from .step_finding import ModuleExcess, StepFinding, Verdict

__all__ = ["LateSender", "late_senders"]

_CHUNK = 256
"""Ranks whose spans are read at a time."""
_MAX_CANDIDATES = 8
"""Ranks of a part of a run that are replayed: those that took most more."""
_MODULES_PER_STEP = 3
_NEVER = np.iinfo(np.int64).min


class _Spans(Protocol):
    def spans(self, ranks: list[int], first: int, last: int) -> SpanTable: ...

    def bounds(self) -> Bounds: ...


class LateSender(NamedTuple):
    """A step with messages, and what made it late.

    Attributes:
        finding: what it says, without its duration.
        shorter: int64, by how much the own time before each event is shorter without the excess of its rank in all
            steps, ns.
    """

    finding: StepFinding
    shorter: Int64Array


class _Candidate(NamedTuple):
    rank: int
    shorter: Int64Array
    saved: dict[int, int]


def late_senders(
    table: CollectiveTable, own_time: OwnTime, replay: Replay, tables: _Spans, first: int, last: int
) -> list[LateSender]:
    """Return what each step says in which ranks sent each other messages, in order.

    Args:
        table: the collectives of all ranks.
        own_time: their own time.
        replay: of what they did.
        tables: where spans come from, and how far times are off.
        first: the first step.
        last: the one behind the last.
    """
    events, late = replay.events, _late_to_messages(table)
    steps = np.unique([step for _, step in late if first <= step < last]).tolist()
    if not steps:
        return []
    ranks = sorted({rank for rank, _ in late})
    chunks = (tables.spans(ranks[begin : begin + _CHUNK], first, last) for begin in range(0, len(ranks), _CHUNK))
    times = module_times(chunks, own_time)
    counted = times.excess > np.maximum(COUNTED_NOISES * times.noise, 0)
    typical = _typical_total(times, counted)
    totals: dict[tuple[int, int], tuple[int, int]] = {}
    for key, rows in _by_rank_and_step(times, counted).items():
        limit = max(noise_limit(times.noise[rows], int(np.sum(times.step == key[1]))), MIN_NOISES * typical)
        if (total := int(times.excess[rows].sum())) > limit:
            totals[key] = total, round(limit)
    worst: dict[int, int] = {}
    for (rank, _), (total, _) in totals.items():
        worst[rank] = worst.get(rank, 0) + total
    candidates = []
    for rank in sorted(worst, key=lambda one: -worst[one])[:_MAX_CANDIDATES]:
        own_steps = [step for one, step in totals if one == rank]
        rows = np.flatnonzero(counted & (times.rank == rank) & np.isin(times.step, own_steps))
        shorter = _shorter(events, times, rows, tables.spans([rank], first, last), own_time)
        candidates.append(_Candidate(rank, shorter, replay.saved_by_step(shorter)))
    bounds = tables.bounds()
    return [_late_sender(step, candidates, totals, late, times, counted, bounds, events) for step in steps]


def _late_sender(
    step: int,
    candidates: list[_Candidate],
    totals: dict[tuple[int, int], tuple[int, int]],
    late: dict[tuple[int, int], tuple[int, int]],
    times: ModuleTimes,
    counted: BoolArray,
    bounds: Bounds,
    events: RankEvents,
) -> LateSender:
    # Late is whom another one waited for, and without whose excess the step would have been shorter.
    here = [
        one
        for one in candidates
        if (one.rank, step) in totals
        and late.get((one.rank, step), (0, 0))[0] > 0
        and one.saved.get(step, 0) > totals[one.rank, step][1]
    ]
    worst = max(here, key=lambda one: one.saved[step], default=None)
    if worst is None:
        rank = min(rank for rank, own in late if own == step)
        return LateSender(StepFinding(step, "even", rank, 0, 0, 0, 0, 0), np.zeros(len(events.time), np.int64))
    total, limit = totals[worst.rank, step]
    lateness, other = late[worst.rank, step]
    bound = bounds.largest(worst.rank, np.array([other]))
    verdict: Verdict = "late" if lateness > bound else "cannot tell"
    rows = np.flatnonzero(counted & (times.rank == worst.rank) & (times.step == step))
    rows = rows[np.argsort(-times.excess[rows], kind="stable")][:_MODULES_PER_STEP]
    modules = tuple(
        ModuleExcess(times.fqns[times.fqn[row]], PHASES[times.phase[row]], int(times.excess[row]), int(times.own[row]))
        for row in rows
    )
    saved = worst.saved[step]
    finding = StepFinding(step, verdict, worst.rank, total, saved, lateness, bound, limit)
    return LateSender(finding._replace(modules=modules if verdict == "late" else ()), worst.shorter)


def _typical_total(times: ModuleTimes, counted: BoolArray) -> float:
    """Return what all modules of a rank together take more in a step as a rule, of the median rank, ns.

    Of many modules some always take long; that is what ranks vary by.
    """
    ranks, rank = np.unique(times.rank, return_inverse=True)
    steps, step = np.unique(times.step, return_inverse=True)
    totals = np.bincount(rank * len(steps) + step, np.where(counted, times.excess, 0), len(ranks) * len(steps))
    of_ranks = np.sort(np.median(totals.reshape(len(ranks), len(steps)), axis=1)) if len(steps) else np.zeros(1)
    return float(of_ranks[(len(of_ranks) - 1) // 2])


def _by_rank_and_step(times: ModuleTimes, counted: BoolArray) -> dict[tuple[int, int], Int64Array]:
    rows = np.flatnonzero(counted)
    order = rows[np.lexsort((times.step[rows], times.rank[rows]))]
    keys, begins = np.unique(np.stack([times.rank[order], times.step[order]]), axis=1, return_index=True)
    parts = np.split(order, begins[1:]) if len(begins) else []
    return {(int(rank), int(step)): part for (rank, step), part in zip(keys.T, parts, strict=True)}


def _shorter(
    events: RankEvents, times: ModuleTimes, rows: Int64Array, spans: SpanTable, own_time: OwnTime
) -> Int64Array:
    """Return by how much the own time before each event is shorter without the excess of some modules of a rank."""
    rank = int(times.rank[rows[0]])
    of_rank = own_time.of_rank(rank)
    segments = segments_of(spans, of_rank, rank)
    own = of_rank.until(segments.end) - of_rank.until(segments.begin)
    inside = slice(*np.searchsorted(events.rank, [rank, rank + 1]).tolist())
    event = np.searchsorted(events.place[inside], segments.end)
    count = inside.stop - inside.start
    step, fqn = spans.step[segments.owner], np.array([name.fqn for name in spans.names], object)
    name, phase = np.divmod(segments.key, len(PHASES))
    shorter = np.zeros(len(events.time), np.int64)
    for row in rows.tolist():
        chosen = (step == times.step[row]) & (phase == times.phase[row]) & (event < count)
        chosen[chosen] = fqn[name[chosen]] == times.fqns[times.fqn[row]]
        weights = np.bincount(event[chosen], own[chosen].astype(np.float64), count).astype(np.float64)
        shorten(shorter, events, inside, weights, int(times.excess[row]))
    return shorter


def _late_to_messages(table: CollectiveTable) -> dict[tuple[int, int], tuple[int, int]]:
    """Return for each rank and step with messages by how long the other end of one waited for it at most, and which."""
    sender, receiver = message_ends(table)
    is_message = sender >= 0
    if not np.any(is_message):
        return {}
    key = shared_keys(table)
    is_receiver = (table.rank == receiver).astype(np.int64)
    began = np.full((int(key.max()) + 1, 2), np.iinfo(np.int64).max)
    waits, calls = np.flatnonzero(is_message & (table.kind == WAIT)), np.flatnonzero(is_message & (table.kind == CALL))
    np.minimum.at(began, (key[waits], is_receiver[waits]), table.start[waits])
    other_began = began[key[calls], 1 - is_receiver[calls]]
    known = other_began < np.iinfo(np.int64).max
    lateness = np.where(known, table.start[calls] - np.where(known, other_began, 0), _NEVER)
    other = np.where(is_receiver == 1, sender, receiver)[calls]
    order = np.lexsort((lateness, table.step[calls], table.rank[calls]))
    # The last of each rank and step is the largest.
    return {
        (int(table.rank[calls[row]]), int(table.step[calls[row]])): (int(lateness[row]), int(other[row]))
        for row in order.tolist()
    }
