"""Converts times between two clocks, with a bound of the error, and between the clocks of a job's hosts.

The clocks of hosts, devices, a profiler and the wall clock are all compared in one way. A program read both clocks at
several moments, and `ClockMap` gives the offset between these readings, before them and after them. A process notes
the offset of its host's clock from another host's in its ring, and `ClockTree` reads these notes.
"""

import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .._arrays import Float64Array, Int64Array
from .owner import BOOT_ID

MAX_SLEW = 500e-6
"""Maximum rate at which a kernel slews a clock; a clock that moved more between two readings was set."""
MAX_RATE = 2 * MAX_SLEW
"""Maximum rate at which two monotonic clocks drift apart: each is slewed."""
_MIN_RATE_CHANGE = 1e-6
"""Minimum change of the rate that is assumed between two readings, because machines warm up."""
_FLOAT_NOISE_NS = 1e-6

Beyond = Literal["last rate", "mean rate", "no rate"]
"""The rate of the offset before the first reading and after the last one, see `ClockMap`."""


class Reading(NamedTuple):
    """One reading of the offset of another clock from the own clock."""

    time_ns: int  # time of the own clock at which the offset holds
    offset_ns: float  # the other clock minus the own clock
    bound_ns: float = 0  # maximum error of the offset
    round_trip_ns: int = 0  # minimum duration of the reading


class Offset(NamedTuple):
    """Offsets at several times."""

    offset_ns: Int64Array  # int64[n], the other clock minus the own clock
    bound_ns: Int64Array  # int64[n], the maximum error of each offset


