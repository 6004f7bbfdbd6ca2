"""A large ring in pieces of whole steps, so that memory follows what is made of it, and not its events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import numpy as np

from ..._errors import ModtraceError
from ..._typing import Int64Array
from ...ring import Kind, RingSnapshot
from ...ring.slot_format import (
    CALL_ENTER_KINDS,
    CALL_EXIT_KINDS,
    DEVICE_KINDS,
    FLOP_KINDS,
    FORWARD_THREAD_MASK,
    NO_NAME,
    RANGE_KINDS,
)
from ..contents import OPEN_AT_END, WHOLE_RUN, Stats
from ..timeline import Timeline
from .analysis import RingAnalysis
from .from_ring import assemble_timeline, build_timeline, describe_whole_run
from .module_spans import ModuleSpans, decode_modules, join_modules
from .pairing import pair_by_key

PIECE_EVENTS = 1 << 19
"""Events of a piece, at least; a ring with fewer than four times as many is decoded as a whole."""
MODULE_KINDS = (
    *(*CALL_ENTER_KINDS, *CALL_EXIT_KINDS, Kind.NODE_BEGIN, Kind.NODE_END, Kind.GRAPH_BUILT, Kind.CALL_BACKWARD),
    *(Kind.BACKWARD_OVER, Kind.SHAPES, Kind.ACCUMULATE_END, Kind.SEGMENT_BEGIN),
)
"""What only the spans of modules are made of: nearly all events of a ring."""
_WHOLE_KINDS = (*FLOP_KINDS, *DEVICE_KINDS, Kind.HELD)
"""Of a ring with these, any event can say something of any other."""

_STEPS_AROUND = 4
"""Calls of these can be open, or have their backward, in the steps beside them."""
_FOREVER = np.iinfo(np.int64).max

ReadRing = Callable[[range, Collection[Kind]], RingSnapshot]
"""Reads the events of some serial numbers, without some kinds."""


class RingPieces:
    """The pieces of a large ring.

    Args:
        read: reads some of its events.
        serials: those of the ring.

    Attributes:
        others: all events but those of calls and nodes.
        is_possible: whether its events can be decoded in pieces.
    """

    def __init__(self, read: ReadRing, serials: range) -> None:
        self._read = read
        self._serials = serials
        self.others = RingAnalysis(read(serials, MODULE_KINDS))
        events, ends = self.others.events, self.others.step_ends
        self._ends = events.serial[ends.event], ends.number
        self.is_possible = not np.isin(self.others.all_events.kind, _WHOLE_KINDS).any()

    def __iter__(self) -> Iterator[RingAnalysis]:
        """Yield the events of each piece, in order.

        Raises:
            CrossedError: nodes of a piece belong to calls of one before.
        """
        made = np.zeros(FORWARD_THREAD_MASK + 1, np.int64)
        begin = self._serials.start
        while begin < self._serials.stop:
            piece = self._next(begin)
            if len(piece.snapshot.records) > len(self.others.snapshot.records):
                raise CrossedError("names were given since, or are lost")
            yield piece
            _refuse_crossed(piece, made)
            begin = piece.snapshot.slots.recorded

    def _next(self, begin: int) -> RingAnalysis:
        size, last = PIECE_EVENTS, self._serials.stop
        while begin + size < last:
            snapshot = self._read(range(begin, begin + size), ())
            cut = self._find_cut(snapshot, begin + size - size // 8)
            if cut:
                return self._part(snapshot, begin, cut)
            size *= 2
        return self._part(self._read(range(begin, last), ()), begin, last)

    def _part(self, snapshot: RingSnapshot, begin: int, end: int) -> RingAnalysis:
        """Return what was read from one serial number to before another."""
        slots = snapshot.slots
        serial = slots.events.serial
        events = slots.events.take((serial >= begin) & (serial < end))
        slots = slots._replace(events=events, recorded=end, overwritten=begin, torn=end - begin - len(events))
        return RingAnalysis(snapshot._replace(slots=slots), self._ends)

    def _find_cut(self, snapshot: RingSnapshot, first: int) -> int:
        """Return the last serial number in the first half from `first` on at which nothing is open; 0: there is none.

        It is the first after the end of a step, if the ring has any.
        """
        window = self._part(snapshot, first, snapshot.slots.recorded)
        events, intervals, passes = window.events, window.intervals, window.passes
        count, call = len(events), window.call
        calls = ~intervals.is_node
        begin = (intervals.start_position - 1) >> 1
        begin = np.minimum(begin, np.where(call >= 0, begin[call], begin))
        begin = np.minimum(begin, np.where(calls, begin[window.original], begin))
        oldest = int(intervals.sequence[calls & (intervals.sequence >= 0)].min(initial=np.iinfo(np.int64).max))
        of_older = (intervals.forward_thread >= 0) & (intervals.sequence < oldest) | (intervals.name != NO_NAME)
        begin[~calls & (call < 0) & of_older] = -1
        begin = np.concatenate([begin, passes.begin])
        end = np.concatenate([intervals.end_position >> 1, np.where(passes.end >= 0, passes.end, count)])
        change = np.bincount(np.clip(begin + 1, 0, count), minlength=count + 2)
        change -= np.bincount(np.clip(end + 1, 0, count + 1), minlength=count + 2)
        is_free = np.cumsum(change)[: count + 1] == 0
        free = np.flatnonzero(is_free)
        if len(self._ends[0]):
            ends = window.step_ends.event
            free = ends[is_free[ends + 1]] + 1
        free = free[(free > 0) & (2 * free < count)]
        return int(events.serial[free[-1] - 1]) + 1 if len(free) else 0

    def timelines(self) -> Iterator[Timeline]:
        """Yield the timeline of each piece, with all ranges that overlap it; its stats count all pieces so far.

        Raises:
            CrossedError: as of iterating.
        """
        events = self.others.all_events
        ranges = np.flatnonzero(np.isin(events.kind, RANGE_KINDS))
        pair = pair_by_key(ranges, events.kind[ranges] == Kind.RANGE_BEGIN, events.value[ranges])
        begun, ended = (
            np.where(rows >= 0, events.serial[rows], other) for rows, other in zip(pair, (-1, _FOREVER), strict=True)
        )
        stats, spans, begin_ns = Stats(), 0, None
        for piece in self:
            begin, end = piece.snapshot.slots.overwritten, piece.snapshot.slots.recorded
            own = (events.serial >= begin) & (events.serial < end)
            for rows in pair:
                own[rows[(rows >= 0) & (begun < end) & (ended >= begin)]] = True
            slots = piece.snapshot.slots._replace(events=events.take(own))
            part = RingAnalysis(piece.snapshot._replace(slots=slots), self._ends)
            timeline = assemble_timeline(part, modules_among(part, piece), piece)
            spans += len(timeline.columns)
            sums = [new + old for new, old in zip(timeline.stats.values(), stats.values(), strict=True)]
            stats = Stats(end, self._serials.start, *sums[2:])
            metadata = {**timeline.metadata, WHOLE_RUN: describe_whole_run(self.others, spans)}
            yield replace(timeline, stats=stats, metadata=metadata, begin_ns=begin_ns)
            begin_ns = max((mark.time_ns for mark in timeline.marks if mark.kind == "step"), default=None)

    def around(self, first: int | None, last: int | None) -> Timeline | None:
        """Return the timeline of some steps and of a few before and after them; None if these are nearly all.

        Args:
            first: number of the first step, from the end if it is negative; None: the first of all.
            last: number of the step behind the last one; the same.
        """
        serial, number = self._ends
        counted = [0 if first is None else first, -1 if last is None else last]
        low, high = (len(number) + at if at < 0 else int(np.searchsorted(number, at)) for at in counted)
        low, high = low - _STEPS_AROUND, len(number) if min(counted[0], last or 0) < 0 else high + _STEPS_AROUND
        if not 0 < low < high:
            return None
        begin, end = int(serial[low]) + 1, int(serial[high]) + 1 if high < len(serial) else self._serials.stop
        if 2 * (end - begin) > len(self._serials):
            return None
        timeline = build_timeline(self._part(self._read(range(begin, end), ()), begin, end))
        stats = replace(timeline.stats, recorded=self._serials.stop, overwritten=self._serials.start)
        metadata = {
            key: value for key, value in timeline.metadata.items() if key != OPEN_AT_END or end == self._serials.stop
        }
        metadata[WHOLE_RUN] = describe_whole_run(self.others, None)
        begin_ns = int(self.others.clock.to_other(self.others.events.time[self.others.step_ends.event[low]])[0])
        return replace(timeline, stats=stats, metadata=metadata, begin_ns=begin_ns)


class CrossedError(ModtraceError):
    """Only the ring as a whole can be decoded: nodes of a piece belong to calls of a piece before."""


def _refuse_crossed(piece: RingAnalysis, made: Int64Array) -> None:
    """Raise a `CrossedError` if nodes were made before the piece; keep up how many nodes each thread has made.

    Args:
        piece: what was decoded.
        made: by torch's number of a thread, the sequence number at the end of the piece before.
    """
    intervals = piece.intervals
    lost = intervals.is_node & (piece.call < 0)
    lost &= (intervals.name != NO_NAME) | (intervals.sequence < made[intervals.forward_thread])
    if made.any() and lost.any():
        raise CrossedError("a graph outlives the piece in which it was made")
    thread = piece.lookup.torch_threads[intervals.thread]
    known = ~intervals.is_node & (thread >= 0)
    np.maximum.at(made, thread[known] & FORWARD_THREAD_MASK, intervals.exit_sequence[known])


def modules_among(others: RingAnalysis, piece: RingAnalysis) -> ModuleSpans:
    """Return the spans of modules of a piece; evaluations have positions among the events of `others`."""
    modules = decode_modules(piece)
    serial = piece.events.serial[modules.evaluations.position >> 1]
    position = 2 * np.searchsorted(others.events.serial, serial) - 1
    return modules._replace(evaluations=modules.evaluations._replace(position=position))


def find_pieces(read: ReadRing, serials: range) -> RingPieces | None:
    """Return the pieces of a large ring; None if it is not large, or if only all events together show it.

    Args:
        read: reads some of its events.
        serials: those of the ring.
    """
    pieces = RingPieces(read, serials) if len(serials) >= 4 * PIECE_EVENTS else None
    return pieces if pieces is not None and pieces.is_possible else None


def build_in_pieces(read: ReadRing, serials: range) -> Timeline | None:
    """Build the timeline of a large ring; None if it is not large, or if only all events together show it.

    Args:
        read: reads some of its events.
        serials: those of the ring.
    """
    pieces = find_pieces(read, serials)
    if pieces is None:
        return None
    piece, others, torn = pieces.others, pieces.others, 0

    def parts() -> Iterator[ModuleSpans]:
        nonlocal torn, piece
        for piece in pieces:
            yield modules_among(others, piece)
            torn += piece.snapshot.slots.torn

    try:
        modules = join_modules(parts())
    except CrossedError:
        return None
    others.snapshot = others.snapshot._replace(slots=others.snapshot.slots._replace(torn=torn))
    return assemble_timeline(others, modules, piece)
