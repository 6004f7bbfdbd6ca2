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
    axis_ns: Int64Array  # time on the axis of `OwnTime`
    time_ns: Int64Array  # Unix time
    key: Int64Array  # number of its collective or message, from 0; -1 if unknown
    is_call: BoolArray  # True for a call, False for the end of a wait
    own_ns: Int64Array  # own time of the rank since its previous event; 0 for the first event
    wait_ns: Int64Array  # waiting time of the rank since its previous event
    binds: BoolArray  # True for the end of a wait that cannot come before the last call of `key`
    transfer_ns: Int64Array  # if `binds`: minimum time from that call to the end of the wait
    excess_wait_ns: Int64Array  # if `binds`: time that the wait lasted longer than this minimum


class _Rows(NamedTuple):
    """Events before they are sorted; arrays of equal length."""

    row: Int64Array  # index into the table of collectives
    time_ns: Int64Array  # Unix time
    done_ns: Int64Array  # Unix time at which its collective or message was complete; -1 if unknown
    is_call: BoolArray


def rank_events(table: CollectiveTable, own_time: OwnTime) -> RankEvents:
    """Return the events of all ranks."""
    keys = shared_keys(table)
    rows = _event_rows(table, keys, own_time)
    axis_ns = own_time.on_axis(table.rank[rows.row].astype(np.int64), rows.time_ns)
    # If both happen at one moment, the end of a wait comes before a call.
    order = np.lexsort((rows.is_call, axis_ns))
    row, time, done, axis_ns = (values[order] for values in (rows.row, rows.time_ns, rows.done_ns, axis_ns))
    is_call = rows.is_call[order]
    rank, key = table.rank[row].astype(np.int64), keys[row]
    own_ns, elapsed_ns = np.diff(own_time.until(axis_ns), prepend=0), np.diff(time, prepend=0)
    first_of_rank = group_starts(rank)
    own_ns[first_of_rank] = elapsed_ns[first_of_rank] = 0
    wait_ns = elapsed_ns - own_ns
    last_call_ns = np.full(int(keys.max(initial=-1)) + 1, INT64_MIN // 2)
    np.maximum.at(last_call_ns, key[is_call], time[is_call])
    binds = ~is_call & (key >= 0)
    binds[first_of_rank] = False  # what the rank did before is unknown
    since_last_ns = np.where(binds, time - last_call_ns[key], 0)
    # A send that completed before its receiver posted the receive did not wait for the receiver, and the source of a
    # broadcast did not wait for the others. Ends of waits whose calls are unknown do not bind.
    binds &= (since_last_ns >= 0) | synchronizing(table.operators)[table.operator[row]]
    binds &= since_last_ns < INT64_MAX // 4
    transfer_ns = np.where(done >= 0, np.minimum(done, time) - last_call_ns[key], since_last_ns)
    # A wait that started after the last call does not show the transfer time: the shortest transfer of `key` is used.
    shortest_ns = np.full(len(last_call_ns), INT64_MAX)
    np.minimum.at(shortest_ns, key[binds], transfer_ns[binds])
    started_late = binds & (done < 0) & (wait_ns < since_last_ns)
    transfer_ns = np.where(binds, np.where(started_late, shortest_ns[key], transfer_ns), 0)
    excess_wait_ns = np.where(binds, time - np.maximum(time - wait_ns, last_call_ns[key] + transfer_ns), 0)
    step = table.step[row].astype(np.int64)
    return RankEvents(rank, step, axis_ns, time, key, is_call, own_ns, wait_ns, binds, transfer_ns, excess_wait_ns)


def message_ends(table: CollectiveTable) -> tuple[Int64Array, Int64Array]:
    """Return the sender and receiver of each row, as ranks of the job; -1 for rows that are not messages."""
    kinds = [PEER_OPERATORS.index(text) if text in PEER_OPERATORS else -1 for text in table.operators]
    kind = np.array(kinds or [-1], np.int8)[table.operator]
    peer_rank = np.full(len(kind), -1, np.int64)
    messages = np.flatnonzero((kind >= 0) & (table.peer >= 0) & (table.counter >= 0))
    for rows in split_by(table.group[messages], messages):
        members = np.array(ranks_in_group(table.groups[table.group[rows[0]]]), np.int64)
        peer_index = table.peer[rows]
        in_group = peer_index < len(members)
        peer_rank[rows[in_group]] = members[peer_index[in_group]]
    caller = np.where(peer_rank >= 0, table.rank, -1)
    return np.where(kind == 0, caller, peer_rank), np.where(kind == 0, peer_rank, caller)


def shared_keys(table: CollectiveTable) -> Int64Array:
    """Return the number of each row's collective or message; -1 if it cannot be matched across ranks."""
    sender, receiver = message_ends(table)
    is_message = sender >= 0
    channel = table.group.astype(np.int64)
    if np.any(is_message):
        # First number the pairs of ranks, then the combinations of group and pair.
        _, pair = np.unique(np.where(is_message, (sender + 1) << RANK_BITS | receiver, 0), return_inverse=True)
        _, channel = np.unique(channel << 32 | pair, return_inverse=True)
    shared = table.counter >= 0
    keys = np.full(len(table.rank), -1, np.int64)
    _, keys[shared] = np.unique(call_keys(channel, table.counter)[shared], return_inverse=True)
    return keys


def _event_rows(table: CollectiveTable, keys: Int64Array, own_time: OwnTime) -> _Rows:
    is_call = table.kind == CALL
    returns_complete = is_call & (table.done_ns >= 0) & (table.done_ns <= table.end_ns)
    parts = [
        _rows(table.start_ns, table.done_ns, np.flatnonzero(is_call & (keys >= 0)), called=True),
        _rows(table.end_ns, table.done_ns, np.flatnonzero(returns_complete), called=False),
        _rows(table.end_ns, table.done_ns, np.flatnonzero(~is_call & (table.kind != INFERRED_WAIT)), called=False),
        _inferred_wait_rows(table, keys, returns_complete, own_time),
    ]
    return _Rows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _rows(time: Int64Array, done: Int64Array, rows: Int64Array, *, called: bool) -> _Rows:
    return _Rows(rows, time[rows], done[rows], np.full(len(rows), called))


def _inferred_wait_rows(
    table: CollectiveTable, keys: Int64Array, returns_complete: BoolArray, own_time: OwnTime
) -> _Rows:
    """Return the ends of inferred waits: one for each awaited collective, at its completion."""
    inferred = np.flatnonzero(table.kind == INFERRED_WAIT)
    is_wait = (table.kind != CALL) & (keys >= 0)
    has_no_wait = (table.kind == CALL) & (keys >= 0) & (table.done_ns >= 0) & ~returns_complete
    if np.any(is_wait):
        rank_keys = keys * (int(table.rank.max()) + 1) + table.rank
        has_no_wait &= ~np.isin(rank_keys, rank_keys[is_wait])
    calls = np.flatnonzero(has_no_wait)
    # Both are in the order of rank and time; a wait is for the calls of its rank since the rank's previous wait.
    wait_axis_ns = own_time.on_axis(table.rank[inferred].astype(np.int64), table.end_ns[inferred])
    order = np.argsort(wait_axis_ns, kind="stable")
    inferred = inferred[order]
    wait = np.searchsorted(
        wait_axis_ns[order], own_time.on_axis(table.rank[calls].astype(np.int64), table.start_ns[calls])
    )
    has_wait = wait < len(inferred)
    calls, wait = calls[has_wait], wait[has_wait]
    row = inferred[wait]
    in_same_step = (table.rank[row] == table.rank[calls]) & (table.step[row] == table.step[calls])
    calls, row, wait = calls[in_same_step], row[in_same_step], wait[in_same_step]
    time = np.clip(table.done_ns[calls], table.start_ns[row], table.end_ns[row])
    has_no_call = np.ones(len(inferred), np.bool_)
    has_no_call[wait] = False
    waits_without_calls = _rows(table.end_ns, table.done_ns, inferred[has_no_call], called=False)
    waits_for_calls = _Rows(calls, time, time, np.zeros(len(calls), np.bool_))
    return _Rows(*(np.concatenate(columns) for columns in zip(waits_for_calls, waits_without_calls, strict=True)))


_BEFORE_ALL_NS = INT64_MIN // 2


class Replay:
    """A replay of all ranks, each starting with its first event."""

    def __init__(self, events: RankEvents) -> None:
        self.events = events
        is_first = np.zeros(len(events.time_ns), np.bool_)
        is_first[group_starts(events.rank)] = True
        is_head = events.binds | is_first
        # First events of the sections, in which a rank runs until its next wait ends.
        self._head = np.flatnonzero(is_head)
        self._section = np.cumsum(is_head) - 1
        self._first = np.flatnonzero(is_first[self._head])
        self._has_next = np.append(~is_first[self._head[1:]], False)
        self._call = np.flatnonzero(events.is_call)
        self._first_call = np.searchsorted(self._section[self._call], np.arange(len(self._head) + 1))
        self._calls = np.bincount(events.key[self._call])
        self._duration_ns = events.own_ns + np.where(events.binds, 0, events.wait_ns)
        rows = np.flatnonzero(counts_steps(events.rank, events.step))
        self._order = rows[np.argsort(events.step[rows], kind="stable")]
        self._step_start = group_starts(events.step[self._order])

    def times(self, cut_ns: Int64Array) -> Int64Array:
        """Return the time of each event, Unix ns, if the own time before event i were shorter by `cut_ns[i]` ns."""
        events, head = self.events, self._head
        own_total_ns = np.cumsum(self._duration_ns - cut_ns)
        missing, last_call_ns = self._calls.copy(), np.full(len(self._calls), _BEFORE_ALL_NS)
        start_ns = events.time_ns[head]
        running, waiting = self._first, np.empty(0, np.int64)
        while len(running) or len(waiting):
            called = self._call[expand_ranges(self._first_call[running], self._first_call[running + 1])[0]]
            section = self._section[called]
            np.maximum.at(
                last_call_ns, events.key[called], start_ns[section] + own_total_ns[called] - own_total_ns[head[section]]
            )
            np.subtract.at(missing, events.key[called], 1)
            waiting = np.concatenate([waiting, running[self._has_next[running]] + 1])
            ready = missing[events.key[head[waiting]]] <= 0
            if len(waiting) and not np.any(ready):
                # If clocks are off, a wait can seem to end by a later call of its own rank.
                ready[np.argmin(events.time_ns[head[waiting]])] = True
            running, waiting = waiting[ready], waiting[~ready]
            wait = head[running]
            arrival_ns = start_ns[running - 1] + own_total_ns[wait] - own_total_ns[head[running - 1]]
            start_ns[running] = (
                np.maximum(arrival_ns, last_call_ns[events.key[wait]] + events.transfer_ns[wait])
                + events.excess_wait_ns[wait]
            )
        times: Int64Array = (start_ns - own_total_ns[head])[self._section] + own_total_ns
        return times

    def saved_by_step(self, cut_ns: Int64Array) -> dict[int, int]:
        """Return the ns by which each step would be shorter; a step ends with its last event."""
        ends, replayed = (
            np.maximum.reduceat(times[self._order], self._step_start)
            for times in (self.events.time_ns, self.times(cut_ns))
        )
        steps = self.events.step[self._order[self._step_start]]
        return dict(zip(steps.tolist(), np.diff(ends - replayed, prepend=0).tolist(), strict=True))


def counts_steps(rank: Int64Array, step: Int64Array) -> BoolArray:
    """Return the mask of rows (sorted by rank) of ranks with several steps; of all rows if no rank has several."""
    starts = group_starts(rank)
    counts = np.minimum.reduceat(step, starts) != np.maximum.reduceat(step, starts)
    return np.repeat(counts if counts.any() else ~counts, group_lengths(starts, len(rank)))


def without_excess(events: RankEvents, arrivals: Arrivals, rows: Sequence[int]) -> Int64Array:
    """Return the ns to subtract from the own time before each event, to remove the excess of the arrivals in `rows`.

    Waits divide the time between two calls into parts; the excess is removed from the parts longer than on other ranks.
    """
    cut_ns = np.zeros(len(events.time_ns), np.int64)
    for row in rows:
        first, last = np.searchsorted(
            events.axis_ns, [arrivals.previous_axis_ns[row], arrivals.axis_ns[row]], side="right"
        )
        inside = slice(int(first), int(last))
        excess = np.maximum(events.own_ns[inside] - _peer_median(events, arrivals, row, int(last - first)), 0)
        shorten(cut_ns, events, inside, excess, int(arrivals.excess_ns[row]))
    return cut_ns


def shorten(cut_ns: Int64Array, events: RankEvents, inside: slice, weights: Float64Array, duration_ns: int) -> None:
    """Distribute `duration_ns` over `cut_ns[inside]` by weight; no event gets more than its own time."""
    total = float(weights.sum())
    if total > 0:
        part = np.rint(weights * (duration_ns / total)).astype(np.int64)
        cut_ns[inside] = np.minimum(cut_ns[inside] + part, events.own_ns[inside])


def _peer_median(events: RankEvents, arrivals: Arrivals, row: int, count: int) -> Float64Array:
    """Return the median own time of the other ranks before each of the `count` events that lead to an arrival."""
    start, end = np.searchsorted(arrivals.collective, arrivals.collective[row] + np.arange(2))
    peer_rows = np.arange(start, end)
    peer_rows = peer_rows[peer_rows != row]
    firsts = np.searchsorted(events.axis_ns, arrivals.previous_axis_ns[peer_rows], side="right")
    lasts = np.searchsorted(events.axis_ns, arrivals.axis_ns[peer_rows], side="right")
    # Ranks with a different number of events in between are not compared.
    firsts = firsts[(lasts - firsts == count) & (arrivals.previous_axis_ns[peer_rows] >= 0)]
    if not len(firsts):
        return np.zeros(count)
    median_ns: Float64Array = np.median(events.own_ns[firsts[:, None] + np.arange(count)], axis=0)
    return median_ns
