"""Some steps of a large ring: looks here and there find where they are; only these and a few beside them are read."""

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..._arrays import INT64_MAX, Int64Array, is_any
from ...ring import Events, Kind, RingSnapshot
from ...ring.slot_format import ALLOCATED, CALL_ENTER_KINDS, CALL_EXIT_KINDS, RANGE_KINDS
from ..contents import OPEN_AT_END, UNSAVED, WHOLE_RUN
from ..timeline import Timeline
from . import pieces
from .analysis import RingAnalysis
from .cuts import find_cuts
from .from_ring import build_timeline, describe_open, describe_whole_run
from .intervals import call_ids, pair_by_value

_OTHER_KINDS = {*Kind} - {*CALL_ENTER_KINDS, *CALL_EXIT_KINDS}
_BLOCKS = 16
"""Parts of a piece. So large is a look, and what is read beside a window at first, to find where it can be cut."""
_STEPS_AROUND = 4
"""Number of steps beside the wanted ones that say whether a call is an evaluation."""
_MIN_ENDS = 4


def build_last(read: pieces.ReadRing, serials: range, max_events: int) -> Timeline | None:
    """Return the timeline of the last events of a large ring; None if it is not large, or cannot be cut there."""
    if not max_events < len(serials) >= 4 * pieces.PIECE_EVENTS:
        return None
    tail = serials[-max_events:]
    end = RingAnalysis(read(serials[-1:], ()))
    blocks = (read(part, ()).slots.events for part in pieces.parts_of(tail))
    cuts = find_cuts(blocks, end.lookup, np.zeros(0, np.int64), is_part=True)
    if not cuts:
        return None

    window = range(cuts[0], serials.stop)
    return _build_part(read, serials, window, np.zeros(0, np.int64), lambda events: [_with_begun_ranges(events)])


def _with_begun_ranges(events: Events) -> Events:
    """Return some events without the ends of ranges that began before them."""
    begin, end = pair_by_value(events, *RANGE_KINDS)
    return events.take(np.delete(np.arange(len(events)), end[begin < 0]))


def _build_part(
    read: pieces.ReadRing,
    serials: range,
    window: range,
    numbers: Int64Array,
    change: Callable[[Events], list[Events]],
    *,
    in_pieces: bool = True,
) -> Timeline:
    """Build the timeline of a part of a ring, which says how much is in all of it; perhaps in pieces.

    `numbers` are those of the steps that end in the ring; `change` returns what is read instead of all events of the
    part.
    """

    def read_window(part: range | None, without: Collection[Kind] = ()) -> RingSnapshot:
        snapshot = read(part or window, without)
        return pieces.with_events(snapshot, change(snapshot.slots.events)) if part in (None, window) else snapshot

    timeline = pieces.RingPieces(read_window, window).join() if in_pieces else build_timeline(read_window(None))
    last = read(serials[-1:], ())
    run = describe_whole_run(last._replace(slots=last.slots._replace(overwritten=serials.start)), numbers, None)
    stats = replace(timeline.stats, recorded=serials.stop, overwritten=serials.start)
    return replace(timeline, stats=stats, metadata={**timeline.metadata, WHOLE_RUN: run})


class _StepEnd(NamedTuple):
    """The serial number of the event that ends a step, and the number of the step."""

    serial: int
    number: int


def build_around(read: pieces.ReadRing, serials: range, first: int | None, last: int | None) -> Timeline | None:
    """Return the timeline of some steps of a large ring and of a few beside them; None if these are most, or none.

    None also if the ring is not large, or if nothing ends its steps. A negative number counts from the end.
    """
    looks = _Looks(read, serials)
    window_and_around = looks.find_window(first or 0, INT64_MAX if last is None else last) if looks.is_large else None
    if window_and_around is None:
        return None
    window, open_calls = window_and_around
    if looks.has_costs:
        ring = pieces.RingPieces(read, serials, window)
        if not ring.cuts:
            return None
        timeline = ring.join()
        if window.start == serials.start:
            return timeline
        return replace(timeline, trained=frozenset(name.fqn for name in timeline.names))  # perhaps in earlier pieces

    def whole_ranges(events: Events) -> list[Events]:
        return [looks.with_whole_ranges(events, window), open_calls]

    numbers = np.arange(looks.first.number, looks.last.number + 1)
    timeline = _build_part(read, serials, window, numbers, whole_ranges, in_pieces=not len(open_calls))
    end = RingAnalysis(read(serials[-looks.block :], ()))
    metadata = {name: value for name, value in timeline.metadata.items() if name not in (OPEN_AT_END, UNSAVED)}
    metadata |= describe_open(end, lambda _: [end])
    return replace(timeline, metadata=metadata, begin_ns=looks.begin_ns(window.start))