class ClockMap:
    """The offset of another clock, interpolated linearly between readings.

    Between two readings the bound is interpolated too. Beyond the readings, and with "last rate" between them, it grows
    with the distance to the nearest reading:

    - "last rate": the rate of two hosts' clocks changes slowly. Beyond the readings, the rate of the nearest two
      readings continues. The bound grows by the error of this rate, and by its possible change: twice the largest
      change between neighbouring intervals, or 1 ppm if that is more.
    - "mean rate": the clocks run evenly. Beyond the readings, the rate from the first to the last reading continues,
      and the bound grows by the error of this rate.
    - "no rate": the offset stays constant, and the bound grows by the maximum drift of clocks. A single reading is
      always used in this way.

    Args:
        readings: one or more, in any order; among readings at one moment, the one with the smallest bound counts.
        beyond: see above.

    Attributes:
        first_ns: time of the own clock at the first reading.

    Example:
        >>> clock = ClockMap([Reading(0, 1_000, 10), Reading(10**9, 2_000, 10)])
        >>> clock.to_other([500_000_000]).tolist()
        [500001500]
    """

    def __init__(self, readings: Iterable[Reading], beyond: Beyond = "last rate") -> None:
        by_time = {reading.time_ns: reading for reading in sorted(readings, key=lambda r: (r.time_ns, -r.bound_ns))}
        if not by_time:
            raise ValueError("a map of clocks needs at least one reading")
        first = next(iter(by_time.values()))
        base = int(first.offset_ns)  # offsets relative to it, and times to the first one, fit a double
        rows = [(r.time_ns - first.time_ns, r.offset_ns - base, r.bound_ns) for r in by_time.values()]
        self._set(first.time_ns, base, np.array(rows, np.float64).T, beyond)

    @classmethod
    def of_columns(
        cls, time: Int64Array, offset: Float64Array, bound: Float64Array, beyond: Beyond, base_ns: int = 0
    ) -> "ClockMap":
        """Return the map of many readings in time order; `base_ns` was subtracted from `offset` to fit doubles."""
        clock_map = cls.__new__(cls)
        clock_map._set(int(time[0]), base_ns, np.stack([time - time[0], offset, bound]), beyond)
        return clock_map

    def _set(self, first_ns: int, offset_ns: int, rows: Float64Array, beyond: Beyond) -> None:
        self.first_ns, self._offset_ns = first_ns, offset_ns
        self._time, self._offset, self._bound = rows
        self._rate_change = 0.0
        if self._time[-1] == 0 or beyond == "no rate":
            self._rate, self._growth = np.zeros(2), np.full(2, MAX_RATE)
        elif beyond == "mean rate":
            rate, growth = _rates(rows[:, [0, -1]])
            self._rate, self._growth = rate.repeat(2), growth.repeat(2)
        else:
            rate, growth = _rates(rows)
            change = 2 * float(np.abs(np.diff(rate)).max(initial=0))
            self._rate_change = min(max(change, _MIN_RATE_CHANGE), 2 * MAX_RATE)
            self._rate = rate[[0, -1]]
            self._growth = np.minimum(growth[[0, -1]] + self._rate_change, MAX_RATE + np.abs(self._rate))

    def at(self, time_ns: npt.ArrayLike) -> Offset:
        """Return the offsets, and their bounds, at times of the own clock."""
        elapsed = self._since_first(time_ns)
        exact = self._offset_at(elapsed)
        offset = np.rint(exact)
        bound = np.interp(elapsed, self._time, self._bound) + np.abs(exact - offset) - _FLOAT_NOISE_NS
        bound += np.maximum(self._time[0] - elapsed, 0) * self._growth[0]
        bound += np.maximum(elapsed - self._time[-1], 0) * self._growth[1]
        if self._rate_change:
            next_reading = np.clip(np.searchsorted(self._time, elapsed), 1, len(self._time) - 1)
            distance = np.minimum(elapsed - self._time[next_reading - 1], self._time[next_reading] - elapsed)
            bound += np.maximum(distance, 0) * self._rate_change
        return Offset(self._offset_ns + offset.astype(np.int64), np.ceil(bound).astype(np.int64))

    def to_other(self, time_ns: npt.ArrayLike) -> Int64Array:
        """Return the times of the other clock at times of the own clock, without changing their order."""
        offset = np.rint(self._offset_at(self._since_first(time_ns))).astype(np.int64)
        return np.asarray(time_ns, np.int64) + (self._offset_ns + offset)

    def largest_bound(self, first_ns: int, last_ns: int) -> int:
        """Return the maximum error of the offset in a range of times of the own clock."""
        # Within the range the error is largest at a reading, or halfway between two readings.
        halfway = (self._time[1:] + self._time[:-1]) / 2
        peaks = self.first_ns + np.concatenate([self._time, halfway]).astype(np.int64)
        peaks = peaks[(first_ns < peaks) & (peaks < last_ns)]
        # The rounding error at other times in the range may be larger, by up to 1 ns.
        return int(self.at(np.concatenate([[first_ns, last_ns], peaks])).bound_ns.max()) + 1

    def _since_first(self, time_ns: npt.ArrayLike) -> Float64Array:
        return (np.atleast_1d(np.asarray(time_ns, np.int64)) - self.first_ns).astype(np.float64)

    def _offset_at(self, elapsed: Float64Array) -> Float64Array:
        offset: Float64Array = np.interp(elapsed, self._time, self._offset)
        if self._rate.any():
            offset -= np.maximum(self._time[0] - elapsed, 0) * self._rate[0]
            offset += np.maximum(elapsed - self._time[-1], 0) * self._rate[1]
        return offset


