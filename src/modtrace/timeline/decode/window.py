"""Selected steps of a large ring: sampled reads locate them, then only they and a few steps around them are read."""

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
"""Number of parts of a piece. One part is the size of a sampled read, and of the first margin around a window."""
_STEPS_AROUND = 4
"""Number of steps read on each side of the selected ones, to recognize evaluations."""
_MIN_ENDS = 4
"""Minimum number of step ends in the last events, to know which events end steps."""


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
    return _build_part(read, serials, window, np.zeros(0, np.int64), lambda events: [_add_started_ranges(events)])


def _add_started_ranges(events: Events) -> Events:
    """Return the events without the ends of ranges that started before them."""
    start, end = pair_by_value(events, *RANGE_KINDS)
    return events.take(np.delete(np.arange(len(events)), end[start < 0]))


def _build_part(
    read: pieces.ReadRing,
    serials: range,
    window: range,
    numbers: Int64Array,
    change: Callable[[Events], list[Events]],
    *,
    in_pieces: bool = True,
) -> Timeline:
    """Build the timeline of a part of a ring, with the counts of the whole ring.

    `numbers` are the numbers of the steps that end in the ring. `change` replaces the events of the part.
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


def build_around(read: pieces.ReadRing, serials: range, first: int | None, stop: int | None) -> Timeline | None:
    """Return the timeline of the selected steps of a large ring and a few around them.

    None if there are no such steps, if they are most of the ring, if the ring is not large, or if its steps have no
    ends. A negative number counts from the end.
    """
    probe = _RingProbe(read, serials)
    window_and_calls = probe.find_window(first or 0, INT64_MAX if stop is None else stop) if probe.is_large else None
    if window_and_calls is None:
        return None
    window, open_calls = window_and_calls
    if probe.has_costs:
        ring = pieces.RingPieces(read, serials, window)
        if not ring.cuts:
            return None
        timeline = ring.join()
        if window.start == serials.start:
            return timeline
        return replace(timeline, trained=frozenset(name.fqn for name in timeline.names))  # perhaps in earlier pieces

    def whole_ranges(events: Events) -> list[Events]:
        return [probe.with_whole_ranges(events, window), open_calls]

    numbers = np.arange(probe.first.number, probe.last.number + 1)
    timeline = _build_part(read, serials, window, numbers, whole_ranges, in_pieces=not len(open_calls))
    end = RingAnalysis(read(serials[-probe.block :], ()))
    metadata = {name: value for name, value in timeline.metadata.items() if name not in (OPEN_AT_END, UNSAVED)}
    metadata |= describe_open(end, lambda _: [end])
    return replace(timeline, metadata=metadata, begin_ns=probe.start_ns(window.start))


def find_last_steps(read: pieces.ReadRing, serials: range, max_events: int) -> tuple[int, int] | None:
    """Return the numbers of the first step that ends in a ring, and of the first of its last whole steps.

    The last steps have up to `max_events`, or are a single step. None if the ring is small, or its steps have no ends.
    """
    probe = _RingProbe(read, serials)
    if not probe.is_large:
        return None
    cut_off = probe.next_end(max(serials.start, serials.stop - max_events))
    return probe.first.number, min(cut_off.number + 1, probe.last.number)


def _without_calls(events: Events, ids: Int64Array) -> Events:
    """Return the events without the enters and exits of the calls with the ids."""
    index = np.flatnonzero(is_any(events.kind, (*CALL_ENTER_KINDS, *CALL_EXIT_KINDS)))
    is_other = np.ones(len(events), np.bool_)
    is_other[index[np.isin(call_ids(events, index), ids)]] = False
    return events if is_other.all() else events.take(is_other)


class _RingProbe:
    """Sampled reads of a ring.

    Args:
        read: function that reads events of the ring.
        serials: serial numbers of the ring's events.

    Attributes:
        is_large: whether the ring is large and its last steps have ends; if not, the other attributes are missing.
        has_costs: whether operators or memory were counted; then the whole ring is needed for the costs of any step.
        block: number of events in a sampled read.
        first: the first end of a step in the ring.
        last: the last end of a step in the ring.
    """

    def __init__(self, read: pieces.ReadRing, serials: range) -> None:
        self._read, self._serials, self.block = read, serials, max(pieces.PIECE_EVENTS // _BLOCKS, 1)
        self.is_large = len(serials) >= 4 * pieces.PIECE_EVENTS
        self._stopped, count, end_count = False, self.block, 0
        while self.is_large and end_count < _MIN_ENDS:
            self.is_large = 2 * count < len(serials)
            tail = RingAnalysis(read(serials[-count:], pieces.PIECE_KINDS))
            ends, count = tail.step_ends, 4 * count
            end_count = len(ends.event)
        if self.is_large:
            event = ends.event[-1]
            self._kind, self._name = tail.events.kind[event], tail.events.name[event]
            self.last = _StepEnd(int(tail.events.serial[event]), int(ends.number[-1]))
            self.first = self.next_end(serials.start)
            self.has_costs = tail.has_flops or ALLOCATED in tail.lookup.texts
            self._no_events = tail.events.take(np.zeros(0, np.int64))
            self._stopped = any(record["kind"] == "stop" for record in tail.snapshot.records)

    def next_end(self, start: int) -> _StepEnd:
        """Return the first end of a step from serial number `start` on; after the last, one with number INT64_MAX."""
        without = {*Kind} - {self._kind}
        for first in range(start, self.last.serial + 1, self.block):
            events = self._read(range(first, min(first + self.block, self._serials.stop)), without).slots.events
            ends = np.flatnonzero((events.kind == self._kind) & (events.name == self._name))
            if len(ends):
                return _StepEnd(int(events.serial[ends[0]]), int(events.value[ends[0]]))
        return _StepEnd(self._serials.stop - 1, INT64_MAX)

    def _serials_around(self, number: int) -> tuple[int, int]:
        """Return a serial number after the end of an earlier step, and one after the end of this or a later step."""
        low, high = self._serials.start, self._serials.stop
        start, stop = low, high
        while high - low > self.block:
            middle = (low + high) // 2
            end = self.next_end(middle)
            if end.number < number:
                low = start = end.serial + 1
            else:
                high, stop = middle, end.serial + 1
        return start, stop

    def find_window(self, first: int, stop_step: int) -> tuple[range, Events] | None:
        """Return the serial numbers of the selected steps and a few around them, and the enters of calls around these.

        Except for those calls, no event inside belongs to one outside. A negative number counts from the end.
        """
        ring, count = self._serials, self.last.number + 1
        low = first if first >= 0 else count + first
        high = stop_step if min(first, stop_step) >= 0 else INT64_MAX  # counting from the end needs the end
        if not (self.first.number <= high and low <= count and low < high):
            return None
        start, stop = (
            self._serials_around(low - _STEPS_AROUND)[0],
            self._serials_around(min(high, count) + _STEPS_AROUND)[1],
        )
        margin = self.block
        while 2 * (stop - start + 2 * margin) <= len(ring):
            outer_start, outer_stop = max(ring.start, start - margin), min(ring.stop, stop + margin)
            analysis = RingAnalysis(self._read(range(outer_start, outer_stop), pieces.PIECE_KINDS))
            ends = analysis.events.serial[analysis.step_ends.event]
            if is_any(analysis.all_events.kind, pieces.WHOLE_KINDS).any():
                break
            open_calls = self._open_at(outer_start, self._no_events, ring.start)
            open_ids = call_ids(open_calls, np.arange(len(open_calls)))
            bounds = sorted({outer_start, *range(start, stop, pieces.PIECE_EVENTS), stop, outer_stop})
            parts = (self._read(range(*part), ()).slots.events for part in itertools.pairwise(bounds))
            blocks = (_without_calls(events, open_ids) for events in parts)
            cuts = find_cuts(blocks, analysis.lookup, ends, is_part=outer_start > ring.start)
            starts = [ring.start] if outer_start == ring.start else [cut for cut in cuts if cut <= start]
            stops = [cut for cut in cuts if cut >= stop] or ([ring.stop] if outer_stop == ring.stop else [])
            if starts and stops:
                window = range(starts[-1], stops[0])
                open_calls = self._open_at(window.start, open_calls, outer_start)
                return (window, open_calls) if self._is_whole(window, open_calls) else None
            margin *= 4
        return None

    def _calls(self, part: range) -> Iterator[tuple[Events, Int64Array]]:
        """Yield the enters of calls in a part, and the ids of the calls that exit in it."""
        for serials in pieces.parts_of(part):
            events = self._read(serials, _OTHER_KINDS).slots.events
            yield (
                events.take(is_any(events.kind, CALL_ENTER_KINDS)),
                call_ids(events, np.flatnonzero(is_any(events.kind, CALL_EXIT_KINDS))),
            )

    def _open_at(self, serial: int, open_: Events, since: int) -> Events:
        """Return the enters of the calls open at `serial`; `open_` are the enters of those open at `since`."""
        for enters, exit_ids in self._calls(range(since, serial)):
            calls = pieces.join_events([open_, enters])
            open_ = calls.take(~np.isin(call_ids(calls, np.arange(len(calls))), exit_ids))
        return open_

    def _is_whole(self, window: range, open_calls: Events) -> bool:
        """Whether the calls around a window end, or the process died in them, and no other call crosses its end."""
        open_ids, later_ids = call_ids(open_calls, np.arange(len(open_calls))), np.zeros(0, np.int64)
        for part in (window, range(window.stop, self._serials.stop)):
            for enters, exit_ids in self._calls(part):
                if part is not window:
                    later_ids = np.concatenate([later_ids, call_ids(enters, np.arange(len(enters)))])
                    if not np.isin(exit_ids, np.concatenate([later_ids, open_ids])).all():
                        return False
                    later_ids = np.setdiff1d(later_ids, exit_ids)
                open_ids = np.setdiff1d(open_ids, exit_ids)
        return not len(open_ids) or not self._stopped

    def with_whole_ranges(self, events: Events, window: range) -> Events:
        """Return the events of a window with the ends of the ranges that start in it, and of no other ranges."""
        is_first = window.start == self._serials.start
        has_unstarted = is_first and window.start > 0  # a range whose start was overwritten belongs to the first step
        later = np.zeros(0, np.int64)  # values of ranges that start after the window
        start_values, end_values = (events.value[events.kind == kind] for kind in RANGE_KINDS)
        parts = [events if is_first else _add_started_ranges(events)]
        for part in pieces.parts_of(range(window.stop, self._serials.stop)):
            if not has_unstarted and np.isin(start_values, end_values).all():
                break
            edges = self._read(part, {*Kind} - {*RANGE_KINDS}).slots.events
            later = np.concatenate([later, edges.value[edges.kind == Kind.RANGE_BEGIN]])
            in_window = np.isin(edges.value, start_values) | has_unstarted & ~np.isin(edges.value, later)
            parts.append(edges.take((edges.kind == Kind.RANGE_END) & in_window))
            end_values = np.concatenate([end_values, parts[-1].value])
        return pieces.join_events(parts)

    def start_ns(self, start: int) -> int | None:
        """Return the end of the step before serial number `start`, Unix nanoseconds; None at the start of the ring."""
        if start == self._serials.start:
            return None
        end = RingAnalysis(self._read(range(start - 1, start), ()))
        return int(end.clock.to_other(end.all_events.time_ns)[0])
