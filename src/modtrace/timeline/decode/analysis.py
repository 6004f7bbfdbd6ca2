"""Results computed from the events of a ring: names, intervals, steps, passes, open calls, device times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ..._arrays import INT64_MAX, BoolArray, Int64Array, is_any, split_by
from ..._interrupts import cached_property
from ...ring import Events, Kind, Record, RingSnapshot, slot_format
from ...ring.clocks import MAX_SLEW, ClockMap, Reading
from ...ring.event_text import CATEGORIES, RangeName, parse_range
from .attribution import attribute_nodes
from .intervals import Intervals, build_intervals, is_core_event, pair_by_key, pair_by_value, pair_calls
from .name_lookup import NameLookup
from .open_calls import AFTER_BACKWARD, OpenCall, ThreadStack, open_stacks
from .spans import forward_of_recompute

_COLLECTIVE_KINDS = (Kind.COLLECTIVE_ENTER, Kind.COLLECTIVE_EXIT, Kind.WAIT_ENTER, Kind.WAIT_EXIT)


class QueuedEvents(NamedTuple):
    """Device events that were queued, read or not, in the order of the host's events; int64 arrays."""

    slot: Int64Array  # index of the `DEVICE_QUEUED` event among all events
    # Index into `RingAnalysis.events` of the host's event that it belongs to; for a collective the last event of a
    # module before the device event. -1 if it is lost.
    event: Int64Array
    # Index among all events of the collective, or the wait for one, that it belongs to; -1 if it belongs to a module.
    collective: Int64Array
    stream: Int64Array  # number of the stream and index of the device, packed as in the ring
    reached: Int64Array  # index of its `DEVICE_REACHED` event among all events; -1 if it was never read
    # Indexes among all events of the device events not recorded because none was free; its length differs.
    dropped: Int64Array


class DevicePoints(NamedTuple):
    """Device events that were read, in the order of the host's events; int64 arrays of equal length."""

    # Index of the host's event that it belongs to: for modules into `RingAnalysis.events`, for the start or the end of
    # a collective or wait into all events.
    event: Int64Array
    stream: Int64Array  # number of the stream and index of the device, packed as in the ring
    device_ns: Int64Array  # time at which the device reached it, on the device's clock

    @property
    def device(self) -> Int64Array:
        """The index of the device of each event."""
        return self.stream >> slot_format.STREAM_NUMBER_BITS


def queued_events(events: Events) -> QueuedEvents:
    """Return the queued device events among all events of a ring."""
    queued = np.flatnonzero(events.kind == Kind.DEVICE_QUEUED)
    is_dropped = events.name[queued] == slot_format.NO_NAME
    index = queued[~is_dropped]
    is_module_event = is_core_event(events)
    is_collective_event = is_any(events.kind, _COLLECTIVE_KINDS)
    queued_by = event_before(events, index, is_module_event | is_collective_event)
    is_collective = (queued_by >= 0) & is_collective_event[queued_by]
    collective = np.where(is_collective, queued_by, -1)
    module = np.where(is_collective, event_before(events, index, is_module_event, beyond_queued=True), queued_by)
    event = np.where(module >= 0, (np.cumsum(is_module_event) - 1)[module], -1).astype(np.int64)
    stream, reached = events.name[index].astype(np.int64), _find_reached(events, index)
    return QueuedEvents(index, event, collective, stream, reached, queued[is_dropped])


def device_points(events: Events, queued: QueuedEvents, *, of_collectives: bool = False) -> DevicePoints:
    """Return the device events that were read, of modules or of collectives."""
    event = queued.collective if of_collectives else np.where(queued.collective < 0, queued.event, -1)
    is_read = (queued.reached >= 0) & (event >= 0)
    return DevicePoints(event[is_read], queued.stream[is_read], events.value[queued.reached[is_read]])


def _find_reached(events: Events, queued: Int64Array) -> Int64Array:
    """Return the index of the `DEVICE_REACHED` event of each queued event; -1 if there is none.

    That event has only the lower bits of the number, which repeat only long after the event was reached.
    """
    reached = np.flatnonzero(events.kind == Kind.DEVICE_REACHED)
    index = np.sort(np.concatenate([queued, reached]))
    is_queued = events.kind[index] == Kind.DEVICE_QUEUED
    number = np.where(is_queued, events.value[index] & slot_format.EVENT_NUMBER_MASK, events.name[index])
    return pair_by_key(index, is_queued, number)[1][: len(queued)]


