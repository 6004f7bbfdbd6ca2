"""Answers from the events of a ring: names, intervals, steps, passes, open calls, the times of devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ..._arrays import INT64_MAX, BoolArray, Int64Array, is_any, split_by
from ..._interrupts import cached_property
from ...ring import Events, Kind, Record, RingSnapshot, slot_format
from ...ring.clocks import ClockMap, Reading
from ...ring.event_text import CATEGORIES, RangeName, parse_range
from .attribution import attribute_nodes
from .intervals import Intervals, build_intervals, is_core_event, pair_by_key, pair_by_value, pair_calls
from .name_lookup import NameLookup
from .open_calls import AFTER_BACKWARD, OpenCall, ThreadStack, open_stacks
from .spans import forward_of_recompute

_COLLECTIVE_KINDS = (Kind.COLLECTIVE_ENTER, Kind.COLLECTIVE_EXIT, Kind.WAIT_ENTER, Kind.WAIT_EXIT)


class QueuedEvents(NamedTuple):
    """Events of devices that were recorded, read or not, in the order of the host's events; int64 arrays."""

    slot: Int64Array  # index of each one's `DEVICE_QUEUED` among all events
    # Index of the host's event that it belongs to, among those of modules (`RingAnalysis.events`). If it belongs to a
    # collective, the last event of a module before it; -1 if lost.
    event: Int64Array
    # Index among all events of the collective, or the wait for one, that it belongs to; -1 if it belongs to a module.
    collective: Int64Array
    stream: Int64Array  # number of the stream and index of the device, as in the ring
    reached: Int64Array  # index of its `DEVICE_REACHED` among all events; -1 if it was never read
    # Indexes among all events of those that could not be recorded, since none was free; another length.
    dropped: Int64Array


class DevicePoints(NamedTuple):
    """Events of devices that were read, in the order of the host's events; int64 arrays of equal length."""

    # Index of the host's event that each belongs to: of modules among those (`RingAnalysis.events`), at the begin or
    # the end of collectives and of waits among all.
    event: Int64Array
    stream: Int64Array  # number of the stream and index of the device, as in the ring
    device_ns: Int64Array  # when the device passed it, on its own clock

    @property
    def device(self) -> Int64Array:
        """The index of each one's device."""
        return self.stream >> slot_format.STREAM_NUMBER_BITS


def queued_events(events: Events) -> QueuedEvents:
    """Return what was recorded on all devices, given all events of a ring."""
    queued = np.flatnonzero(events.kind == Kind.DEVICE_QUEUED)
    is_dropped = events.name[queued] == slot_format.NO_NAME
    index = queued[~is_dropped]
    of_modules = is_core_event(events)
    of_collectives = is_any(events.kind, _COLLECTIVE_KINDS)
    queued_by = event_before(events, index, of_modules | of_collectives)
    is_collective = (queued_by >= 0) & of_collectives[queued_by]
    collective = np.where(is_collective, queued_by, -1)
    module = np.where(is_collective, event_before(events, index, of_modules, beyond_queued=True), queued_by)
    event = np.where(module >= 0, (np.cumsum(of_modules) - 1)[module], -1).astype(np.int64)
    stream, reached = events.name[index].astype(np.int64), _find_reached(events, index)
    return QueuedEvents(index, event, collective, stream, reached, queued[is_dropped])


def device_points(events: Events, queued: QueuedEvents, *, of_collectives: bool = False) -> DevicePoints:
    """Return the points of modules, or of collectives, given all events of a ring and those that were queued."""
    event = queued.collective if of_collectives else np.where(queued.collective < 0, queued.event, -1)
    is_read = (queued.reached >= 0) & (event >= 0)
    return DevicePoints(event[is_read], queued.stream[is_read], events.value[queued.reached[is_read]])


def _find_reached(events: Events, queued: Int64Array) -> Int64Array:
    """Return for each queued event the index of the event that says that it was reached; -1 if there is none.

    That event has only the lower bits of the number; but these come again only long after it was reached.
    """
    reached = np.flatnonzero(events.kind == Kind.DEVICE_REACHED)
    index = np.sort(np.concatenate([queued, reached]))
    is_queued = events.kind[index] == Kind.DEVICE_QUEUED
    number = np.where(is_queued, events.value[index] & slot_format.EVENT_NUMBER_MASK, events.name[index])
    return pair_by_key(index, is_queued, number)[1][: len(queued)]


