"""When a device passed an event of the host, and the clock that turns the device's times into the host's."""

from typing import NamedTuple

import numpy as np

from ..._numbering import is_any
from ..._typing import BoolArray, Int64Array
from ...ring import Events, Kind
from ...ring.clock_map import ClockMap
from ...ring.slot_format import DEVICE_TIME_BITS, DEVICE_TIME_MASK, EVENT_NUMBER_MASK, NO_NAME, STREAM_NUMBER_BITS
from .intervals import is_core_event, pair_by_key

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
        return self.stream >> STREAM_NUMBER_BITS


def queued_events(events: Events) -> QueuedEvents:
    """Return what was recorded on all devices, given all events of a ring."""
    queued = np.flatnonzero(events.kind == Kind.DEVICE_QUEUED)
    is_dropped = events.name[queued] == NO_NAME
    index = queued[~is_dropped]
    of_modules = is_core_event(events)
    of_collectives = is_any(events.kind, _COLLECTIVE_KINDS)
    own = event_before(events, index, of_modules | of_collectives)
    is_collective = (own >= 0) & of_collectives[own]
    collective = np.where(is_collective, own, -1)
    module = np.where(is_collective, event_before(events, index, of_modules, beyond_queued=True), own)
    event = np.where(module >= 0, (np.cumsum(of_modules) - 1)[module], -1).astype(np.int64)
    stream, reached = events.name[index].astype(np.int64), _find_reached(events, index)
    return QueuedEvents(index, event, collective, stream, reached, queued[is_dropped])


def device_points(events: Events, queued: QueuedEvents, *, of_collectives: bool = False) -> DevicePoints:
    """Return the points of modules, or of collectives, given all events of a ring and those that were queued."""
    event = queued.collective if of_collectives else np.where(queued.collective < 0, queued.event, -1)
    known = (queued.reached >= 0) & (event >= 0)
    return DevicePoints(event[known], queued.stream[known], events.value[queued.reached[known]])


def read_stream_ids(events: Events) -> dict[int, int]:
    """Return torch's id of each stream by its number in the ring."""
    named = np.flatnonzero(events.kind == Kind.DEVICE_STREAM)
    return dict(zip(events.name[named].tolist(), events.value[named].tolist(), strict=True))


def _find_reached(events: Events, queued: Int64Array) -> Int64Array:
    """Return for each queued event the index of the event that says that it was reached; -1 if there is none.

    That event has only the lower bits of the number; but these come again only long after it was reached.
    """
    reached = np.flatnonzero(events.kind == Kind.DEVICE_REACHED)
    index = np.sort(np.concatenate([queued, reached]))
    is_queued = events.kind[index] == Kind.DEVICE_QUEUED
    number = np.where(is_queued, events.value[index] & EVENT_NUMBER_MASK, events.name[index])
    return pair_by_key(index, is_queued, number)[1][: len(queued)]


def event_before(events: Events, queued: Int64Array, chosen: BoolArray, *, beyond_queued: bool = False) -> Int64Array:
    """Return for each queued event the last of the chosen ones before it on its thread, -1 if that is lost.

    With `beyond_queued` other queued events may be between the two.
    """
    has_queued = np.zeros(int(events.thread.max(initial=0)) + 1, np.bool_)
    has_queued[events.thread[queued]] = True
    own = np.concatenate([np.flatnonzero(chosen & has_queued[events.thread]), queued])
    is_queued = np.arange(len(own)) >= len(own) - len(queued)
    order = np.lexsort((own, events.thread[own]))
    # By place in that order: the last that is not queued.
    place = np.maximum.accumulate(np.where(is_queued[order], -1, np.arange(len(own))))
    last = own[order[np.maximum(place, 0)]]
    known = is_queued[order] & (place >= 0) & (events.thread[last] == events.thread[own[order]])
    if not beyond_queued:
        known &= place == np.arange(len(own)) - 1
    before = np.full(len(queued), -1, np.int64)
    before[order[known] - (len(own) - len(queued))] = last[known]
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


def read_device_clocks(events: Events) -> dict[int, ClockMap]:
    """Return for each device whose clock was read, by its index, the host's clock."""
    readings = np.flatnonzero(events.kind == Kind.DEVICE_CLOCK)
    device = events.value[readings] >> DEVICE_TIME_BITS
    clocks = {}
    for index in np.unique(device).tolist():
        own = readings[device == index]
        clocks[index] = device_clock(
            events.value[own] & DEVICE_TIME_MASK, events.time[own], events.name[own].astype(np.int64)
        )
    return clocks
