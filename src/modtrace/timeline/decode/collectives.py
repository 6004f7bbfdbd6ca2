"""A ring's events of torch.distributed → collectives and waits."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..._numbering import is_any
from ..._typing import AnyArray, BoolArray, Int64Array
from ...ring import Events, Kind
from ...ring.collective_text import parse_collective
from ...ring.slot_format import COMMUNICATION_KINDS, NO_NAME, NOT_AWAITED_BIT
from ..collectives import Group, collective_args
from ..contents import COMMUNICATION, Process, Track
from ..slices import COLLECTIVE, WAIT, Slices
from .analysis import RingAnalysis
from .device_points import device_points
from .intervals import find_key

_COUNTER_BITS = 39


def is_communication(events: Events) -> BoolArray:
    """Return which events are of torch.distributed."""
    return is_any(events.kind, COMMUNICATION_KINDS)


def build_collectives(analysis: RingAnalysis) -> tuple[Slices, list[Group]]:
    """Return collectives and waits, and the groups; `track` holds their threads, by the number in the name table."""
    events, clock, groups = analysis.all_events, analysis.clock, list(analysis.lookup.groups.values())
    index = np.flatnonzero(is_communication(events))
    if not len(index):
        return Slices.empty(), groups
    calls = events.kind[index] != Kind.COLLECTIVE_DONE
    begin, end, complete = _pair(events, index[calls])
    order = np.lexsort((begin, events.time[begin]))
    begin, end, complete = begin[order], end[order], complete[order]
    is_wait = events.kind[begin] == Kind.WAIT_ENTER
    counter = np.where(events.value[begin] < 1 << _COUNTER_BITS, np.maximum(events.value[begin], -1), -1)
    done = _find_done(events, index[~calls], begin, is_wait)
    used, name = np.unique(np.where(events.name[begin] == NO_NAME, -1, events.name[begin]), return_inverse=True)
    known = used[used >= 0]
    exit_value = np.where(complete & ~is_wait, events.value[end], 0)
    names = [parse_collective(analysis.lookup.texts[number]) for number in known.tolist()]
    # Up to 100 ms pass between the end of the work and the question whether it is done. The stream's event has the end.
    on_device = np.array([bool(name.device) for name in names] + [False])[name - (len(used) - len(known))]
    done = np.where(on_device, _find_done_on_device(analysis, begin, end, is_wait), done)
    nbytes = np.where(exit_value > 0, exit_value & (NOT_AWAITED_BIT - 1), 0)
    done = np.where(done >= 0, clock.to_other(done), -1)
    rows = Slices.of_kind(
        np.where(is_wait, WAIT, COLLECTIVE),
        clock.to_other(events.time[begin]),
        end=clock.to_other(events.time[end]),
        track=events.thread[begin],
        step=analysis.steps_before(analysis.positions_between(events.serial[begin])),
        complete=complete,
        args=collective_args(names, name - (len(used) - len(known)), counter, nbytes, done),
    )
    return rows, groups


def assign_communication_tracks(
    tracks: Sequence[Track], collectives: Slices, threads: Sequence[tuple[str, int]], process: Process
) -> tuple[list[Track], Slices]:
    """Add a track for each thread that has collectives. Return all tracks, and the collectives on the new ones."""
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
    enter = is_any(events.kind[index], (Kind.COLLECTIVE_ENTER, Kind.WAIT_ENTER))
    thread, name = events.thread[index], events.name[index]
    following = np.minimum(np.arange(len(index)) + 1, len(index) - 1)
    same_thread = (thread[following] == thread) & (following != np.arange(len(index)))
    paired = same_thread & ~enter[following] & (name[following] == name)
    paired &= events.kind[index[following]] == events.kind[index] + 1
    last = len(events) - 1
    end = np.where(same_thread, index[following], last)
    chosen = np.flatnonzero(enter)
    return index[chosen].astype(np.int64), end[chosen].astype(np.int64), paired[chosen]


def _key(events: Events, index: AnyArray) -> Int64Array:
    """Return a number for each event, the same for those of one collective."""
    counter = events.value[index] & (1 << _COUNTER_BITS) - 1
    return np.asarray(events.name[index].astype(np.int64) << _COUNTER_BITS | counter, np.int64)


def _find_done(events: Events, done: AnyArray, begin: Int64Array, is_wait: BoolArray) -> Int64Array:
    """Return when each call was complete, monotonic nanoseconds; -1 for waits and where it is not known."""
    if not len(done):
        return np.full(len(begin), -1, np.int64)
    position = find_key(_key(events, done), _key(events, begin))
    time = events.time[done[position]]
    return np.where((position >= 0) & ~is_wait & (time >= events.time[begin]), time, -1)


def _find_done_on_device(analysis: RingAnalysis, begin: Int64Array, end: Int64Array, is_wait: BoolArray) -> Int64Array:
    """Return the same for calls that a device runs: when its stream passed the end of the call, or of a first wait."""
    done = np.full(len(begin), -1, np.int64)
    events = analysis.all_events
    points = device_points(events, analysis.queued, of_collectives=True)
    if not len(points.event):
        return done
    reached = np.full(len(events), -1, np.int64)
    for device, clock in analysis.device_clocks.items():
        own = points.device == device
        reached[points.event[own]] = clock.to_other(points.device_ns[own])
    # Only the end of a call that leaves nothing to wait for has an event.
    ends = is_any(events.kind[end], (Kind.COLLECTIVE_EXIT, Kind.WAIT_EXIT))
    moment = np.where(ends & (reached[end] >= 0), np.maximum(reached[end], events.time[end]), -1)
    key = _key(events, begin)
    waits = np.flatnonzero(is_wait & (moment >= 0))
    waits = waits[np.argsort(-moment[waits], kind="stable")]
    first_wait = dict(zip(key[waits].tolist(), moment[waits].tolist(), strict=True))
    for row in np.flatnonzero(~is_wait).tolist():
        done[row] = moment[row] if moment[row] >= 0 else first_wait.get(int(key[row]), -1)
    return done
