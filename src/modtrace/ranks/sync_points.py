"""Collectives that no rank can leave before the last rank has called them, and the clock offsets that follow from them.

Rank A calls a collective at a and leaves it at A'; rank B calls it at b and leaves it at B'. On a common clock, B' is
not before a, and A' is not before b. So each collective gives a range that contains the true offset, as a ping does.
The ends come at about the same time, which gives an estimate inside the range. Then ranks need no pings.
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
"""Prefixes of the names of operators that end on no rank before all ranks have called them."""

_GROUP_SHIFT = 40

_PER_READING = 64
"""Number of collectives of one reading, if there are enough of them."""
_MAX_READINGS = 64
_MIN_RATE_ERROR = 1e-6
"""Minimum change of the rate of two clocks that is assumed within a reading."""
GroupKey = tuple[str, tuple[int, ...]]
"""A process group: torch's name, and its global ranks, because different groups can have one name."""


class SyncPoints(NamedTuple):
    """Calls of synchronizing collectives, in the order of their starts; arrays of equal length."""

    groups: Sequence[GroupKey]  # the groups that `group` refers to
    row: Int64Array  # index of the call among the collectives
    group: Int64Array
    counter: Int64Array  # number of the collective in its group
    start_ns: Int64Array  # time of the call
    # Time of its completion, or of the end of the first wait for it; -1 if unknown, such as for a device's collectives
    released_ns: Int64Array


def synchronizing(operators: Iterable[str]) -> BoolArray:
    """Return a mask of the operators whose collectives no rank can leave before the last rank has called them."""
    return np.array([operator.startswith(SYNCHRONIZING) for operator in operators], np.bool_)


def group_keys(groups: Sequence[Group]) -> dict[str, GroupKey]:
    """Return name -> key of each group of a rank; keys differ between groups of one name."""
    return {group.name: (group.name, group.ranks) for group in groups}


def call_keys(group: Int32Array | Int64Array, counter: Int64Array) -> Int64Array:
    """Return an integer for each call: the number of its group, with its counter in the lower 40 bits."""
    keys: Int64Array = group.astype(np.int64) << _GROUP_SHIFT | counter
    return keys


def sync_points(collectives: Collectives) -> SyncPoints:
    """Return the synchronizing calls of a rank that have a counter."""
    key_of = group_keys(collectives.groups)
    keys = [key_of.get(name.group, (name.group, ())) for name in collectives.names]
    groups, number_of_name = number_distinct(keys)
    group_of_name = np.append(number_of_name, -1).astype(np.int64)
    synchronizes = synchronizing([*(name.operator for name in collectives.names), ""])
    is_sync_point = synchronizes[collectives.name] & (collectives.counter >= 0)
    rows = np.flatnonzero(is_sync_point & ~collectives.is_wait)
    group, counter = group_of_name[collectives.name[rows]], collectives.counter[rows]
    released = np.where(collectives.on_device[rows], -1, collectives.done[rows])
    waits = np.flatnonzero(is_sync_point & collectives.is_wait & collectives.complete & ~collectives.on_device)
    wait_end = _first_wait_end(collectives, group_of_name, waits, group, counter)
    released = np.where(released >= 0, released, wait_end)
    return SyncPoints(groups, rows.astype(np.int64), group, counter, collectives.start[rows], released)


def _first_wait_end(
    collectives: Collectives, group_of_name: Int64Array, waits: Int64Array, group: Int64Array, counter: Int64Array
) -> Int64Array:
    """Return the first end of a wait for each call; -1 if there is no wait."""
    never = INT64_MAX
    call_key = call_keys(group, counter)
    wait_key = call_keys(group_of_name[collectives.name[waits]], collectives.counter[waits])
    keys, key_index = np.unique(np.concatenate([call_key, wait_key]), return_inverse=True)
    first = np.full(len(keys), never)
    np.minimum.at(first, key_index[len(call_key) :], collectives.end[waits])
    ends = first[key_index[: len(call_key)]]
    return np.where(ends == never, -1, ends)


class InferredWaits(NamedTuple):
    """Waits of one rank; arrays of equal length."""

    start_ns: Int64Array
    end_ns: Int64Array
    step: Int64Array  # number of the step


