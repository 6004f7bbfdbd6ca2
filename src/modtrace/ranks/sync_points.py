"""Collectives that no rank can leave before the last one has come, and the offsets between ranks that they show.

Rank A calls a collective at a and leaves it at A'; rank B calls it at b and leaves it at B'. On any clock that shows
both, B' is not before a, and A' is not before b. So each collective gives a range that holds the true offset, as a ping
does. The ends come at about the same time, and say where in the range it is. Ranks need no pings then.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .._arrays import (
    INT64_MAX,
    INT64_MIN,
    BoolArray,
    Float64Array,
    IndexArray,
    Int32Array,
    Int64Array,
    group_lengths,
    group_starts,
    number_distinct,
)
from ..ring.clocks import MAX_RATE, ClockMap, Offset, Reading
from ..timeline import Collectives, Group, Timeline

SYNCHRONIZING = ("all_", "reduce_scatter", "barrier", "monitored_barrier")
"""The begins of the names of operators that end on no rank before all have called them."""

_GROUP_SHIFT = 40

_PER_READING = 64
"""The number of collectives of one reading, if there are so many."""
_MAX_READINGS = 64
_MIN_RATE_ERROR = 1e-6
"""The least change of the rate of two clocks that is assumed within a reading."""
GroupKey = tuple[str, tuple[int, ...]]
"""A process group: its name as torch has it, and its global ranks, as different groups can have one name."""


class SyncPoints(NamedTuple):
    """Calls of synchronizing collectives, in the order of their starts; arrays of equal length."""

    groups: Sequence[GroupKey]  # what `group` points into
    row: Int64Array  # index of the call among the collectives
    group: Int64Array
    counter: Int64Array  # which collective of its group it is
    start: Int64Array  # when it was called, nanoseconds
    # When it was complete or, if that is not known, when a thread had waited for it; -1 if neither is known, as of what
    # a device runs.
    released: Int64Array


def synchronizing(operators: Iterable[str]) -> BoolArray:
    """Return for each operator whether no rank can leave its collectives before the last one has come."""
    return np.array([operator.startswith(SYNCHRONIZING) for operator in operators], np.bool_)


def group_keys(groups: Sequence[Group]) -> dict[str, GroupKey]:
    """Return the key of each group of a rank, by name: it differs between groups of one name."""
    return {group.name: (group.name, group.ranks) for group in groups}


def call_keys(group: Int32Array | Int64Array, counter: Int64Array) -> Int64Array:
    """Return one integer for each call: the number of its group, and in the lower 40 bits its counter."""
    keys: Int64Array = group.astype(np.int64) << _GROUP_SHIFT | counter
    return keys


def sync_points(collectives: Collectives) -> SyncPoints:
    """Return the calls of a rank that have a counter and synchronize."""
    key_of = group_keys(collectives.groups)
    keys = [key_of.get(name.group, (name.group, ())) for name in collectives.names]
    groups, number_of_name = number_distinct(keys)
    group_of_name = np.append(number_of_name, -1).astype(np.int64)
    synchronizes = synchronizing([*(name.operator for name in collectives.names), ""])
    chosen = synchronizes[collectives.name] & (collectives.counter >= 0)
    rows = np.flatnonzero(chosen & ~collectives.is_wait)
    group, counter = group_of_name[collectives.name[rows]], collectives.counter[rows]
    released = np.where(collectives.on_device[rows], -1, collectives.done[rows])
    waits = np.flatnonzero(chosen & collectives.is_wait & collectives.complete & ~collectives.on_device)
    waited = _first_wait_end(collectives, group_of_name, waits, group, counter)
    released = np.where(released >= 0, released, waited)
    return SyncPoints(groups, rows.astype(np.int64), group, counter, collectives.start[rows], released)


def _first_wait_end(
    collectives: Collectives, group_of_name: Int64Array, waits: Int64Array, group: Int64Array, counter: Int64Array
) -> Int64Array:
    """Return for each call the first end of a wait for it; -1 if there is none."""
    never = INT64_MAX
    called = call_keys(group, counter)
    waited = call_keys(group_of_name[collectives.name[waits]], collectives.counter[waits])
    keys, place = np.unique(np.concatenate([called, waited]), return_inverse=True)
    first = np.full(len(keys), never)
    np.minimum.at(first, place[len(called) :], collectives.end[waits])
    ends = first[place[: len(called)]]
    return np.where(ends == never, -1, ends)


class InferredWaits(NamedTuple):
    """Waits of one rank; arrays of equal length."""

    start: Int64Array  # ns
    end: Int64Array  # ns
    step: Int64Array  # the step that they are in


def inferred_waits(timeline: Timeline) -> InferredWaits:
    """Return the waits of a rank that have no row in `Timeline.collectives`."""
    collectives = timeline.collectives
    points = sync_points(collectives)
    unseen = (collectives.done[points.row] >= 0) & (collectives.done[points.row] > collectives.end[points.row])
    unseen &= ~collectives.on_device[points.row]
    waits = collectives.is_wait & (collectives.counter >= 0)
    key = call_keys(collectives.name, collectives.counter)
    unseen &= ~np.isin(key[points.row], key[waits])
    row, done = points.row[unseen], points.released[unseen]
    if not len(row):
        return InferredWaits(*(np.empty(0, np.int64) for _ in range(3)))
    begin, end = _sections(timeline)
    section = np.searchsorted(begin, collectives.start[row], side="right") - 1
    inside = (section >= 0) & (collectives.start[row] < end[section])
    row, done, section = row[inside], done[inside], section[inside]
    until = np.zeros(len(begin), np.int64)
    np.maximum.at(until, section, np.minimum(done, end[section]))
    last_row = np.full(len(begin), -1, np.int64)
    np.maximum.at(last_row, section, row)
    used = np.flatnonzero(last_row >= 0)
    # The last work before: the call itself, or a span after it.
    since = np.maximum(collectives.end[last_row[used]], _last_activity(timeline, until[used]))
    waited = since < until[used]
    return InferredWaits(since[waited], until[used][waited], collectives.step[last_row[used]][waited])


def _sections(timeline: Timeline) -> tuple[Int64Array, Int64Array]:
    """Return begins and ends of backward passes, or of steps if there are no passes."""
    passes = sorted((backward.start_ns, backward.end_ns) for backward in timeline.backward_passes)
    if passes:
        begin, end = np.array(passes, np.int64).T
        return begin, end
    edges = np.array([INT64_MIN, *timeline.step_ends, INT64_MAX])
    return edges[:-1], edges[1:]


def _last_activity(timeline: Timeline, until: Int64Array) -> Int64Array:
    """Return for some moments when the last span before had ended; the moment itself if a span is open then."""
    columns = timeline.columns
    outermost = columns.depth == 0
    start, end = columns.start[outermost], np.maximum.accumulate(columns.end[outermost])
    index = np.searchsorted(start, until) - 1
    if not len(start):
        return np.full(len(until), INT64_MIN)
    return np.where(index >= 0, np.minimum(end[np.maximum(index, 0)], until), INT64_MIN)


def offsets_by_collectives(
    collectives: Mapping[int, Collectives], placed: Mapping[int, Callable[[Int64Array], Offset]]
) -> Iterator[tuple[int, ClockMap]]:
    """Yield how far the job's time is ahead of each rank that has collectives together with ranks that are placed.

    Those that have them only with ranks that this places come after these. The bound holds that of the ranks that one
    is placed by.
    """
    numbers: dict[GroupKey, int] = {}
    points = {rank: sync_points(table) for rank, table in collectives.items()}
    to_job = dict(placed)
    while True:
        placed_calls = _calls_of([(points[rank], to_job[rank]) for rank in to_job if rank in points], numbers)
        newly_placed = [
            (rank, ClockMap(readings))
            for rank in sorted(points.keys() - to_job.keys())
            if (readings := _readings(points[rank], placed_calls, numbers))
        ]
        if not newly_placed:
            return
        yield from newly_placed
        to_job.update((rank, offsets.at) for rank, offsets in newly_placed)


def readings_of_ranges(time: Int64Array, low: Int64Array, high: Int64Array, estimate: Int64Array) -> list[Reading]:
    """Return readings of a clock from ranges, ascending in own time, of how far it can be ahead."""
    parts = np.array_split(
        np.arange(len(time)), int(np.clip(len(time) // _PER_READING, min(2, len(time)), _MAX_READINGS))
    )
    base_time, base = int(time[0]), int(estimate[0])
    since, about = (time - base_time).astype(np.float64), (estimate - base).astype(np.float64)
    least, most = (low - base).astype(np.float64), (high - base).astype(np.float64)
    middle = np.array([np.median(since[part]) for part in parts])
    seems = np.array([np.median(about[part]) for part in parts])
    rate, rate_error = _rate(parts, (since, least, most), middle, seems)
    readings = []
    for part, moment in zip(parts, middle.tolist(), strict=True):
        distance = since[part] - moment
        drift, slack = distance * rate, np.abs(distance) * rate_error
        bottom, top = float(np.max(least[part] - drift - slack)), float(np.min(most[part] - drift + slack))
        if bottom > top:  # a clock jumped
            bottom, top = float(np.min(least[part])), float(np.max(most[part]))
        offset = float(np.clip(np.median(about[part] - drift), bottom, top))
        bound = int(np.ceil(max(top - offset, offset - bottom))) + 1
        readings.append(Reading(base_time + round(moment), base + round(offset), bound, round(top - bottom)))
    return readings


def _rate(
    parts: Sequence[IndexArray], ranges: tuple[Float64Array, ...], middle: Float64Array, about: Float64Array
) -> tuple[float, float]:
    """Return how fast an offset grows by its readings' ranges, and how far that is off at most if it grows evenly."""
    time, low, high = ranges
    first, second = np.triu_indices(len(middle), 1)
    apart = middle[second] > middle[first]
    if not np.any(apart):
        return 0.0, MAX_RATE
    rough = float(np.median((about[second] - about[first])[apart] / (middle[second] - middle[first])[apart]))
    rough = float(np.clip(rough, -MAX_RATE, MAX_RATE))
    # In each part the ranges that say most.
    lowest = np.array([part[np.argmin(high[part] - rough * time[part])] for part in parts])
    highest = np.array([part[np.argmax(low[part] - rough * time[part])] for part in parts])
    most, least = _least_slope(time, low, high, highest, lowest), -_least_slope(time, -high, -low, lowest, highest)
    rate = float(np.clip(rough, max(least, -MAX_RATE), min(most, MAX_RATE)))
    return rate, min(max(most - rate, rate - least) + _MIN_RATE_ERROR, 2 * MAX_RATE)


