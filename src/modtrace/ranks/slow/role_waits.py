"""Waits of roles for other roles, in messages and in ranges, followed to the process that all of them wait for.

The process with the longest steps defines the steps. Work of other processes belongs to the step in which it
ends, so a role may count its own steps, or none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple, TypeVar

import numpy as np

from ..._arrays import INT64_MAX, INT64_MIN, Float64Array, Int64Array, expand_ranges, split_by
from ...ring.event_text import CATEGORIES
from ...timeline import PHASES
from ...timeline.contents import process_label
from ...timeline.nesting import TimeIntervals, find_parents, union_of
from ..rank_tables import CALL, CollectiveTable, RangeTable, RankTables, SpanTable, StepTable, take
from .late_steps import (
    COUNTED_NOISES,
    IN_RANGE,
    MAD_TO_SIGMA,
    NO_RANK,
    OUTSIDE_FQN,
    RANK_BITS,
    ModulePhase,
    OwnTime,
    often_late,
    place_text,
)
from .replay import rank_events

_WAIT_RANGE_PREFIXES = ("range wait", "range ray.get", "range ray.wait")
"""Prefixes of the names of ranges in which a process waits for others."""
_MAX_HOPS = 8
"""Maximum length of a chain of waits that is followed: A waits for B, which waits for C, and so on."""
_MIN_REPORTED_SHARE = 0.05
"""Minimum share of a step that a role waits for another role for the wait to be reported."""
_MIN_COUNTED_SHARE = 0.01
"""Minimum share of a step for a wait, or for the delay of one process in a step, to count."""
_MIN_SHARE_OF_SINGLE = 0.1
"""Minimum share if the awaited process has no peers and no place there with a `_MIN_REPORTED_SHARE` of the step."""
_MIN_RATIO = 1.1
"""Minimum ratio between the times of a process and of its peers for the process to be named."""
_NEGLIGIBLE_SHARE = 0.1
"""A delay below this share of the median delay does not count: small delays are common to all processes."""
_MIN_SLOW_STEPS = 3
"""Minimum number of slow steps for a place to be named: every place has a few, such as its first one."""
_CAUSE_SHARE = 0.8
"""Share of the largest delay in a range that a range needs to be the cause; a module needs half of this share."""

_Key = TypeVar("_Key")
_NO_PLACE: ModulePhase = (OUTSIDE_FQN, "")


class RoleWait(NamedTuple):
    """A role that waits for another one.

    Attributes:
        role: the waiting process or role, in the form used in sentences (`trainers`).
        waits_for: the awaited process (`rollout 2`), or all processes of a role.
        share: share of a step, the mean of the waiting processes.
        ns_per_step: that share in nanoseconds: the mean wait in a step.
        fqn: the module or range that causes the wait; empty outside modules and ranges.
        phase: phase of the module; `IN_RANGE`; empty outside modules and ranges.
        ratio: time there divided by the time in the other processes of its role; None if they have none.
    """

    role: str
    waits_for: str
    share: float
    ns_per_step: int
    fqn: str
    phase: str
    ratio: float | None

    @property
    def sentence(self) -> str:
        """The waiting role, the share of a step, the awaited role, and the module or range that causes the wait."""
        wait = f"{self.role} {'wait' if self.role.endswith('s') else 'waits'} {100 * self.share:.0f} % of a step"
        outside = "outside modules and ranges"
        place = place_text(self.fqn, self.phase) if self.fqn != OUTSIDE_FQN else f"what runs {outside}"
        position = f"in {place}" if self.fqn != OUTSIDE_FQN else outside
        cause = f", mostly {position}" if self.ratio is None else f": {place} is {self.ratio:.1f} times as long there"
        return f"{wait} for {self.waits_for}{cause}"


class RoleTimes(NamedTuple):
    """The work and the waits of processes of several roles in a range of steps."""

    processes: Mapping[int, tuple[str, int]]  # role and rank by process number
    step_ns: Int64Array  # int64[steps], duration of each step, ns
    wait_ns: Mapping[tuple[int, int], Float64Array]  # (waiting process, awaited process of another role) -> ns per step
    # (process, place) -> ns in each step, without waits. A place is a range, a module (without inner ones), or neither.
    work_ns: Mapping[tuple[int, ModulePhase], Float64Array]


class _Waits(NamedTuple):
    """Waits of processes; arrays of equal length."""

    process: Int64Array  # the waiting process
    start_ns: Int64Array  # Unix time
    end_ns: Int64Array  # Unix time at which the awaited collective, message or result was complete
    target: Int64Array  # the awaited process; -1 if it has to be inferred from times


class _Process(NamedTuple):
    """The spans, ranges and waits of one process."""

    spans: SpanTable
    ranges: RangeTable
    waits: TimeIntervals

    @property
    def own_ends(self) -> Int64Array:
        """The ends of its outermost spans and of its ranges, Unix ns, ascending."""
        return np.sort(
            np.append((self.spans.start_ns + self.spans.duration_ns)[self.spans.depth == 0], self.ranges.end_ns)
        )


def role_times(worlds: Sequence[RankTables], first: int, stop: int) -> RoleTimes | None:
    """Return the work and waits of a job in the steps from `first` to before `stop`; None if the job has one role."""
    processes = {
        world << RANK_BITS | rank: (role, rank)
        for world, tables in enumerate(worlds)
        for rank, role in tables.roles.items()
        if role
    }
    edges = _step_ends(worlds, first, stop)
    if len({role for role, _ in processes.values()}) < 2 or len(edges) < 2:
        return None
    waits: list[_Waits] = []
    activity: dict[int, _Process] = {}
    for world, tables in enumerate(worlds):
        table, base = tables.read(CollectiveTable, first - 1, stop), world << RANK_BITS
        by_messages = _waits_by_messages(table)
        waits.append(by_messages._replace(process=by_messages.process | base, target=by_messages.target | base))
        blocks = take(table, (table.kind != CALL) | (table.done_ns >= 0) & (table.done_ns <= table.end_ns))
        ranges = tables.read(RangeTable, first - 1, stop)
        is_wait = np.array([place.startswith(_WAIT_RANGE_PREFIXES) for place in ranges.places] or [False])[ranges.place]
        is_work = ~np.isin(ranges.category, [CATEGORIES.index("communication"), CATEGORIES.index("torch")])
        spans = tables.read(SpanTable, first - 1, stop)
        for rank in tables.roles:
            in_wait = take(ranges, is_wait & (ranges.rank == rank))
            blocked = take(blocks, blocks.rank == rank)
            # If messages inside a range show which process is awaited, the range itself adds nothing.
            has_no_message = (
                union_of(blocked.start_ns, blocked.end_ns).time_within(in_wait.start_ns, in_wait.end_ns) == 0
            )
            in_wait = take(in_wait, has_no_message)
            count, process = len(in_wait.start_ns), base | rank
            waits.append(_Waits(np.full(count, process), in_wait.start_ns, in_wait.end_ns, np.full(count, -1)))
            activity[process] = _Process(
                take(spans, spans.rank == rank),
                take(ranges, is_work & ~is_wait & (ranges.rank == rank)),
                union_of(np.append(blocked.start_ns, in_wait.start_ns), np.append(blocked.end_ns, in_wait.end_ns)),
            )
    all_waits = _infer_targets(_Waits(*map(np.concatenate, zip(*waits, strict=True))), activity, processes)
    times = {process: _place_times(activity[process], edges).items() for process in processes}
    work_ns = {(process, place): ns for process, place_times in times.items() for place, ns in place_times}
    wait_ns = _resolve_wait_chains(_split_at_step_ends(all_waits, edges), processes, edges)
    return RoleTimes(processes, np.diff(edges), wait_ns, work_ns)


def _step_ends(worlds: Sequence[RankTables], first: int, stop: int) -> Int64Array:
    """Return the step ends of the process with the longest median step, among those that last half of the run."""
    tables = [tables.read(StepTable, first - 1, stop) for tables in worlds]
    ends = [np.sort(table.end_ns[table.rank == rank]) for table in tables for rank in np.unique(table.rank)]
    longest = max((int(np.ptp(rank_ends)) for rank_ends in ends), default=0)
    candidates = [rank_ends for rank_ends in ends if len(rank_ends) > 1 and 2 * np.ptp(rank_ends) >= longest]
    return max(candidates, key=lambda rank_ends: float(np.median(np.diff(rank_ends))), default=np.empty(0, np.int64))


def _waits_by_messages(table: CollectiveTable) -> _Waits:
    """Return the waits for collectives and messages; the target of a wait is the rank that called last."""
    events = rank_events(table, OwnTime(table))
    rows = np.flatnonzero(events.is_call & (events.key >= 0) | events.binds)
    order = rows[np.lexsort((events.binds[rows], events.time_ns[rows], events.key[rows]))]
    last_call = np.maximum.accumulate(np.where(events.is_call[order], np.arange(len(order)), -1))
    binding_rows = np.flatnonzero(events.binds[order])
    wait, call = order[binding_rows], order[last_call[binding_rows]]
    start = events.time_ns[wait] - events.wait_ns[wait]
    is_for_other = (
        (last_call[binding_rows] >= 0)
        & (events.key[call] == events.key[wait])
        & (events.rank[call] != events.rank[wait])
    )
    is_for_other &= events.time_ns[call] > start
    wait, call = wait[is_for_other], call[is_for_other]
    return _Waits(events.rank[wait], start[is_for_other], events.time_ns[call], events.rank[call])


def _infer_targets(waits: _Waits, activity: Mapping[int, _Process], processes: Mapping[int, tuple[str, int]]) -> _Waits:
    """Return the waits in order, each with a target, without overlaps within a process.

    An unknown target is the process of another role that last finished a span or range before the wait ended.
    """
    ends = {process: activity[process].own_ends for process in processes}
    target, end = waits.target.copy(), waits.end_ns.copy()
    for row in np.flatnonzero(target < 0).tolist():
        last = {
            process: int(process_ends[index])
            for process, process_ends in ends.items()
            if processes[process][0] != processes.get(int(waits.process[row]), ("", 0))[0]
            for index in [int(np.searchsorted(process_ends, waits.end_ns[row], side="right")) - 1]
            if index >= 0 and process_ends[index] > waits.start_ns[row]
        }
        if last:
            target[row] = max(last, key=lambda process: last[process])
            end[row] = last[int(target[row])]
    order = np.lexsort((waits.start_ns, waits.process))
    order = order[target[order] >= 0]
    start, end = waits.start_ns[order], end[order]
    for rows in split_by(waits.process[order]):
        end[rows] = np.maximum.accumulate(end[rows])
        start[rows[1:]] = np.maximum(start[rows[1:]], end[rows[:-1]])
    has_length = end > start
    return _Waits(waits.process[order][has_length], start[has_length], end[has_length], target[order][has_length])


def _split_at_step_ends(waits: _Waits, edges: Int64Array) -> _Waits:
    """Return the waits, each divided at the ends of the steps that it crosses."""
    first, last = np.searchsorted(edges, waits.start_ns, "right"), np.searchsorted(edges, waits.end_ns)
    bounds = np.concatenate([[INT64_MIN], edges, [INT64_MAX]])
    step, wait = expand_ranges(first, last + 1)
    start, end = np.maximum(waits.start_ns[wait], bounds[step]), np.minimum(waits.end_ns[wait], bounds[step + 1])
    return _Waits(waits.process[wait], start, end, waits.target[wait])


def _resolve_wait_chains(
    waits: _Waits, processes: Mapping[int, tuple[str, int]], edges: Int64Array
) -> dict[tuple[int, int], Float64Array]:
    """Return the ns that each process waited in each step for each process of another role.

    While the awaited process is itself waiting, the wait counts against the process that it waits for.
    """
    numbers = np.unique(np.append(waits.process, waits.target))
    start_ns = int(waits.start_ns.min(initial=0))
    axis_ns = int(waits.end_ns.max(initial=0)) - start_ns + 1

    def on_axis(process: Int64Array, time: Int64Array) -> Int64Array:
        position: Int64Array = np.searchsorted(numbers, process) * axis_ns + (time - start_ns)
        return position

    starts, ends = on_axis(waits.process, waits.start_ns), on_axis(waits.process, waits.end_ns)
    waiter, holder, start, end = waits.process, waits.target, waits.start_ns, waits.end_ns
    wait_ns: dict[tuple[int, int], Float64Array] = {}
    for _ in range(_MAX_HOPS):
        first_inner = np.searchsorted(ends, on_axis(holder, start), side="right")
        inner, outer = expand_ranges(first_inner, np.searchsorted(starts, on_axis(holder, end)))
        goes_on = waits.target[inner] != waiter[outer]
        inner, outer = inner[goes_on], outer[goes_on]
        inner_start = np.maximum(waits.start_ns[inner], start[outer])
        inner_end = np.minimum(waits.end_ns[inner], end[outer])
        own_ns = end - start - np.bincount(outer, inner_end - inner_start, len(start))
        step = np.searchsorted(edges, end) - 1
        for row in np.flatnonzero((own_ns > 0) & (step >= 0) & (step < len(edges) - 1)).tolist():
            pair = int(waiter[row]), int(holder[row])
            roles = [processes.get(process, ("", 0))[0] for process in pair]
            if all(roles) and roles[0] != roles[1]:
                wait_ns.setdefault(pair, np.zeros(len(edges) - 1))[step[row]] += own_ns[row]
        waiter, holder, start, end = waiter[outer], waits.target[inner], inner_start, inner_end
    return wait_ns


def _place_times(process: _Process, edges: Int64Array) -> dict[ModulePhase, Float64Array]:
    """Return a process's ns in each place and step, without waits; time in a module excludes inner modules."""
    spans, ranges = process.spans, process.ranges
    wait_ns = process.waits.time_within(spans.start_ns, spans.start_ns + spans.duration_ns)
    parent = find_parents(spans.track, spans.depth)
    wait_ns -= np.bincount(parent[parent >= 0], wait_ns[parent >= 0], len(wait_ns)).astype(np.int64)
    range_ns = ranges.end_ns - ranges.start_ns - process.waits.time_within(ranges.start_ns, ranges.end_ns)
    places: list[ModulePhase] = [(name.fqn, phase) for name in spans.names for phase in PHASES]
    places += [(place.removeprefix("range "), IN_RANGE) for place in ranges.places]
    place = np.append(
        spans.name.astype(np.int64) * len(PHASES) + spans.phase, len(spans.names) * len(PHASES) + ranges.place
    )
    step = np.searchsorted(edges, np.append(spans.start_ns + spans.duration_ns, ranges.end_ns)) - 1
    is_in_steps = (step >= 0) & (step < len(edges) - 1)
    place_ns = np.append(spans.self_ns - wait_ns, range_ns)
    times: dict[ModulePhase, Float64Array] = {}
    for index in np.unique(place[is_in_steps]).tolist():
        in_place = is_in_steps & (place == index)
        times.setdefault(places[index], np.zeros(len(edges) - 1))
        times[places[index]] += np.bincount(step[in_place], place_ns[in_place], len(edges) - 1)
    busy_intervals = union_of(
        np.concatenate([spans.start_ns, ranges.start_ns, process.waits.start_ns]),
        np.concatenate([spans.start_ns + spans.duration_ns, ranges.end_ns, process.waits.end_ns]),
    )
    times[_NO_PLACE] = np.diff(edges) - busy_intervals.time_within(edges[:-1], edges[1:]).astype(np.float64)
    return times


