"""A large ring in pieces of whole steps, so that memory follows what is made of it, and not its events."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..._interrupts import cached_property
from ..._typing import BoolArray, Int64Array
from ...ring import Events, Kind, RingSnapshot
from ...ring.slot_format import CALL_ENTER_KINDS, CALL_EXIT_KINDS, DEVICE_KINDS, GREENLET_KINDS, RANGE_KINDS
from ..contents import COUNTED, WHOLE_RUN, Stats
from ..step_begins import trained_modules
from ..timeline import Timeline
from .analysis import MAX_BACKWARD_EVENTS, RingAnalysis
from .cuts import find_cuts
from .flops import CountedCalls, counted_serials, describe_counted, note_counted
from .from_ring import (
    ModuleSpans,
    Samples,
    assemble_timeline,
    decode_modules,
    describe_open,
    describe_whole_run,
    join_modules,
)
from .intervals import pair_by_key
from .memory import HeldMemory, held_memory, samples_at_moments
from .open_calls import OpenCall

PIECE_EVENTS = 1 << 18
"""Events of a piece, at most if a cut allows it; a ring with fewer than four times as many is decoded as a whole."""
PIECE_KINDS = (
    *(*CALL_ENTER_KINDS, *CALL_EXIT_KINDS, *GREENLET_KINDS),
    *(Kind.NODE_BEGIN, Kind.NODE_END, Kind.GRAPH_BUILT, Kind.CALL_BACKWARD),
    *(Kind.BACKWARD_OVER, Kind.SHAPES, Kind.ACCUMULATE_END, Kind.SEGMENT_BEGIN, Kind.COUNTER),
)
"""What only the spans of modules, and samples, are made of: nearly all events of a ring."""
WHOLE_KINDS = DEVICE_KINDS
"""A ring that has any of these is not cut: such an event can be about any other."""

_FOREVER = np.iinfo(np.int64).max
NOTHING: Samples = (np.zeros(0, np.int64), np.zeros(0, np.int64))
"""No samples."""

ReadRing = Callable[[range, Collection[Kind]], RingSnapshot]
"""Reads the events of some serial numbers, without some kinds."""


class RingPieces:
    """The pieces of a large ring.

    Args:
        read: reads some of its events.
        serials: those of the ring.

    Attributes:
        others: all events but those of calls and nodes, and of samples only those that `held_memory` needs; its stats
            count what is lost of all.
        cuts: serial numbers with which a piece can begin; none if all events are needed together.
    """

    def __init__(self, read: ReadRing, serials: range) -> None:
        self._read, self._serials = read, serials
        self.others, self._torn, samples = RingAnalysis(read(serials, PIECE_KINDS)), 0, list[Events]()
        events, ends = self.others.events, self.others.step_ends
        self._ends = events.serial[ends.event]
        is_possible = not np.isin(self.others.all_events.kind, WHOLE_KINDS).any()
        self.cuts = find_cuts(self._blocks(samples), self.others.lookup, self._ends) if is_possible else []
        if any(map(len, samples)) and not len(self._ends):
            self.cuts = []  # what grows does so with outermost calls
        all_others = self.others.all_events
        snapshot = with_events(self.others.snapshot, [all_others.take(all_others.kind != Kind.COUNTER), *samples])
        self.others = RingAnalysis(snapshot._replace(slots=snapshot.slots._replace(torn=self._torn)))

    def _blocks(self, samples: list[Events]) -> Iterator[Events]:
        for part in parts_of(self._serials):
            piece = self._piece(part.start, part.stop)
            self._torn += piece.snapshot.slots.torn
            samples.append(samples_at_moments(piece.all_events, self.others.lookup))
            yield piece.all_events

    def __iter__(self) -> Iterator[RingAnalysis]:
        """Yield the events of each piece, in order."""
        return self.within(self._serials)

    def within(self, part: range) -> Iterator[RingAnalysis]:
        """Yield the events of the pieces in which some serial numbers are, and the samples of the others, in order."""
        for begin, end in self._bounds():
            is_inside = begin < part.stop and part.start < end
            yield self._piece(begin, end) if is_inside else self._samples(begin, end)

    def _samples(self, begin: int, end: int) -> RingAnalysis:
        snapshot = self._read(range(begin, end), {*Kind} - {Kind.COUNTER})
        events = snapshot.slots.events
        slots = snapshot.slots._replace(events=events.take(events.kind == Kind.COUNTER))
        return RingAnalysis(snapshot._replace(slots=slots))

    def _bounds(self) -> Iterator[tuple[int, int]]:
        bounds, begin = [*self.cuts, self._serials.stop], self._serials.start
        while begin < self._serials.stop:
            end = bounds[max(bisect_right(bounds, begin), bisect_right(bounds, begin + PIECE_EVENTS) - 1)]
            yield begin, end
            begin = end

    @cached_property
    def counted(self) -> tuple[CountedCalls, int]:
        """What calls of which operators were counted cost, and FLOPs outside of modules."""
        counted, outside = CountedCalls({}, {}), 0
        windows = counted_serials(self.others) if self.others.has_flops else []
        for begin, end in self._bounds():
            if any(first < end and begin < last for first, last in windows):
                outside += note_counted(self._piece(begin, end), counted)
        return counted, outside

    @cached_property
    def memory(self) -> HeldMemory | None:
        """What tensors hold."""
        return held_memory(self.others, self._read_until)

    @cached_property
    def open_at_end(self) -> dict[str, object]:
        """What the process died in, or is in for long: a call of the last piece, or a range of any."""
        *_, (begin, end) = self._bounds()
        piece, before = self._piece(begin, end), self.others.all_events
        ranges = before.take((before.serial < begin) & np.isin(before.kind, RANGE_KINDS))
        last = RingAnalysis(with_events(piece.snapshot, [ranges, piece.all_events]))
        return describe_open(last, self._parts_with)

    def _parts_with(self, call: OpenCall) -> Iterable[RingAnalysis]:
        if call.phase == "backward":
            end = self._serials.stop
            return [self._piece(max(self._serials.start, end - 4 * MAX_BACKWARD_EVENTS), end)]
        return [self.others] if call.is_range else self

    def _read_until(self, serial: int) -> RingAnalysis:
        cuts = [self._serials.start, *self.cuts]
        return self._piece(cuts[max(bisect_left(cuts, serial) - 1, 0)], serial)

    def decode(self, piece: RingAnalysis) -> ModuleSpans:
        """Return the spans of modules of a piece."""
        return decode_modules(piece, self.counted[0])

    def _piece(self, begin: int, end: int) -> RingAnalysis:
        """Return the events from one serial number to before another."""
        snapshot = self._read(range(begin, end), ())
        slots = snapshot.slots
        slots = slots._replace(recorded=end, overwritten=begin, torn=end - begin - len(slots.events))
        # Names that were given since belong to later events.
        return RingAnalysis(snapshot._replace(slots=slots, records=self.others.snapshot.records), self.others)

    @cached_property
    def _ranges(self) -> tuple[tuple[Int64Array, Int64Array], Int64Array, Int64Array]:
        """The indexes of the begins and ends of ranges among all events, -1 if there is none, and when these were."""
        events = self.others.all_events
        ranges = np.flatnonzero(np.isin(events.kind, RANGE_KINDS))
        pair = pair_by_key(ranges, events.kind[ranges] == Kind.RANGE_BEGIN, events.value[ranges])
        begun, ended = (
            np.where(rows >= 0, events.serial[rows], other) for rows, other in zip(pair, (-1, _FOREVER), strict=True)
        )
        return pair, begun, ended

    def _timeline(self, piece: RingAnalysis, modules: ModuleSpans) -> Timeline:
        """Return the timeline of a piece, with all ranges that overlap it; the last piece shows the end of the ring."""
        events, slots = self.others.all_events, piece.snapshot.slots
        pair, begun, ended = self._ranges
        own: BoolArray = (events.serial >= slots.overwritten) & (events.serial < slots.recorded)
        for rows in pair:
            own[rows[(rows >= 0) & (begun < slots.recorded) & (ended >= slots.overwritten)]] = True
        part = RingAnalysis(piece.snapshot._replace(slots=slots._replace(events=events.take(own))), self.others)
        open_at_end = self.open_at_end if slots.recorded == self._serials.stop else {}
        return assemble_timeline(part, place_among(part, piece, modules), self.memory, open_at_end)

    def timelines(self, look: Callable[[RingAnalysis, ModuleSpans], None] | None = None) -> Iterator[Timeline]:
        """Yield the timeline of each piece; its stats count all pieces so far.

        Args:
            look: is called with each piece and its spans of modules before they are put into a timeline.
        """
        stats, spans, begin_ns, flops = Stats(), 0, None, np.zeros(2, np.int64)
        counted = describe_counted(self.others, 0, 0) if self.others.has_flops else None
        last: dict[int, Samples] = {}
        trained = frozenset[str]()
        for piece in self:
            modules = self.decode(piece)
            if look is not None:
                look(piece, modules)
            last = {
                name: after_last(last.get(name, NOTHING), modules.counters.get(name, NOTHING))
                for name in sorted({*last, *modules.counters})
            }
            timeline = self._timeline(piece, modules._replace(counters=last))
            spans += len(timeline.columns)
            sums = [new + old for new, old in zip(timeline.stats.values(), stats.values(), strict=True)]
            stats = Stats(piece.snapshot.slots.recorded, self._serials.start, *sums[2:])
            flops += modules.flops
            outside, unknown = flops.tolist()
            metadata = {
                **timeline.metadata,
                WHOLE_RUN: describe_whole_run(self.others.snapshot, self.others.step_ends.number, spans),
                **({} if counted is None else {COUNTED: counted | {"outside": outside, "unknown": unknown}}),
            }
            yield replace(timeline, stats=stats, metadata=metadata, begin_ns=begin_ns, trained=trained)
            trained |= trained_modules(timeline)
            begin_ns = max((mark.time_ns for mark in timeline.marks if mark.kind == "step"), default=None)


def parts_of(serials: range) -> Iterator[range]:
    """Yield serial numbers in parts that are looked at together."""
    return (serials[first : first + PIECE_EVENTS] for first in range(0, len(serials), PIECE_EVENTS))


def join_events(parts: Sequence[Events]) -> Events:
    """Return the events of several parts, one after the other."""
    return Events(*(np.concatenate([getattr(part, name) for part in parts]) for name in Events.__slots__))


def with_events(snapshot: RingSnapshot, parts: Sequence[Events]) -> RingSnapshot:
    """Return a snapshot with the events of some parts, in order."""
    events = join_events(parts)
    events = events.take(np.argsort(events.serial, kind="stable"))
    return snapshot._replace(slots=snapshot.slots._replace(events=events))


def after_last(before: Samples, own: Samples) -> Samples:
    """Return samples after the last of those before: a part of a ring begins with what was sampled last."""
    return np.append(before[0][-1:], own[0]), np.append(before[1][-1:], own[1])


def place_among(others: RingAnalysis, piece: RingAnalysis, modules: ModuleSpans) -> ModuleSpans:
    """Return the spans of modules of a piece, whose evaluations then have positions among the events of `others`."""
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
    return pieces if pieces is not None and pieces.cuts else None


def build_in_pieces(read: ReadRing, serials: range, part: range | None = None) -> Timeline | None:
    """Build the timeline of a large ring; None if it is not large, or if only all events together show it.

    Args:
        read: reads some of its events.
        serials: those of the ring.
        part: some of these; spans of modules are only those of the pieces in which these are. None: all.
    """
    pieces = find_pieces(read, serials)
    if pieces is None:
        return None
    others, within = pieces.others, pieces.within(part or serials)
    modules = join_modules(place_among(others, piece, pieces.decode(piece)) for piece in within)
    modules = modules._replace(flops=(pieces.counted[1], modules.flops[1]))
    return assemble_timeline(others, modules, pieces.memory, pieces.open_at_end)
