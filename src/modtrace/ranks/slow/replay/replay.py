"""A part of a run replayed: when ranks would have done what they did, had some of their own time been shorter.

A rank goes on at its own pace until it waits; it leaves a collective when the last rank has called it, and what its
transfer took is over. A message is a collective of two. With nothing shorter the replay is what was recorded.
"""

from __future__ import annotations

import numpy as np

from ...._typing import IndexArray, Int64Array
from ..rank_events import RankEvents
from ..runs import run_starts

__all__ = ["Replay"]

_LEAST = np.iinfo(np.int64).min // 2


class Replay:
    """Replays what ranks did, each from its first event on.

    Args:
        events: what they did.

    Attributes:
        events: the same.
    """

    def __init__(self, events: RankEvents) -> None:
        self.events = events
        is_first = np.zeros(len(events.time), np.bool_)
        is_first[run_starts(events.rank)] = True
        is_head = events.binds | is_first
        # Sections in which a rank runs without leaving a wait, by their first events.
        self._head = np.flatnonzero(is_head)
        self._section = np.cumsum(is_head) - 1
        self._first = np.flatnonzero(is_first[self._head])
        self._follows = np.append(~is_first[self._head[1:]], False)
        self._call = np.flatnonzero(events.is_call)
        self._call_begin = np.searchsorted(self._section[self._call], np.arange(len(self._head) + 1))
        self._calls = np.bincount(events.key[self._call])
        self._pace = events.own + np.where(events.binds, 0, events.waited)
        step = events.step - events.step.min(initial=np.iinfo(np.int64).max)
        self._order = np.argsort(step, kind="stable")
        self._step_begin = run_starts(step[self._order])

    def times(self, shorter: Int64Array) -> Int64Array:
        """Return when each event would have been, Unix ns.

        Args:
            shorter: by how much the own time before each event would have been shorter, ns.
        """
        events, head = self.events, self._head
        since = np.cumsum(self._pace - shorter)
        missing, last = self._calls.copy(), np.full(len(self._calls), _LEAST)
        begin = events.time[head]
        running, waiting = self._first, np.empty(0, np.int64)
        while len(running) or len(waiting):
            called = self._call[_ranges(self._call_begin[running], self._call_begin[running + 1])]
            section = self._section[called]
            np.maximum.at(last, events.key[called], begin[section] + since[called] - since[head[section]])
            np.subtract.at(missing, events.key[called], 1)
            waiting = np.concatenate([waiting, running[self._follows[running]] + 1])
            ready = missing[events.key[head[waiting]]] <= 0
            if len(waiting) and not np.any(ready):
                # Clocks that are off can tell of a wait that its own rank's later call ended.
                ready[np.argmin(events.time[head[waiting]])] = True
            running, waiting = waiting[ready], waiting[~ready]
            wait = head[running]
            arrived = begin[running - 1] + since[wait] - since[head[running - 1]]
            begin[running] = np.maximum(arrived, last[events.key[wait]] + events.transfer[wait]) + events.over[wait]
        times: Int64Array = (begin - since[head])[self._section] + since
        return times

    def saved_by_step(self, shorter: Int64Array) -> dict[int, int]:
        """Return by how much shorter each step would have been, ns: from the last event of one to that of the next."""
        if not len(self._order):
            return {}
        ends, replayed = (
            np.maximum.reduceat(times[self._order], self._step_begin)
            for times in (self.events.time, self.times(shorter))
        )
        steps = self.events.step[self._order[self._step_begin]]
        return dict(zip(steps.tolist(), np.diff(ends - replayed, prepend=0).tolist(), strict=True))


def _ranges(begins: IndexArray, ends: IndexArray) -> IndexArray:
    """Return the numbers from each begin to before its end, one range behind the other."""
    sizes = ends - begins
    within: IndexArray = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(begins, sizes) + within