def inferred_waits(timeline: Timeline) -> InferredWaits:
    """Return the waits of a rank that have no row in `Timeline.collectives`."""
    collectives = timeline.collectives
    points = sync_points(collectives)
    has_no_wait = (collectives.done[points.row] >= 0) & (collectives.done[points.row] > collectives.end[points.row])
    has_no_wait &= ~collectives.on_device[points.row]
    waits = collectives.is_wait & (collectives.counter >= 0)
    key = call_keys(collectives.name, collectives.counter)
    has_no_wait &= ~np.isin(key[points.row], key[waits])
    row, done = points.row[has_no_wait], points.released_ns[has_no_wait]
    if not len(row):
        return InferredWaits(*(np.empty(0, np.int64) for _ in range(3)))
    start, end = _sections(timeline)
    section = np.searchsorted(start, collectives.start[row], side="right") - 1
    inside = (section >= 0) & (collectives.start[row] < end[section])
    row, done, section = row[inside], done[inside], section[inside]
    wait_end = np.zeros(len(start), np.int64)
    np.maximum.at(wait_end, section, np.minimum(done, end[section]))
    last_row = np.full(len(start), -1, np.int64)
    np.maximum.at(last_row, section, row)
    sections = np.flatnonzero(last_row >= 0)
    # A wait starts after the last work: the call itself, or a later span.
    wait_start = np.maximum(collectives.end[last_row[sections]], _last_activity(timeline, wait_end[sections]))
    is_wait = wait_start < wait_end[sections]
    sections = sections[is_wait]
    return InferredWaits(wait_start[is_wait], wait_end[sections], collectives.step[last_row[sections]])


def _sections(timeline: Timeline) -> tuple[Int64Array, Int64Array]:
    """Return the starts and ends of backward passes, or of steps if there are no passes."""
    passes = sorted((backward.start_ns, backward.end_ns) for backward in timeline.backward_passes)
    if passes:
        start, end = np.array(passes, np.int64).T
        return start, end
    edges = np.array([INT64_MIN, *timeline.step_ends, INT64_MAX])
    return edges[:-1], edges[1:]


def _last_activity(timeline: Timeline, moments: Int64Array) -> Int64Array:
    """Return the end of the last span before each moment; the moment itself if a span is open then."""
    columns = timeline.columns
    outermost = columns.depth == 0
    start, end = columns.start[outermost], np.maximum.accumulate(columns.end[outermost])
    index = np.searchsorted(start, moments) - 1
    if not len(start):
        return np.full(len(moments), INT64_MIN)
    return np.where(index >= 0, np.minimum(end[np.maximum(index, 0)], moments), INT64_MIN)


def offsets_by_collectives(
    collectives: Mapping[int, Collectives], known_times: Mapping[int, Callable[[Int64Array], Offset]]
) -> Iterator[tuple[int, ClockMap]]:
    """Yield (rank, clock map to the job's time) for ranks that share collectives with ranks of known time.

    A rank that shares them only with ranks yielded here comes after these. Its bound includes theirs.
    """
    numbers: dict[GroupKey, int] = {}
    points = {rank: sync_points(table) for rank, table in collectives.items()}
    to_job = dict(known_times)
    while True:
        known_calls = _calls_of([(points[rank], to_job[rank]) for rank in to_job if rank in points], numbers)
        new_maps = [
            (rank, ClockMap(readings))
            for rank in sorted(points.keys() - to_job.keys())
            if (readings := _readings(points[rank], known_calls, numbers))
        ]
        if not new_maps:
            return
        yield from new_maps
        to_job.update((rank, offsets.at) for rank, offsets in new_maps)


