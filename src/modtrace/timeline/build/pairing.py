"""Openings and closings, paired: calls by name and key, nodes by their nesting, stretches by what follows them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._typing import AnyArray, BoolArray, Int32Array, Int64Array
from ...ring.slot_format import (
    ABANDONED_BIT,
    CALL_ENTER_KINDS,
    CALL_EXIT_KINDS,
    CALL_INDEX_BITS,
    CALL_INDEX_MASK,
    CALL_KEY_BITS,
    CALL_KEY_MASK,
    FORWARD_THREAD_SHIFT,
    GRAPH_TASK_MASK,
    NO_NAME,
    RECOMPUTE_BIT,
    SEQUENCE_BITS,
    SEQUENCE_MASK,
    Events,
    Kind,
)

__all__ = ["Pairs", "calls", "nodes", "stretch_task", "stretches"]

Pairs = dict[str, AnyArray]
"""The columns of `Brackets` but depth and parent, and `cut`: closed, but nobody knows when. `opened` and `closed` are
-1 where there is none."""


def _part(count: int, **columns: AnyArray | int | bool) -> Pairs:
    defaults: dict[str, Any] = {"sequence": -1, "sequence_out": -1, "origin": -1, "task": -1, "cut": False}
    filled = defaults | columns
    return {
        field: np.full(count, value, np.bool_ if isinstance(value, bool) else np.int64) if np.isscalar(value) else value
        for field, value in sorted(filled.items())
    }


def calls(events: Events) -> Pairs:
    """Pair enters and exits by name and key."""
    enter = np.flatnonzero(np.isin(events.kind, CALL_ENTER_KINDS))
    leave = np.flatnonzero(np.isin(events.kind, CALL_EXIT_KINDS))
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
    number = events.value[known] >> SEQUENCE_BITS & CALL_INDEX_MASK
    sequence = events.value & SEQUENCE_MASK
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


def _identity(events: Events, index: Int64Array) -> Int64Array:
    number = events.value[index] >> SEQUENCE_BITS & CALL_INDEX_MASK
    recompute = np.isin(events.kind[index], (Kind.RECOMPUTE_ENTER, Kind.RECOMPUTE_EXIT))
    return events.name[index].astype(np.int64) << CALL_KEY_BITS | recompute.astype(np.int64) << CALL_INDEX_BITS | number


def nodes(events: Events) -> Pairs:
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
        origin=name[known].astype(np.int64) >> FORWARD_THREAD_SHIFT,
        task=name[known].astype(np.int64) & GRAPH_TASK_MASK,
    )


def _lengthen(events: Events, ends: Int64Array, known: BoolArray, end: Int64Array) -> None:
    """Let a node last until its thread begins the next one of the same task, where nothing else lies between.

    In that time the engine checks the gradients that the node made, sums them with others and accumulates them. Behind
    the last node of a task, only what is accumulated is known; and while another thread runs nodes of the task, the
    time between two nodes may be waiting for those.
    """
    kinds = (Kind.GRAPH_BUILT, Kind.STEP, Kind.MARK, Kind.COUNTER, Kind.SHAPES)
    index = np.flatnonzero(~np.isin(events.kind, kinds))
    index = index[np.lexsort((index, events.thread[index]))]
    accumulated = events.kind[index] == Kind.ACCUMULATE_END
    # Each takes the last other event before it on its thread, and gives its time to that where it is an end.
    before = np.maximum.accumulate(np.where(accumulated, -1, np.arange(len(index))))
    before[~accumulated] = np.roll(before, 1)[~accumulated]
    gives = accumulated | (events.kind[index] == Kind.NODE_BEGIN)
    source, target = index[gives], index[np.maximum(before[gives], 0)]
    fits = (
        (before[gives] >= 0)
        & (events.kind[target] == Kind.NODE_END)
        & (events.thread[target] == events.thread[source])
        & (events.name[target] & GRAPH_TASK_MASK == events.name[source] & GRAPH_TASK_MASK)
    )
    begins = events.kind[source] == Kind.NODE_BEGIN
    fits[begins] &= ~_shared(events, target[begins], source[begins])
    until = np.zeros(len(events), np.int64)
    np.maximum.at(until, target[fits], events.time[source[fits]])
    end[known] = np.maximum(end[known], until[ends[known]])


def _shared(events: Events, ended: Int64Array, begun: Int64Array) -> BoolArray:
    """Say of each gap between two nodes of a thread whether a node of the same task runs in it on another thread.

    Args:
        events: all events.
        ended: index of the end before each gap.
        begun: index of the begin behind it.
    """
    task = events.name.astype(np.int64) & GRAPH_TASK_MASK
    of_thread = task * (int(events.thread.max()) + 1 if len(events) else 1) + events.thread
    elsewhere = _running(events, task, ended, begun) - _running(events, of_thread, ended, begun)
    return np.asarray(elsewhere > 0, np.bool_)


def _running(events: Events, group: Int64Array, ended: Int64Array, begun: Int64Array) -> Int64Array:
    """Return for each gap how many nodes of its group began before it was over and had not ended when it began."""
    first = group * len(events)
    place = first + np.arange(len(events))
    begins = np.sort(place[events.kind == Kind.NODE_BEGIN])
    ends = np.sort(place[events.kind == Kind.NODE_END])
    started = np.searchsorted(begins, place[begun], "left") - np.searchsorted(begins, first[begun], "left")
    over = np.searchsorted(ends, place[ended], "right") - np.searchsorted(ends, first[ended], "left")
    return np.asarray(started - over, np.int64)


def _pair_by_stack(
    thread: Int64Array, opens: BoolArray, value: Int64Array, name: Int32Array
) -> tuple[Int64Array, Int64Array]:
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


def stretches(events: Events) -> Pairs:
    """Take each stretch, from one "backward goes on" to the next, as a node."""
    index = np.flatnonzero((events.kind == Kind.CALL_BACKWARD) | (events.kind == Kind.SEGMENT_BEGIN))
    thread = events.thread[index].astype(np.int64)
    task = stretch_task(events)[index]
    order = np.lexsort((index, thread, task))
    index, thread, task = index[order], thread[order], task[order]
    follows = np.zeros(len(index), np.bool_)
    follows[:-1] = (np.diff(task) == 0) & (np.diff(thread) == 0)
    over = np.flatnonzero(events.kind == Kind.BACKWARD_OVER)
    over_task = events.value[over] & ~ABANDONED_BIT
    by_task = np.argsort(over_task, kind="stable")
    over, over_task = over[by_task], over_task[by_task]
    place = np.minimum(np.searchsorted(over_task, task), max(len(over) - 1, 0))
    ended = (over_task[place] == task) if len(over) else np.zeros(len(index), np.bool_)
    ending = over[place] if len(over) else np.zeros(len(index), np.int64)
    following = np.roll(index, -1)
    closed = np.where(follows, 2 * following, np.where(ended, 2 * ending + 1, -1))
    end = np.where(follows, events.time[following], events.time[ending])
    numbered = events.kind[index] == Kind.SEGMENT_BEGIN
    name, value = events.name[index].astype(np.int64), events.value[index]
    cut = (
        ended & ~follows & (events.value[ending] & ABANDONED_BIT != 0) if len(over) else np.zeros(len(index), np.bool_)
    )
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
        key=np.where(numbered, -1, value & CALL_KEY_MASK),
        sequence=np.where(numbered, value & SEQUENCE_MASK, -1),
        origin=np.where(numbered, name >> FORWARD_THREAD_SHIFT, -1),
        # Passes and graph tasks are numbered apart.
        task=np.where(numbered, -2 - task, task),
    )


def stretch_task(events: Events) -> Int64Array:
    """Return of each event that begins a stretch the graph task or pass, as a `BACKWARD_OVER` names it."""
    return np.asarray(
        events.value >> np.where(events.kind == Kind.SEGMENT_BEGIN, SEQUENCE_BITS, CALL_KEY_BITS), np.int64
    )