def event_before(events: Events, queued: Int64Array, chosen: BoolArray, *, beyond_queued: bool = False) -> Int64Array:
    """Return for each queued event the last of the chosen ones before it on its thread, -1 if that is lost.

    With `beyond_queued` other queued events may be between the two.
    """
    has_queued = np.zeros(int(events.thread.max(initial=0)) + 1, np.bool_)
    has_queued[events.thread[queued]] = True
    candidate = np.flatnonzero(chosen & has_queued[events.thread])
    index = np.concatenate([candidate, queued])
    order = np.lexsort((index, events.thread[index]))
    is_queued, place = order >= len(candidate), np.arange(len(order))
    # By place in that order: the last that is not queued.
    last_place = np.maximum.accumulate(np.where(is_queued, -1, place))
    last = index[order[np.maximum(last_place, 0)]]
    is_found = is_queued & (last_place >= 0) & (events.thread[last] == events.thread[index[order]])
    if not beyond_queued:
        is_found &= last_place == place - 1
    before = np.full(len(queued), -1, np.int64)
    before[order[is_found] - len(candidate)] = last[is_found]
    return before


_MIN_APART_NS = 100_000_000
"""Between readings that are used: what each is off by would change the durations between closer ones."""


def device_clock(device_ns: Int64Array, host_ns: Int64Array, width_ns: Int64Array) -> ClockMap:
    """Return the host's clock by readings of a device's, each shown at `host_ns` or up to `width_ns` before."""
    order = np.argsort(device_ns, kind="stable")
    # The last one is read when the recording stops, which may be right after another: the narrower one counts.
    before_last: Int64Array = device_ns[order[-1]] - device_ns[order]
    close = order[1:][before_last[1:] < _MIN_APART_NS]
    if close.size:
        order = np.append(order[: -close.size], close[np.argmin(width_ns[close])])
    time, half = device_ns[order], width_ns[order] / 2
    offset = host_ns[order] - time
    base = int(offset[0])
    return ClockMap.of_columns(time, offset - base - half, half, "mean rate", base)


_MAX_DRIFT = 500e-6
"""A wall clock is slewed by at most 500 ppm; one that moved by more between two readings was set."""
MAX_BACKWARD_EVENTS = 1 << 16
"""Usual durations of backward are those of so many last events."""


