"""Who came late in a step: own times without waits, when each rank arrived, and which modules took longer."""

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import numpy as np

from ..._arrays import (
    INT64_MAX,
    BoolArray,
    Float64Array,
    Int64Array,
    count_in_run,
    expand_ranges,
    group_lengths,
    group_starts,
    median_of_others,
    medians_within,
    split_by,
)
from ...live.triggers import format_ns
from ...ring.event_text import RangeName
from ...timeline import PHASES
from ...timeline.nesting import TimeIntervals, find_parents, union_of
from ..rank_tables import CALL, FOR_ITSELF, Bounds, CollectiveTable, RangeTable, SpanTable, take
from ..sync_points import call_keys, synchronizing


class OwnTime:
    """Times of many ranks on one axis, and how much of that time the ranks did not wait.

    Args:
        table: the collectives of all ranks. A rank waits in waits, and in calls that return when they are complete.
    """

    def __init__(self, table: CollectiveTable) -> None:
        self.ranks = np.unique(table.rank).astype(np.int64)  # int64, the ranks, ascending
        first, last = (int(table.start.min()), int(table.end.max())) if len(table.start) else (0, 0)
        # Moments before the first one, as the begin of a span, are on the axis too.
        self._length = 4 * (last - first + 1)
        self._zero = first - (last - first + 1)
        blocks = (table.kind != CALL) | (table.done >= 0) & (table.done <= table.end)
        start = self.place(table.rank[blocks], table.start[blocks])
        self._waits = union_of(start, self.place(table.rank[blocks], table.end[blocks]))

    def place(self, rank: Int64Array, time: Int64Array) -> Int64Array:
        """Return where times of ranks are on the axis; the order is by rank, then by time."""
        ranks = self.ranks
        has_gaps = len(ranks) and ranks[-1] - ranks[0] >= len(ranks)
        index = np.searchsorted(ranks, rank) if has_gaps else rank - ranks[:1]
        position: Int64Array = index * self._length + (time - self._zero)
        return position

    def of_rank(self, rank: int) -> "OwnTime":
        """Return the same for one rank alone, which is quicker to ask."""
        index = int(np.searchsorted(self.ranks, rank))
        first, last = np.searchsorted(self._waits.start, [index * self._length, (index + 1) * self._length])
        alone = copy.copy(self)
        alone._waits = TimeIntervals(self._waits.start[first:last], self._waits.end[first:last])
        return alone

    def without(self, parts: TimeIntervals) -> "OwnTime":
        """Return the same without some intervals of the axis."""
        less = copy.copy(self)
        less._waits = union_of(*map(np.append, self._waits, parts))
        return less

    def until(self, place: Int64Array) -> Int64Array:
        """Return for places on the axis the own time until then, ns; only differences within one rank mean anything."""
        return place - self._waits.time_until(place)


class Segments(NamedTuple):
    """Parts of spans with nothing inside them; arrays of equal length."""

    owner: Int64Array  # the span, as an index of its table
    key: Int64Array  # name × phases + phase
    begin: Int64Array  # on the axis of `OwnTime`
    end: Int64Array
    own_ns: Int64Array  # own time in between, ns


def segments_of(spans: SpanTable, own_time: OwnTime, rank: int) -> Segments:
    """Return the segments of a rank."""
    count = len(spans.start)
    if not count:
        return Segments(*np.empty((5, 0), np.int64))
    parent = find_parents(spans.track, spans.depth)
    track = np.concatenate([spans.track, spans.track])
    time = np.concatenate([spans.start, spans.start + spans.duration])
    is_end = np.repeat([False, True], count)
    depth = np.concatenate([spans.depth, spans.depth])
    # At one moment ends come before begins, the inner ones first, and of begins the outer ones.
    order = np.lexsort((np.where(is_end, -depth, depth), ~is_end, time, track))
    owner = np.concatenate([np.arange(count), parent])[order]
    begin, track = time[order], track[order]
    end = np.append(begin[1:], 0)
    goes_on = np.append(track[1:] == track[:-1], False) & (owner >= 0) & (end > begin)
    owner, begin, end = owner[goes_on], begin[goes_on], end[goes_on]
    ranks = np.full(len(owner), rank, np.int64)
    key = spans.name[owner].astype(np.int64) * len(PHASES) + spans.phase[owner]
    begin, end, of_rank = own_time.place(ranks, begin), own_time.place(ranks, end), own_time.of_rank(rank)
    return Segments(owner, key, begin, end, of_rank.until(end) - of_rank.until(begin))