def event_before(
    events: Events, queued: Int64Array, is_candidate: BoolArray, *, beyond_queued: bool = False
) -> Int64Array:
    """Return the last candidate before each queued event on its thread; -1 if it is lost.

    If `beyond_queued`, other queued events may come between the two.
    """
    has_queued = np.zeros(int(events.thread.max(initial=0)) + 1, np.bool_)
    has_queued[events.thread[queued]] = True
    candidate = np.flatnonzero(is_candidate & has_queued[events.thread])
    index = np.concatenate([candidate, queued])
    order = np.lexsort((index, events.thread[index]))
    is_queued, rank = order >= len(candidate), np.arange(len(order))
    last_rank = np.maximum.accumulate(np.where(is_queued, -1, rank))  # rank of the last candidate in that order
    last = index[order[np.maximum(last_rank, 0)]]
    has_candidate = is_queued & (last_rank >= 0) & (events.thread[last] == events.thread[index[order]])
    if not beyond_queued:
        has_candidate &= last_rank == rank - 1
    candidate_before = np.full(len(queued), -1, np.int64)
    candidate_before[order[has_candidate] - len(candidate)] = last[has_candidate]
    return candidate_before


_MIN_READING_DISTANCE_NS = 100_000_000
"""Minimum distance of two readings in use; between closer ones, their errors would change durations."""


def device_clock(device_ns: Int64Array, host_ns: Int64Array, width_ns: Int64Array) -> ClockMap:
    """Return the map from a device's clock to the host's, by readings made at `host_ns` or up to `width_ns` before."""
    order = np.argsort(device_ns, kind="stable")
    # The last reading is made when the recording stops, maybe right after another: the narrowest of them counts.
    ns_to_last: Int64Array = device_ns[order[-1]] - device_ns[order]
    close = order[1:][ns_to_last[1:] < _MIN_READING_DISTANCE_NS]
    if close.size:
        order = np.append(order[: -close.size], close[np.argmin(width_ns[close])])
    time, half = device_ns[order], width_ns[order] / 2
    offset = host_ns[order] - time
    base = int(offset[0])
    return ClockMap.of_columns(time, offset - base - half, half, "mean rate", base)


MAX_BACKWARD_EVENTS = 1 << 16
"""Number of last events of a ring from which the usual durations of backward are taken."""


