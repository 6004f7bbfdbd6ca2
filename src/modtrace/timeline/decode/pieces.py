"""A ring's events → a timeline, piece by piece. Every ring is decoded here.

A piece has whole steps, and a ring with few events is one piece. Memory holds one piece at a time:

    events   | step 0  step 1  step 2 | step 3  step 4 | …      cut after ends of steps, see `cuts`
    pieces   a timeline of each part: its modules, and the ranges that are open in it
    rest     the ring without its modules: known after the last piece
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
"""Maximum number of events in a piece, if cuts allow it; a ring of up to four times that (the default) is one piece."""
PIECE_KINDS = (
    *(*slot_format.CALL_ENTER_KINDS, *slot_format.CALL_EXIT_KINDS, *slot_format.GREENLET_KINDS),
    *(Kind.NODE_BEGIN, Kind.NODE_END, Kind.GRAPH_BUILT, Kind.CALL_BACKWARD),
    *(Kind.BACKWARD_OVER, Kind.SHAPES, Kind.ACCUMULATE_END, Kind.SEGMENT_BEGIN, Kind.COUNTER),
)
"""Kinds of events used only for spans of modules, and for samples; nearly all events of a ring."""
WHOLE_KINDS = slot_format.DEVICE_KINDS
"""Kinds of events that can refer to any other event; a ring that contains one is not cut."""

_CACHED_BLOCKS = 4
"""Number of blocks of `PIECE_EVENTS` kept in memory, so that the events of the newest pieces are read only once."""
NOTHING: Samples = (np.zeros(0, np.int64), np.zeros(0, np.int64))
"""No samples."""

ReadRing = Callable[[range | None, Collection[Kind]], RingSnapshot]
"""Function that reads the events with the serial numbers (None: all), leaving out the given kinds."""


class RingPieces:
    """The timeline of a ring in pieces of whole steps; see `timeline.Pieces`.

    Args:
        read: function that reads events of the ring.
        serials: serial numbers of the ring's events.
        part: serial numbers whose pieces are decoded; pieces outside give no modules. None: all.
        change: function applied to each timeline before it is returned; None: no change.

    Attributes:
        remainder: if there are cuts, the events of neither calls nor nodes, with only the samples that
            `held_memory` needs; its stats count all lost events.
        cuts: serial numbers at which a piece after the first can start; empty if all events are needed together.
        joined: the timeline of all pieces, after `join`.
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
        self._block = lru_cache(_CACHED_BLOCKS)(self._read_block)
        self._seen = list[ModuleSpans]()
        self.joined: Timeline | None = None
        self._rest: Timeline | None = None
        self.cuts = self._find_cuts() if len(serials) > 4 * PIECE_EVENTS else []

    def _find_cuts(self) -> list[int]:
        self.remainder, samples = RingAnalysis(self._read(self._serials, PIECE_KINDS)), list[Events]()
        self._torn, self._first_call = 0, INT64_MAX
        events, ends = self.remainder.events, self.remainder.step_ends
        self._ends = events.serial[ends.event]
        if is_any(self.remainder.all_events.kind, WHOLE_KINDS).any():
            return []
        cuts = find_cuts(self._blocks(samples), self.remainder.lookup, self._ends)
        if any(map(len, samples)) and not len(self._ends):
            return []  # without step ends, growth is measured at outermost calls
        events = self.remainder.all_events
        snapshot = with_events(self.remainder.snapshot, [events.take(events.kind != Kind.COUNTER), *samples])
        self.remainder = RingAnalysis(snapshot._replace(slots=snapshot.slots._replace(torn=self._torn)))
        # The first step that calls a module must be in the first piece, without cuts before it.
        return cuts if self._first_call == INT64_MAX else cuts[bisect_right(cuts, self._first_call) :]

    def _blocks(self, samples: list[Events]) -> Iterator[Events]:
        for part in parts_of(self._serials):
            piece = self._piece(part.start, part.stop)
            self._torn += piece.snapshot.slots.torn
            samples.append(samples_at_moments(piece.all_events, self.remainder.lookup))
            if self._first_call == INT64_MAX:
                is_call = is_any(piece.all_events.kind, (*slot_format.CALL_ENTER_KINDS, *slot_format.CALL_EXIT_KINDS))
                self._first_call = int(piece.all_events.serial[is_call].min(initial=INT64_MAX))
            yield piece.all_events

    @property
    def has_step_ends(self) -> bool:
        """Whether the ring has cuts and ends of steps."""
        return bool(self.cuts) and len(self._ends) > 0

    @property
    def is_joined_to_write(self) -> bool:
        """Whether arrows lead from modules to collectives, so that a written trace needs all pieces together."""
        return bool(self.cuts) and bool(is_any(self.remainder.all_events.kind, slot_format.COMMUNICATION_KINDS).any())

    @property
    def is_single(self) -> bool:
        """Whether there is one piece."""
        return not self.cuts

    @property
    def spans(self) -> int:
        """The number of module spans in the pieces so far."""
        return sum(modules.span_count for modules in self._seen) if self.joined is None else len(self.joined.columns)

    def _analyses(self) -> Iterator[RingAnalysis]:
        """Yield the events of the pieces in `part`, and only the samples of the other pieces, in order."""
        for start, end in self._bounds():
            is_inside = start < self._part.stop and self._part.start < end
            yield self._piece(start, end) if is_inside else self._samples(start, end)

    def _samples(self, start: int, end: int) -> RingAnalysis:
        snapshot = self._read(range(start, end), {*Kind} - {Kind.COUNTER})
        events = snapshot.slots.events
        slots = snapshot.slots._replace(events=events.take(events.kind == Kind.COUNTER))
        return RingAnalysis(snapshot._replace(slots=slots))

    def _bounds(self) -> Iterator[tuple[int, int]]:
        bounds, start = [*self.cuts, self._serials.stop], self._serials.start
        while start < self._serials.stop:
            end = bounds[max(bisect_right(bounds, start), bisect_right(bounds, start + PIECE_EVENTS) - 1)]
            yield start, end
            start = end

    @cached_property
    def counted(self) -> tuple[CountedCalls, int]:
        """The costs of calls whose operators were counted, and the FLOPs outside modules."""
        counted, outside = CountedCalls({}, {}), 0
        windows = counted_serials(self.remainder) if self.remainder.has_flops else []
        for start, end in self._bounds():
            if any(first < end and start < last for first, last in windows):
                outside += note_counted(self._piece(start, end), counted)
        return counted, outside

    @cached_property
    def memory(self) -> HeldMemory | None:
        """The memory that tensors hold."""
        return held_memory(self.remainder, self._read_until)

    @cached_property
    def open_at_end(self) -> dict[str, object]:
        """The call or range in which the process died or hangs: a call of the last piece, or a range of any piece."""
        *_, (start, end) = self._bounds()
        piece, events = self._piece(start, end), self.remainder.all_events
        ranges = events.take((events.serial < start) & is_any(events.kind, slot_format.RANGE_KINDS))
        last = RingAnalysis(with_events(piece.snapshot, [ranges, piece.all_events]))
        return from_ring.describe_open(last, self._parts_with)

    def _parts_with(self, call: OpenCall) -> Iterable[RingAnalysis]:
        if call.phase == "backward":
            end = self._serials.stop
            return [self._piece(max(self._serials.start, end - 4 * MAX_BACKWARD_EVENTS), end)]
        return [self.remainder] if call.is_range else itertools.starmap(self._piece, self._bounds())

    def _read_until(self, serial: int) -> RingAnalysis:
        cuts = [self._serials.start, *self.cuts]
        return self._piece(cuts[max(bisect_left(cuts, serial) - 1, 0)], serial)

    def _modules(self) -> Iterator[tuple[RingAnalysis, ModuleSpans]]:
        """Yield the events of each piece and its modules; all pieces share the numbering of tracks and links."""
        self._seen, self._rest = list[ModuleSpans](), None
        tracks, first_link = Numbering[int](), 0
        for piece in self._analyses():
            modules = from_ring.decode_modules(piece, self.counted[0], tracks)
            link = modules.columns["link"]
            link[link >= 0] += first_link
            first_link = max(first_link, int(link.max(initial=-1)) + 1)
            self._seen.append(place_among(self.remainder, piece, modules._replace(columns={}, args={})))
            yield piece, modules
            del piece, modules  # free them before the next piece is decoded

    def _piece(self, start: int, end: int) -> RingAnalysis:
        """Return the events from serial number `start` to before `end`."""
        first = self._serials.start
        numbers = range((start - first) // PIECE_EVENTS, -((first - end) // PIECE_EVENTS))
        events = join_events([self._block(number) for number in numbers])
        events = events.take(slice(*np.searchsorted(events.serial, (start, end))))
        slots = SlotSnapshot(events, end, start, end - start - len(events))
        # The name table of `remainder` is used: names added later belong to later events.
        return RingAnalysis(self.remainder.snapshot._replace(slots=slots), self.remainder)

    def _read_block(self, number: int) -> Events:
        first = number * PIECE_EVENTS
        return self._read(self._serials[first : first + PIECE_EVENTS], ()).slots.events

    @cached_property
    def _ranges(self) -> tuple[tuple[Int64Array, Int64Array], Int64Array, Int64Array]:
        """The indexes of the starts and ends of ranges among all events, -1 if missing, and their serial numbers."""
        events = self.remainder.all_events
        start, end = pair_by_value(events, *slot_format.RANGE_KINDS)
        start_serial = np.where(start >= 0, events.serial[start], -1)
        return (start, end), start_serial, np.where(end >= 0, events.serial[end], INT64_MAX)

    def _timeline(self, piece: RingAnalysis, modules: ModuleSpans) -> Timeline:
        """Return the timeline of a piece, with all ranges that overlap it, and `open_at_end` for the last piece."""
        events, slots = self.remainder.all_events, piece.snapshot.slots
        pair, start_serial, end_serial = self._ranges
        in_piece: BoolArray = (events.serial >= slots.overwritten) & (events.serial < slots.recorded)
        for rows in pair:
            in_piece[rows[(rows >= 0) & (start_serial < slots.recorded) & (end_serial >= slots.overwritten)]] = True
        part = RingAnalysis(piece.snapshot._replace(slots=slots._replace(events=events.take(in_piece))), self.remainder)
        open_at_end = self.open_at_end if slots.recorded == self._serials.stop else {}
        return from_ring.assemble_timeline(part, place_among(part, piece, modules), self.memory, open_at_end)

    def __iter__(self) -> Iterator[Timeline]:
        """Yield the pieces, which share numbers of names, module tracks and links; stats cover the pieces so far."""
        if not self.cuts:
            yield self.join()
            return
        stats, spans, start_ns, flops = Stats(), 0, None, np.zeros(2, np.int64)
        counted = describe_counted(self.remainder, 0, 0) if self.remainder.has_flops else None
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
            timeline = replace(timeline, stats=stats, metadata=metadata, begin_ns=start_ns, trained=trained)
            yield self._change(timeline)
            trained |= trained_modules(timeline)
            start_ns = int(timeline.step_ends[-1]) if len(timeline.step_ends) else None

    def rest(self) -> Timeline:
        """Return the timeline without its modules, after all pieces were yielded; a single piece with its modules."""
        if self.joined is not None:
            return self.joined
        if self._rest is None:
            modules = from_ring.join_modules(self._seen)
            modules = modules._replace(flops=(self.counted[1], modules.flops[1]))
            self._rest = self._change(
                from_ring.assemble_timeline(self.remainder, modules, self.memory, self.open_at_end)
            )
        return self._rest

    def join(self) -> Timeline:
        """Return the timeline of all pieces; memory holds them once."""
        if self.joined is None and not self.cuts:
            self.joined = self._change(from_ring.build_timeline(self._read(None, ())))
        if self.joined is None:
            columns: dict[str, AnyArray] = {}
            args, first = list[tuple[int, Args]](), 0
            for _, modules in self._modules():
                parent = modules.columns["parent"]
                parent[parent >= 0] += first
                args.append((first, modules.args))
                append_to(columns, modules.columns)
                first += len(parent)
            self.joined = put_modules_before(self.rest(), columns, join_args(args))
        return self.joined

    def _whole_run(self, spans: int) -> dict[str, float | None]:
        return from_ring.describe_whole_run(self.remainder.snapshot, self.remainder.step_ends.number, spans)


def parts_of(serials: range) -> Iterator[range]:
    """Yield the serial numbers in parts of `PIECE_EVENTS`."""
    return (serials[first : first + PIECE_EVENTS] for first in range(0, len(serials), PIECE_EVENTS))


def join_events(parts: Sequence[Events]) -> Events:
    """Return the events of several parts, one after the other."""
    return Events(*(np.concatenate([getattr(part, name) for part in parts]) for name in Events.__slots__))


def with_events(snapshot: RingSnapshot, parts: Sequence[Events]) -> RingSnapshot:
    """Return a snapshot with the events of the parts, sorted by serial number."""
    events = join_events(parts)
    events = events.take(np.argsort(events.serial, kind="stable"))
    return snapshot._replace(slots=snapshot.slots._replace(events=events))


def after_last(previous: Samples, samples: Samples) -> Samples:
    """Return the samples with the last previous sample in front, so that a part of a ring starts with a value."""
    return np.append(previous[0][-1:], samples[0]), np.append(previous[1][-1:], samples[1])


def place_among(remainder: RingAnalysis, piece: RingAnalysis, modules: ModuleSpans) -> ModuleSpans:
    """Return the modules of a piece, with evaluations at positions among the events of `remainder`."""
    position = remainder.positions_between(piece.events.serial[modules.evaluations.position >> 1])
    return modules._replace(evaluations=modules.evaluations._replace(position=position))
