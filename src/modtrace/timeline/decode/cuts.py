"""Cuts of a large ring into pieces, at ends of steps after which no event belongs to an earlier one.

Events that belong together share a number, which is given out in order: to the calls of a module, the nodes that a
thread makes, the passes, the collectives. A cut is clean if no number used after it was given out before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._arrays import INT64_MAX, Int64Array, is_any, order_in_groups
from ...ring import Events, Kind, slot_format
from .intervals import segment_pass

if TYPE_CHECKING:
    from .name_lookup import NameLookup

_WINDOWS = 4
"""Number of parts of a block. Each has one candidate for a cut: the last with the fewest open calls and passes."""
_PASS, _SEGMENTS, _COLLECTIVE, _FIRST_THREAD = range(4)
"""Columns of counters. After one column per thread there are two per name: for its calls, and for recomputed calls."""
_CALL_KINDS = (*slot_format.CALL_ENTER_KINDS, *slot_format.CALL_EXIT_KINDS)


class _Counters(NamedTuple):
    """The counter values in some events of a block; arrays of equal length."""

    event: Int64Array  # index of the event in its block
    column: Int64Array  # column of the counter; -1 if its thread is unknown
    number: Int64Array  # value of the counter

    def keys(self) -> Int64Array:
        """Return column and number as one number."""
        return self.column << slot_format.SEQUENCE_BITS | self.number


class _BlockCounters(NamedTuple):
    """The counter values in a block of events."""

    starts: list[_Counters]  # numbers of calls and passes that start
    ends: list[_Counters]  # numbers of calls and passes that end
    given_out: list[_Counters]  # numbers given out in the block
    referred_to: list[_Counters]  # numbers of earlier events, which must be in the same piece
    lowest: list[_Counters]  # numbers whose minimum is the first one given out in this part of the ring


def find_cuts(blocks: Iterable[Events], lookup: NameLookup, ends: Int64Array, *, is_part: bool = False) -> list[int]:
    """Return the serial numbers at which a ring can be cut, so that no later event belongs to an earlier one.

    Empty if names are lost. Cuts are after ends of steps, except the last, so that no piece is only an evaluation;
    without ends, cuts can be anywhere. Numbers given out before a part of a ring are lower than the first one in it, or
    unknown if it has none.
    """
    count = _FIRST_THREAD + len(lookup.threads) + 2 * len(lookup.names) + 1
    cuts = list[int]()
    # One row before the first cut and one after each: the highest number given out, the lowest one referred to.
    given_out, referred_to = [np.full(count, -1)], [np.full(count, INT64_MAX)]
    open_edges, first = np.zeros(0, np.int64), np.full(count, INT64_MAX)
    for events in blocks:
        names = events.name[is_any(events.kind, _CALL_KINDS)]
        if names.max(initial=-1) >= len(lookup.names) or events.thread.max(initial=-1) >= len(lookup.threads):
            return []
        block = _block_counters(events, lookup)
        for counters in block.lowest if is_part else ():
            np.minimum.at(first, counters.column, counters.number)
        candidates = _candidates(events, ends)
        part = np.searchsorted(candidates, events.serial, "right")
        given, referred = (given_out, np.maximum, block.given_out), (referred_to, np.minimum, block.referred_to)
        for rows, extreme, values in (given, referred):
            part_rows = np.full((len(candidates) + 1, count), -1 if rows is given_out else INT64_MAX)
            for counters in values:
                extreme.at(part_rows.reshape(-1), part[counters.event] * count + counters.column, counters.number)
            extreme(rows[-1], part_rows[0], out=rows[-1])
            rows.extend(part_rows[1:])
        cuts += candidates.tolist()
        # Each edge as one number: twice the key, plus one for an end.
        edges = [counters.keys() * 2 for counters in block.starts]
        edges += [counters.keys() * 2 + 1 for counters in block.ends]
        edge = np.concatenate([open_edges, *edges])
        edge = edge[order_in_groups(edge, slot_format.SEQUENCE_BITS + 1)]
        open_edges = edge[(np.diff(edge >> 1, append=-1) != 0) & (edge & 1 == 0)]
        unstarted = edge[(np.diff(edge >> 1, prepend=-1) != 0) & (edge & 1 == 1)] >> 1
        # Except the end of a pass in which no node of a module ran.
        unstarted = unstarted[unstarted >> slot_format.SEQUENCE_BITS != _SEGMENTS]
        np.maximum.at(given_out[0], unstarted >> slot_format.SEQUENCE_BITS, unstarted & slot_format.SEQUENCE_MASK)
    open_column, open_number = open_edges >> slot_format.SEQUENCE_BITS + 1, open_edges >> 1 & slot_format.SEQUENCE_MASK
    np.minimum.at(referred_to[-1], open_column, open_number)
    if is_part:
        np.maximum(given_out[0], first - 1, out=given_out[0])
    highest_before = np.maximum.accumulate(given_out)[:-1]
    lowest_after = np.minimum.accumulate(referred_to[::-1])[::-1][1:]
    is_clean: list[bool] = np.all((highest_before < lowest_after)[:, :-1], axis=1).tolist()
    return [*compress(cuts, is_clean)]


def count_open(events: Events) -> Int64Array:
    """Return the number of open calls and passes after each event, minus the number open before the first event."""
    starts = np.cumsum(is_any(events.kind, (*slot_format.CALL_ENTER_KINDS, Kind.PASS_BEGIN)), dtype=np.int64)
    return starts - np.cumsum(is_any(events.kind, (*slot_format.CALL_EXIT_KINDS, Kind.PASS_END)))


def _candidates(events: Events, ends: Int64Array) -> Int64Array:
    """Return the serial numbers at which a block may be cut, in order."""
    open_count, index = count_open(events), np.arange(len(events))
    if len(ends):
        index = np.searchsorted(events.serial, ends[:-1])
        index = index[np.append(events.serial, -1)[index] == ends[:-1]]
    windows = [window[::-1] for window in np.array_split(index, _WINDOWS) if len(window)]
    return events.serial[np.array([window[np.argmin(open_count[window])] for window in windows], np.int64)] + 1


def _block_counters(events: Events, lookup: NameLookup) -> _BlockCounters:
    """Return the counter values in a block of events, grouped by the use that the events make of them."""
    value, first_name = events.value, _FIRST_THREAD + len(lookup.threads)
    torch_threads, known_threads = lookup.torch_threads, np.flatnonzero(lookup.torch_threads >= 0)
    column_by_id = np.full(slot_format.FORWARD_THREAD_MASK + 1, -1)
    column_by_id[torch_threads[known_threads] & slot_format.FORWARD_THREAD_MASK] = _FIRST_THREAD + known_threads
    thread_column = np.where(torch_threads >= 0, column_by_id[torch_threads & slot_format.FORWARD_THREAD_MASK], -1)

    def find(*kinds: Kind) -> Int64Array:
        return np.flatnonzero(is_any(events.kind, kinds))

    def numbers(column: int, *kinds: Kind) -> _Counters:
        index = find(*kinds)
        return _Counters(index, np.full(len(index), column), value[index] & slot_format.SEQUENCE_MASK)

    def calls(*kinds: Kind) -> _Counters:
        index = find(*kinds)
        is_rerun = is_any(events.kind[index], (Kind.RECOMPUTE_ENTER, Kind.RECOMPUTE_EXIT))
        column = first_name + 2 * events.name[index].astype(np.int64) + is_rerun
        return _Counters(index, column, value[index] >> slot_format.SEQUENCE_BITS & slot_format.CALL_INDEX_MASK)

    index = find(Kind.CALL_BACKWARD, Kind.SEGMENT_BEGIN)
    in_pass = _Counters(
        index, np.full(len(index), _SEGMENTS), segment_pass(events.take(index)) & slot_format.SEQUENCE_MASK
    )
    index = find(Kind.CALL_BACKWARD)
    name, key = events.name[index].astype(np.int64), value[index]
    made_by = np.where(name == slot_format.NO_NAME, -1, first_name + 2 * name + (key & slot_format.RECOMPUTE_BIT != 0))
    called = _Counters(index, made_by, key & slot_format.CALL_INDEX_MASK)
    index = find(Kind.NODE_BEGIN, Kind.NODE_END, Kind.SEGMENT_BEGIN)
    nodes = _Counters(
        index,
        column_by_id[events.name[index] >> slot_format.FORWARD_THREAD_SHIFT],
        value[index] & slot_format.SEQUENCE_MASK,
    )
    # A thread's counter is the number of its next node.
    index = find(*_CALL_KINDS, Kind.GRAPH_BUILT, *slot_format.GREENLET_KINDS)
    next_nodes = _Counters(index, thread_column[events.thread[index]], value[index] & slot_format.SEQUENCE_MASK)
    starts = [calls(*slot_format.CALL_ENTER_KINDS), numbers(_PASS, Kind.PASS_BEGIN), in_pass]
    ends = [calls(*slot_format.CALL_EXIT_KINDS), numbers(_PASS, Kind.PASS_END), numbers(_SEGMENTS, Kind.BACKWARD_OVER)]
    waits = numbers(_COLLECTIVE, Kind.COLLECTIVE_DONE, Kind.WAIT_ENTER, Kind.WAIT_EXIT)
    new = [*starts, numbers(_COLLECTIVE, Kind.COLLECTIVE_ENTER)]
    return _BlockCounters(
        starts,
        ends,
        given_out=[*new, nodes, next_nodes._replace(number=next_nodes.number - 1)],
        referred_to=[*ends, nodes, in_pass, called, waits],
        lowest=[*new, next_nodes],
    )