def _least_slope(
    time: Float64Array, low: Float64Array, high: Float64Array, begins: IndexArray, ends: IndexArray
) -> float:
    """Return the least of the slopes that no line through two ranges exceeds."""
    apart = time[ends][None, :] - time[begins][:, None]
    rise = high[ends][None, :] - low[begins][:, None]
    later = apart > 0
    return float(np.min(rise[later] / apart[later], initial=MAX_RATE))


def _calls_of(
    ranks: Iterable[tuple[SyncPoints, Callable[[Int64Array], Offset]]], numbers: dict[GroupKey, int]
) -> tuple[Int64Array, ...]:
    """Return the calls of collectives by many ranks: arrays of equal length, in nanoseconds of the job.

    They say, ordered by the first, which collective it is; the latest call of any of the ranks, less its bound; the
    earliest release of any of them, and its bound; their median release.
    """
    parts = [np.empty((4, 0), np.int64)]
    for points, to_job in ranks:
        whole = points.released >= 0
        start, released = points.start[whole], points.released[whole]
        of_start, of_release = to_job(start), to_job(released)
        bound = np.maximum(of_start.bound_ns, of_release.bound_ns)
        moved = [start + of_start.offset_ns, released + of_release.offset_ns]
        parts.append(np.stack([_keys(points, numbers)[whole], *moved, bound]))
    calls = np.concatenate(parts, axis=1)
    key, start_ns, release_ns, bound_ns = calls[:, np.lexsort((calls[2], calls[0]))]
    first = group_starts(key)
    return (
        key[first],
        np.maximum.reduceat(start_ns - bound_ns, first),
        np.minimum.reduceat(release_ns + bound_ns, first),
        release_ns[first + group_lengths(first, len(key)) // 2],
    )


def _readings(points: SyncPoints, placed_calls: tuple[Int64Array, ...], numbers: dict[GroupKey, int]) -> list[Reading]:
    key, last_start, first_release, release = placed_calls
    whole = np.flatnonzero(points.released >= 0)
    _, position, call = np.intersect1d(key, _keys(points, numbers)[whole], return_indices=True)
    if not len(call):
        return []
    start = points.start[whole[call]]
    order = np.argsort(start, kind="stable")
    position, start, released = position[order], start[order], points.released[whole[call]][order]
    low, high = last_start[position] - released, first_release[position] - start
    return readings_of_ranges(start, low, high, release[position] - released)


def _keys(points: SyncPoints, numbers: dict[GroupKey, int]) -> Int64Array:
    group = np.array([numbers.setdefault(key, len(numbers)) for key in points.groups] + [-1], np.int64)
    return call_keys(group[points.group], points.counter)