class RingAnalysis:
    """Results computed from the events of a ring, each on its first use.

    Args:
        snapshot: the ring, or a part of it.
        ring: if the snapshot is a part of a ring, the analysis of the whole ring's step ends.

    Attributes:
        snapshot: the argument.
        all_events: all events of the ring.
    """

    def __init__(self, snapshot: RingSnapshot, ring: RingAnalysis | None = None) -> None:
        self.snapshot = snapshot
        self.all_events = snapshot.slots.events
        self._ring = ring

    @property
    def ring(self) -> RingAnalysis:
        """The analysis of the whole ring: this one unless another was given."""
        return self if self._ring is None else self._ring  # no reference to itself, so it is freed after its last use

    @cached_property
    def lookup(self) -> NameLookup:
        """The name table."""
        is_known = self._ring is not None and self._ring.snapshot.records is self.snapshot.records
        return self.ring.lookup if is_known else NameLookup(self.snapshot.records)

    @cached_property
    def clock(self) -> ClockMap:
        """The map from monotonic to Unix nanoseconds."""
        return wall_clock(self.snapshot.records)

    @cached_property
    def events(self) -> Events:
        """The events of modules, nodes, steps and marks, without events of torch.distributed and devices."""
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
        """The index of the call of each interval that is a node; -1 for other intervals."""
        return attribute_nodes(self.intervals, self.events, self.lookup.torch_threads)

    @cached_property
    def forward_call(self) -> Int64Array:
        """The forward call that each call repeats; itself for a forward call."""
        return forward_of_recompute(self.intervals, self.call_of_node)

    @cached_property
    def passes(self) -> PassColumns:
        """The backward passes; they hold indexes into `events`."""
        return _pair_passes(self.events)

    @cached_property
    def step_ends(self) -> StepEnds:
        """The ends of training steps; they hold indexes into `events`."""
        if self._ring is None:
            return _find_step_ends(self.events)
        ends = self._ring.step_ends
        serial, number = self._ring.events.serial[ends.event], ends.number
        first, last = np.searchsorted(serial, (self.snapshot.slots.overwritten, self.snapshot.slots.recorded))
        inside = np.searchsorted(self.events.serial, serial[first:last])
        return StepEnds(inside, number[first:last], ends.with_passes, number[first - 1 : first] + 1)

    @cached_property
    def extent(self) -> tuple[int, int]:
        """The times of the ring's first and last events, used for lost starts and ends."""
        times = self.ring.all_events.time_ns
        return int(times.min(initial=INT64_MAX)), int(times.max(initial=0))

    @cached_property
    def open_stacks(self) -> list[ThreadStack]:
        """The stack of each thread that has written an event, in the order of their first events."""
        return open_stacks(self)

    @cached_property
    def queued(self) -> QueuedEvents:
        """The events queued on devices."""
        return queued_events(self.all_events)

    @cached_property
    def device_clocks(self) -> Mapping[int, ClockMap]:
        """The map from the clock of a device to the host's clock, by index of the device, if it was read."""
        readings = self.all_events.take(self.all_events.kind == Kind.DEVICE_CLOCK)
        device, width_ns = readings.value >> slot_format.DEVICE_TIME_BITS, readings.name.astype(np.int64)
        device_ns = readings.value & slot_format.DEVICE_TIME_MASK
        return {
            int(device[rows[0]]): device_clock(device_ns[rows], readings.time_ns[rows], width_ns[rows])
            for rows in split_by(device)
        }

    @cached_property
    def stream_ids(self) -> Mapping[int, int]:
        """Torch's id of each stream, by its number in the ring."""
        streams = self.all_events.take(self.all_events.kind == Kind.DEVICE_STREAM)
        return dict(zip(streams.name.tolist(), streams.value.tolist(), strict=True))

    def positions_between(self, serial: Int64Array) -> Int64Array:
        """Return the positions (see `Intervals`) of events outside `events`, given by serial number."""
        return 2 * np.searchsorted(self.events.serial, serial)

    def steps_before(self, position: Int64Array) -> Int64Array:
        """Return the number of steps that had ended before each position (see `Intervals`)."""
        ends = self.step_ends
        if not len(ends.event) and not len(ends.first_count):
            return np.zeros(len(position), np.int64)
        first_count = ends.first_count if len(ends.first_count) else ends.number[:1]
        return np.concatenate([first_count, ends.number + 1])[np.searchsorted(2 * ends.event, position)]

    def usual_durations(self, calls: Iterable[OpenCall]) -> dict[tuple[str, str], int]:
        """Return the median duration in ns of each module that is in one of the calls, by (fqn, phase).

        For "backward" it is the duration of one autograd node, or run of nodes, as `OpenCall.since_ns` counts it. For
        ranges the key is (name, category). Modules whose calls never ended in the ring and waits after backward are
        left out.
        """
        call_by_key = {(call.fqn, call.phase): call for call in calls}
        medians = {key: usual_duration([self], call) for key, call in call_by_key.items()}
        return {key: ns for key, ns in medians.items() if ns is not None}

    def durations(self, fqn: str, phase: str) -> Int64Array:
        """Return the durations in ns of the calls of a module with both start and end, see `usual_durations`."""
        if phase in CATEGORIES:
            ids = [
                number for number, text in enumerate(self.lookup.texts) if parse_range(text) == RangeName(fqn, phase)
            ]
            events = self.all_events.take(np.isin(self.all_events.name, ids))
            start, end = pair_by_value(events, *slot_format.RANGE_KINDS)
            is_complete = (start >= 0) & (end >= 0)
            return np.asarray(events.time_ns[end[is_complete]] - events.time_ns[start[is_complete]], np.int64)
        ids = [number for number, name in enumerate(self.lookup.names) if name.fqn == fqn] or [slot_format.NO_NAME]
        if phase == "backward":
            name, duration = self._ended_nodes
            return duration[np.isin(name, ids)]
        is_call = is_any(self.events.kind, (*slot_format.CALL_ENTER_KINDS, *slot_format.CALL_EXIT_KINDS))
        pairs = pair_calls(self.events.take(np.flatnonzero(is_call & np.isin(self.events.name, ids))))
        is_complete = (pairs["start_position"] >= 0) & (pairs["end_position"] >= 0)
        in_phase = is_complete & ((pairs["call_key"] & slot_format.RECOMPUTE_BIT != 0) == (phase == "recompute"))
        duration = pairs["end_ns"][in_phase] - pairs["start_ns"][in_phase]
        return np.asarray(duration, np.int64)

    @cached_property
    def _ended_nodes(self) -> tuple[Int64Array, Int64Array]:
        """The name of the call that made each ended node (`NO_NAME` if unknown), and the node's duration in ns."""
        # Attributing a node costs more than pairing a call, and the last events suffice for a median.
        events = self.events.take(slice(-MAX_BACKWARD_EVENTS, None))
        intervals = build_intervals(events)
        call = attribute_nodes(intervals, events, self.lookup.torch_threads)
        is_complete: BoolArray = intervals.is_node & intervals.has_start & intervals.has_end
        name = np.where(call >= 0, intervals.name[call], slot_format.NO_NAME)
        return name[is_complete], (intervals.end_ns - intervals.start_ns)[is_complete]


