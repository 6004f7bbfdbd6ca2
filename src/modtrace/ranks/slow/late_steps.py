"""The late rank of each step: own times without waits, arrivals at collectives, and the modules that took longer."""

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
from ..rank_tables import CALL, EXCLUSIVE_CATEGORIES, Bounds, CollectiveTable, RangeTable, SpanTable, take
from ..sync_points import call_keys, synchronizing


class OwnTime:
    """The times of many ranks on one axis, and the ranks' own time: the time in which they do not wait.

    Args:
        table: the collectives of all ranks. A rank waits in waits, and in calls that return only when complete.
    """

    def __init__(self, table: CollectiveTable) -> None:
        self.ranks = np.unique(table.rank).astype(np.int64)  # int64, the ranks, ascending
        first, last = (int(table.start_ns.min()), int(table.end_ns.max())) if len(table.start_ns) else (0, 0)
        # The axis includes moments before the first call, such as the start of a span around it.
        self._length = 4 * (last - first + 1)
        self._zero = first - (last - first + 1)
        blocks = (table.kind != CALL) | (table.done_ns >= 0) & (table.done_ns <= table.end_ns)
        start = self.on_axis(table.rank[blocks], table.start_ns[blocks])
        self._waits = union_of(start, self.on_axis(table.rank[blocks], table.end_ns[blocks]))

    def on_axis(self, rank: Int64Array, time: Int64Array) -> Int64Array:
        """Return the times of ranks as ns on the axis, which orders them by rank, then by time."""
        ranks = self.ranks
        has_gaps = len(ranks) and ranks[-1] - ranks[0] >= len(ranks)
        index = np.searchsorted(ranks, rank) if has_gaps else rank - ranks[:1]
        position: Int64Array = index * self._length + (time - self._zero)
        return position

    def for_rank(self, rank: int) -> "OwnTime":
        """Return the own time of one rank, which is faster to query."""
        index = int(np.searchsorted(self.ranks, rank))
        first, last = np.searchsorted(self._waits.start_ns, [index * self._length, (index + 1) * self._length])
        own_time = copy.copy(self)
        own_time._waits = TimeIntervals(self._waits.start_ns[first:last], self._waits.end_ns[first:last])
        return own_time

    def excluding(self, intervals: TimeIntervals) -> "OwnTime":
        """Return the own time outside the given intervals of the axis."""
        own_time = copy.copy(self)
        own_time._waits = union_of(*map(np.append, self._waits, intervals))
        return own_time

    def until(self, on_axis: Int64Array) -> Int64Array:
        """Return the own ns until each moment of the axis; only differences within one rank are meaningful."""
        return on_axis - self._waits.time_until(on_axis)


class Segments(NamedTuple):
    """Parts of spans outside their inner spans; arrays of equal length."""

    owner: Int64Array  # index of the span in its table
    key: Int64Array  # name × len(PHASES) + phase
    start_ns: Int64Array  # on the axis of `OwnTime`
    end_ns: Int64Array
    own_ns: Int64Array  # own time between `start_ns` and `end_ns`


def segments_of(spans: SpanTable, own_time: OwnTime, rank: int) -> Segments:
    """Return the segments of a rank."""
    count = len(spans.start_ns)
    if not count:
        return Segments(*np.empty((5, 0), np.int64))
    parent = find_parents(spans.track, spans.depth)
    track = np.concatenate([spans.track, spans.track])
    time = np.concatenate([spans.start_ns, spans.start_ns + spans.duration_ns])
    is_end = np.repeat([False, True], count)
    depth = np.concatenate([spans.depth, spans.depth])
    # At one moment ends come before starts; inner spans end first, outer spans start first.
    order = np.lexsort((np.where(is_end, -depth, depth), ~is_end, time, track))
    owner = np.concatenate([np.arange(count), parent])[order]
    start, track = time[order], track[order]
    end = np.append(start[1:], 0)
    is_segment = np.append(track[1:] == track[:-1], False) & (owner >= 0) & (end > start)
    owner, start, end = owner[is_segment], start[is_segment], end[is_segment]
    ranks = np.full(len(owner), rank, np.int64)
    key = spans.name[owner].astype(np.int64) * len(PHASES) + spans.phase[owner]
    start, end, rank_time = own_time.on_axis(ranks, start), own_time.on_axis(ranks, end), own_time.for_rank(rank)
    return Segments(owner, key, start, end, rank_time.until(end) - rank_time.until(start))