def join_role_times(parts: Iterable[RoleTimes | None]) -> RoleTimes | None:
    """Return the times of all parts of a run, in their order; None if the run has one role."""
    in_order = [part for part in parts if part is not None]
    if not in_order:
        return None

    zeros = [np.zeros(len(part.step_ns)) for part in in_order]

    def join(tables: Sequence[Mapping[_Key, Float64Array]]) -> dict[_Key, Float64Array]:
        keys = dict.fromkeys(key for table in tables for key in table)
        return {key: np.concatenate([t.get(key, zero) for t, zero in zip(tables, zeros, strict=True)]) for key in keys}

    lengths = np.concatenate([part.step_ns for part in in_order])
    return RoleTimes(
        in_order[0].processes, lengths, join([p.wait_ns for p in in_order]), join([p.work_ns for p in in_order])
    )


def find_role_waits(times: RoleTimes | None) -> tuple[RoleWait, ...]:
    """Return the waits of roles for other roles, the longest first; a slow process is named instead of its role."""
    if times is None:
        return ()
    members: dict[str, list[int]] = {}
    for process, (role, _) in sorted(times.processes.items(), key=lambda item: item[1]):
        members.setdefault(role, []).append(process)
    waits = [_role_wait(times, *pair, members) for pair in permutations(members, 2)]
    return tuple(sorted((wait for wait in waits if wait is not None), key=lambda wait: -wait.share))


