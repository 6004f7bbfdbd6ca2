"""A ring's events of torch.distributed → collectives and waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..._typing import AnyArray, BoolArray, Int64Array
from ...ring import Events, Kind, Record
from ...ring.collective_text import parse_collective
from ...ring.slot_format import COMMUNICATION_KINDS, NO_NAME, NOT_AWAITED_BIT
from ..collectives import Collectives, Group
from ..contents import COMMUNICATION, Process, Track
from .device import collective_points, device_clocks

__all__ = ["assign_communication_tracks", "build_collectives", "is_communication"]

_COUNTER_BITS = 39


def is_communication(events: Events) -> BoolArray:
    """Tell which events are of torch.distributed; modules and nodes are found as if they were not there."""
    return np.isin(events.kind, COMMUNICATION_KINDS)


def build_collectives(
    events: Events,
    texts: Sequence[str],
    records: Sequence[Record],
    to_unix: Callable[[Int64Array], Int64Array],
    steps_at: Callable[[Int64Array], Int64Array],
) -> Collectives:
    """Build the table; the column `track` holds the threads, by their number in the name table.

    Args:
        events: all events.
        texts: those of the name table, by number.
        records: the name table.
        to_unix: monotonic → Unix nanoseconds.
        steps_at: index of an event → the number of steps that had ended.
    """
    index = np.flatnonzero(is_communication(events))
    if not len(index):
        return Collectives.of(groups=_groups(records))
    calls = events.kind[index] != Kind.COLLECTIVE_DONE
    begin, end, complete = _pair(events, index[calls])
    is_wait = events.kind[begin] == Kind.WAIT_ENTER
    counter = np.where(events.value[begin] < 1 << _COUNTER_BITS, np.maximum(events.value[begin], -1), -1)
    done = _find_done(events, index[~calls], begin, is_wait)
    used, name = np.unique(np.where(events.name[begin] == NO_NAME, -1, events.name[begin]), return_inverse=True)
    known = used[used >= 0]
    exit_value = np.where(complete & ~is_wait, events.value[end], 0)
    order = np.lexsort((begin, events.time[begin]))
    names = [parse_collective(texts[number]) for number in known.tolist()]
    # What says that a device is done comes when somebody asked it, up to 100 ms later.
    on_device = np.array([bool(name.device) for name in names] + [False])[name - (len(used) - len(known))]
    done = np.where(on_device, _find_done_on_device(events, begin, end, is_wait), done)
    table = Collectives.of(
        names,
        _groups(records),
        start=to_unix(events.time[begin]),
        end=to_unix(events.time[end]),
        done=np.where(done >= 0, to_unix(done), -1),
        name=name - (len(used) - len(known)),
        is_wait=is_wait,
        counter=counter,
        nbytes=np.where(exit_value > 0, exit_value & (NOT_AWAITED_BIT - 1), 0),
        track=events.thread[begin],
        step=steps_at(begin),
        complete=complete,
    )
    return table.take(order)


def assign_communication_tracks(
    tracks: Sequence[Track], collectives: Collectives, threads: Sequence[tuple[str, int]], process: Process
) -> tuple[list[Track], Collectives]:
    """Return the tracks with one more for each thread that has collectives, and the collectives on these."""
    used, track = np.unique(collectives.track, return_inverse=True)
    described = [threads[thread] for thread in used.tolist()]
    added = [Track(COMMUNICATION, name, tid, process) for name, tid in described]
    table = replace(collectives, track=(len(tracks) + track).astype(np.int32))
    return [*tracks, *added], table


def _pair(events: Events, index: AnyArray) -> tuple[Int64Array, Int64Array, BoolArray]:
    """Return each enter, what ends it, and whether that is its exit.

    An enter whose exit is lost ends with the next event of its thread, or, as what is open, with the last of all.
    """
    index = index[np.argsort(events.thread[index], kind="stable")]
    enter = np.isin(events.kind[index], (Kind.COLLECTIVE_ENTER, Kind.WAIT_ENTER))
    thread, name = events.thread[index], events.name[index]
    following = np.minimum(np.arange(len(index)) + 1, len(index) - 1)
    same_thread = (thread[following] == thread) & (following != np.arange(len(index)))
    paired = same_thread & ~enter[following] & (name[following] == name)
    paired &= events.kind[index[following]] == events.kind[index] + 1
    last = len(events) - 1
    end = np.where(same_thread, index[following], last)
    chosen = np.flatnonzero(enter)
    return index[chosen].astype(np.int64), end[chosen].astype(np.int64), paired[chosen]


def _find_done(events: Events, done: AnyArray, begin: Int64Array, is_wait: BoolArray) -> Int64Array:
    """Return when each call was complete, monotonic nanoseconds; -1 for waits and where it is not known."""

    def key(index: AnyArray) -> Int64Array:
        counter = events.value[index] & (1 << _COUNTER_BITS) - 1
        return np.asarray(events.name[index].astype(np.int64) << _COUNTER_BITS | counter, np.int64)

    found = np.full(len(begin), -1, np.int64)
    if not len(done):
        return found
    order = np.argsort(key(done), kind="stable")
    done_key, wanted = key(done)[order], key(begin)
    position = np.minimum(np.searchsorted(done_key, wanted), len(done) - 1)
    fits = (done_key[position] == wanted) & ~is_wait
    fits &= events.time[done[order[position]]] >= events.time[begin]
    found[fits] = events.time[done[order[position[fits]]]]
    return found


def _find_done_on_device(events: Events, begin: Int64Array, end: Int64Array, is_wait: BoolArray) -> Int64Array:
    """Return the same of what a device runs: when a stream came by the end of the call, or of the first wait for it."""
    found = np.full(len(begin), -1, np.int64)
    points, clocks = collective_points(events), device_clocks(events)
    if not len(points.event):
        return found
    reached = np.full(len(events), -1, np.int64)
    for device, clock in clocks.items():
        own = points.device == device
        reached[points.event[own]] = clock.to_monotonic(points.device_ns[own])
    # Only the end of a call that leaves nothing to wait for has an event.
    ends = np.isin(events.kind[end], (Kind.COLLECTIVE_EXIT, Kind.WAIT_EXIT))
    moment = np.where(ends & (reached[end] >= 0), np.maximum(reached[end], events.time[end]), -1)
    key = events.name[begin].astype(np.int64) << _COUNTER_BITS | events.value[begin] & (1 << _COUNTER_BITS) - 1
    first_wait: dict[int, int] = {}
    for row in np.flatnonzero(is_wait & (moment >= 0)).tolist():
        first_wait[int(key[row])] = min(int(moment[row]), first_wait.get(int(key[row]), int(moment[row])))
    for row in np.flatnonzero(~is_wait).tolist():
        found[row] = moment[row] if moment[row] >= 0 else first_wait.get(int(key[row]), -1)
    return found


def _groups(records: Sequence[Record]) -> list[Group]:
    groups = {record["name"]: Group.of_record(record) for record in records if record["kind"] == "group"}
    return list(groups.values())