OUTSIDE = ""
"""The name of what ran in no module and in no range."""
IN_RANGE = "range"
"""The phase of what ran in no module and in a range: loading a batch, the optimizer."""

ModulePhase = tuple[str, str]
"""A module and its phase, or a range and `IN_RANGE`."""

MODULES_PER_STEP = 3
"""How many modules a finding names."""

Verdict = Literal["late", "even", "cannot tell"]


def place_text(fqn: str, phase: str) -> str:
    """Return the name in a sentence of a module, of a range, or of the time in neither."""
    if phase == IN_RANGE:
        return fqn
    return f"{fqn} {phase}" if fqn != OUTSIDE else "(outside modules)"


class ModuleExcess(NamedTuple):
    """A module that took a rank more time than others."""

    fqn: str  # its fully qualified name; what a range is ("data loading"); or `OUTSIDE`
    phase: str  # one of `timeline.PHASES`; `IN_RANGE`; empty outside modules and ranges
    excess_ns: int  # its self time in the late arrivals of a step, less the median of the other ranks', ns
    own_ns: int  # that self time


class StepFinding(NamedTuple):
    """One step; times are ns.

    Attributes:
        step: its number.
        verdict: "late", one rank kept the others waiting; "even", none did by more than they all vary; "cannot tell",
            one did, but by less than the clocks of two ranks may differ.
        rank: that rank.
        cost_ns: how much more own time than the median of the others it took before collectives it came to last, at
            most its lateness there.
        saved_ns: by how much earlier the others would have gone on had it been like the median.
        lateness_ns: the most by which it came after the median of the others in this step.
        bound_ns: how far that is off at most.
        noise_ns: the most of `cost_ns` that chance explains.
        modules: where it took more than the others, the worst first; only if the verdict is "late".
        duration_ns: of the step, the median of all ranks; 0 if it is not known.
    """

    step: int
    verdict: Verdict
    rank: int
    cost_ns: int = 0
    saved_ns: int = 0
    lateness_ns: int = 0
    bound_ns: int = 0
    noise_ns: int = 0
    modules: tuple[ModuleExcess, ...] = ()
    duration_ns: int = 0

    @property
    def sentence(self) -> str:
        """Who came late, by how much, and where it took more."""
        return self.sentence_of(f"rank {self.rank}")

    def sentence_of(self, name: str) -> str:
        """Return the sentence with what the rank is called, as `rollout 2`."""
        where = f", in {place_text(*self.modules[0][:2])}" if self.modules else ""
        return f"{name} came late in step {self.step} by {format_ns(self.cost_ns)}{where}"


class Arrivals(NamedTuple):
    """Calls of synchronizing collectives by at least two ranks, by collective and then by time; one entry per call."""

    collective: Int64Array  # which collective it is, from 0, by group and counter
    rank: Int64Array
    step: Int64Array  # the same for all calls of one collective
    position: Int64Array  # which call of its rank in its step it is, from 0, the same for all calls of one collective
    place: Int64Array  # when it was called, on the axis of `OwnTime`
    place_before: Int64Array  # of the same rank's call before; -1 if there is none
    own_ns: Int64Array  # own time between the two, ns; -1 if there is none before
    excess: Int64Array  # by how much `own_ns` is more than the median of the other ranks', ns; 0 if it is not known
    lateness: Int64Array  # by how much the call was later than the median of the other ranks' calls, ns
    is_last: BoolArray  # whether it is the last call of its collective