class RingAnalysis:
    """Answers from the events of a ring. Each is computed when it is first asked for, and then kept.

    Args:
        snapshot: what the ring held.
        ring: if the snapshot is a part of a ring, the analysis of what ends steps in all of it.

    Attributes:
        snapshot: as given.
        all_events: all events of the ring.
    """

    def __init__(self, snapshot: RingSnapshot, ring: RingAnalysis | None = None) -> None:
        self.snapshot = snapshot
        self.all_events = snapshot.slots.events
        self._ring = ring

    @property
    def ring(self) -> RingAnalysis:
        """The analysis of all of the ring: this one, or the other one that was given."""
        return self if self._ring is None else self._ring  # none holds itself: each is freed after its last use

    @cached_property
    def lookup(self) -> NameLookup:
        """The name table."""
        is_known = self._ring is not None and self._ring.snapshot.records is self.snapshot.records
        return self.ring.lookup if is_known else NameLookup(self.snapshot.records)

    @cached_property
    def clock(self) -> ClockMap:
        """The conversion of monotonic to Unix nanoseconds."""
        return wall_clock(self.snapshot.records)

    @cached_property
    def events(self) -> Events:
        """The events of modules and nodes, without those of torch.distributed and of devices."""
        return self.all_events.take(is_core_event(self.all_events))

    @cached_property
    def has_flops(self) -> bool:
        """Whether operators were counted."""
        return bool(is_any(self.all_events.kind, slot_format.FLOP_KINDS).any())

    @cached_property
    def intervals(self) -> Intervals:
        """The calls and nodes."""
        return build_intervals(self.events)

    @cached_property
    def call_of_node(self) -> Int64Array:
        """For each interval that is a node the index of the call it belongs to; else -1."""
        return attribute_nodes(self.intervals, self.events, self.lookup.torch_threads)

    @cached_property
    def forward_call(self) -> Int64Array:
        """For each call the forward call that it is or repeats."""
        return forward_of_recompute(self.intervals, self.call_of_node)

    @cached_property
    def passes(self) -> PassColumns:
        """The backward passes; indexes are those of `events`."""
        return _pair_passes(self.events)

    @cached_property
    def step_ends(self) -> StepEnds:
        """The ends of training steps; indexes are those of `events`."""
        if self._ring is None:
            return _find_step_ends(self.events)
        ends = self._ring.step_ends
        serial, number = self._ring.events.serial[ends.event], ends.number
        first, last = np.searchsorted(serial, (self.snapshot.slots.overwritten, self.snapshot.slots.recorded))
        inside = np.searchsorted(self.events.serial, serial[first:last])
        return StepEnds(inside, number[first:last], ends.with_passes, number[first - 1 : first] + 1)

    @cached_property
    def extent(self) -> tuple[int, int]:
        """The times of the ring's first and last events, for begins that were overwritten and ends that were lost."""
        times = self.ring.all_events.time
        return int(times.min(initial=INT64_MAX)), int(times.max(initial=0))

    @cached_property
    def open_stacks(self) -> list[ThreadStack]:
        """The stack of each thread that has written any event, in the order in which they came."""
        return open_stacks(self)

    @cached_property
    def queued(self) -> QueuedEvents:
        """The events that were recorded on devices."""
        return queued_events(self.all_events)

    @cached_property
    def device_clocks(self) -> Mapping[int, ClockMap]:
        """For each device whose clock was read, by the device's index, the host's clock."""
        readings = self.all_events.take(self.all_events.kind == Kind.DEVICE_CLOCK)
        device, width_ns = readings.value >> slot_format.DEVICE_TIME_BITS, readings.name.astype(np.int64)
        device_ns = readings.value & slot_format.DEVICE_TIME_MASK
        return {
            int(device[rows[0]]): device_clock(device_ns[rows], readings.time[rows], width_ns[rows])
            for rows in split_by(device)
        }

    @cached_property
    def stream_ids(self) -> Mapping[int, int]:
        """Torch's id of each stream, by its number in the ring."""
        named = self.all_events.take(self.all_events.kind == Kind.DEVICE_STREAM)
        return dict(zip(named.name.tolist(), named.value.tolist(), strict=True))

    def positions_between(self, serial: Int64Array) -> Int64Array:
        """Return the positions, as of `Intervals`, of events that are not among `events`, by their serial numbers."""
        return 2 * np.searchsorted(self.events.serial, serial)

    def steps_before(self, position: Int64Array) -> Int64Array:
        """Return for each position among `events`, as of `Intervals`, the number of steps that had ended before it."""
        ends = self.step_ends
        if not len(ends.event) and not len(ends.ended):
            return np.zeros(len(position), np.int64)
        ended = np.concatenate([ends.ended if len(ends.ended) else ends.number[:1], ends.number + 1])
        return ended[np.searchsorted(2 * ends.event, position)]

    def usual_durations(self, calls: Iterable[OpenCall]) -> dict[tuple[str, str], int]:
        """Return the median duration in ns of each module that is in one of the calls, by (fqn, phase).

        For "backward" it is that of one autograd node, or run of nodes, of the module, as `OpenCall.since_ns` counts.
        Ranges have their name and category for fqn and phase. The result lacks what has not ended once in the ring,
        and waits after backward.
        """
        wanted = {(call.fqn, call.phase): call for call in calls}
        usual = {key: usual_duration([self], call) for key, call in wanted.items()}
        return {key: ns for key, ns in usual.items() if ns is not None}

    def durations(self, fqn: str, phase: str) -> Int64Array:
        """Return how long each call of a module took that has begun and ended, in ns; see `usual_durations`."""
        if phase in CATEGORIES:
            ids = [
                number for number, text in enumerate(self.lookup.texts) if parse_range(text) == RangeName(fqn, phase)
            ]
            events = self.all_events.take(np.isin(self.all_events.name, ids))
            begin, end = pair_by_value(events, *slot_format.RANGE_KINDS)
            is_whole = (begin >= 0) & (end >= 0)
            return np.asarray(events.time[end[is_whole]] - events.time[begin[is_whole]], np.int64)
        ids = [number for number, name in enumerate(self.lookup.names) if name.fqn == fqn] or [slot_format.NO_NAME]
        if phase == "backward":
            name, duration = self._ended_nodes
            return duration[np.isin(name, ids)]
        is_call = is_any(self.events.kind, (*slot_format.CALL_ENTER_KINDS, *slot_format.CALL_EXIT_KINDS))
        pairs = pair_calls(self.events.take(np.flatnonzero(is_call & np.isin(self.events.name, ids))))
        is_wanted = (pairs["start_position"] >= 0) & (pairs["end_position"] >= 0)
        is_wanted &= (pairs["call_key"] & slot_format.RECOMPUTE_BIT != 0) == (phase == "recompute")
        duration = pairs["end"][is_wanted] - pairs["start"][is_wanted]
        return np.asarray(duration, np.int64)

    @cached_property
    def _ended_nodes(self) -> tuple[Int64Array, Int64Array]:
        """The name of the call that made each ended node, if any, and how long the node ran, ns."""
        # To attribute a node takes longer than to pair a call: the last events are enough to say what is usual.
        events = self.events.take(slice(-MAX_BACKWARD_EVENTS, None))
        intervals = build_intervals(events)
        call = attribute_nodes(intervals, events, self.lookup.torch_threads)
        is_ended: BoolArray = intervals.is_node & intervals.has_start & intervals.has_end
        name = np.where(call >= 0, intervals.name[call], slot_format.NO_NAME)
        return name[is_ended], (intervals.end - intervals.start)[is_ended]


