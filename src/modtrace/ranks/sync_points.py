"""The collectives of one rank that no rank can leave before the last one has come."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .._typing import Int32Array, Int64Array
from ..timeline import Collectives, Group, Timeline
from .groups import number_distinct

SYNCHRONIZING = ("all_", "reduce_scatter", "barrier", "monitored_barrier")
"""How the names of operators begin that end on no rank before all have called them."""

_COUNTER_BITS = 40

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


def is_synchronizing(operator: str) -> bool:
    """Tell whether no rank can leave a collective of this operator before the last one has come."""
    return operator.startswith(SYNCHRONIZING)


def group_keys(groups: Sequence[Group]) -> dict[str, GroupKey]:
    """Return the key of each group of a rank, by name: it differs between groups of one name."""
    return {group.name: (group.name, group.ranks) for group in groups}


def call_keys(group: Int32Array | Int64Array, counter: Int64Array) -> Int64Array:
    """Return one integer for each call: the number of its group, and in the lower 40 bits its counter."""
    keys: Int64Array = group.astype(np.int64) << _COUNTER_BITS | counter
    return keys


def sync_points(collectives: Collectives) -> SyncPoints:
    """Return the calls of a rank that have a counter and synchronize."""
    known = group_keys(collectives.groups)
    keys = [known.get(name.group, (name.group, ())) for name in collectives.names]
    groups, number_of_name = number_distinct(keys)
    group_of_name = np.append(number_of_name, -1).astype(np.int64)
    synchronizes = np.array([is_synchronizing(name.operator) for name in collectives.names] + [False], np.bool_)
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
    never = np.iinfo(np.int64).max
    called = call_keys(group, counter)
    waited = call_keys(group_of_name[collectives.name[waits]], collectives.counter[waits])
    keys, place = np.unique(np.concatenate([called, waited]), return_inverse=True)
    first = np.full(len(keys), never)
    np.minimum.at(first, place[len(called) :], collectives.end[waits])
    ends = first[place[: len(called)]]
    return np.where(ends == never, -1, ends)


class InferredWaits(NamedTuple):
    """Waits of one rank; arrays of equal length.

    Attributes:
        start: int64, ns.
        end: int64, ns.
        step: int64, the step that they are in.
    """

    start: Int64Array
    end: Int64Array
    step: Int64Array


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
    # What ran last before: the call itself, or a span after it.
    since = np.maximum(collectives.end[last_row[used]], _last_activity(timeline, until[used]))
    waited = since < until[used]
    return InferredWaits(since[waited], until[used][waited], collectives.step[last_row[used]][waited])


def _sections(timeline: Timeline) -> tuple[Int64Array, Int64Array]:
    """Return begins and ends of backward passes, or of steps if there are no passes."""
    passes = sorted((one.start_ns, one.end_ns) for one in timeline.backward_passes)
    if passes:
        begin, end = np.array(passes, np.int64).T
        return begin, end
    marks = sorted(mark.time_ns for mark in timeline.marks if mark.kind == "step")
    edges = [np.iinfo(np.int64).min, *marks, np.iinfo(np.int64).max]
    return np.array(edges[:-1], np.int64), np.array(edges[1:], np.int64)


def _last_activity(timeline: Timeline, until: Int64Array) -> Int64Array:
    """Return for some moments when the last span before had ended; the moment itself if a span is open then."""
    columns = timeline.columns
    outermost = columns.depth == 0
    start, end = columns.start[outermost], np.maximum.accumulate(columns.end[outermost])
    index = np.searchsorted(start, until) - 1
    if not len(start):
        return np.full(len(until), np.iinfo(np.int64).min)
    return np.where(index >= 0, np.minimum(end[np.maximum(index, 0)], until), np.iinfo(np.int64).min)
