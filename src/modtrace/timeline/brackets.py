"""Events → brackets: what was open, from when to when, on which thread, inside what.

Calls and autograd nodes are brackets on their thread's stack. Where the order of the nodes is known, no more is noted
of them than "from now on the nodes of this call run"; each such stretch is taken as one node, so that all ends in the
same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ring.event import ABANDONED, KEY_BITS, NO_NAME, NUMBER_BITS, RECOMPUTE_BIT, SEQUENCE_BITS, Events, Kind

__all__ = ["Brackets", "find_brackets", "stretch_task"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_CALLS_IN = (Kind.FORWARD_ENTER, Kind.RECOMPUTE_ENTER)
_CALLS_OUT = (Kind.FORWARD_EXIT, Kind.RECOMPUTE_EXIT)


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

    thread: Ints
    opened: Ints
    closed: Ints
    start: Ints
    end: Ints
    node: Bools
    name: Ints
    key: Ints
    sequence: Ints
    sequence_out: Ints
    origin: Ints
    task: Ints
    started: Bools
    finished: Bools
    depth: Ints
    parent: Ints

    def __len__(self) -> int:
        return len(self.thread)

    @property
    def recompute(self) -> Bools:
        """Which are calls made inside backward."""
        again: Bools = ~self.node & (self.key & RECOMPUTE_BIT != 0)
        return again


def find_brackets(events: Events) -> Brackets:
    """Pair the openings and closings of `events` and nest them."""
    parts = [part for part in (_calls(events), _nodes(events), _stretches(events)) if len(part["thread"])]
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


def _end_on_own_thread(events: Events, columns: dict[str, npt.NDArray[Any]]) -> None:
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


def _part(count: int, **columns: npt.NDArray[Any] | int | bool) -> dict[str, npt.NDArray[Any]]:
    defaults: dict[str, Any] = {"sequence": -1, "sequence_out": -1, "origin": -1, "task": -1, "cut": False}
    filled = defaults | columns
    return {
        field: np.full(count, value, np.bool_ if isinstance(value, bool) else np.int64) if np.isscalar(value) else value
        for field, value in sorted(filled.items())
    }


def _calls(events: Events) -> dict[str, npt.NDArray[Any]]:
    """Pair enters and exits by name and key."""
    enter = np.flatnonzero(np.isin(events.kind, _CALLS_IN))
    leave = np.flatnonzero(np.isin(events.kind, _CALLS_OUT))
    enter_identity, leave_identity = _identity(events, enter), _identity(events, leave)
    by_identity = np.argsort(enter_identity, kind="stable")
    place = np.searchsorted(enter_identity[by_identity], leave_identity)
    place = np.minimum(place, len(enter) - 1)
    found = by_identity[place] if len(enter) else np.zeros(len(leave), np.int64)
    paired = (enter_identity[found] == leave_identity) if len(enter) else np.zeros(len(leave), np.bool_)
    exit_of = np.full(len(enter), -1, np.int64)
    exit_of[found[paired]] = leave[paired]
    alone = leave[~paired]
    first = np.concatenate([enter, np.full(len(alone), -1, np.int64)])
    last = np.concatenate([exit_of, alone])
    known = np.where(first >= 0, first, last)
    recompute = np.isin(events.kind[known], (Kind.RECOMPUTE_ENTER, Kind.RECOMPUTE_EXIT))
    number = events.value[known] >> SEQUENCE_BITS & (1 << NUMBER_BITS) - 1
    sequence = events.value & (1 << SEQUENCE_BITS) - 1
    return _part(
        len(known),
        thread=events.thread[known].astype(np.int64),
        opened=np.where(first >= 0, 2 * first + 1, -1),
        closed=np.where(last >= 0, 2 * last + 1, -1),
        start=events.time[first],
        end=events.time[last],
        node=False,
        name=events.name[known].astype(np.int64),
        key=np.where(recompute, number | RECOMPUTE_BIT, number),
        sequence=np.where(first >= 0, sequence[first], -1),
        sequence_out=np.where(last >= 0, sequence[last], -1),
    )


def _identity(events: Events, index: Ints) -> Ints:
    number = events.value[index] >> SEQUENCE_BITS & (1 << NUMBER_BITS) - 1
    recompute = np.isin(events.kind[index], (Kind.RECOMPUTE_ENTER, Kind.RECOMPUTE_EXIT))
    return events.name[index].astype(np.int64) << KEY_BITS | recompute.astype(np.int64) << NUMBER_BITS | number


def _nodes(events: Events) -> dict[str, npt.NDArray[Any]]:
    """Pair the native engine's node begins and ends by their nesting on each thread."""
    index = np.flatnonzero((events.kind == Kind.NODE_BEGIN) | (events.kind == Kind.NODE_END))
    index = index[np.argsort(events.thread[index], kind="stable")]
    thread = events.thread[index].astype(np.int64)
    opens = events.kind[index] == Kind.NODE_BEGIN
    total = np.cumsum(np.where(opens, 1, -1))
    depth = np.where(opens, total - 1, total)
    order = np.lexsort((np.arange(len(index)), depth, thread))
    same = (np.diff(thread[order], prepend=-1) == 0) & (np.diff(depth[order], prepend=-(1 << 60)) == 0)
    before = np.roll(order, 1)
    value, name = events.value[index], events.name[index]
    closes = ~opens[order] & same & opens[before]
    agree = (value[order] == value[before]) & (name[order] == name[before])
    if np.any(closes & ~agree) or np.any(opens[order] & same & opens[before]):
        first, last = _pair_by_stack(thread, opens, value, name)
    else:
        partner = np.full(len(index), -1, np.int64)
        partner[before[closes]] = order[closes]
        begins = np.flatnonzero(opens)
        orphans = order[~opens[order] & ~closes]
        first = np.concatenate([begins, np.full(len(orphans), -1, np.int64)])
        last = np.concatenate([partner[begins], orphans])
    known = np.where(first >= 0, first, last)
    at_first, at_last = index[first], index[last]
    end = events.time[at_last].copy()
    _lengthen(events, at_last, last >= 0, end)
    return _part(
        len(known),
        thread=thread[known],
        opened=np.where(first >= 0, 2 * at_first + 1, -1),
        closed=np.where(last >= 0, 2 * at_last + 1, -1),
        start=events.time[at_first],
        end=end,
        node=True,
        name=NO_NAME,
        key=-1,
        sequence=value[known],
        origin=name[known].astype(np.int64) >> 8,
        task=name[known].astype(np.int64) & 0xFF,
    )