OUTSIDE_FQN = ""
"""The name of the time outside modules and ranges."""
IN_RANGE = "range"
"""The phase of a range outside modules, such as data loading or the optimizer."""

ModulePhase = tuple[str, str]
"""The fqn of a module and its phase, or the name of a range and `IN_RANGE`."""

MODULES_PER_STEP = 3
"""Maximum number of modules that a finding names."""

LateVerdict = Literal["late", "even", "cannot tell"]


def place_text(fqn: str, phase: str) -> str:
    """Return the name, as used in sentences, of a module, a range, or the time outside both."""
    if phase == IN_RANGE:
        return fqn
    return f"{fqn} {phase}" if fqn != OUTSIDE_FQN else "(outside modules)"


class ModuleExcess(NamedTuple):
    """A module that took longer on a rank than on the other ranks."""

    fqn: str  # fully qualified name of the module, text of the range ("data loading"), or `OUTSIDE_FQN`
    phase: str  # one of `timeline.PHASES`; `IN_RANGE`; empty outside modules and ranges
    excess_ns: int  # `own_ns` minus the median of the other ranks
    own_ns: int  # its self time before the late arrivals of a step


class StepFinding(NamedTuple):
    """The late rank of one step; times are ns.

    Attributes:
        step: number of the step.
        verdict: "late" if one rank kept the others waiting; "even" if no rank did by more than the usual variation;
            "cannot tell" if one did, but by less than the clocks of two ranks may differ.
        rank: the rank with the largest cost.
        cost_ns: its excess of own time over the median of the other ranks before the collectives that it called last;
            limited to its lateness there.
        saved_ns: time by which the step would be shorter without the rank's excess.
        lateness_ns: its maximum delay after the median of the other ranks in this step.
        bound_ns: maximum error of `lateness_ns`.
        noise_ns: maximum `cost_ns` that chance explains.
        modules: the modules in which it took longer than the others, the worst first; only if the verdict is "late".
        duration_ns: median duration of the step over all ranks; 0 if unknown.
    """

    step: int
    verdict: LateVerdict
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
        """The late rank, its cost, and the module in which it took longer."""
        return self.sentence_of(f"rank {self.rank}")

    def sentence_of(self, name: str) -> str:
        """Return the sentence, with `name` (such as `rollout 2`) for the rank."""
        where = f", in {place_text(*self.modules[0][:2])}" if self.modules else ""
        return f"{name} came late in step {self.step} by {format_ns(self.cost_ns)}{where}"


class Arrivals(NamedTuple):
    """Calls of synchronizing collectives that at least two ranks call, sorted by collective, then by time."""

    collective: Int64Array  # number of the collective, from 0, by group and counter
    rank: Int64Array
    step: Int64Array  # equal for all calls of one collective
    position: Int64Array  # index of the call among its rank's calls in the step; equal for all calls of one collective
    axis_ns: Int64Array  # time of the call on the axis of `OwnTime`
    previous_axis_ns: Int64Array  # `axis_ns` of the same rank's previous call; -1 if there is none
    own_ns: Int64Array  # own time between these two calls; -1 if there is no previous call
    excess_ns: Int64Array  # `own_ns` minus the median of the other ranks; 0 if unknown
    lateness_ns: Int64Array  # time between the median of the other ranks' calls and this call
    is_last: BoolArray  # True for the last call of its collective