def _role_wait(times: RoleTimes, role: str, awaited: str, members: Mapping[str, Sequence[int]]) -> RoleWait | None:
    zeros, holders, mean_step_ns = np.zeros(len(times.step_ns)), members[awaited], float(times.step_ns.mean())
    wait_ns = np.mean(
        [[times.wait_ns.get((waiter, holder), zeros) for holder in holders] for waiter in members[role]], axis=0
    )
    shares = wait_ns.sum(axis=1) / times.step_ns.sum()
    share = float(shares.sum())
    places = list(dict.fromkeys(place for process, place in times.work_ns if process in holders and place != _NO_PLACE))
    if not places or share < _MIN_COUNTED_SHARE:
        return None
    work_ns, recurring_ns = _work_times(times, holders, places)
    waiter_label = role if len(members[role]) == 1 else f"{role}s"
    # Time outside modules and ranges comes last: an unrecorded wait there looks like work.
    for candidate_places in (places, [_NO_PLACE]) if len(holders) > 1 else ():
        for index, place, ratio in _find_slower(times, holders, candidate_places, wait_ns):
            if ratio is None or ratio >= _MIN_RATIO:
                label, share = process_label(*times.processes[holders[index]]), float(shares[index])
                return RoleWait(waiter_label, label, share, round(share * mean_step_ns), *place, ratio)
    if share < _MIN_REPORTED_SHARE:
        return None
    label = process_label(*times.processes[holders[0]]) if len(holders) == 1 else f"{awaited}s"
    mean_ns = recurring_ns.mean(axis=(1, 2))
    main = _main_place(places, mean_ns, mean_ns)
    if len(holders) == 1 and share < _MIN_SHARE_OF_SINGLE and mean_ns[main] < _MIN_REPORTED_SHARE * mean_step_ns:
        return None
    # In each step the waiting role waits for the process that works longest.
    outside_ns = float((wait_ns.sum(axis=0) - work_ns.sum(axis=0).max(axis=0)).mean())
    place = _NO_PLACE if outside_ns > mean_ns[main] else places[main]
    return RoleWait(waiter_label, label, share, round(share * mean_step_ns), *place, None)


