"""Who idles for whom across roles: waits by messages and by ranges, followed to the process that all of them wait for.

A step here is one of the process whose steps are the longest. What others do belongs to the step in which it ends, so
that roles may count their own steps, or none.
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
    OUTSIDE,
    RANK_BITS,
    ModulePhase,
    OwnTime,
    often_late,
    place_text,
)
from .replay import rank_events

_WAITS = ("range wait", "range ray.get", "range ray.wait")
"""The begins of the names of ranges in which a process waits for others."""
_MAX_HOPS = 8
"""The longest chain of waits that is followed: A waits for B, which waits for C, and so on."""
_SAID_SHARE = 0.05
"""The least share of a step that a role waits for another one, if a sentence says so."""
_NAMED_SHARE = 0.01
"""A wait, or a delay of one process in a step, does not count below this share of a step."""
_SAID_SHARE_ALONE = 0.1
"""The same for the only process of its role, unless one place there takes `_SAID_SHARE`: it has no like."""
_LEAST_RATIO = 1.1
"""How many times as long as the others a process takes at least, to be named."""
_LITTLE = 0.1
"""A delay below this part of the median delay does not count: it is often a little late as all are."""
_AGAIN = 3
"""The least number of steps in which a place takes long, to be named: any is made once, or loads data anew."""
_MOST = 0.8
"""A range is the cause if it has this share of the delay of a process, and a module if it has half of that."""

_Key = TypeVar("_Key")
_NOWHERE: ModulePhase = (OUTSIDE, "")


class RoleWait(NamedTuple):
    """A role that waits for another one."""

    role: str  # who waits: one process, or all of a role, as a sentence calls them (`trainers`)
    waits_for: str  # for whom: one process (`rollout 2`), or all of a role
    share: float  # of a step, the mean of who waits
    ns_per_step: int
    fqn: str  # what was waited for: a module or a range; or `OUTSIDE`
    phase: str  # of the module; `IN_RANGE`; empty outside
    ratio: float | None  # how many times as long that is there as in the others of its role; None: there is no such

    @property
    def sentence(self) -> str:
        """Who waits for whom, and for what."""
        wait = f"{self.role} {'wait' if self.role.endswith('s') else 'waits'} {100 * self.share:.0f} % of a step"
        outside = "outside of modules and ranges"
        place = place_text(self.fqn, self.phase) if self.fqn != OUTSIDE else f"what runs {outside}"
        mostly = f"in {place}" if self.fqn != OUTSIDE else outside
        why = f", mostly {mostly}" if self.ratio is None else f": {place} is {self.ratio:.1f} times as long there"
        return f"{wait} for {self.waits_for}{why}"


class RoleTimes(NamedTuple):
    """The work and the waits of processes of several roles in some steps."""

    processes: Mapping[int, tuple[str, int]]  # role and rank of each, by a number
    length: Int64Array  # int64[steps], ns
    waited: Mapping[tuple[int, int], Float64Array]  # by who waits and for whom, of another role, ns in each step
    # By process and place, ns in each step without waits: inside of ranges, in modules outside of others, in neither.
    took: Mapping[tuple[int, ModulePhase], Float64Array]


class _Waits(NamedTuple):
    """Waits of processes; arrays of equal length."""

    process: Int64Array  # who waits
    start: Int64Array  # Unix ns
    until: Int64Array  # when what it waited for was there
    target: Int64Array  # the process that it waited for; -1 if only the time can tell


class _Process(NamedTuple):
    """The spans and ranges of one process, and when it was waiting."""

    spans: SpanTable
    ranges: RangeTable
    waits: TimeIntervals

    @property
    def own_ends(self) -> Int64Array:
        """When its outermost spans and its ranges ended, ascending."""
        return np.sort(np.append((self.spans.start + self.spans.duration)[self.spans.depth == 0], self.ranges.end))


def role_times(worlds: Sequence[RankTables], first: int, last: int) -> RoleTimes | None:
    """Return the work and waits of a job in the steps from `first` to before `last`; None if it has one role."""
    processes = {
        world << RANK_BITS | rank: (role, rank)
        for world, tables in enumerate(worlds)
        for rank, role in tables.roles.items()
        if role
    }
    edges = _step_ends(worlds, first, last)
    if len({role for role, _ in processes.values()}) < 2 or len(edges) < 2:
        return None
    waits: list[_Waits] = []
    did: dict[int, _Process] = {}
    for world, tables in enumerate(worlds):
        table, base = tables.read(CollectiveTable, first - 1, last), world << RANK_BITS
        by_messages = _waits_by_messages(table)
        waits.append(by_messages._replace(process=by_messages.process | base, target=by_messages.target | base))
        blocks = take(table, (table.kind != CALL) | (table.done >= 0) & (table.done <= table.end))
        ranges = tables.read(RangeTable, first - 1, last)
        is_wait = np.array([place.startswith(_WAITS) for place in ranges.places] or [False])[ranges.place]
        says_what = ~np.isin(ranges.category, [CATEGORIES.index("communication"), CATEGORIES.index("torch")])
        spans = tables.read(SpanTable, first - 1, last)
        for rank in tables.roles:
            in_wait = take(ranges, is_wait & (ranges.rank == rank))
            blocked = take(blocks, blocks.rank == rank)
            # Where messages say for whom it waits, the range around them says nothing new.
            unknown = union_of(blocked.start, blocked.end).time_within(in_wait.start, in_wait.end) == 0
            in_wait = take(in_wait, unknown)
            count, process = len(in_wait.start), base | rank
            waits.append(_Waits(np.full(count, process), in_wait.start, in_wait.end, np.full(count, -1)))
            did[process] = _Process(
                take(spans, spans.rank == rank),
                take(ranges, says_what & ~is_wait & (ranges.rank == rank)),
                union_of(np.append(blocked.start, in_wait.start), np.append(blocked.end, in_wait.end)),
            )
    whole = _told_by_time(_Waits(*map(np.concatenate, zip(*waits, strict=True))), did, processes)
    took = {(process, place): ns for process in processes for place, ns in _place_times(did[process], edges).items()}
    return RoleTimes(processes, np.diff(edges), _followed(_cut(whole, edges), processes, edges), took)


def _step_ends(worlds: Sequence[RankTables], first: int, last: int) -> Int64Array:
    """Return when the steps ended of the process whose steps are the longest, of those that do more than begin."""
    tables = [tables.read(StepTable, first - 1, last) for tables in worlds]
    ends = [np.sort(table.end[table.rank == rank]) for table in tables for rank in np.unique(table.rank)]
    longest = max((int(np.ptp(rank_ends)) for rank_ends in ends), default=0)
    many = [rank_ends for rank_ends in ends if len(rank_ends) > 1 and 2 * np.ptp(rank_ends) >= longest]
    return max(many, key=lambda rank_ends: float(np.median(np.diff(rank_ends))), default=np.empty(0, np.int64))


def _waits_by_messages(table: CollectiveTable) -> _Waits:
    """Return the waits for collectives and messages: each is for the last rank that called what had ended it."""
    events = rank_events(table, OwnTime(table))
    rows = np.flatnonzero(events.is_call & (events.key >= 0) | events.binds)
    order = rows[np.lexsort((events.binds[rows], events.time[rows], events.key[rows]))]
    last_call = np.maximum.accumulate(np.where(events.is_call[order], np.arange(len(order)), -1))
    bound = np.flatnonzero(events.binds[order])
    wait, call = order[bound], order[last_call[bound]]
    start = events.time[wait] - events.waited[wait]
    is_for_other = (
        (last_call[bound] >= 0) & (events.key[call] == events.key[wait]) & (events.rank[call] != events.rank[wait])
    )
    is_for_other &= events.time[call] > start
    wait, call = wait[is_for_other], call[is_for_other]
    return _Waits(events.rank[wait], start[is_for_other], events.time[call], events.rank[call])


def _told_by_time(waits: _Waits, did: Mapping[int, _Process], processes: Mapping[int, tuple[str, int]]) -> _Waits:
    """Return waits with a target each, in order, that do not overlap within a process.

    A wait of unknown target is for the process of another role that did something last before the wait ended.
    """
    ends = {process: did[process].own_ends for process in processes}
    target, until = waits.target.copy(), waits.until.copy()
    for row in np.flatnonzero(target < 0).tolist():
        last = {
            process: int(done[index])
            for process, done in ends.items()
            if processes[process][0] != processes.get(int(waits.process[row]), ("", 0))[0]
            for index in [int(np.searchsorted(done, waits.until[row], side="right")) - 1]
            if index >= 0 and done[index] > waits.start[row]
        }
        if last:
            target[row] = max(last, key=lambda process: last[process])
            until[row] = last[int(target[row])]
    order = np.lexsort((waits.start, waits.process))
    order = order[target[order] >= 0]
    start, until = waits.start[order], until[order]
    for done in split_by(waits.process[order]):
        until[done] = np.maximum.accumulate(until[done])
        start[done[1:]] = np.maximum(start[done[1:]], until[done[:-1]])
    kept = until > start
    return _Waits(waits.process[order][kept], start[kept], until[kept], target[order][kept])


def _cut(waits: _Waits, edges: Int64Array) -> _Waits:
    """Return waits that end where a step ends, and go on from there: each step has what is in it, and no more."""
    first, last = np.searchsorted(edges, waits.start, "right"), np.searchsorted(edges, waits.until)
    bounds = np.concatenate([[INT64_MIN], edges, [INT64_MAX]])
    part, wait = expand_ranges(first, last + 1)
    start, until = np.maximum(waits.start[wait], bounds[part]), np.minimum(waits.until[wait], bounds[part + 1])
    return _Waits(waits.process[wait], start, until, waits.target[wait])


def _followed(
    waits: _Waits, processes: Mapping[int, tuple[str, int]], edges: Int64Array
) -> dict[tuple[int, int], Float64Array]:
    """Return how long each process waited in each step for each of another role, ns.

    While that waits itself, it is waited for whom it waits for.
    """
    numbers = np.unique(np.append(waits.process, waits.target))
    begin = int(waits.start.min(initial=0))
    length = int(waits.until.max(initial=0)) - begin + 1

    def on_axis(process: Int64Array, time: Int64Array) -> Int64Array:
        place: Int64Array = np.searchsorted(numbers, process) * length + (time - begin)
        return place

    starts, ends = on_axis(waits.process, waits.start), on_axis(waits.process, waits.until)
    waiter, holder, since, until = waits.process, waits.target, waits.start, waits.until
    waited: dict[tuple[int, int], Float64Array] = {}
    for _ in range(_MAX_HOPS):
        low = np.searchsorted(ends, on_axis(holder, since), side="right")
        inner, outer = expand_ranges(low, np.searchsorted(starts, on_axis(holder, until)))
        goes_on = waits.target[inner] != waiter[outer]
        inner, outer = inner[goes_on], outer[goes_on]
        inner_since = np.maximum(waits.start[inner], since[outer])
        inner_until = np.minimum(waits.until[inner], until[outer])
        own_ns = until - since - np.bincount(outer, inner_until - inner_since, len(since))
        step = np.searchsorted(edges, until) - 1
        for row in np.flatnonzero((own_ns > 0) & (step >= 0) & (step < len(edges) - 1)).tolist():
            pair = int(waiter[row]), int(holder[row])
            roles = [processes.get(process, ("", 0))[0] for process in pair]
            if all(roles) and roles[0] != roles[1]:
                waited.setdefault(pair, np.zeros(len(edges) - 1))[step[row]] += own_ns[row]
        waiter, holder, since, until = waiter[outer], waits.target[inner], inner_since, inner_until
    return waited


def _place_times(process: _Process, edges: Int64Array) -> dict[ModulePhase, Float64Array]:
    """Return how long a process was in each range, and in each module outside of others, in each step without waits."""
    spans, ranges = process.spans, process.ranges
    waiting = process.waits.time_within(spans.start, spans.start + spans.duration)
    parent = find_parents(spans.track, spans.depth)
    waiting -= np.bincount(parent[parent >= 0], waiting[parent >= 0], len(waiting)).astype(np.int64)
    inside = ranges.end - ranges.start - process.waits.time_within(ranges.start, ranges.end)
    places: list[ModulePhase] = [(name.fqn, phase) for name in spans.names for phase in PHASES]
    places += [(place.removeprefix("range "), IN_RANGE) for place in ranges.places]
    place = np.append(
        spans.name.astype(np.int64) * len(PHASES) + spans.phase, len(spans.names) * len(PHASES) + ranges.place
    )
    step = np.searchsorted(edges, np.append(spans.start + spans.duration, ranges.end)) - 1
    counts = (step >= 0) & (step < len(edges) - 1)
    place_ns = np.append(spans.self_time - waiting, inside)
    times: dict[ModulePhase, Float64Array] = {}
    for number in np.unique(place[counts]).tolist():
        chosen = counts & (place == number)
        times.setdefault(places[number], np.zeros(len(edges) - 1))
        times[places[number]] += np.bincount(step[chosen], place_ns[chosen], len(edges) - 1)
    busy = union_of(
        np.concatenate([spans.start, ranges.start, process.waits.start]),
        np.concatenate([spans.start + spans.duration, ranges.end, process.waits.end]),
    )
    times[_NOWHERE] = np.diff(edges) - busy.time_within(edges[:-1], edges[1:]).astype(np.float64)
    return times


def join_role_times(parts: Iterable[RoleTimes | None]) -> RoleTimes | None:
    """Return the times of all parts of a run, in their order; None if it has one role."""
    in_order = [part for part in parts if part is not None]
    if not in_order:
        return None

    none = [np.zeros(len(part.length)) for part in in_order]

    def joined(tables: Sequence[Mapping[_Key, Float64Array]]) -> dict[_Key, Float64Array]:
        keys = dict.fromkeys(key for table in tables for key in table)
        return {key: np.concatenate([t.get(key, no) for t, no in zip(tables, none, strict=True)]) for key in keys}

    lengths = np.concatenate([part.length for part in in_order])
    return RoleTimes(
        in_order[0].processes, lengths, joined([p.waited for p in in_order]), joined([p.took for p in in_order])
    )


def find_role_waits(times: RoleTimes | None) -> tuple[RoleWait, ...]:
    """Say which role waits for which, the longest wait first; for which process, if that takes longer than its like."""
    if times is None:
        return ()
    members: dict[str, list[int]] = {}
    for process, (role, _) in sorted(times.processes.items(), key=lambda item: item[1]):
        members.setdefault(role, []).append(process)
    waits = [_role_wait(times, *pair, members) for pair in permutations(members, 2)]
    return tuple(sorted((wait for wait in waits if wait is not None), key=lambda wait: -wait.share))


def _role_wait(times: RoleTimes, role: str, other: str, members: Mapping[str, Sequence[int]]) -> RoleWait | None:
    none, holders, usual_step = np.zeros(len(times.length)), members[other], float(times.length.mean())
    waited = np.mean(
        [[times.waited.get((waiter, holder), none) for holder in holders] for waiter in members[role]], axis=0
    )
    shares = waited.sum(axis=1) / times.length.sum()
    share = float(shares.sum())
    places = list(dict.fromkeys(place for process, place in times.took if process in holders and place != _NOWHERE))
    if not places or share < _NAMED_SHARE:
        return None
    took, counted = _times_in(times, holders, places)
    who = role if len(members[role]) == 1 else f"{role}s"
    # Those outside last: there a process that waits unseen seems to work.
    for some in (places, [_NOWHERE]) if len(holders) > 1 else ():
        for slower, place, ratio in _find_slower(times, holders, some, waited):
            if ratio is None or ratio >= _LEAST_RATIO:
                named, own_share = process_label(*times.processes[holders[slower]]), float(shares[slower])
                return RoleWait(who, named, own_share, round(own_share * usual_step), *place, ratio)
    if share < _SAID_SHARE:
        return None
    label = process_label(*times.processes[holders[0]]) if len(holders) == 1 else f"{other}s"
    mean = counted.mean(axis=(1, 2))
    main = _main_place(places, mean, mean)
    if len(holders) == 1 and share < _SAID_SHARE_ALONE and mean[main] < _SAID_SHARE * usual_step:
        return None
    # In each step the others wait for the process that takes the longest.
    outside = float((waited.sum(axis=0) - took.sum(axis=0).max(axis=0)).mean())
    place = _NOWHERE if outside > mean[main] else places[main]
    return RoleWait(who, label, share, round(share * usual_step), *place, None)


def _times_in(
    times: RoleTimes, holders: Sequence[int], places: Sequence[ModulePhase]
) -> tuple[Float64Array, Float64Array]:
    """Return the time by place, process and step; and the same times without those of few steps, to compare by."""
    none = np.zeros(len(times.length))
    took = np.array([[times.took.get((holder, place), none) for holder in holders] for place in places])
    return took, np.minimum(took, _made_again(took)[..., None])


def _made_again(times: Float64Array) -> Float64Array:
    """Return the time that each row reaches in `_AGAIN` steps."""
    reached: Float64Array = np.sort(times)[..., max(times.shape[-1] - _AGAIN, 0)]
    return reached


def _find_slower(
    times: RoleTimes, holders: Sequence[int], places: Sequence[ModulePhase], waited: Float64Array
) -> Iterator[tuple[int, ModulePhase, float | None]]:
    """Yield which of `holders` take longer than the others again and again, in which of `places`, by what ratio."""
    took, counted = _times_in(times, holders, places)
    more = [counted[:, holder] - _of_others(counted, holder) for holder in range(len(holders))]
    worst = [_main_place(places, counted[:, holder].mean(axis=1), ns.mean(axis=1)) for holder, ns in enumerate(more)]
    usual = np.concatenate([_of_others(took[[place]], holder) for holder, place in enumerate(worst)])
    excess = took[worst, range(len(holders))] - usual
    # Work that the others never do does not vary by chance, however long it takes from step to step.
    noise = np.minimum(_deviation(excess), _deviation(usual))
    cost = np.minimum(excess, waited)
    cost[cost <= np.maximum(COUNTED_NOISES * noise[:, None], _NAMED_SHARE * times.length)] = 0
    if cost.any():
        cost[cost < _LITTLE * np.median(cost[cost > 0])] = 0
    late = np.where(cost.any(axis=0), cost.argmax(axis=0), NO_RANK).tolist()
    # If the others never take nearly as much more, that is not by chance.
    by_chance = _made_again(usual - np.median(usual, axis=1, keepdims=True))
    alone = {
        holder
        for holder, costs in enumerate(cost)
        if np.count_nonzero(costs) >= _AGAIN and by_chance[holder] < _LITTLE * np.median(costs[costs > 0])
    }
    total_cost, least = cost.sum(axis=1), _SAID_SHARE * times.length.sum()
    named = [holder for holder in often_late(late, len(holders)) | alone if total_cost[holder] >= least]
    for holder in sorted(named, key=lambda holder: -float(total_cost[holder])):
        total = float(usual[holder].sum())
        yield holder, places[worst[holder]], 1 + float(excess[holder].sum()) / total if total > 0 else None


def _of_others(times: Float64Array, holder: int) -> Float64Array:
    """Return for each place the median time in each step of all holders but one."""
    usual: Float64Array = np.median(np.delete(times, holder, axis=1), axis=1)
    return usual


def _deviation(times: Float64Array) -> Float64Array:
    """Return the deviation of each row from step to step."""
    deviation: Float64Array = MAD_TO_SIGMA * np.median(np.abs(times - np.median(times, axis=1, keepdims=True)), axis=1)
    return deviation


def _main_place(places: Sequence[ModulePhase], times: Float64Array, more: Float64Array) -> int:
    """Return the place that is named for a delay: a module, or the shortest range that has most of it."""
    in_range = np.array([phase == IN_RANGE for _, phase in places])
    modules, ranges = np.where(in_range, -np.inf, more), np.where(in_range, more, -np.inf)
    if not in_range.any() or modules.max() >= max(_MOST / 2 * ranges.max(), 0):
        return int(modules.argmax())
    return int(np.where(ranges >= _MOST * ranges.max(), times, np.inf).argmin())