def readings_of_ranges(time: Int64Array, low: Int64Array, high: Int64Array, estimate: Int64Array) -> list[Reading]:
    """Return readings of a clock, given (low, high) ranges of its offset, ascending in own time."""
    parts = np.array_split(
        np.arange(len(time)), int(np.clip(len(time) // _PER_READING, min(2, len(time)), _MAX_READINGS))
    )
    base_time, base = int(time[0]), int(estimate[0])
    elapsed, offset_estimate = (time - base_time).astype(np.float64), (estimate - base).astype(np.float64)
    low_offset, high_offset = (low - base).astype(np.float64), (high - base).astype(np.float64)
    middles = np.array([np.median(elapsed[part]) for part in parts])
    median_estimate = np.array([np.median(offset_estimate[part]) for part in parts])
    rate, rate_error = _rate(parts, (elapsed, low_offset, high_offset), middles, median_estimate)
    readings = []
    for part, moment in zip(parts, middles.tolist(), strict=True):
        distance = elapsed[part] - moment
        drift, slack = distance * rate, np.abs(distance) * rate_error
        bottom, top = float(np.max(low_offset[part] - drift - slack)), float(np.min(high_offset[part] - drift + slack))
        if bottom > top:  # a clock jumped
            bottom, top = float(np.min(low_offset[part])), float(np.max(high_offset[part]))
        offset = float(np.clip(np.median(offset_estimate[part] - drift), bottom, top))
        bound = int(np.ceil(max(top - offset, offset - bottom))) + 1
        readings.append(Reading(base_time + round(moment), base + round(offset), bound, round(top - bottom)))
    return readings


def _rate(
    parts: Sequence[IndexArray], ranges: tuple[Float64Array, ...], middle: Float64Array, estimate: Float64Array
) -> tuple[float, float]:
    """Return (rate, maximum error of the rate) of an offset, given its ranges; the offset is assumed to grow evenly."""
    time, low, high = ranges
    first, second = np.triu_indices(len(middle), 1)
    differs = middle[second] > middle[first]
    if not np.any(differs):
        return 0.0, MAX_RATE
    rates = (estimate[second] - estimate[first])[differs] / (middle[second] - middle[first])[differs]
    median_rate = float(np.clip(np.median(rates), -MAX_RATE, MAX_RATE))
    # The narrowest limits of each part.
    lowest = np.array([part[np.argmin(high[part] - median_rate * time[part])] for part in parts])
    highest = np.array([part[np.argmax(low[part] - median_rate * time[part])] for part in parts])
    max_rate, min_rate = _max_slope(time, low, high, highest, lowest), -_max_slope(time, -high, -low, lowest, highest)
    rate = float(np.clip(median_rate, max(min_rate, -MAX_RATE), min(max_rate, MAX_RATE)))
    return rate, min(max(max_rate - rate, rate - min_rate) + _MIN_RATE_ERROR, 2 * MAX_RATE)


def _max_slope(
    time: Float64Array, low: Float64Array, high: Float64Array, starts: IndexArray, ends: IndexArray
) -> float:
    """Return the smallest upper limit of the slopes of lines through two ranges."""
    distance = time[ends][None, :] - time[starts][:, None]
    rise = high[ends][None, :] - low[starts][:, None]
    is_later = distance > 0
    return float(np.min(rise[is_later] / distance[is_later], initial=MAX_RATE))


def _calls_of(
    ranks: Iterable[tuple[SyncPoints, Callable[[Int64Array], Offset]]], numbers: dict[GroupKey, int]
) -> tuple[Int64Array, ...]:
    """Return (key, latest call, earliest release, median release) of the ranks' collectives, sorted by key.

    Times are ns of the job. The latest call is less its bound; the earliest release includes its bound.
    """
    parts = [np.empty((4, 0), np.int64)]
    for points, to_job in ranks:
        is_released = points.released_ns >= 0
        start, released = points.start_ns[is_released], points.released_ns[is_released]
        start_offset, release_offset = to_job(start), to_job(released)
        bound = np.maximum(start_offset.bound_ns, release_offset.bound_ns)
        job_times = [start + start_offset.offset_ns, released + release_offset.offset_ns]
        parts.append(np.stack([_keys(points, numbers)[is_released], *job_times, bound]))
    calls = np.concatenate(parts, axis=1)
    key, start_ns, release_ns, bound_ns = calls[:, np.lexsort((calls[2], calls[0]))]
    first = group_starts(key)
    return (
        key[first],
        np.maximum.reduceat(start_ns - bound_ns, first),
        np.minimum.reduceat(release_ns + bound_ns, first),
        release_ns[first + group_lengths(first, len(key)) // 2],
    )


def _readings(points: SyncPoints, known_calls: tuple[Int64Array, ...], numbers: dict[GroupKey, int]) -> list[Reading]:
    key, last_start, first_release, release = known_calls
    released_rows = np.flatnonzero(points.released_ns >= 0)
    _, position, call = np.intersect1d(key, _keys(points, numbers)[released_rows], return_indices=True)
    if not len(call):
        return []
    start = points.start_ns[released_rows[call]]
    order = np.argsort(start, kind="stable")
    position, start, released = position[order], start[order], points.released_ns[released_rows[call]][order]
    low, high = last_start[position] - released, first_release[position] - start
    return readings_of_ranges(start, low, high, release[position] - released)


def _keys(points: SyncPoints, numbers: dict[GroupKey, int]) -> Int64Array:
    group = np.array([numbers.setdefault(key, len(numbers)) for key in points.groups] + [-1], np.int64)
    return call_keys(group[points.group], points.counter)
