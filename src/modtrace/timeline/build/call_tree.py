"""Events → brackets: what was open, from when to when, on which thread, inside what.

Calls and autograd nodes are brackets on their thread's stack. Where the order of the nodes is known, no more is noted
of them than "from now on the nodes of this call run"; each such stretch is taken as one node, so that all ends in the
same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..._typing import BoolArray, Int64Array
from ...ring.slot_format import RECOMPUTE_BIT, Events
from .pairing import Pairs, calls, nodes, stretches

__all__ = ["Brackets", "find_brackets"]


@dataclass(frozen=True)
class Brackets:
    """Brackets in order of (thread, opening); arrays of equal length.

    Attributes:
        thread: index of the thread.
        opened: position of the opening, twice the index of its event (plus one); negative where it was overwritten.
        closed: position of the closing; beyond all events where it never came.
        start: monotonic nanoseconds.
        end: monotonic nanoseconds.
        node: True for autograd nodes and stretches of them, False for calls.
        name: number of the module's name; for a node of the portable engine that of its call, else `NO_NAME`.
        key: which call of that name; -1 for nodes of the native engine.
        sequence: of a node its own number, of a call the thread's number at enter.
        sequence_out: of a call the thread's number at exit.
        origin: of a native node the forward thread as torch numbers it, else -1.
        task: of a node the graph task, or its pass, which is then negative.
        started: False where the opening was overwritten.
        finished: False where the closing never came.
        depth: brackets around it on its thread.
        parent: index of the bracket around it, or -1.
    """

    thread: Int64Array
    opened: Int64Array
    closed: Int64Array
    start: Int64Array
    end: Int64Array
    node: BoolArray
    name: Int64Array
    key: Int64Array
    sequence: Int64Array
    sequence_out: Int64Array
    origin: Int64Array
    task: Int64Array
    started: BoolArray
    finished: BoolArray
    depth: Int64Array
    parent: Int64Array

    def __len__(self) -> int:
        return len(self.thread)

    @property
    def recompute(self) -> BoolArray:
        """Which are calls made inside backward."""
        again: BoolArray = ~self.node & (self.key & RECOMPUTE_BIT != 0)
        return again


def find_brackets(events: Events) -> Brackets:
    """Pair the openings and closings of `events` and nest them."""
    parts = [part for part in (calls(events), nodes(events), stretches(events)) if len(part["thread"])]
    if not parts:
        return Brackets(**_empty())
    columns = {field: np.concatenate([part[field] for part in parts]) for field in parts[0]}
    _end_on_own_thread(events, columns)
    last = 2 * len(events) + 2
    opened, closed = columns["opened"], columns["closed"]
    # In a damaged file a closing can stand before its opening.
    started, finished = opened >= 0, closed > opened
    cut = columns.pop("cut")
    # What was open at either edge nests by what is known of it: closed later means opened earlier.
    closed = np.where(finished, closed, 2 * last - opened)
    opened = np.where(started, opened, -closed)
    order = np.lexsort((opened, columns["thread"]))
    columns = {field: column[order] for field, column in columns.items()}
    columns["opened"], columns["closed"] = opened[order], closed[order]
    columns["started"], columns["finished"] = started[order], (finished & ~cut)[order]
    columns["start"] = np.where(columns["started"], columns["start"], events.time.min())
    columns["end"] = np.where(finished[order], columns["end"], events.time.max())
    # A clock read by two threads can run back by a little where a task ends on another thread.
    columns["end"] = np.maximum(columns["end"], columns["start"])
    depth, parent = _nest(columns)
    return Brackets(**columns, depth=depth, parent=parent)


def _end_on_own_thread(events: Events, columns: Pairs) -> None:
    """Let what another thread closes end between the events of its own thread that stand around the closing.

    Within a thread, times follow positions. The clocks of two threads differ by a little, in a damaged file by much.
    """
    closed, thread, end = columns["closed"], columns["thread"], columns["end"]
    # An even position lies between two events of the bracket's own thread.
    elsewhere = np.flatnonzero((closed >= 0) & (closed & 1 == 1))
    elsewhere = elsewhere[events.thread[closed[elsewhere] >> 1] != thread[elsewhere]]
    for number in np.unique(thread[elsewhere]).tolist():
        rows = elsewhere[thread[elsewhere] == number]
        rows = rows[np.argsort(closed[rows], kind="stable")]
        own = np.flatnonzero(events.thread == number)
        time = np.concatenate([events.time[own[:1]], events.time[own], [np.iinfo(np.int64).max]])
        place = np.searchsorted(own, closed[rows] >> 1)
        end[rows] = np.maximum.accumulate(np.clip(end[rows], time[place], time[place + 1]))


def _empty() -> dict[str, Any]:
    none = np.zeros(0, np.int64)
    flags = np.zeros(0, np.bool_)
    fields = Brackets.__dataclass_fields__
    return {field: flags if field in ("node", "started", "finished") else none for field in fields}


def _nest(columns: Pairs) -> tuple[Int64Array, Int64Array]:
    """Return depth and parent of brackets in (thread, opening) order; those that overlap are clipped first."""
    thread, opened = columns["thread"], columns["opened"]
    count = len(thread)
    depth = _depths(thread, opened, columns["closed"])
    if depth is None:
        _clip(columns)
        depth = _depths(thread, opened, columns["closed"])
        assert depth is not None
    # The bracket around one at depth d is the last one opened at depth d - 1 before it on its thread.
    rank = np.arange(count, dtype=np.int64)
    stride = np.int64(depth.max() + 2)
    place = (thread * stride + depth) * count + rank
    by_place = np.argsort(place, kind="stable")
    around = np.searchsorted(place[by_place], (thread * stride + depth - 1) * count + rank) - 1
    return depth, np.where(depth > 0, by_place[np.maximum(around, 0)], -1)


def _depths(thread: Int64Array, opened: Int64Array, closed: Int64Array) -> Int64Array | None:
    """Return each bracket's depth on its thread; None where they do not nest."""
    count = len(thread)
    owner = np.concatenate([np.arange(count), np.arange(count)])
    sign = np.repeat(np.array([1, -1]), count)
    # Clipped brackets close together with the one around them: the inner (later opened) one first.
    tie = np.concatenate([opened, -opened])
    order = np.lexsort((tie, np.concatenate([opened, closed]), np.concatenate([thread, thread])))
    total = np.cumsum(sign[order])
    position_depth = np.where(sign[order] > 0, total - 1, total)
    at_open = np.empty(count, np.int64)
    at_close = np.empty(count, np.int64)
    opening = sign[order] > 0
    at_open[owner[order][opening]] = position_depth[opening]
    at_close[owner[order][~opening]] = position_depth[~opening]
    # Equal depths at both ends are not enough: two that overlap swap their closings at the same depth.
    by_depth = np.lexsort((opened, at_open, thread))
    neighbours = (np.diff(thread[by_depth]) == 0) & (np.diff(at_open[by_depth]) == 0)
    apart = closed[by_depth][:-1] < opened[by_depth][1:]
    return at_open if np.array_equal(at_open, at_close) and bool(np.all(apart | ~neighbours)) else None


def _clip(columns: Pairs) -> None:
    """Close what would outlive the bracket around it together with that one, and mark it."""
    thread, opened = columns["thread"], columns["opened"]
    closed, end, finished = columns["closed"].copy(), columns["end"].copy(), columns["finished"].copy()
    stack: list[int] = []
    for at in range(len(thread)):
        while stack and (thread[stack[-1]] != thread[at] or closed[stack[-1]] < opened[at]):
            stack.pop()
        if stack and closed[at] > closed[stack[-1]]:
            around = stack[-1]
            closed[at] = closed[around]
            end[at] = min(end[at], end[around])
            finished[at] = False
        stack.append(at)
    columns["closed"] = closed
    columns["end"], columns["finished"] = np.maximum(end, columns["start"]), finished