def _lengthen(events: Events, ends: Ints, known: Bools, end: Ints) -> None:
    """Let a node last until its thread begins the next one of the same task, where nothing else lies between.

    In that time the engine checks the gradients that the node made, sums them with others and accumulates them. Behind
    the last node of a task, only what is accumulated is known; and while another thread runs nodes of the task, the
    time between two nodes may be waiting for those.
    """
    kinds = (Kind.NODE_SEQUENCE, Kind.STEP, Kind.MARK, Kind.COUNTER, Kind.SHAPES)
    index = np.flatnonzero(~np.isin(events.kind, kinds))
    index = index[np.lexsort((index, events.thread[index]))]
    accumulated = events.kind[index] == Kind.ACCUMULATED
    # Each takes the last other event before it on its thread, and gives its time to that where it is an end.
    before = np.maximum.accumulate(np.where(accumulated, -1, np.arange(len(index))))
    before[~accumulated] = np.roll(before, 1)[~accumulated]
    gives = accumulated | (events.kind[index] == Kind.NODE_BEGIN)
    source, target = index[gives], index[np.maximum(before[gives], 0)]
    fits = (
        (before[gives] >= 0)
        & (events.kind[target] == Kind.NODE_END)
        & (events.thread[target] == events.thread[source])
        & (events.name[target] & 0xFF == events.name[source] & 0xFF)
    )
    begins = events.kind[source] == Kind.NODE_BEGIN
    fits[begins] &= ~_shared(events, target[begins], source[begins])
    until = np.zeros(len(events), np.int64)
    np.maximum.at(until, target[fits], events.time[source[fits]])
    end[known] = np.maximum(end[known], until[ends[known]])


def _shared(events: Events, ended: Ints, begun: Ints) -> Bools:
    """Say of each gap between two nodes of a thread whether a node of the same task runs in it on another thread.

    Args:
        events: all events.
        ended: index of the end before each gap.
        begun: index of the begin behind it.
    """
    task = events.name.astype(np.int64) & 0xFF
    of_thread = task * (int(events.thread.max()) + 1 if len(events) else 1) + events.thread
    elsewhere = _running(events, task, ended, begun) - _running(events, of_thread, ended, begun)
    return np.asarray(elsewhere > 0, np.bool_)