def find_arrivals(table: CollectiveTable, own_time: OwnTime) -> Arrivals:
    """Return the arrivals of all ranks."""
    synchronizes = synchronizing(table.operators)[table.operator]
    rows = np.flatnonzero((table.kind == CALL) & (table.counter >= 0) & synchronizes)
    axis_ns = own_time.on_axis(table.rank[rows].astype(np.int64), table.start_ns[rows])
    order = np.argsort(axis_ns, kind="stable")
    rows, axis_ns = rows[order], axis_ns[order]
    rank, step = table.rank[rows].astype(np.int64), table.step[rows].astype(np.int64)
    previous_axis_ns, own_ns = np.full(len(rows), -1), np.full(len(rows), -1)
    previous_axis_ns[1:], own_ns[1:] = axis_ns[:-1], np.diff(own_time.until(axis_ns))
    first_of_rank = group_starts(rank)
    previous_axis_ns[first_of_rank] = own_ns[first_of_rank] = -1
    position = count_in_run(rank, step)
    key = call_keys(table.group[rows], table.counter[rows])
    _, collective, count = np.unique(key, return_inverse=True, return_counts=True)
    time = table.start_ns[rows]
    shared_rows = np.flatnonzero(count[collective] > 1)
    shared_rows = shared_rows[np.lexsort((time[shared_rows], collective[shared_rows]))]
    rank, step, position, axis_ns, previous_axis_ns, own_ns, collective, time = (
        values[shared_rows] for values in (rank, step, position, axis_ns, previous_axis_ns, own_ns, collective, time)
    )
    starts = group_starts(collective)
    size = group_lengths(starts, len(collective))
    collective_of_row = np.repeat(np.arange(len(starts)), size)
    last_rows = starts + size - 1
    is_last = np.zeros(len(time), np.bool_)
    is_last[last_rows] = True
    step, position = (np.minimum.reduceat(values, starts)[collective_of_row] for values in (step, position))
    by_own_ns = np.lexsort((own_ns, collective_of_row))
    excess = np.zeros(len(own_ns), np.int64)
    excess[by_own_ns] = np.rint(own_ns[by_own_ns] - median_of_others(own_ns[by_own_ns], starts)).astype(np.int64)
    # If a rank has no previous call, its own time is unknown.
    excess[np.minimum.reduceat(own_ns, starts)[collective_of_row] < 0] = 0
    # Relative to the first call, because a double cannot represent Unix nanoseconds.
    elapsed_ns = time - time.min(initial=INT64_MAX)
    lateness = np.rint(elapsed_ns - median_of_others(elapsed_ns, starts)).astype(np.int64)
    return Arrivals(
        collective_of_row, rank, step, position, axis_ns, previous_axis_ns, own_ns, excess, lateness, is_last
    )


MIN_NOISES = 6.0
"""Minimum ratio of a step's cost to the noise for the step to be late."""
COUNTED_NOISES = 3.0
"""Minimum ratio of an excess to the noise for the excess to count."""
_MIN_STEPS_FOR_MEDIAN = 4
"""Minimum number of steps for a rank's median excess to be subtracted when the variation is computed."""
_STEADY_STEPS = 8
"""Minimum number of steps for an excess to be judged steady."""
_STEADY_SHARE = 0.75
"""Minimum share of the steps with an excess that counts, for the excess to be steady and not by chance."""
_STEADY_OWN = 0.05
"""Minimum steady excess, as a share of a rank's own time: a rank on a slower core is always a little later."""
_STEADY_EXCESS_SHARE = 0.1
"""An excess of this share of a rank's own time is steady for any noise, if `_STEADY_SHARE` of the steps have it.

One of two ranks is later by chance in `_STEADY_SHARE` of the steps once in 50 runs, and by a tenth far more rarely.
"""
_MIN_STEADY_EXCESS_STEPS = 16
"""Minimum number of steps for the rule of `_STEADY_EXCESS_SHARE`."""
MAD_TO_SIGMA = 1.4826
RANK_BITS = 31
"""Number of low bits of an integer that hold a rank; a step or another number is in the bits above."""


class LateStep(NamedTuple):
    """The finding of a step with the arrivals that explain it."""

    finding: StepFinding  # without modules, `duration_ns` and `saved_ns`
    arrivals: Int64Array  # indices of the rank's arrivals with a cost
    slower: Int64Array  # indices of the rank's arrivals with an excess that counts, even if no rank waited