def _work_times(
    times: RoleTimes, holders: Sequence[int], places: Sequence[ModulePhase]
) -> tuple[Float64Array, Float64Array]:
    """Return the time by place, process and step, and these times limited to a value that recurs in several steps."""
    zeros = np.zeros(len(times.step_ns))
    work_ns = np.array([[times.work_ns.get((holder, place), zeros) for holder in holders] for place in places])
    return work_ns, np.minimum(work_ns, _reached_in_min_steps(work_ns)[..., None])


def _reached_in_min_steps(times: Float64Array) -> Float64Array:
    """Return the time that each row reaches in at least `_MIN_SLOW_STEPS` steps."""
    reached: Float64Array = np.sort(times)[..., max(times.shape[-1] - _MIN_SLOW_STEPS, 0)]
    return reached


def _find_slower(
    times: RoleTimes, holders: Sequence[int], places: Sequence[ModulePhase], wait_ns: Float64Array
) -> Iterator[tuple[int, ModulePhase, float | None]]:
    """Yield the (index of holder, place, ratio) of each holder that is repeatedly slower than the other holders."""
    work_ns, recurring_ns = _work_times(times, holders, places)
    means = [recurring_ns[:, holder].mean(axis=1) for holder in range(len(holders))]
    excesses = [recurring_ns[:, holder] - _peer_median(recurring_ns, holder) for holder in range(len(holders))]
    worst = [_main_place(places, mean, ns.mean(axis=1)) for mean, ns in zip(means, excesses, strict=True)]
    peer_ns = np.concatenate([_peer_median(work_ns[[place]], holder) for holder, place in enumerate(worst)])
    excess = work_ns[worst, range(len(holders))] - peer_ns
    # Work that the other holders never do is not random variation, even if its duration varies from step to step.
    noise = np.minimum(_deviation(excess), _deviation(peer_ns))
    cost = np.minimum(excess, wait_ns)
    cost[cost <= np.maximum(COUNTED_NOISES * noise[:, None], _MIN_COUNTED_SHARE * times.step_ns)] = 0
    if cost.any():
        cost[cost < _NEGLIGIBLE_SHARE * np.median(cost[cost > 0])] = 0
    late = np.where(cost.any(axis=0), cost.argmax(axis=0), NO_RANK).tolist()
    # The excess is not by chance if the other holders never have nearly as much.
    peer_excess = _reached_in_min_steps(peer_ns - np.median(peer_ns, axis=1, keepdims=True))
    unmatched = {
        holder
        for holder, costs in enumerate(cost)
        if (costs > 0).sum() >= _MIN_SLOW_STEPS
        and peer_excess[holder] < _NEGLIGIBLE_SHARE * np.median(costs[costs > 0])
    }
    total_cost, min_cost = cost.sum(axis=1), _MIN_REPORTED_SHARE * times.step_ns.sum()
    slow_holders = [holder for holder in often_late(late, len(holders)) | unmatched if total_cost[holder] >= min_cost]
    for holder in sorted(slow_holders, key=lambda holder: -float(total_cost[holder])):
        total_ns = float(peer_ns[holder].sum())
        yield holder, places[worst[holder]], 1 + float(excess[holder].sum()) / total_ns if total_ns > 0 else None


def _peer_median(times: Float64Array, holder: int) -> Float64Array:
    """Return the median time of the other holders for each place and step."""
    median_ns: Float64Array = np.median(np.delete(times, holder, axis=1), axis=1)
    return median_ns


def _deviation(times: Float64Array) -> Float64Array:
    """Return the standard deviation of each row over the steps, estimated from the median absolute deviation."""
    deviation: Float64Array = MAD_TO_SIGMA * np.median(np.abs(times - np.median(times, axis=1, keepdims=True)), axis=1)
    return deviation


def _main_place(places: Sequence[ModulePhase], times: Float64Array, excess: Float64Array) -> int:
    """Return the index of the place named for a delay: a module, or the shortest range that contains most of it."""
    in_range = np.array([phase == IN_RANGE for _, phase in places])
    modules, ranges = np.where(in_range, -np.inf, excess), np.where(in_range, excess, -np.inf)
    if not in_range.any() or modules.max() >= max(_CAUSE_SHARE / 2 * ranges.max(), 0):
        return int(modules.argmax())
    return int(np.where(ranges >= _CAUSE_SHARE * ranges.max(), times, np.inf).argmin())