def find_last_steps(read: pieces.ReadRing, serials: range, max_events: int) -> tuple[int, int] | None:
    """Return the numbers of the first step that ends in a ring, and of the first of its last ones, which are whole.

    None if the ring is not large, or if nothing ends its steps. They have at most `max_events` together, unless the
    last one that ended has more.
    """
    looks = _Looks(read, serials)
    if not looks.is_large:
        return None
    cut_off = looks.next_end(max(serials.start, serials.stop - max_events))
    return looks.first.number, min(cut_off.number + 1, looks.last.number)


def _without_calls(events: Events, ids: Int64Array) -> Events:
    """Return the events without the begins and ends of some calls."""
    index = np.flatnonzero(is_any(events.kind, (*CALL_ENTER_KINDS, *CALL_EXIT_KINDS)))
    kept = np.ones(len(events), np.bool_)
    kept[index[np.isin(call_ids(events, index), ids)]] = False
    return events if kept.all() else events.take(kept)


class _Looks:
    """Looks into a ring.

    Args:
        read: reads some of its events.
        serials: those of the ring.

    Attributes:
        is_large: whether it is large, and its last steps have ends; else it has no other attribute.
        has_costs: whether operators or memory were counted: all of the ring says what of them some steps have.
        block: how many events a look reads.
        first: the end of a step that is first in it.
        last: the last one.
    """

    def __init__(self, read: pieces.ReadRing, serials: range) -> None:
        self._read, self._serials, self.block = read, serials, max(pieces.PIECE_EVENTS // _BLOCKS, 1)
        self.is_large = len(serials) >= 4 * pieces.PIECE_EVENTS
        self._stopped, count, ended = False, self.block, 0
        while self.is_large and ended < _MIN_ENDS:
            self.is_large = 2 * count < len(serials)
            tail = RingAnalysis(read(serials[-count:], pieces.PIECE_KINDS))
            ends, count = tail.step_ends, 4 * count
            ended = len(ends.event)
        if self.is_large:
            event = ends.event[-1]
            self._kind, self._name = tail.events.kind[event], tail.events.name[event]
            self.last = _StepEnd(int(tail.events.serial[event]), int(ends.number[-1]))
            self.first = self.next_end(serials.start)
            self.has_costs = tail.has_flops or ALLOCATED in tail.lookup.texts
            self._no_events = tail.events.take(np.zeros(0, np.int64))
            self._stopped = any(record["kind"] == "stop" for record in tail.snapshot.records)

    def next_end(self, begin: int) -> _StepEnd:
        """Return the first end of a step from a serial number on; after the last, that of a step that never comes."""
        without = {*Kind} - {self._kind}
        for first in range(begin, self.last.serial + 1, self.block):
            events = self._read(range(first, min(first + self.block, self._serials.stop)), without).slots.events
            ends = np.flatnonzero((events.kind == self._kind) & (events.name == self._name))
            if len(ends):
                return _StepEnd(int(events.serial[ends[0]]), int(events.value[ends[0]]))
        return _StepEnd(self._serials.stop - 1, INT64_MAX)

    def _around(self, number: int) -> tuple[int, int]:
        """Return serial numbers after the end of an earlier step, and after the end of this step or a later one."""
        low, high = self._serials.start, self._serials.stop
        before, after = low, high
        while high - low > self.block:
            middle = (low + high) // 2
            end = self.next_end(middle)
            if end.number < number:
                low = before = end.serial + 1
            else:
                high, after = middle, end.serial + 1
        return before, after

    def find_window(self, first: int, last: int) -> tuple[range, Events] | None:
        """Return the serial numbers of some steps and a few beside them, cut where nothing belongs to what is outside.

        Also return the begins of the calls around them, which began before. A negative number counts from the end.
        """
        start, stop, count = self._serials.start, self._serials.stop, self.last.number + 1
        low = first if first >= 0 else count + first
        high = last if min(first, last) >= 0 else INT64_MAX  # to count from the end needs the end
        if not (self.first.number <= high and low <= count and low < high):
            return None
        before, after = self._around(low - _STEPS_AROUND)[0], self._around(min(high, count) + _STEPS_AROUND)[1]
        beside = self.block
        while 2 * (after - before + 2 * beside) <= len(self._serials):
            begin, end = max(start, before - beside), min(stop, after + beside)
            tail_events = RingAnalysis(self._read(range(begin, end), pieces.PIECE_KINDS))
            ends = tail_events.events.serial[tail_events.step_ends.event]
            if is_any(tail_events.all_events.kind, pieces.WHOLE_KINDS).any():
                break
            open_calls = self._open_at(begin, self._no_events, start)
            of_around = call_ids(open_calls, np.arange(len(open_calls)))
            bounds = sorted({begin, *range(before, after, pieces.PIECE_EVENTS), after, end})
            parts = (self._read(range(*part), ()).slots.events for part in itertools.pairwise(bounds))
            blocks = (_without_calls(events, of_around) for events in parts)
            cuts = find_cuts(blocks, tail_events.lookup, ends, is_part=begin > start)
            begins = [start] if begin == start else [cut for cut in cuts if cut <= before]
            stops = [cut for cut in cuts if cut >= after] or ([stop] if end == stop else [])
            if begins and stops:
                window = range(begins[-1], stops[0])
                open_calls = self._open_at(window.start, open_calls, begin)
                return (window, open_calls) if self._is_whole(window, open_calls) else None
            beside *= 4
        return None

    def _calls(self, part: range) -> Iterator[tuple[Events, Int64Array]]:
        """Yield the begins of calls in a part, and the ids of those that end in it."""
        for serials in pieces.parts_of(part):
            events = self._read(serials, _OTHER_KINDS).slots.events
            yield (
                events.take(is_any(events.kind, CALL_ENTER_KINDS)),
                call_ids(events, np.flatnonzero(is_any(events.kind, CALL_EXIT_KINDS))),
            )

    def _open_at(self, serial: int, open_: Events, since: int) -> Events:
        """Return the begins of calls that have not ended before an event, of those open at an earlier one and later."""
        for begun, ended in self._calls(range(since, serial)):
            calls = pieces.join_events([open_, begun])
            open_ = calls.take(~np.isin(call_ids(calls, np.arange(len(calls))), ended))
        return open_

    def _is_whole(self, window: range, open_calls: Events) -> bool:
        """Whether the calls around a window end, or the process died in them, and no other one reaches out of it."""
        left, later = call_ids(open_calls, np.arange(len(open_calls))), np.zeros(0, np.int64)
        for part in (window, range(window.stop, self._serials.stop)):
            for begun, ended in self._calls(part):
                if part is not window:
                    later = np.concatenate([later, call_ids(begun, np.arange(len(begun)))])
                    if not np.isin(ended, np.concatenate([later, left])).all():
                        return False
                    later = np.setdiff1d(later, ended)
                left = np.setdiff1d(left, ended)
        return not len(left) or not self._stopped

    def with_whole_ranges(self, events: Events, window: range) -> Events:
        """Return the events of a window with the ends of all ranges that begin in it, and of no others."""
        is_first = window.start == self._serials.start
        has_lost = is_first and window.start > 0  # a range whose begin was overwritten counts to the first step
        after = np.zeros(0, np.int64)  # whose begins are after the window
        begun, ended = (events.value[events.kind == kind] for kind in RANGE_KINDS)
        parts = [events if is_first else _with_begun_ranges(events)]
        for part in pieces.parts_of(range(window.stop, self._serials.stop)):
            if not has_lost and np.isin(begun, ended).all():
                break
            edges = self._read(part, {*Kind} - {*RANGE_KINDS}).slots.events
            after = np.concatenate([after, edges.value[edges.kind == Kind.RANGE_BEGIN]])
            is_wanted = np.isin(edges.value, begun) | has_lost & ~np.isin(edges.value, after)
            parts.append(edges.take((edges.kind == Kind.RANGE_END) & is_wanted))
            ended = np.concatenate([ended, parts[-1].value])
        return pieces.join_events(parts)

    def begin_ns(self, begin: int) -> int | None:
        """Return when the step ended after which a part begins; None for the begin of the ring."""
        if begin == self._serials.start:
            return None
        end = RingAnalysis(self._read(range(begin - 1, begin), ()))
        return int(end.clock.to_other(end.all_events.time)[0])
