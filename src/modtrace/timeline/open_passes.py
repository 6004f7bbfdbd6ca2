"""The backward passes that are open at the end of what a ring holds, and the nodes that ran in them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._typing import BoolArray, Int64Array
from ..ring import Events
from .decode import Intervals, pair_passes

__all__ = ["OpenPass", "events_of_passes", "nodes_of_pass", "open_passes"]


class OpenPass(NamedTuple):
    """A backward pass that is not over.

    Attributes:
        thread: index of the thread that called it, in the name table.
        serial: of the event that begins it.
        since_ns: when it began, monotonic nanoseconds.
        others: int64, the threads that called no pass: its nodes may run there.
        position: of its begin among the events that `located` was given, as `Intervals` has positions.
    """

    thread: int
    serial: int
    since_ns: int
    others: Int64Array
    position: int = -1

    def located(self, events: Events) -> OpenPass:
        """Return it with its position among some events, in which it begins."""
        return self._replace(position=2 * int(np.searchsorted(events.serial, self.serial)) + 1)


def open_passes(events: Events) -> list[OpenPass]:
    """Return the innermost open pass of each thread that has any."""
    thread, begin, end = pair_passes(events)
    others = np.setdiff1d(events.thread, thread).astype(np.int64)
    innermost: dict[int, OpenPass] = {}
    for index in np.flatnonzero(end < 0).tolist():
        # One that lies in another that is over has lost its end.
        around = (thread == thread[index]) & (begin < begin[index]) & (end > begin[index])
        if not around.any():
            at = begin[index]
            innermost[int(thread[index])] = OpenPass(
                int(thread[index]), int(events.serial[at]), int(events.time[at]), others
            )
    return list(innermost.values())


def events_of_passes(events: Events, passes: list[OpenPass]) -> BoolArray:
    """Return which events may tell of the nodes of open passes."""
    needed = np.zeros(len(events), np.bool_)
    for open_pass in passes:
        threads = np.append(open_pass.others, open_pass.thread)
        needed |= (events.serial >= open_pass.serial) & np.isin(events.thread, threads)
    return needed


def nodes_of_pass(intervals: Intervals, open_pass: OpenPass) -> Int64Array:
    """Return the nodes that ran in a pass, as indexes in order: on its thread, or where it has none there on others."""
    ran = intervals.is_node & (intervals.start_position > open_pass.position)
    own = np.flatnonzero(ran & (intervals.thread == open_pass.thread))
    found = own if len(own) else np.flatnonzero(ran & np.isin(intervals.thread, open_pass.others))
    return found[np.argsort(intervals.start_position[found], kind="stable")].astype(np.int64)
