"""When devices came by: an event of a device, and the event of the host that it belongs to."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...._typing import Int64Array
from ....ring import Events, Kind
from ....ring.slot_format import EVENT_NUMBER_MASK, NO_NAME, STREAM_NUMBER_BITS
from ..module_events import is_of_modules

__all__ = ["DevicePoints", "device_points", "stream_ids"]


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


def device_points(events: Events) -> DevicePoints:
    """Return the points of all devices, given all events of a ring."""
    all_queued = np.flatnonzero(events.kind == Kind.DEVICE_QUEUED)
    queued = all_queued[events.name[all_queued] != NO_NAME]
    reached = _find_reached(events, queued)
    host = _event_before(events, queued)
    known = (reached >= 0) & (host >= 0)
    module_index = np.cumsum(is_of_modules(events)) - 1
    return DevicePoints(
        module_index[host[known]],
        events.name[queued[known]].astype(np.int64),
        events.value[reached[known]],
        len(all_queued) - len(queued),
        int(np.count_nonzero(reached < 0)),
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