def find_arrivals(table: CollectiveTable, own_time: OwnTime) -> Arrivals:
    """Return the arrivals of all ranks."""
    synchronizes = synchronizing(table.operators)[table.operator]
    rows = np.flatnonzero((table.kind == CALL) & (table.counter >= 0) & synchronizes)
    place = own_time.place(table.rank[rows].astype(np.int64), table.start[rows])
    order = np.argsort(place, kind="stable")
    rows, place = rows[order], place[order]
    rank, step = table.rank[rows].astype(np.int64), table.step[rows].astype(np.int64)
    before, own_ns = np.full(len(rows), -1), np.full(len(rows), -1)
    before[1:], own_ns[1:] = place[:-1], np.diff(own_time.until(place))
    first_of_rank = group_starts(rank)
    before[first_of_rank] = own_ns[first_of_rank] = -1
    position = count_in_run(rank, step)
    key = call_keys(table.group[rows], table.counter[rows])
    _, collective, count = np.unique(key, return_inverse=True, return_counts=True)
    time = table.start[rows]
    chosen = np.flatnonzero(count[collective] > 1)
    chosen = chosen[np.lexsort((time[chosen], collective[chosen]))]
    rank, step, position, place, before, own_ns, collective, time = (
        values[chosen] for values in (rank, step, position, place, before, own_ns, collective, time)
    )
    begins = group_starts(collective)
    size = group_lengths(begins, len(collective))
    of_row = np.repeat(np.arange(len(begins)), size)
    last = begins + size - 1
    is_last = np.zeros(len(time), np.bool_)
    is_last[last] = True
    step, position = (np.minimum.reduceat(values, begins)[of_row] for values in (step, position))
    by_own = np.lexsort((own_ns, of_row))
    excess = np.zeros(len(own_ns), np.int64)
    excess[by_own] = np.rint(own_ns[by_own] - median_of_others(own_ns[by_own], begins)).astype(np.int64)
    # If one rank has no call before, nothing says what it did.
    excess[np.minimum.reduceat(own_ns, begins)[of_row] < 0] = 0
    # From the first call of all on: a double does not hold Unix nanoseconds.
    since = time - time.min(initial=INT64_MAX)
    lateness = np.rint(since - median_of_others(since, begins)).astype(np.int64)
    return Arrivals(of_row, rank, step, position, place, before, own_ns, excess, lateness, is_last)


MIN_NOISES = 6.0
"""A step may be late if its cost is more than this many times the noise."""
COUNTED_NOISES = 3.0
"""An excess counts if it is more than this many times the noise."""
_MIN_STEPS = 4
"""The number of steps from which on a steady excess of a rank can be told from variation."""
_STEADY_STEPS = 8
"""The number of steps from which on it is judged whether an excess is steady."""
_STEADY_SHARE = 0.75
"""An excess that counts in this share of the steps is steady, and not by chance."""
_STEADY_OWN = 0.05
"""The least steady excess, as a share of a rank's own time: one on a slower core is always a little later."""
_ALWAYS_OWN = 0.1
"""An excess of this share of a rank's own time is steady for any noise, if `_STEADY_SHARE` of the steps have it.

Of two ranks, one is later by chance in so many steps once in 50 times, and by a tenth far more rarely.
"""
_ALWAYS_STEPS = 16
"""The number of steps from which on `_ALWAYS_OWN` is asked for."""
MAD_TO_SIGMA = 1.4826
RANK_BITS = 31
"""The bits of an integer that hold a rank, below a step or another number."""


class LateStep(NamedTuple):
    """A step with the rank that made it late, and why."""

    finding: StepFinding  # what it says, without modules, duration, and what it saved
    arrivals: Int64Array  # those of its rank that cost something, as indices of `Arrivals`
    slower: Int64Array  # those before which its rank took more than all vary by, whether somebody waited or not