def usual_duration(parts: Iterable[RingAnalysis], call: OpenCall) -> int | None:
    """Return the median duration in ns of what is open, which crosses no edge of parts; None if not known."""
    if call.phase == AFTER_BACKWARD:
        return None
    ns = np.concatenate([part.durations(call.fqn, call.phase) for part in parts])
    return int(np.median(ns[ns > 0])) if np.any(ns > 0) else None


def wall_clock(records: Iterable[Record]) -> ClockMap:
    """Return the wall clock by the readings at a recording's start and stop; without any it is the monotonic one."""
    anchors = [
        Reading(int(record["monotonic"]), int(record["wall"]) - int(record["monotonic"]))
        for record in records
        if record["kind"] == "anchor"
    ] or [Reading(0, 0)]
    first, last = anchors[0], anchors[-1]
    elapsed, drift = last.time_ns - first.time_ns, last.offset_ns - first.offset_ns
    evenly = elapsed > 0 and abs(drift) <= _MAX_DRIFT * elapsed
    return ClockMap([first, last] if evenly else [first], "mean rate")


class StepEnds(NamedTuple):
    """The ends of training steps, in their order; int64 arrays of equal length."""

    event: Int64Array  # index of the event that ends each
    number: Int64Array  # of the step
    with_passes: bool = False  # whether backward passes end them
    ended: Int64Array = np.zeros(0, np.int64)  # how many had ended before the first; empty if only that one says it


def _find_step_ends(events: Events) -> StepEnds:
    """Return where training steps end.

    The user's marks count first. Without any, a step ends with the last optimizer step that belongs to it; steps of
    several threads overlap, and are numbered as they end. Without optimizer steps, a step ends with each backward pass
    that added gradients to leaf tensors; without these, with each that returned gradients.
    """
    marked = np.flatnonzero(events.kind == Kind.STEP)
    if len(marked):
        return StepEnds(marked, events.value[marked])
    optimizer = np.flatnonzero(events.kind == Kind.OPTIMIZER_STEP)
    if len(optimizer):
        number, last = np.unique(events.value[optimizer][::-1], return_index=True)
        return StepEnds(np.sort(optimizer[::-1][last]), number)
    passes = np.flatnonzero(events.kind == Kind.GRADIENTS)
    passes = passes[events.name[passes] == events.name[passes].min(initial=1)]
    return StepEnds(passes, events.value[passes], len(passes) > 0)


class PassColumns(NamedTuple):
    """Backward passes in the order of their begins; int64 arrays of equal length."""

    thread: Int64Array  # index into the name table's threads
    begin: Int64Array  # index of the event that begins it; -1 if that was overwritten
    end: Int64Array  # index of the event that ends it; -1 if it is not over


def _pair_passes(events: Events) -> PassColumns:
    """Pair the begins and ends of passes by their numbers; of several whose begin is lost, the longest comes first."""
    begin, end = pair_by_value(events, Kind.PASS_BEGIN, Kind.PASS_END)
    order = np.lexsort((-np.where(end >= 0, end, len(events)), begin))
    begin, end = begin[order], end[order]
    return PassColumns(events.thread[np.where(begin >= 0, begin, end)].astype(np.int64), begin, end)
