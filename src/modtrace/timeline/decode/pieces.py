"""A ring's events → a timeline, piece by piece: the one way in which a ring is decoded.

A piece has whole steps, and a ring with few events is one piece. What is in memory follows what is made of the pieces:

    events   | step 0  step 1  step 2 | step 3  step 4 | …      cut after ends of steps, see `cuts`
    pieces   a timeline of each part: its modules, and the ranges that are open in it
    rest     all of the ring but modules: known after the last piece
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from ..._arrays import INT64_MAX, AnyArray, BoolArray, Int64Array, Numbering, is_any
from ..._interrupts import cached_property
from ...ring import Events, Kind, RingSnapshot, slot_format
from ...ring.read_file import SlotSnapshot
from ..contents import COUNTED, WHOLE_RUN, Stats
from ..join import put_modules_before
from ..slices import Args, append_to, join_args
from ..step_pieces import trained_modules
from ..timeline import Timeline
from . import from_ring
from .analysis import MAX_BACKWARD_EVENTS, RingAnalysis
from .cuts import find_cuts
from .from_ring import ModuleSpans, Samples
from .held_memory import HeldMemory, held_memory, samples_at_moments
from .intervals import pair_by_value
from .open_calls import OpenCall
from .span_costs import CountedCalls, counted_serials, describe_counted, note_counted

PIECE_EVENTS = 1 << 18
"""Events of a piece, at most if a cut allows it; a ring with at most four times as many is one piece, as by default."""
PIECE_KINDS = (
    *(*slot_format.CALL_ENTER_KINDS, *slot_format.CALL_EXIT_KINDS, *slot_format.GREENLET_KINDS),
    *(Kind.NODE_BEGIN, Kind.NODE_END, Kind.GRAPH_BUILT, Kind.CALL_BACKWARD),
    *(Kind.BACKWARD_OVER, Kind.SHAPES, Kind.ACCUMULATE_END, Kind.SEGMENT_BEGIN, Kind.COUNTER),
)
"""Events of which only the spans of modules, and samples, are made: nearly all events of a ring."""
WHOLE_KINDS = slot_format.DEVICE_KINDS
"""A ring that has any of these is not cut: such an event can be about any other."""

_BLOCKS_HELD = 4
"""So many times the events of a piece stay in memory: those of the newest pieces are read once."""
NOTHING: Samples = (np.zeros(0, np.int64), np.zeros(0, np.int64))
"""No samples."""

ReadRing = Callable[[range | None, Collection[Kind]], RingSnapshot]
"""Reads the events of some serial numbers, or of all, without some kinds."""


class RingPieces:
    """The timeline of a ring in pieces of whole steps; see `timeline.Pieces`.

    Args:
        read: reads some of its events.
        serials: those of the ring.
        part: some of these; modules are only those of the pieces in which these are. None: all.
        change: what is done to each timeline before it is given out; None: nothing.

    Attributes:
        others: if there are cuts, all events but those of calls and nodes, and of samples only those that `held_memory`
            needs; its stats count what is lost of all.
        cuts: serial numbers with which a piece but the first can begin; none if all events are needed together.
        whole: the timeline of all pieces, once it was asked for.
    """

    def __init__(
        self,
        read: ReadRing,
        serials: range,
        part: range | None = None,
        change: Callable[[Timeline], Timeline] | None = None,
    ) -> None:
        self._read, self._serials, self._part = read, serials, part or serials
        self._change = change or (lambda timeline: timeline)
        self._block = lru_cache(_BLOCKS_HELD)(self._read_block)
        self._seen = list[ModuleSpans]()
        self.whole: Timeline | None = None
        self._rest: Timeline | None = None
        self.cuts = self._find_cuts() if len(serials) > 4 * PIECE_EVENTS else []

    def _find_cuts(self) -> list[int]:
        self.others, samples = RingAnalysis(self._read(self._serials, PIECE_KINDS)), list[Events]()
        self._torn, self._first_call = 0, INT64_MAX
        events, ends = self.others.events, self.others.step_ends
        self._ends = events.serial[ends.event]
        if is_any(self.others.all_events.kind, WHOLE_KINDS).any():
            return []
        cuts = find_cuts(self._blocks(samples), self.others.lookup, self._ends)
        if any(map(len, samples)) and not len(self._ends):
            return []  # what grows does so with outermost calls
        all_others = self.others.all_events
        snapshot = with_events(self.others.snapshot, [all_others.take(all_others.kind != Kind.COUNTER), *samples])
        self.others = RingAnalysis(snapshot._replace(slots=snapshot.slots._replace(torn=self._torn)))
        # The first step in which a module is called is the first in its piece too.
        return cuts if self._first_call == INT64_MAX else cuts[bisect_right(cuts, self._first_call) :]

    def _blocks(self, samples: list[Events]) -> Iterator[Events]:
        for part in parts_of(self._serials):
            piece = self._piece(part.start, part.stop)
            self._torn += piece.snapshot.slots.torn
            samples.append(samples_at_moments(piece.all_events, self.others.lookup))
            if self._first_call == INT64_MAX:
                called = piece.all_events.serial[
                    is_any(piece.all_events.kind, (*slot_format.CALL_ENTER_KINDS, *slot_format.CALL_EXIT_KINDS))
                ]
                self._first_call = int(called.min(initial=INT64_MAX))
            yield piece.all_events

    @property
    def has_step_ends(self) -> bool:
        """Whether something ends steps in a ring that has cuts."""
        return bool(self.cuts) and len(self._ends) > 0

    @property
    def is_joined_to_write(self) -> bool:
        """Whether arrows lead from modules to collectives, so that a written trace needs all pieces together."""
        return bool(self.cuts) and bool(is_any(self.others.all_events.kind, slot_format.COMMUNICATION_KINDS).any())

    @property
    def is_single(self) -> bool:
        """Whether there is one piece."""
        return not self.cuts

    @property
    def spans(self) -> int:
        """The number of modules' spans in the pieces so far."""
        return sum(modules.spans for modules in self._seen) if self.whole is None else len(self.whole.columns)

    def _analyses(self) -> Iterator[RingAnalysis]:
        """Yield the events of the pieces that are asked for, and the samples of the others, in order."""
        for begin, end in self._bounds():
            is_inside = begin < self._part.stop and self._part.start < end
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
        """The costs of calls whose operators were counted, and FLOPs outside of modules."""
        counted, outside = CountedCalls({}, {}), 0
        windows = counted_serials(self.others) if self.others.has_flops else []
        for begin, end in self._bounds():
            if any(first < end and begin < last for first, last in windows):
                outside += note_counted(self._piece(begin, end), counted)
        return counted, outside

    @cached_property
    def memory(self) -> HeldMemory | None:
        """The memory that tensors hold."""
        return held_memory(self.others, self._read_until)

    @cached_property
    def open_at_end(self) -> dict[str, object]:
        """The call or range that the process died in, or is in for long: a call of the last piece, a range of any."""
        *_, (begin, end) = self._bounds()
        piece, before = self._piece(begin, end), self.others.all_events
        ranges = before.take((before.serial < begin) & is_any(before.kind, slot_format.RANGE_KINDS))
        last = RingAnalysis(with_events(piece.snapshot, [ranges, piece.all_events]))
        return from_ring.describe_open(last, self._parts_with)

    def _parts_with(self, call: OpenCall) -> Iterable[RingAnalysis]:
        if call.phase == "backward":
            end = self._serials.stop
            return [self._piece(max(self._serials.start, end - 4 * MAX_BACKWARD_EVENTS), end)]
        return [self.others] if call.is_range else itertools.starmap(self._piece, self._bounds())

    def _read_until(self, serial: int) -> RingAnalysis:
        cuts = [self._serials.start, *self.cuts]
        return self._piece(cuts[max(bisect_left(cuts, serial) - 1, 0)], serial)

    def _modules(self) -> Iterator[tuple[RingAnalysis, ModuleSpans]]:
        """Yield the events of each piece and its modules, whose tracks and links are numbered alike in all pieces."""
        self._seen, self._rest = list[ModuleSpans](), None
        tracks, first_link = Numbering[int](), 0
        for piece in self._analyses():
            modules = from_ring.decode_modules(piece, self.counted[0], tracks)
            link = modules.columns["link"]
            link[link >= 0] += first_link
            first_link = max(first_link, int(link.max(initial=-1)) + 1)
            self._seen.append(place_among(self.others, piece, modules._replace(columns={}, args={})))
            yield piece, modules
            del piece, modules  # before the next ones are made

    def _piece(self, begin: int, end: int) -> RingAnalysis:
        """Return the events from one serial number to before another."""
        first = self._serials.start
        numbers = range((begin - first) // PIECE_EVENTS, -((first - end) // PIECE_EVENTS))
        events = join_events([self._block(number) for number in numbers])
        events = events.take(slice(*np.searchsorted(events.serial, (begin, end))))
        slots = SlotSnapshot(events, end, begin, end - begin - len(events))
        # Names that were given since belong to later events.
        return RingAnalysis(self.others.snapshot._replace(slots=slots), self.others)

    def _read_block(self, number: int) -> Events:
        first = number * PIECE_EVENTS
        return self._read(self._serials[first : first + PIECE_EVENTS], ()).slots.events

    @cached_property
    def _ranges(self) -> tuple[tuple[Int64Array, Int64Array], Int64Array, Int64Array]:
        """The indexes of the begins and ends of ranges among all events, -1 if there is none, and when these were."""
        events = self.others.all_events
        begin, end = pair_by_value(events, *slot_format.RANGE_KINDS)
        begun = np.where(begin >= 0, events.serial[begin], -1)
        return (begin, end), begun, np.where(end >= 0, events.serial[end], INT64_MAX)

    def _timeline(self, piece: RingAnalysis, modules: ModuleSpans) -> Timeline:
        """Return the timeline of a piece, with all ranges that overlap it; the last piece shows the end of the ring."""
        events, slots = self.others.all_events, piece.snapshot.slots
        pair, begun, ended = self._ranges
        is_in_piece: BoolArray = (events.serial >= slots.overwritten) & (events.serial < slots.recorded)
        for rows in pair:
            is_in_piece[rows[(rows >= 0) & (begun < slots.recorded) & (ended >= slots.overwritten)]] = True
        part = RingAnalysis(piece.snapshot._replace(slots=slots._replace(events=events.take(is_in_piece))), self.others)
        open_at_end = self.open_at_end if slots.recorded == self._serials.stop else {}
        return from_ring.assemble_timeline(part, place_among(part, piece, modules), self.memory, open_at_end)

    def __iter__(self) -> Iterator[Timeline]:
        """Yield the pieces. Names, tracks of modules and links are numbered alike in all; stats are of those so far."""
        if not self.cuts:
            yield self.join()
            return
        stats, spans, begin_ns, flops = Stats(), 0, None, np.zeros(2, np.int64)
        counted = describe_counted(self.others, 0, 0) if self.others.has_flops else None
        last: dict[int, Samples] = {}
        trained = frozenset[str]()
        for piece, modules in self._modules():
            last = {
                name: after_last(last.get(name, NOTHING), modules.counters.get(name, NOTHING))
                for name in sorted({*last, *modules.counters})
            }
            timeline = self._timeline(piece, modules._replace(counters=last))
            spans += len(timeline.columns)
            sums = [new + old for new, old in zip(timeline.stats.values(), stats.values(), strict=True)]
            stats = Stats(timeline.stats.recorded, self._serials.start, *sums[2:])
            flops += modules.flops
            del piece, modules
            outside, unknown = flops.tolist()
            metadata = {
                **timeline.metadata,
                WHOLE_RUN: self._whole_run(spans),
                **({} if counted is None else {COUNTED: counted | {"outside": outside, "unknown": unknown}}),
            }
            timeline = replace(timeline, stats=stats, metadata=metadata, begin_ns=begin_ns, trained=trained)
            yield self._change(timeline)
            trained |= trained_modules(timeline)
            begin_ns = int(timeline.step_ends[-1]) if len(timeline.step_ends) else None

    def rest(self) -> Timeline:
        """Return the timeline without its modules, once all pieces have come; of a single piece that."""
        if self.whole is not None:
            return self.whole
        if self._rest is None:
            modules = from_ring.join_modules(self._seen)
            modules = modules._replace(flops=(self.counted[1], modules.flops[1]))
            self._rest = self._change(from_ring.assemble_timeline(self.others, modules, self.memory, self.open_at_end))
        return self._rest

    def join(self) -> Timeline:
        """Return the timeline of all pieces; memory holds them once."""
        if self.whole is None and not self.cuts:
            self.whole = self._change(from_ring.build_timeline(self._read(None, ())))
        if self.whole is None:
            columns: dict[str, AnyArray] = {}
            args, first = list[tuple[int, Args]](), 0
            for _, modules in self._modules():
                parent = modules.columns["parent"]
                parent[parent >= 0] += first
                args.append((first, modules.args))
                append_to(columns, modules.columns)
                first += len(parent)
            self.whole = put_modules_before(self.rest(), columns, join_args(args))
        return self.whole

    def _whole_run(self, spans: int) -> dict[str, float | None]:
        return from_ring.describe_whole_run(self.others.snapshot, self.others.step_ends.number, spans)


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


def after_last(before: Samples, samples: Samples) -> Samples:
    """Return samples after the last of those before: a part of a ring begins with what was sampled last."""
    return np.append(before[0][-1:], samples[0]), np.append(before[1][-1:], samples[1])


def place_among(others: RingAnalysis, piece: RingAnalysis, modules: ModuleSpans) -> ModuleSpans:
    """Return the spans of modules of a piece, whose evaluations then have positions among the events of `others`."""
    position = others.positions_between(piece.events.serial[modules.evaluations.position >> 1])
    return modules._replace(evaluations=modules.evaluations._replace(position=position))