def usual_duration(parts: Iterable[RingAnalysis], call: OpenCall) -> int | None:
    """Return the median duration in ns of calls like an open one in parts whose edges cut no call; None if unknown."""
    if call.phase == AFTER_BACKWARD:
        return None
    ns = np.concatenate([part.durations(call.fqn, call.phase) for part in parts])
    return int(np.median(ns[ns > 0])) if np.any(ns > 0) else None


def wall_clock(records: Iterable[Record]) -> ClockMap:
    """Return the map to the wall clock by the readings at a recording's start and stop; the identity without any."""
    anchors = [
        Reading(int(record["monotonic"]), int(record["wall"]) - int(record["monotonic"]))
        for record in records
        if record["kind"] == "anchor"
    ] or [Reading(0, 0)]
    first, last = anchors[0], anchors[-1]
    elapsed, drift = last.time_ns - first.time_ns, last.offset_ns - first.offset_ns
    is_slewed = elapsed > 0 and abs(drift) <= MAX_SLEW * elapsed
    return ClockMap([first, last] if is_slewed else [first], "mean rate")


class StepEnds(NamedTuple):
    """The ends of training steps, in their order; int64 arrays of equal length."""

    event: Int64Array  # index of the event that ends the step
    number: Int64Array  # number of the step
    with_passes: bool = False  # whether backward passes end the steps
    first_count: Int64Array = np.zeros(0, np.int64)  # number of steps ended before; empty: the first step's number


def _find_step_ends(events: Events) -> StepEnds:
    """Return the ends of training steps.

    The user's marks come first. Without marks, a step ends with its last optimizer step; steps of several threads
    overlap, and are numbered in the order of their ends. Without optimizer steps, a step ends with each backward pass
    that added gradients to leaf tensors; without these, with each pass that returned gradients.
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
    """Backward passes in the order of their starts; int64 arrays of equal length."""

    thread: Int64Array  # index into the name table's threads
    start_event: Int64Array  # index of the event that starts the pass; -1 if it was overwritten
    end_event: Int64Array  # index of the event that ends the pass; -1 if the pass has not ended


def _pair_passes(events: Events) -> PassColumns:
    """Pair the starts and ends of passes by number; among passes whose start is lost, the longest comes first."""
    start, end = pair_by_value(events, Kind.PASS_BEGIN, Kind.PASS_END)
    order = np.lexsort((-np.where(end >= 0, end, len(events)), start))
    start, end = start[order], end[order]
    return PassColumns(events.thread[np.where(start >= 0, start, end)].astype(np.int64), start, end)