def late_steps(arrivals: Arrivals, bounds: Bounds) -> list[LateStep]:
    """Return the finding of each step, in order."""
    noise = _noise(arrivals)
    is_steady, least, usual_own = _steady_excess(arrivals, noise)
    # Only the last one keeps others waiting, and by no more than it is late at most.
    latest = arrivals.lateness + bounds.of_groups(arrivals.rank, arrivals.collective)
    cost = np.where(arrivals.is_last, np.clip(arrivals.excess, 0, np.maximum(latest, 0)), 0)
    # Ordinary variation belongs to no rank, and would add up over many collectives.
    cost = np.where(cost > least, cost, 0)
    in_order = []
    for rows in split_by(arrivals.step):
        lasts = rows[arrivals.is_last[rows]]
        ranks, index = np.unique(arrivals.rank[lasts], return_inverse=True)
        rank = int(ranks[np.argmax(np.bincount(index, cost[lasts], len(ranks)))])
        last_calls = lasts[arrivals.rank[lasts] == rank]
        costly = last_calls[cost[last_calls] > 0]
        counted = costly if len(costly) else last_calls
        limit = float(noise_limit(np.sum(noise[counted] ** 2, keepdims=True), np.array([len(rows)]))[0])
        total = int(cost[last_calls].sum())
        steady = costly[is_steady[costly]]
        if cost[steady].sum() > _STEADY_OWN * usual_own:
            limit = min(limit, float(np.sqrt(np.sum(least[steady] ** 2))))
        worst = int(counted[np.argmax(arrivals.lateness[counted])])
        lateness = int(arrivals.lateness[worst])
        # Any rank may be last but one or near the median, so the largest bound of all that came counts.
        came = slice(*np.searchsorted(arrivals.collective, arrivals.collective[worst] + np.arange(2)))
        bound = bounds.largest_bound(rank, arrivals.rank[came])
        verdict: Verdict = "even" if total <= limit else "cannot tell" if lateness <= bound else "late"
        step = int(arrivals.step[rows[0]])
        finding = StepFinding(step, verdict, rank, total, lateness_ns=lateness, bound_ns=bound, noise_ns=round(limit))
        slower = rows[(arrivals.rank[rows] == rank) & (arrivals.excess[rows] > least[rows])]
        in_order.append(LateStep(finding, costly, slower))
    return in_order


def _noise(arrivals: Arrivals) -> Float64Array:
    """Return for each arrival how much excesses at its place in the step vary from step to step, as a deviation, ns.

    A rank that is slower in each step does not vary: what it always has more is taken out first. If one of two
    ranks varies, the excess of both does. So the noise is at most what the own time of
    the median rank lets expect.
    """
    place, rank = arrivals.position, arrivals.rank
    of_place = medians_within(_from_usual(arrivals, arrivals.excess), place)
    of_rank = medians_within(_from_usual(arrivals, arrivals.own_ns), rank, place)
    # Once for each rank, in the order of what varies.
    order = np.lexsort((rank, of_rank, place))
    order = order[group_starts(place[order], of_rank[order], rank[order])]
    first = group_starts(place[order])
    middle = first + (group_lengths(first, len(order)) - 1) // 2
    of_median_rank = of_rank[order][middle][np.searchsorted(place[order][first], place)]
    noise: Float64Array = MAD_TO_SIGMA * np.minimum(of_place, math.sqrt(2) * of_median_rank)
    return noise


def _steady_excess(arrivals: Arrivals, noise: Float64Array) -> tuple[BoolArray, Float64Array, float]:
    """Return which arrivals are of a rank that takes more at that place in nearly all steps, and a rank's own time.

    That is the median over ranks and steps, ns; between them from which excess on each arrival counts, ns.
    """
    is_known = arrivals.own_ns >= 0
    place = arrivals.position << RANK_BITS | arrivals.rank
    _, of_row = np.unique(place, return_inverse=True)
    _, of_step = np.unique(arrivals.step << RANK_BITS | arrivals.rank, return_inverse=True)
    own_ns = np.bincount(of_step[is_known], arrivals.own_ns[is_known])
    usual_own = float(np.median(own_ns)) if len(own_ns) else 0.0
    steps, least = np.bincount(of_row, is_known), COUNTED_NOISES * noise

    def takes_more(ns: Float64Array | float, in_steps: int) -> BoolArray:
        counts = np.bincount(of_row, is_known & (arrivals.excess > ns))
        return ((steps >= in_steps) & (counts >= _STEADY_SHARE * steps))[of_row]

    is_steady = takes_more(least, _STEADY_STEPS)
    always = ~is_steady & takes_more(_ALWAYS_OWN * usual_own, _ALWAYS_STEPS)
    return is_steady | always, np.where(always, _ALWAYS_OWN * usual_own, least), usual_own


