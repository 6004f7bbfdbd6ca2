"""A part of a run replayed: when ranks would have done what they did, had some of their own time been shorter.

A rank goes on at its own pace until it waits; it leaves a collective when the last rank has called it, and what its
transfer took is over. A message is a collective of two. With nothing shorter the replay is what was recorded.
"""

from __future__ import annotations

import numpy as np

from ..._typing import IndexArray, Int64Array
from .rank_events import RankEvents
from .runs import run_starts

__all__ = ["replay", "saved_by_step"]


def replay(events: RankEvents, shorter: Int64Array) -> Int64Array:
    """Return when each event would have been, Unix ns.

    Args:
        events: what the ranks did; each begins when it did.
        shorter: by how much the own time before each event would have been shorter, ns.
    """
    since = np.cumsum(events.own - shorter + np.where(events.binds, 0, events.waited))
    is_first = np.zeros(len(events.time), np.bool_)
    is_first[run_starts(events.rank)] = True
    is_begin = events.binds | is_first
    # Sections in which a rank runs without leaving a wait, by their first events.
    head = np.flatnonzero(is_begin)
    section = np.cumsum(is_begin) - 1
    follows = np.append(events.rank[head[1:]] == events.rank[head[:-1]], False)
    call = np.flatnonzero(events.is_call)
    call_begin = np.searchsorted(section[call], np.arange(len(head)))
    call_end = np.append(call_begin[1:], len(call))
    key_count = int(events.key.max(initial=-1)) + 1
    missing = np.bincount(events.key[call], minlength=key_count)
    last = np.full(key_count, np.iinfo(np.int64).min // 2)
    begin = events.time[head]
    running = np.flatnonzero(is_first[head])
    waiting = np.empty(0, np.int64)
    while len(running) or len(waiting):
        called = call[_ranges(call_begin[running], call_end[running])]
        of_call = section[called]
        np.maximum.at(last, events.key[called], begin[of_call] + since[called] - since[head[of_call]])
        np.subtract.at(missing, events.key[called], 1)
        waiting = np.concatenate([waiting, running[follows[running]] + 1])
        ready = missing[events.key[head[waiting]]] <= 0
        if len(waiting) and not np.any(ready):
            # Clocks that are off can tell of a wait that its own rank's later call ended.
            ready[np.argmin(events.time[head[waiting]])] = True
        running, waiting = waiting[ready], waiting[~ready]
        wait = head[running]
        arrived = begin[running - 1] + since[wait] - since[head[running - 1]]
        begin[running] = np.maximum(arrived, last[events.key[wait]] + events.transfer[wait]) + events.over[wait]
    times: Int64Array = begin[section] + since - since[head[section]]
    return times


def saved_by_step(events: RankEvents, shorter: Int64Array) -> dict[int, int]:
    """Return by how much shorter each step would have been, ns: from the last event of one to that of the next."""
    if not len(events.time):
        return {}
    first = int(events.step.min())
    index = events.step - first
    steps = np.flatnonzero(np.bincount(index))
    ends = np.full((2, int(steps[-1]) + 1), np.iinfo(np.int64).min)
    np.maximum.at(ends[0], index, events.time)
    np.maximum.at(ends[1], index, replay(events, shorter))
    saved = np.diff((ends[0] - ends[1])[steps], prepend=0)
    return dict(zip((steps + first).tolist(), saved.tolist(), strict=True))


def _ranges(begins: IndexArray, ends: IndexArray) -> IndexArray:
    """Return the numbers from each begin to before its end, one range behind the other."""
    sizes = ends - begins
    within: IndexArray = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(begins, sizes) + within
