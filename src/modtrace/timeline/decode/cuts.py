"""Cuts of a large ring into pieces: at ends of steps after which nothing belongs to what is before.

What belongs together has a number that is given out in order: the calls of a module, the nodes that a thread makes, the
passes, the collectives. A cut parts nothing if no number that comes after it was given out before it.
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
"""Parts of a block; in each, one cut is looked at: the last one at which the fewest calls and passes are open."""
_PASS, _SEGMENTS, _COLLECTIVE, _FIRST_THREAD = range(4)
"""Columns of numbers. Those of threads are followed by two for each name: of its calls, and of those that run again."""
_CALL_KINDS = (*slot_format.CALL_ENTER_KINDS, *slot_format.CALL_EXIT_KINDS)


class _Numbers(NamedTuple):
    """The numbers of some events."""

    event: Int64Array  # the indexes of the events in their block
    column: Int64Array  # what each number counts, a column; -1 if its thread is not known
    number: Int64Array  # the numbers

    def keys(self) -> Int64Array:
        """Return column and number as one number."""
        return self.column << slot_format.SEQUENCE_BITS | self.number


class _BlockNumbers(NamedTuple):
    """The numbers of a block of events."""

    begun: list[_Numbers]  # those of calls and passes that begin
    ended: list[_Numbers]  # those of calls and passes that end
    given_out: list[_Numbers]  # those that are given out in the block; the others were before
    referred_to: list[_Numbers]  # those of something earlier, which must be in the same piece
    lowest: list[_Numbers]  # those of which the lowest is the first that a part of a ring gives out


def find_cuts(blocks: Iterable[Events], lookup: NameLookup, ends: Int64Array, *, is_part: bool = False) -> list[int]:
    """Return serial numbers from which on nothing belongs to what is before; none if names are lost.

    Cuts are after ends of steps, but not after the last, so that no piece is an evaluation alone; without any ends,
    they can be anywhere. What was given out before a part of a ring is lower than the first number that is given out in
    it; if none is, it can be any.
    """
    count = _FIRST_THREAD + len(lookup.threads) + 2 * len(lookup.names) + 1
    # By cut, what was given out since the one before it, and the lowest that comes; one row more than cuts.
    cuts, made, used = list[int](), [np.full(count, -1)], [np.full(count, INT64_MAX)]
    is_open, first = np.zeros(0, np.int64), np.full(count, INT64_MAX)
    for events in blocks:
        names = events.name[is_any(events.kind, _CALL_KINDS)]
        if names.max(initial=-1) >= len(lookup.names) or events.thread.max(initial=-1) >= len(lookup.threads):
            return []
        block = _numbers_of(events, lookup)
        for numbers in block.lowest if is_part else ():
            np.minimum.at(first, numbers.column, numbers.number)
        candidates = _candidates(events, ends)
        part = np.searchsorted(candidates, events.serial, "right")
        for rows, extreme, tables in ((made, np.maximum, block.given_out), (used, np.minimum, block.referred_to)):
            of_parts = np.full((len(candidates) + 1, count), -1 if rows is made else INT64_MAX)
            for numbers in tables:
                extreme.at(of_parts.reshape(-1), part[numbers.event] * count + numbers.column, numbers.number)
            extreme(rows[-1], of_parts[0], out=rows[-1])
            rows.extend(of_parts[1:])
        cuts += candidates.tolist()
        # Each as one number: twice what begins, and one more where it ends.
        edges = [begun.keys() * 2 for begun in block.begun] + [ended.keys() * 2 + 1 for ended in block.ended]
        edge = np.concatenate([is_open, *edges])
        edge = edge[order_in_groups(edge, slot_format.SEQUENCE_BITS + 1)]
        is_open = edge[(np.diff(edge >> 1, append=-1) != 0) & (edge & 1 == 0)]
        lost = edge[(np.diff(edge >> 1, prepend=-1) != 0) & (edge & 1 == 1)] >> 1
        lost = lost[
            lost >> slot_format.SEQUENCE_BITS != _SEGMENTS
        ]  # the end of a pass in which no node of a module ran
        np.maximum.at(made[0], lost >> slot_format.SEQUENCE_BITS, lost & slot_format.SEQUENCE_MASK)
    np.minimum.at(used[-1], is_open >> slot_format.SEQUENCE_BITS + 1, is_open >> 1 & slot_format.SEQUENCE_MASK)
    if is_part:
        np.maximum(made[0], first - 1, out=made[0])
    before = np.maximum.accumulate(made)[:-1]
    after = np.minimum.accumulate(used[::-1])[::-1][1:]
    parts_nothing: list[bool] = np.all((before < after)[:, :-1], axis=1).tolist()
    return [*compress(cuts, parts_nothing)]


def count_open(events: Events) -> Int64Array:
    """Return how many calls and passes are open after each event, less those that were open before the first."""
    begun = np.cumsum(is_any(events.kind, (*slot_format.CALL_ENTER_KINDS, Kind.PASS_BEGIN)), dtype=np.int64)
    return begun - np.cumsum(is_any(events.kind, (*slot_format.CALL_EXIT_KINDS, Kind.PASS_END)))


def _candidates(events: Events, ends: Int64Array) -> Int64Array:
    """Return the serial numbers after which a block may be cut, in order."""
    open_count, index = count_open(events), np.arange(len(events))
    if len(ends):
        index = np.searchsorted(events.serial, ends[:-1])
        index = index[np.append(events.serial, -1)[index] == ends[:-1]]
    windows = [window[::-1] for window in np.array_split(index, _WINDOWS) if len(window)]
    return events.serial[np.array([window[np.argmin(open_count[window])] for window in windows], np.int64)] + 1


def _numbers_of(events: Events, lookup: NameLookup) -> _BlockNumbers:
    """Return the numbers of a block of events, by what the events do with them."""
    value, first_name = events.value, _FIRST_THREAD + len(lookup.threads)
    torch_threads, numbered = lookup.torch_threads, np.flatnonzero(lookup.torch_threads >= 0)
    column_of = np.full(slot_format.FORWARD_THREAD_MASK + 1, -1)
    column_of[torch_threads[numbered] & slot_format.FORWARD_THREAD_MASK] = _FIRST_THREAD + numbered
    thread_column = np.where(torch_threads >= 0, column_of[torch_threads & slot_format.FORWARD_THREAD_MASK], -1)

    def find(*kinds: Kind) -> Int64Array:
        return np.flatnonzero(is_any(events.kind, kinds))

    def numbers(column: int, *kinds: Kind) -> _Numbers:
        index = find(*kinds)
        return _Numbers(index, np.full(len(index), column), value[index] & slot_format.SEQUENCE_MASK)

    def calls(*kinds: Kind) -> _Numbers:
        index = find(*kinds)
        is_rerun = is_any(events.kind[index], (Kind.RECOMPUTE_ENTER, Kind.RECOMPUTE_EXIT))
        column = first_name + 2 * events.name[index].astype(np.int64) + is_rerun
        return _Numbers(index, column, value[index] >> slot_format.SEQUENCE_BITS & slot_format.CALL_INDEX_MASK)

    index = find(Kind.CALL_BACKWARD, Kind.SEGMENT_BEGIN)
    in_pass = _Numbers(
        index, np.full(len(index), _SEGMENTS), segment_pass(events.take(index)) & slot_format.SEQUENCE_MASK
    )
    index = find(Kind.CALL_BACKWARD)
    name, key = events.name[index].astype(np.int64), value[index]
    made_by = np.where(name == slot_format.NO_NAME, -1, first_name + 2 * name + (key & slot_format.RECOMPUTE_BIT != 0))
    called = _Numbers(index, made_by, key & slot_format.CALL_INDEX_MASK)
    index = find(Kind.NODE_BEGIN, Kind.NODE_END, Kind.SEGMENT_BEGIN)
    nodes = _Numbers(
        index,
        column_of[events.name[index] >> slot_format.FORWARD_THREAD_SHIFT],
        value[index] & slot_format.SEQUENCE_MASK,
    )
    # A thread's counter is the next node's number: the last one made is one less.
    index = find(*_CALL_KINDS, Kind.GRAPH_BUILT, *slot_format.GREENLET_KINDS)
    counted = _Numbers(index, thread_column[events.thread[index]], value[index] & slot_format.SEQUENCE_MASK)
    begun = [calls(*slot_format.CALL_ENTER_KINDS), numbers(_PASS, Kind.PASS_BEGIN), in_pass]
    ended = [calls(*slot_format.CALL_EXIT_KINDS), numbers(_PASS, Kind.PASS_END), numbers(_SEGMENTS, Kind.BACKWARD_OVER)]
    waits = numbers(_COLLECTIVE, Kind.COLLECTIVE_DONE, Kind.WAIT_ENTER, Kind.WAIT_EXIT)
    new = [*begun, numbers(_COLLECTIVE, Kind.COLLECTIVE_ENTER)]
    return _BlockNumbers(
        begun,
        ended,
        given_out=[*new, nodes, counted._replace(number=counted.number - 1)],
        referred_to=[*ended, nodes, in_pass, called, waits],
        lowest=[*new, counted],
    )