def late_steps(arrivals: Arrivals, bounds: Bounds) -> list[LateStep]:
    """Return the finding of each step, in order."""
    noise = _noise(arrivals)
    is_steady, min_excess, median_own_ns = _steady_excess(arrivals, noise)
    # Only the last rank keeps others waiting, and no longer than its maximum lateness.
    max_lateness = arrivals.lateness_ns + bounds.within_groups(arrivals.rank, arrivals.collective)
    cost = np.where(arrivals.is_last, np.clip(arrivals.excess_ns, 0, np.maximum(max_lateness, 0)), 0)
    # Usual variation is not charged to a rank: it would add up over many collectives.
    cost = np.where(cost > min_excess, cost, 0)
    in_order = []
    for rows in split_by(arrivals.step):
        last_rows = rows[arrivals.is_last[rows]]
        ranks, index = np.unique(arrivals.rank[last_rows], return_inverse=True)
        rank = int(ranks[np.argmax(np.bincount(index, cost[last_rows], len(ranks)))])
        last_calls = last_rows[arrivals.rank[last_rows] == rank]
        costly = last_calls[cost[last_calls] > 0]
        counted_rows = costly if len(costly) else last_calls
        limit = float(noise_limit(np.sum(noise[counted_rows] ** 2, keepdims=True), np.array([len(rows)]))[0])
        total_ns = int(cost[last_calls].sum())
        steady_rows = costly[is_steady[costly]]
        if cost[steady_rows].sum() > _STEADY_OWN * median_own_ns:
            limit = min(limit, float(np.sqrt(np.sum(min_excess[steady_rows] ** 2))))
        worst_row = int(counted_rows[np.argmax(arrivals.lateness_ns[counted_rows])])
        lateness = int(arrivals.lateness_ns[worst_row])
        # The second to last and the median rank are uncertain, so the largest bound of all ranks counts.
        in_collective = slice(*np.searchsorted(arrivals.collective, arrivals.collective[worst_row] + np.arange(2)))
        bound = bounds.largest_bound(rank, arrivals.rank[in_collective])
        verdict: LateVerdict = "even" if total_ns <= limit else "cannot tell" if lateness <= bound else "late"
        step = int(arrivals.step[rows[0]])
        noise_ns = round(limit)
        finding = StepFinding(step, verdict, rank, total_ns, lateness_ns=lateness, bound_ns=bound, noise_ns=noise_ns)
        slower = rows[(arrivals.rank[rows] == rank) & (arrivals.excess_ns[rows] > min_excess[rows])]
        in_order.append(LateStep(finding, costly, slower))
    return in_order


def _noise(arrivals: Arrivals) -> Float64Array:
    """Return the standard deviation, in ns, of the excesses at each arrival's position in the step.

    The median excess of each rank is subtracted first, so a rank that is always slower does not count as noise. If one
    of two ranks varies, the excess of both does. So the noise is at most what the own time of the median rank suggests.
    """
    position, rank = arrivals.position, arrivals.rank
    position_noise = medians_within(_deviation_from_rank_median(arrivals, arrivals.excess_ns), position)
    rank_noise = medians_within(_deviation_from_rank_median(arrivals, arrivals.own_ns), rank, position)
    # One row per rank and position, by increasing variation.
    order = np.lexsort((rank, rank_noise, position))
    order = order[group_starts(position[order], rank_noise[order], rank[order])]
    first = group_starts(position[order])
    middle = first + (group_lengths(first, len(order)) - 1) // 2
    median_rank_noise = rank_noise[order][middle][np.searchsorted(position[order][first], position)]
    noise: Float64Array = MAD_TO_SIGMA * np.minimum(position_noise, math.sqrt(2) * median_rank_noise)
    return noise


def _steady_excess(arrivals: Arrivals, noise: Float64Array) -> tuple[BoolArray, Float64Array, float]:
    """Return a mask of steady arrivals, the minimum excess of each arrival that counts, and a rank's median own time.

    An arrival is steady if its rank has an excess at its position in nearly all steps. Times are ns.
    """
    is_known = arrivals.own_ns >= 0
    rank_position = arrivals.position << RANK_BITS | arrivals.rank
    _, position_of_row = np.unique(rank_position, return_inverse=True)
    _, step_of_row = np.unique(arrivals.step << RANK_BITS | arrivals.rank, return_inverse=True)
    own_ns = np.bincount(step_of_row[is_known], arrivals.own_ns[is_known])
    median_own_ns = float(np.median(own_ns)) if len(own_ns) else 0.0
    steps, min_excess = np.bincount(position_of_row, is_known), COUNTED_NOISES * noise

    def has_excess(ns: Float64Array | float, min_steps: int) -> BoolArray:
        counts = np.bincount(position_of_row, is_known & (arrivals.excess_ns > ns))
        return ((steps >= min_steps) & (counts >= _STEADY_SHARE * steps))[position_of_row]

    is_steady = has_excess(min_excess, _STEADY_STEPS)
    is_large = ~is_steady & has_excess(_STEADY_EXCESS_SHARE * median_own_ns, _MIN_STEADY_EXCESS_STEPS)
    return is_steady | is_large, np.where(is_large, _STEADY_EXCESS_SHARE * median_own_ns, min_excess), median_own_ns


