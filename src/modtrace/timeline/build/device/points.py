"""When devices came by: an event of a device, and the event of the host that it belongs to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...._typing import Int64Array
from ....ring import Events, Kind
from ....ring.slot_format import EVENT_NUMBER_MASK, NO_NAME, STREAM_NUMBER_BITS
from ..module_events import is_of_modules

__all__ = ["DevicePoints", "QueuedEvents", "device_points", "queued_events", "stream_ids"]


class QueuedEvents(NamedTuple):
    """Events of devices that were recorded, read or not, in the order of the host's events; int64 arrays.

    Attributes:
        slot: index of each one's `DEVICE_QUEUED` among all events.
        event: index of the host's event that it belongs to, among those of modules (`module_events`); -1 where lost.
        stream: number of the stream and index of the device, as in the ring.
        reached: index of its `DEVICE_REACHED` among all events; -1 where it was never read.
        dropped: indexes among all events of those that there were no more of, an array of another length.
    """

    slot: Int64Array
    event: Int64Array
    stream: Int64Array
    reached: Int64Array
    dropped: Int64Array


class DevicePoints(NamedTuple):
    """Events of devices that were read, in the order of the host's events; int64 arrays of equal length.

    Attributes:
        event: index of the host's event that each belongs to, among those of modules (`module_events`).
        stream: number of the stream and index of the device, as in the ring.
        device_ns: when the device came by, on its own clock.
        dropped: how many events there were no more of.
        unread: how many were recorded, and never read.
    """

    event: Int64Array
    stream: Int64Array
    device_ns: Int64Array
    dropped: int
    unread: int

    @property
    def device(self) -> Int64Array:
        """The index of each one's device."""
        return self.stream >> STREAM_NUMBER_BITS


def queued_events(events: Events) -> QueuedEvents:
    """Return what was recorded on all devices, given all events of a ring."""
    queued = np.flatnonzero(events.kind == Kind.DEVICE_QUEUED)
    is_dropped = events.name[queued] == NO_NAME
    index = queued[~is_dropped]
    host = _event_before(events, index)
    module_index = np.cumsum(is_of_modules(events)) - 1
    event = np.where(host >= 0, module_index[host], -1).astype(np.int64)
    return QueuedEvents(
        index, event, events.name[index].astype(np.int64), _find_reached(events, index), queued[is_dropped]
    )


def device_points(events: Events) -> DevicePoints:
    """Return the points of all devices, given all events of a ring."""
    queued = queued_events(events)
    known = (queued.reached >= 0) & (queued.event >= 0)
    return DevicePoints(
        queued.event[known],
        queued.stream[known],
        events.value[queued.reached[known]],
        len(queued.dropped),
        int(np.count_nonzero(queued.reached < 0)),
    )


def stream_ids(events: Events) -> dict[int, int]:
    """Return torch's id of each stream by what stands for it in the ring."""
    told = np.flatnonzero(events.kind == Kind.DEVICE_STREAM)
    return dict(zip(events.name[told].tolist(), events.value[told].tolist(), strict=True))


def _find_reached(events: Events, queued: Int64Array) -> Int64Array:
    """Return for each queued event the index of what says that it was reached, -1 where nothing does.

    Of a number only the lower bits are told; but a number comes again only long after it was reached.
    """
    reached = np.flatnonzero(events.kind == Kind.DEVICE_REACHED)
    index = np.concatenate([queued, reached])
    number = np.concatenate([events.value[queued] & EVENT_NUMBER_MASK, events.name[reached].astype(np.int64)])
    order = np.lexsort((index, number))
    is_reached = order >= len(queued)
    first, second = order[:-1], order[1:]
    paired = ~is_reached[:-1] & is_reached[1:] & (number[first] == number[second])
    found = np.full(len(queued), -1, np.int64)
    found[first[paired]] = index[second[paired]]
    return found


def _event_before(events: Events, queued: Int64Array) -> Int64Array:
    """Return for each queued event what its thread wrote just before of modules, -1 where that is lost."""
    own = np.concatenate([np.flatnonzero(is_of_modules(events)), queued])
    is_queued = np.arange(len(own)) >= len(own) - len(queued)
    order = np.lexsort((own, events.thread[own]))
    before = np.full(len(queued), -1, np.int64)
    first, second = order[:-1], order[1:]
    fits = is_queued[second] & ~is_queued[first] & (events.thread[own[first]] == events.thread[own[second]])
    before[second[fits] - (len(own) - len(queued))] = own[first[fits]]
    return before