def _from_usual(arrivals: Arrivals, values: Int64Array) -> Float64Array:
    """Return how far each value is from what its rank has at its place of the step as a rule."""
    place, rank = arrivals.position, arrivals.rank
    _, of_row, steps = np.unique(place << RANK_BITS | rank, return_inverse=True, return_counts=True)
    # Few steps do not show what is always so: then ranks are compared alone.
    return np.abs(values - np.where(steps[of_row] < _MIN_STEPS, 0, medians_within(values, rank, place)))


def noise_limit(squares: Float64Array, count: Int64Array) -> Float64Array:
    """Return the limit that sums of excesses must exceed if the largest of `count` is looked at."""
    limit: Float64Array = np.maximum(MIN_NOISES, 1 + np.sqrt(2 * np.log(np.maximum(count, 2)))) * np.sqrt(squares)
    return limit


_MAX_PEERS = 32
"""Ranks that one is compared with: more do not change the median."""


def peers_of(arrivals: Arrivals, late: LateStep) -> list[int]:
    """Return the ranks that a late one is compared with: of those that came to the same collectives, evenly chosen."""
    ranks = np.unique(arrivals.rank[_rows_of(arrivals, late)])
    ranks = ranks[ranks != late.finding.rank]
    if len(ranks) > _MAX_PEERS:
        # Those beside it first: they are in the same part of a dataset.
        index = int(np.searchsorted(ranks, late.finding.rank))
        first = min(max(index - _MAX_PEERS // 2, 0), len(ranks) - _MAX_PEERS)
        ranks = ranks[first : first + _MAX_PEERS]
    peers: list[int] = ranks.tolist()
    return peers


def module_excess(
    arrivals: Arrivals, late: LateStep, peers: Sequence[int], *, spans: SpanTable, ranges: RangeTable, own_time: OwnTime
) -> list[ModuleExcess]:
    """Return the modules, and the ranges outside of them, in which the late rank of a step took more than others.

    The worst comes first. The spans are those of the late rank and of its peers, from the step before to this one.
    """
    keys = [(name.fqn, phase) for name in spans.names for phase in range(len(PHASES))]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    number_of = np.array([numbers[key] for key in keys], np.int64)
    outside = len(numbers) + len(ranges.places)
    times = np.zeros((1 + len(peers), outside + 1))
    rows = _rows_of(arrivals, late)
    for row, rank in enumerate([late.finding.rank, *peers]):
        own_rows = rows[(arrivals.rank[rows] == rank) & (arrivals.place_before[rows] >= 0)]
        begins, stops = arrivals.place_before[own_rows], arrivals.place[own_rows]
        layers = list(_layers(rank, spans, ranges, own_time, number_of))
        for begin, end in zip(begins.tolist(), stops.tolist(), strict=True):
            for key, inside, time in layers:
                since, until = np.clip(inside.start, begin, end), np.clip(inside.end, begin, end)
                times[row] += np.bincount(key, time.until(until) - time.until(since), outside + 1)
        times[row, outside] = max(arrivals.own_ns[own_rows].sum() - times[row, :outside].sum(), 0)
    usual = np.median(times[1:], axis=0) if peers else np.zeros(outside + 1)
    more = times[0] - usual
    names = [
        *((fqn, PHASES[phase]) for fqn, phase in numbers),
        *((place, IN_RANGE) for place in ranges.places),
        (OUTSIDE, ""),
    ]
    order = np.argsort(-more, kind="stable")
    return [
        ModuleExcess(fqn, phase, round(more[number]), round(times[0, number]))
        for number in order.tolist()
        for fqn, phase in [names[number]]
        if more[number] > 0
    ]


def _layers(
    rank: int, spans: SpanTable, ranges: RangeTable, own_time: OwnTime, number_of: Int64Array
) -> Iterator[tuple[Int64Array, TimeIntervals, OwnTime]]:
    """Yield the modules and ranges that a rank was in: their numbers, when it was there, and the time that counts.

    Each range of `FOR_ITSELF` comes before all others, whose time is then without it. `number_of` has the number of
    each module in each phase; those of ranges follow.
    """
    rest, first_range = own_time.of_rank(rank), int(number_of.max(initial=-1)) + 1
    segments = segments_of(take(spans, spans.rank == rank), rest, rank)
    in_range = take(ranges, ranges.rank == rank)
    place = np.full(len(in_range.start), rank, np.int64)
    starts, ends = own_time.place(place, in_range.start), own_time.place(place, in_range.end)
    others = np.ones(len(place), np.bool_)
    for category in FOR_ITSELF:
        if (text := RangeName("", category).place) in ranges.places:
            number = ranges.places.index(text)
            chosen = in_range.place == number
            parts, others = union_of(starts[chosen], ends[chosen]), others & ~chosen
            yield np.full_like(parts.start, first_range + number), parts, rest
            rest = rest.without(parts)
    key: Int64Array = np.append(number_of[segments.key], first_range + in_range.place[others])
    yield key, TimeIntervals(np.append(segments.begin, starts[others]), np.append(segments.end, ends[others])), rest


def _rows_of(arrivals: Arrivals, late: LateStep) -> Int64Array:
    """Return the arrivals of all ranks at the collectives that a late rank came to last."""
    wanted = np.unique(arrivals.collective[late.arrivals])
    begins, ends = np.searchsorted(arrivals.collective, wanted), np.searchsorted(arrivals.collective, wanted + 1)
    return expand_ranges(begins, ends)[0]


NO_RANK = -1
"""The rank of a step in which none was late."""
_SIGNIFICANT = 1e-3
"""A rank is slow if it were late so often by chance with a smaller probability."""
_LATE_BY_CHANCE = 0.02
"""The share of steps in which a rank may be late by chance if most never are; less if there are many ranks."""


def often_late(late: Sequence[int], ranks: int) -> set[int]:
    """Return the ranks that are late more often than chance has it, by which was late in each step, or `NO_RANK`.

    Chance has a rank late as often as the median rank is. What makes ranks late by chance lasts for a while, as when
    something else has their processors, so steps in a row are not as many chances: they count as parts of the runs that
    the ranks have which are late by chance.
    """
    counts = Counter(rank for rank in late if rank != NO_RANK)
    usual = sorted([*counts.values(), *[0] * (ranks - len(counts))])[(ranks - 1) // 2] if ranks else 0

    def chance(count: int, length: float) -> float:
        """Return how probable it is that a rank is late `count` times by chance, of runs of `length` steps."""
        runs, of_others = int(count / length), int(usual * (ranks - 1) / length)
        # How often the others were late is a count too: few ranks do not show the rate well.
        as_others = at_least(runs, runs + of_others, 1 / ranks)
        return max(as_others, at_least(runs, int(len(late) / length), min(_LATE_BY_CHANCE, 1 / ranks)))

    def often(among: set[int], length: float) -> set[int]:
        return {rank for rank in among if ranks * chance(counts[rank], length) < _SIGNIFICANT}

    suspects = often(set(counts), 1.0)
    runs = [len(list(steps)) for rank, steps in groupby(late) if rank != NO_RANK and rank not in suspects]
    return often(suspects, sum(runs) / len(runs)) if runs else suspects


def at_least(count: int, trials: int, probability: float) -> float:
    """Return how probable it is that something happens in `count` of some trials or in more."""
    if count <= 0 or probability >= 1:
        return 1.0
    logs = [
        math.lgamma(trials + 1) - math.lgamma(n + 1) - math.lgamma(trials - n + 1)
        + n * math.log(probability) + (trials - n) * math.log1p(-probability)
        for n in range(count, trials + 1)
    ]  # fmt: skip
    return math.fsum(math.exp(value) for value in logs)