def _running(events: Events, group: Ints, ended: Ints, begun: Ints) -> Ints:
    """Return for each gap how many nodes of its group began before it was over and had not ended when it began."""
    first = group * len(events)
    place = first + np.arange(len(events))
    begins = np.sort(place[events.kind == Kind.NODE_BEGIN])
    ends = np.sort(place[events.kind == Kind.NODE_END])
    started = np.searchsorted(begins, place[begun], "left") - np.searchsorted(begins, first[begun], "left")
    over = np.searchsorted(ends, place[ended], "right") - np.searchsorted(ends, first[ended], "left")
    return np.asarray(started - over, np.int64)


def _pair_by_stack(thread: Ints, opens: Bools, value: Ints, name: npt.NDArray[np.int32]) -> tuple[Ints, Ints]:
    """Pair node begins and ends where some are missing in between (torn slots)."""
    pairs: list[tuple[int, int]] = []
    stack: list[int] = []
    current = -1
    for at in range(len(thread)):
        if thread[at] != current:
            pairs.extend((begin, -1) for begin in stack)
            stack, current = [], int(thread[at])
        if opens[at]:
            stack.append(at)
            continue
        for height in range(len(stack) - 1, -1, -1):
            if value[stack[height]] == value[at] and name[stack[height]] == name[at]:
                # Those above it have lost their end; they cannot have outlived it.
                pairs.extend((begin, at) for begin in stack[height:])
                del stack[height:]
                break
        else:
            pairs.append((-1, at))
    pairs.extend((begin, -1) for begin in stack)
    first, last = np.array(pairs, np.int64).reshape(-1, 2).T
    return first, last


def _stretches(events: Events) -> dict[str, npt.NDArray[Any]]:
    """Take each stretch, from one "backward goes on" to the next, as a node."""
    index = np.flatnonzero((events.kind == Kind.BACKWARD) | (events.kind == Kind.STRETCH))
    thread = events.thread[index].astype(np.int64)
    task = stretch_task(events)[index]
    order = np.lexsort((index, thread, task))
    index, thread, task = index[order], thread[order], task[order]
    follows = np.zeros(len(index), np.bool_)
    follows[:-1] = (np.diff(task) == 0) & (np.diff(thread) == 0)
    over = np.flatnonzero(events.kind == Kind.BACKWARD_OVER)
    over_task = events.value[over] & ~ABANDONED
    by_task = np.argsort(over_task, kind="stable")
    over, over_task = over[by_task], over_task[by_task]
    place = np.minimum(np.searchsorted(over_task, task), max(len(over) - 1, 0))
    ended = (over_task[place] == task) if len(over) else np.zeros(len(index), np.bool_)
    ending = over[place] if len(over) else np.zeros(len(index), np.int64)
    following = np.roll(index, -1)
    closed = np.where(follows, 2 * following, np.where(ended, 2 * ending + 1, -1))
    end = np.where(follows, events.time[following], events.time[ending])
    numbered = events.kind[index] == Kind.STRETCH
    name, value = events.name[index].astype(np.int64), events.value[index]
    cut = ended & ~follows & (events.value[ending] & ABANDONED != 0) if len(over) else np.zeros(len(index), np.bool_)
    for at in np.flatnonzero(cut):
        # Nothing says when the task failed; it ran at least until the last event of this thread before that was seen.
        before = np.flatnonzero(events.thread[: ending[at]] == thread[at])[-1]
        closed[at], end[at] = 2 * before + 2, events.time[before]
    return _part(
        len(index),
        cut=cut,
        thread=thread,
        opened=2 * index + 1,
        closed=closed,
        start=events.time[index],
        end=end,
        node=True,
        name=np.where(numbered, NO_NAME, name),
        key=np.where(numbered, -1, value & (1 << KEY_BITS) - 1),
        sequence=np.where(numbered, value & (1 << SEQUENCE_BITS) - 1, -1),
        origin=np.where(numbered, name >> 8, -1),
        # Passes and graph tasks are numbered apart.
        task=np.where(numbered, -2 - task, task),
    )


def stretch_task(events: Events) -> Ints:
    """Return of each event that begins a stretch the graph task or pass, as a `BACKWARD_OVER` names it."""
    return np.asarray(events.value >> np.where(events.kind == Kind.STRETCH, SEQUENCE_BITS, KEY_BITS), np.int64)


def _nest(columns: dict[str, npt.NDArray[Any]]) -> tuple[Ints, Ints]:
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


def _depths(thread: Ints, opened: Ints, closed: Ints) -> Ints | None:
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


def _clip(columns: dict[str, npt.NDArray[Any]]) -> None:
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