def _deviation_from_rank_median(arrivals: Arrivals, values: Int64Array) -> Float64Array:
    """Return the distance of each value from the median of its rank at its position in the step."""
    position, rank = arrivals.position, arrivals.rank
    _, position_of_row, steps = np.unique(position << RANK_BITS | rank, return_inverse=True, return_counts=True)
    # A median of few steps means little: then the values are not reduced by it.
    return np.abs(
        values - np.where(steps[position_of_row] < _MIN_STEPS_FOR_MEDIAN, 0, medians_within(values, rank, position))
    )


def noise_limit(squares: Float64Array, count: Int64Array) -> Float64Array:
    """Return the limit for a sum of excesses that is the largest of `count` sums."""
    limit: Float64Array = np.maximum(MIN_NOISES, 1 + np.sqrt(2 * np.log(np.maximum(count, 2)))) * np.sqrt(squares)
    return limit


_MAX_PEERS = 32
"""Maximum number of ranks that a late rank is compared with: more do not change the median."""


def peers_of(arrivals: Arrivals, late_step: LateStep) -> list[int]:
    """Return the ranks that a late rank is compared with: its nearest neighbours that called the same collectives."""
    ranks = np.unique(arrivals.rank[_rows_of(arrivals, late_step)])
    ranks = ranks[ranks != late_step.finding.rank]
    if len(ranks) > _MAX_PEERS:
        # Neighbouring ranks are in the same part of a dataset.
        index = int(np.searchsorted(ranks, late_step.finding.rank))
        first = min(max(index - _MAX_PEERS // 2, 0), len(ranks) - _MAX_PEERS)
        ranks = ranks[first : first + _MAX_PEERS]
    peers: list[int] = ranks.tolist()
    return peers


def module_excess(
    arrivals: Arrivals, step: LateStep, peers: Sequence[int], *, spans: SpanTable, ranges: RangeTable, own_time: OwnTime
) -> list[ModuleExcess]:
    """Return the modules, and the ranges outside them, in which the late rank took longer, the worst first.

    `spans` and `ranges` contain the previous step and this one, of the late rank and its peers.
    """
    keys = [(name.fqn, phase) for name in spans.names for phase in range(len(PHASES))]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    number_of = np.array([numbers[key] for key in keys], np.int64)
    outside = len(numbers) + len(ranges.places)
    times = np.zeros((1 + len(peers), outside + 1))
    rows = _rows_of(arrivals, step)
    for row, rank in enumerate([step.finding.rank, *peers]):
        own_rows = rows[(arrivals.rank[rows] == rank) & (arrivals.previous_axis_ns[rows] >= 0)]
        starts, ends = arrivals.previous_axis_ns[own_rows], arrivals.axis_ns[own_rows]
        layers = list(_layers(rank, spans, ranges, own_time, number_of))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            for key, inside, time in layers:
                starts_ns, ends_ns = np.clip(inside.start_ns, start, end), np.clip(inside.end_ns, start, end)
                times[row] += np.bincount(key, time.until(ends_ns) - time.until(starts_ns), outside + 1)
        times[row, outside] = max(arrivals.own_ns[own_rows].sum() - times[row, :outside].sum(), 0)
    peer_median = np.median(times[1:], axis=0) if peers else np.zeros(outside + 1)
    excess = times[0] - peer_median
    names = [
        *((fqn, PHASES[phase]) for fqn, phase in numbers),
        *((place, IN_RANGE) for place in ranges.places),
        (OUTSIDE_FQN, ""),
    ]
    order = np.argsort(-excess, kind="stable")
    return [
        ModuleExcess(fqn, phase, round(excess[number]), round(times[0, number]))
        for number in order.tolist()
        for fqn, phase in [names[number]]
        if excess[number] > 0
    ]


def _layers(
    rank: int, spans: SpanTable, ranges: RangeTable, own_time: OwnTime, number_of: Int64Array
) -> Iterator[tuple[Int64Array, TimeIntervals, OwnTime]]:
    """Yield the numbers of modules and ranges, the intervals that a rank spent there, and the time that counts.

    Ranges of `EXCLUSIVE_CATEGORIES` come first; their time does not count for later items. `number_of` maps a segment's
    key to the number of a module in a phase; the numbers of ranges follow these.
    """
    remaining_time, first_range = own_time.for_rank(rank), int(number_of.max(initial=-1)) + 1
    segments = segments_of(take(spans, spans.rank == rank), remaining_time, rank)
    in_range = take(ranges, ranges.rank == rank)
    rank_of_range = np.full(len(in_range.start_ns), rank, np.int64)
    starts, ends = own_time.on_axis(rank_of_range, in_range.start_ns), own_time.on_axis(rank_of_range, in_range.end_ns)
    is_outside = np.ones(len(rank_of_range), np.bool_)
    for category in EXCLUSIVE_CATEGORIES:
        if (text := RangeName("", category).place) in ranges.places:
            number = ranges.places.index(text)
            has_category = in_range.place == number
            intervals, is_outside = union_of(starts[has_category], ends[has_category]), is_outside & ~has_category
            yield np.full_like(intervals.start_ns, first_range + number), intervals, remaining_time
            remaining_time = remaining_time.excluding(intervals)
    key: Int64Array = np.append(number_of[segments.key], first_range + in_range.place[is_outside])
    yield (
        key,
        TimeIntervals(np.append(segments.start_ns, starts[is_outside]), np.append(segments.end_ns, ends[is_outside])),
        remaining_time,
    )


def _rows_of(arrivals: Arrivals, late_step: LateStep) -> Int64Array:
    """Return the indices of the arrivals of all ranks at the collectives that a late rank called last."""
    collectives = np.unique(arrivals.collective[late_step.arrivals])
    starts, ends = (
        np.searchsorted(arrivals.collective, collectives),
        np.searchsorted(arrivals.collective, collectives + 1),
    )
    return expand_ranges(starts, ends)[0]


NO_RANK = -1
"""The late rank of a step in which no rank was late."""
_MAX_CHANCE = 1e-3
"""A rank is slow if the probability of being late this often by chance is smaller."""
_LATE_BY_CHANCE = 0.02
"""Share of steps in which a rank may be late by chance if most ranks never are; smaller if there are many ranks."""


def often_late(late: Sequence[int], ranks: int) -> set[int]:
    """Return the ranks that are late more often than by chance; `late` is the late rank of each step, or `NO_RANK`.

    By chance alone, a rank is late as often as the median rank. Random causes last for several steps, such as another
    program on the rank's CPUs, so consecutive steps are not independent. The number of late steps is therefore divided
    by the mean length of the runs of ranks that are late by chance.
    """
    counts = Counter(rank for rank in late if rank != NO_RANK)
    median_count = sorted([*counts.values(), *[0] * (ranks - len(counts))])[(ranks - 1) // 2] if ranks else 0

    def chance(count: int, length: float) -> float:
        """Return the probability that a rank is late `count` times by chance, in runs of `length` steps."""
        runs, peer_runs = int(count / length), int(median_count * (ranks - 1) / length)
        # The count of the other ranks is random too: few ranks do not show the rate well.
        peer_chance = probability_of_at_least(runs, runs + peer_runs, 1 / ranks)
        return max(peer_chance, probability_of_at_least(runs, int(len(late) / length), min(_LATE_BY_CHANCE, 1 / ranks)))

    def filter_unlikely(candidates: set[int], length: float) -> set[int]:
        return {rank for rank in candidates if ranks * chance(counts[rank], length) < _MAX_CHANCE}

    suspects = filter_unlikely(set(counts), 1.0)
    runs = [len(list(steps)) for rank, steps in groupby(late) if rank != NO_RANK and rank not in suspects]
    return filter_unlikely(suspects, sum(runs) / len(runs)) if runs else suspects


def probability_of_at_least(count: int, trials: int, probability: float) -> float:
    """Return the probability of at least `count` events in `trials` trials."""
    if count <= 0 or probability >= 1:
        return 1.0
    logs = [
        math.lgamma(trials + 1) - math.lgamma(n + 1) - math.lgamma(trials - n + 1)
        + n * math.log(probability) + (trials - n) * math.log1p(-probability)
        for n in range(count, trials + 1)
    ]  # fmt: skip
    return math.fsum(math.exp(value) for value in logs)
