"""A device's nanoseconds → the host's monotonic ones, and how far that may be off."""

from __future__ import annotations

import numpy as np

from ...._typing import Int64Array
from ....ring import Events, Kind
from ....ring.slot_format import DEVICE_TIME_BITS, DEVICE_TIME_MASK

__all__ = ["DeviceClock", "device_clocks"]

_EVENT_RESOLUTION_NS = 500
"""CUDA tells times of events to about so much."""
_MAX_DRIFT = 500e-6
"""Of a clock that was read once only."""
_MIN_APART_NS = 100_000_000
"""Between readings that are used: what each is off by would change the durations between closer ones."""


class DeviceClock:
    """Interpolates between the readings of a device's clock; behind the first and the last it goes on as between these.

    Args:
        device_ns: int64[n], what the clock showed, n > 0.
        host_ns: int64[n], monotonic: it showed that at this time at the latest …
        width_ns: int64[n], … and so long before at the earliest.
    """

    def __init__(self, device_ns: Int64Array, host_ns: Int64Array, width_ns: Int64Array) -> None:
        order = np.argsort(device_ns, kind="stable")
        # The last one is read when the recording stops, which may be right behind another: the narrower one counts.
        before_last: Int64Array = device_ns[order[-1]] - device_ns[order]
        close = order[1:][before_last[1:] < _MIN_APART_NS]
        if close.size:
            order = np.append(order[: -close.size], close[np.argmin(width_ns[close])])
        self._device = device_ns[order]
        self._half = width_ns[order] / 2
        offset = host_ns[order] - self._device
        self._offset = int(offset[0])
        self._moved = (offset - self._offset) - self._half
        span = int(self._device[-1] - self._device[0])
        self._drift = float(self._moved[-1] - self._moved[0]) / span if span else 0.0
        self._drift_bound = float(self._half[0] + self._half[-1]) / span if span else _MAX_DRIFT

    def to_monotonic(self, device_ns: Int64Array) -> Int64Array:
        """Convert; the order of times is kept where no reading is damaged."""
        moved = np.interp(device_ns, self._device, self._moved) + self._drift * self._outside(device_ns)
        monotonic: Int64Array = device_ns + self._offset + np.rint(moved).astype(np.int64)
        return monotonic

    def bound_ns(self, device_ns: Int64Array) -> Int64Array:
        """Return how far each converted time may be off, ns, where the clocks run evenly between two readings."""
        bound = np.interp(device_ns, self._device, self._half)
        bound += self._drift_bound * np.abs(self._outside(device_ns)) + _EVENT_RESOLUTION_NS
        return np.ceil(bound).astype(np.int64)

    def _outside(self, device_ns: Int64Array) -> Int64Array:
        """Return how far each lies before the first reading (negative) or behind the last."""
        outside: Int64Array = device_ns - np.clip(device_ns, self._device[0], self._device[-1])
        return outside


def device_clocks(events: Events) -> dict[int, DeviceClock]:
    """Return the clock of each device that was read, by its index."""
    readings = np.flatnonzero(events.kind == Kind.DEVICE_CLOCK)
    device = events.value[readings] >> DEVICE_TIME_BITS
    clocks = {}
    for index in np.unique(device).tolist():
        own = readings[device == index]
        clocks[index] = DeviceClock(
            events.value[own] & DEVICE_TIME_MASK, events.time[own], events.name[own].astype(np.int64)
        )
    return clocks
