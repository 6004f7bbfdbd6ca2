"""The replay of a run without some delays, by calls of collectives and messages and the ends of waits for them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..._arrays import (
    INT64_MAX,
    INT64_MIN,
    BoolArray,
    Float64Array,
    Int64Array,
    expand_ranges,
    group_lengths,
    group_starts,
    split_by,
)
from ...ring.event_text import PEER_OPERATORS
from ..rank_tables import CALL, INFERRED_WAIT, CollectiveTable, ranks_in_group
from ..sync_points import call_keys, synchronizing
from .late_steps import RANK_BITS, Arrivals, OwnTime


class RankEvents(NamedTuple):
    """Calls, and ends of waits, by rank and then by time; arrays of equal length."""

    rank: Int64Array
    step: Int64Array
    place: Int64Array  # on the axis of `OwnTime`
    time: Int64Array  # Unix ns
    key: Int64Array  # which collective or message it is of, from 0; -1 if that is not known
    is_call: BoolArray  # whether it is a call; else the end of a wait
    own_ns: Int64Array  # the rank's own time since its event before, ns; 0 for its first
    waited: Int64Array  # its waiting since then
    binds: BoolArray  # whether it is the end of a wait that cannot be before the last call of `key`
    transfer: Int64Array  # if it binds: how long after that call the wait was over at the earliest, ns
    over: Int64Array  # if it binds: how much later than that it was over


class _Rows(NamedTuple):
    """Events as they are found: the row of each, its time, and when what it waits for was complete (-1: not known)."""

    row: Int64Array
    time: Int64Array
    done: Int64Array
    is_call: BoolArray


def rank_events(table: CollectiveTable, own_time: OwnTime) -> RankEvents:
    """Return the events of all ranks."""
    keys = shared_keys(table)
    rows = _events(table, keys, own_time)
    place = own_time.place(table.rank[rows.row].astype(np.int64), rows.time)
    # At one moment a rank leaves a wait before it calls something.
    order = np.lexsort((rows.is_call, place))
    row, time, done, place = (values[order] for values in (rows.row, rows.time, rows.done, place))
    is_call = rows.is_call[order]
    rank, key = table.rank[row].astype(np.int64), keys[row]
    own_ns, passed = np.diff(own_time.until(place), prepend=0), np.diff(time, prepend=0)
    first = group_starts(rank)
    own_ns[first] = passed[first] = 0
    waited = passed - own_ns
    last = np.full(int(keys.max(initial=-1)) + 1, INT64_MIN // 2)
    np.maximum.at(last, key[is_call], time[is_call])
    binds = ~is_call & (key >= 0)
    binds[first] = False  # nothing is known of what it did before
    since_last = np.where(binds, time - last[key], 0)
    # A send that was complete before its receiver asked for it did not wait for that, nor the source of a broadcast for
    # all; nor what no call is known of.
    binds &= (since_last >= 0) | synchronizing(table.operators)[table.operator[row]]
    binds &= since_last < INT64_MAX // 4
    transfer = np.where(done >= 0, np.minimum(done, time) - last[key], since_last)
    # A wait that began after the last call says less than others about how long the transfer took.
    least = np.full(len(last), INT64_MAX)
    np.minimum.at(least, key[binds], transfer[binds])
    came_late = binds & (done < 0) & (waited < since_last)
    transfer = np.where(binds, np.where(came_late, least[key], transfer), 0)
    over = np.where(binds, time - np.maximum(time - waited, last[key] + transfer), 0)
    step = table.step[row].astype(np.int64)
    return RankEvents(rank, step, place, time, key, is_call, own_ns, waited, binds, transfer, over)


def message_ends(table: CollectiveTable) -> tuple[Int64Array, Int64Array]:
    """Return sender and receiver of each row that is a message, as ranks of the job; -1 for all others."""
    kinds = [PEER_OPERATORS.index(text) if text in PEER_OPERATORS else -1 for text in table.operators]
    kind = np.array(kinds or [-1], np.int8)[table.operator]
    other = np.full(len(kind), -1, np.int64)
    messages = np.flatnonzero((kind >= 0) & (table.peer >= 0) & (table.counter >= 0))
    for rows in split_by(table.group[messages], messages):
        members = np.array(ranks_in_group(table.groups[table.group[rows[0]]]), np.int64)
        peer = table.peer[rows]
        in_group = peer < len(members)
        other[rows[in_group]] = members[peer[in_group]]
    caller = np.where(other >= 0, table.rank, -1)
    return np.where(kind == 0, caller, other), np.where(kind == 0, other, caller)


def shared_keys(table: CollectiveTable) -> Int64Array:
    """Return for each row a number of its collective or message; -1 if ranks share none."""
    sender, receiver = message_ends(table)
    is_message = sender >= 0
    channel = table.group.astype(np.int64)
    if np.any(is_message):
        # First one integer for each pair of ranks, then a number for each group and pair.
        _, pair = np.unique(np.where(is_message, (sender + 1) << RANK_BITS | receiver, 0), return_inverse=True)
        _, channel = np.unique(channel << 32 | pair, return_inverse=True)
    shared = table.counter >= 0
    keys = np.full(len(table.rank), -1, np.int64)
    _, keys[shared] = np.unique(call_keys(channel, table.counter)[shared], return_inverse=True)
    return keys


def _events(table: CollectiveTable, keys: Int64Array, own_time: OwnTime) -> _Rows:
    is_call = table.kind == CALL
    returns_complete = is_call & (table.done >= 0) & (table.done <= table.end)
    parts = [
        _rows(table.start, table.done, np.flatnonzero(is_call & (keys >= 0)), called=True),
        _rows(table.end, table.done, np.flatnonzero(returns_complete), called=False),
        _rows(table.end, table.done, np.flatnonzero(~is_call & (table.kind != INFERRED_WAIT)), called=False),
        _inferred(table, keys, returns_complete, own_time),
    ]
    return _Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _rows(time: Int64Array, done: Int64Array, rows: Int64Array, *, called: bool) -> _Rows:
    return _Rows(rows, time[rows], done[rows], np.full(len(rows), called))


def _inferred(table: CollectiveTable, keys: Int64Array, returns_complete: BoolArray, own_time: OwnTime) -> _Rows:
    """Return the ends of inferred waits: one for each collective that it was for, when that was complete."""
    inferred = np.flatnonzero(table.kind == INFERRED_WAIT)
    is_wait = (table.kind != CALL) & (keys >= 0)
    unseen = (table.kind == CALL) & (keys >= 0) & (table.done >= 0) & ~returns_complete
    if np.any(is_wait):
        of_rank = keys * (int(table.rank.max()) + 1) + table.rank
        unseen &= ~np.isin(of_rank, of_rank[is_wait])
    calls = np.flatnonzero(unseen)
    # Both by rank and time; a wait is for the calls of its rank since its wait before.
    wait_place = own_time.place(table.rank[inferred].astype(np.int64), table.end[inferred])
    order = np.argsort(wait_place, kind="stable")
    inferred = inferred[order]
    wait = np.searchsorted(wait_place[order], own_time.place(table.rank[calls].astype(np.int64), table.start[calls]))
    before_a_wait = wait < len(inferred)
    calls, wait = calls[before_a_wait], wait[before_a_wait]
    row = inferred[wait]
    in_same_step = (table.rank[row] == table.rank[calls]) & (table.step[row] == table.step[calls])
    calls, row, wait = calls[in_same_step], row[in_same_step], wait[in_same_step]
    time = np.clip(table.done[calls], table.start[row], table.end[row])
    of_unknown = np.ones(len(inferred), np.bool_)
    of_unknown[wait] = False
    rest = _rows(table.end, table.done, inferred[of_unknown], called=False)
    of_calls = _Rows(calls, time, time, np.zeros(len(calls), np.bool_))
    return _Rows(*(np.concatenate(columns) for columns in zip(of_calls, rest, strict=True)))


_LEAST = INT64_MIN // 2


class Replay:
    """A replay of all ranks, each from its first event on."""

    def __init__(self, events: RankEvents) -> None:
        self.events = events
        is_first = np.zeros(len(events.time), np.bool_)
        is_first[group_starts(events.rank)] = True
        is_head = events.binds | is_first
        # Sections in which a rank runs without leaving a wait, by their first events.
        self._head = np.flatnonzero(is_head)
        self._section = np.cumsum(is_head) - 1
        self._first = np.flatnonzero(is_first[self._head])
        self._follows = np.append(~is_first[self._head[1:]], False)
        self._call = np.flatnonzero(events.is_call)
        self._call_begin = np.searchsorted(self._section[self._call], np.arange(len(self._head) + 1))
        self._calls = np.bincount(events.key[self._call])
        self._pace = events.own_ns + np.where(events.binds, 0, events.waited)
        rows = np.flatnonzero(counts_steps(events.rank, events.step))
        self._order = rows[np.argsort(events.step[rows], kind="stable")]
        self._step_begin = group_starts(events.step[self._order])

    def times(self, shorter: Int64Array) -> Int64Array:
        """Return the time of each event if some own times were shorter, Unix ns."""
        events, head = self.events, self._head
        since = np.cumsum(self._pace - shorter)
        missing, last = self._calls.copy(), np.full(len(self._calls), _LEAST)
        begin = events.time[head]
        running, waiting = self._first, np.empty(0, np.int64)
        while len(running) or len(waiting):
            called = self._call[expand_ranges(self._call_begin[running], self._call_begin[running + 1])[0]]
            section = self._section[called]
            np.maximum.at(last, events.key[called], begin[section] + since[called] - since[head[section]])
            np.subtract.at(missing, events.key[called], 1)
            waiting = np.concatenate([waiting, running[self._follows[running]] + 1])
            ready = missing[events.key[head[waiting]]] <= 0
            if len(waiting) and not np.any(ready):
                # If clocks are off, a wait can seem to end by a later call of its own rank.
                ready[np.argmin(events.time[head[waiting]])] = True
            running, waiting = waiting[ready], waiting[~ready]
            wait = head[running]
            arrived = begin[running - 1] + since[wait] - since[head[running - 1]]
            begin[running] = np.maximum(arrived, last[events.key[wait]] + events.transfer[wait]) + events.over[wait]
        times: Int64Array = (begin - since[head])[self._section] + since
        return times

    def saved_by_step(self, shorter: Int64Array) -> dict[int, int]:
        """Return by how much shorter each step would have been, ns: from the last event of one to that of the next."""
        ends, replayed = (
            np.maximum.reduceat(times[self._order], self._step_begin)
            for times in (self.events.time, self.times(shorter))
        )
        steps = self.events.step[self._order[self._step_begin]]
        return dict(zip(steps.tolist(), np.diff(ends - replayed, prepend=0).tolist(), strict=True))


def counts_steps(rank: Int64Array, step: Int64Array) -> BoolArray:
    """Return which rows, by rank, are of ranks with several steps; all, if no rank has several."""
    begins = group_starts(rank)
    counts = np.minimum.reduceat(step, begins) != np.maximum.reduceat(step, begins)
    return np.repeat(counts if counts.any() else ~counts, group_lengths(begins, len(rank)))


def without_excess(events: RankEvents, arrivals: Arrivals, rows: Sequence[int]) -> Int64Array:
    """Return by how much shorter the own time before each event is without the excess of some arrivals, ns.

    What a rank took more between two of its calls is taken off where it took more than the others: from its waits in
    between on, or before them.
    """
    shorter = np.zeros(len(events.time), np.int64)
    for row in rows:
        first, last = np.searchsorted(events.place, [arrivals.place_before[row], arrivals.place[row]], side="right")
        inside = slice(int(first), int(last))
        more = np.maximum(events.own_ns[inside] - _usual(events, arrivals, row, int(last - first)), 0)
        shorten(shorter, events, inside, more, int(arrivals.excess[row]))
    return shorter


def shorten(shorter: Int64Array, events: RankEvents, where: slice, weights: Float64Array, duration_ns: int) -> None:
    """Add to `shorter` some of the own time before each of some events, by their weights, and no more than there is."""
    total = float(weights.sum())
    if total > 0:
        part = np.rint(weights * (duration_ns / total)).astype(np.int64)
        shorter[where] = np.minimum(shorter[where] + part, events.own_ns[where])


def _usual(events: RankEvents, arrivals: Arrivals, row: int, count: int) -> Float64Array:
    """Return the median own time of the other ranks before each of the events that lead to an arrival."""
    begin, end = np.searchsorted(arrivals.collective, arrivals.collective[row] + np.arange(2))
    others = np.arange(begin, end)
    others = others[others != row]
    firsts = np.searchsorted(events.place, arrivals.place_before[others], side="right")
    lasts = np.searchsorted(events.place, arrivals.place[others], side="right")
    # A rank with other events in between did something else.
    firsts = firsts[(lasts - firsts == count) & (arrivals.place_before[others] >= 0)]
    if not len(firsts):
        return np.zeros(count)
    usual: Float64Array = np.median(events.own_ns[firsts[:, None] + np.arange(count)], axis=0)
    return usual