def _rates(rows: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return the rate of each interval, and the error of the rate, from the bounds of the readings at its ends."""
    time, offset, bound = rows
    length = np.diff(time)
    return np.diff(offset) / length, (bound[1:] + bound[:-1]) / length


FAN_OUT = 32
"""Maximum number of clocks that are measured against one parent clock."""
_TIME_NAMESPACE = Path("/proc/self/ns/time")


def clock_id() -> str:
    """Return the id of this process's monotonic clock; processes that read the same clock have the same id.

    The id is a hash of the boot id and the time namespace, and reveals neither. If the system does not report both,
    each process has an id of its own.
    """
    try:
        boot = BOOT_ID.read_text("utf-8").strip()
        text = f"{boot} {os.readlink(_TIME_NAMESPACE)}"
    except OSError:
        text = f"{platform.uname()} {os.getpid()}"
    return hashlib.sha256(f"modtrace clock {text}".encode()).hexdigest()[:16]


class Measurement(NamedTuple):
    """One reading of a parent's clock."""

    clock: str  # id of the own clock
    parent: str  # id of the parent's clock
    reading: Reading  # offset of the parent's clock


_READING = ("time", "offset", "bound", "round_trip")
"""The names of the fields of a `Reading` in a record."""


def measurement_record(measurement: Measurement) -> dict[str, Any]:
    """Return the record of a measurement, see `ring.file_format`."""
    clock, parent, reading = measurement
    return {"kind": "offset", "clock": clock, "parent": parent, **dict(zip(_READING, reading, strict=True))}


def measurements_in(records: Iterable[Mapping[str, Any]]) -> list[Measurement]:
    """Return the measurements among the records of a ring."""
    return [
        Measurement(record["clock"], record["parent"], Reading(*(record[key] for key in _READING)))
        for record in records
        if record["kind"] == "offset"
    ]


def clock_in(records: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the id of the clock of a ring's times; None without a record of it."""
    return next((record["clock"] for record in records if record["kind"] == "clock"), None)


def parent_number(number: int) -> int | None:
    """Return the number of the clock against which clock `number` is measured; the root has number 0.

    Example:
        >>> parent_number(0), parent_number(32), parent_number(33)
        (None, 0, 1)
    """
    return None if number == 0 else (number - 1) // FAN_OUT


class ClockTree:
    """Converts times of measured clocks to the root's clock; a clock's last measurement decides its parent."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        readings: dict[str, dict[str, list[Reading]]] = {}
        for measurement in sorted(measurements, key=lambda m: m.reading.time_ns):
            readings.setdefault(measurement.clock, {}).setdefault(measurement.parent, []).append(measurement.reading)
        self._offsets: dict[str, tuple[str, ClockMap]] = {}
        for clock, by_parent in readings.items():
            parent, parent_readings = max(by_parent.items(), key=lambda item: item[1][-1].time_ns)
            self._offsets[clock] = (parent, ClockMap(parent_readings))

    def path_of(self, clock: str) -> "ClockTree":
        """Return the tree of only a clock and its chain of parents, which is small enough to send in any job."""
        path = ClockTree(())
        path._offsets = {link: self._offsets[link] for link in self._chain(clock) if link in self._offsets}
        return path

    def root_of(self, clock: str) -> str:
        """Return the clock at the end of a clock's chain of parents; an unmeasured clock is its own root."""
        return self._chain(clock)[-1]

    def to_root(self, clock: str, time_ns: npt.ArrayLike) -> Offset:
        """Return the offsets to add to times of a clock to get times of the root's clock, and their maximum errors."""
        time = np.atleast_1d(np.asarray(time_ns, np.int64))
        offset, bound = np.zeros(len(time), np.int64), np.zeros(len(time), np.int64)
        for link in self._chain(clock)[:-1]:
            to_parent = self._offsets[link][1].at(time + offset)
            offset, bound = offset + to_parent.offset_ns, bound + to_parent.bound_ns
        return Offset(offset, bound)

    def largest_bound(self, clock: str, first_ns: int, last_ns: int) -> int:
        """Return the maximum error of the offsets of `to_root` in a range of a clock's monotonic times."""
        bound, ends = 0, np.array([first_ns, last_ns], np.int64)
        for link in self._chain(clock)[:-1]:
            offsets = self._offsets[link][1]
            bound += offsets.largest_bound(*ends.tolist())
            ends = ends + offsets.at(ends).offset_ns
        return bound

    def _chain(self, clock: str) -> list[str]:
        chain = [clock]
        # In an edited file, clocks can be each other's parents.
        while (link := self._offsets.get(chain[-1])) is not None and link[0] not in chain:
            chain.append(link[0])
        return chain
