"""The time of another clock at a time of this one, and how far off that can be; the clocks of a job's hosts.

Hosts of a job, devices, a profiler and the wall clock are all compared in one way: something read both clocks at some
moments, and `ClockMap` says what was between these readings, before them and after them. A process notes in its ring
how far its host's clock is from another's, and `ClockTree` reads these notes.
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

MAX_RATE = 1e-3
"""Two monotonic clocks drift apart by at most this: each is slewed by at most 500 ppm."""
_MIN_RATE_CHANGE = 1e-6
"""The least change of rate that is assumed between two readings, as the machines warm up."""
_FLOAT_NOISE_NS = 1e-6

Beyond = Literal["last rate", "mean rate", "no rate"]
"""How the offset changes before the first reading and after the last one, see `ClockMap`."""


class Reading(NamedTuple):
    """One reading of how far another clock was ahead of this one."""

    time_ns: int  # own nanoseconds at which it holds
    offset_ns: float  # the other clock less the own one
    bound_ns: float = 0  # the true offset is at most so far from that
    round_trip_ns: int = 0  # how long the reading took at least


class Offset(NamedTuple):
    """Offsets at some times."""

    offset_ns: Int64Array  # int64[n], the other clock less the own one
    bound_ns: Int64Array  # int64[n], how far that is off at most


class ClockMap:
    """The offset of another clock, on a line from each reading to the next.

    On a line the bound is between those of its two ends. Beyond the readings, and with "last rate" between them, it
    grows with the distance to the nearest one:

    - "last rate": the rate of two hosts' clocks changes slowly. Beyond the readings that of the nearest two goes on.
      The bound grows by how well this rate is known, and by how much it may have changed: twice the largest change
      between neighbouring intervals, and at least 1 ppm.
    - "mean rate": the clocks run evenly. Beyond the readings the rate from the first to the last goes on, and the bound
      grows by how well it is known.
    - "no rate": the offset stays what it is, and the bound grows by all that clocks can drift. A single reading is
      always used in this way.

    Args:
        readings: at least one, in any order; of several at one moment the one with the least bound counts.
        beyond: see above.

    Attributes:
        first_ns: own nanoseconds of the first reading.

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
        base = int(first.offset_ns)  # relative to it and to the first time, so that all fits a double
        rows = [(r.time_ns - first.time_ns, r.offset_ns - base, r.bound_ns) for r in by_time.values()]
        self._set(first.time_ns, base, np.array(rows, np.float64).T, beyond)

    @classmethod
    def of_columns(
        cls, time: Int64Array, offset: Float64Array, bound: Float64Array, beyond: Beyond, base_ns: int = 0
    ) -> "ClockMap":
        """Return the map of many readings, ascending; `base_ns` was taken off offsets, so that doubles hold them."""
        made = cls.__new__(cls)
        made._set(int(time[0]), base_ns, np.stack([time - time[0], offset, bound]), beyond)
        return made

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
        """Return the offset, and its bound, at some own nanoseconds."""
        since = self._since(time_ns)
        exact = self._offset_at(since)
        offset = np.rint(exact)
        bound = np.interp(since, self._time, self._bound) + np.abs(exact - offset) - _FLOAT_NOISE_NS
        bound += np.maximum(self._time[0] - since, 0) * self._growth[0]
        bound += np.maximum(since - self._time[-1], 0) * self._growth[1]
        if self._rate_change:
            after = np.clip(np.searchsorted(self._time, since), 1, len(self._time) - 1)
            distance = np.minimum(since - self._time[after - 1], self._time[after] - since)
            bound += np.maximum(distance, 0) * self._rate_change
        return Offset(self._offset_ns + offset.astype(np.int64), np.ceil(bound).astype(np.int64))

    def to_other(self, time_ns: npt.ArrayLike) -> Int64Array:
        """Return the time of the other clock at some own nanoseconds; the order of times is kept."""
        since = self._since(time_ns)
        offset = np.rint(self._offset_at(since)).astype(np.int64)
        return np.asarray(time_ns, np.int64) + (self._offset_ns + offset)

    def largest_bound(self, first_ns: int, last_ns: int) -> int:
        """Return how far the offset is off at most in a range of own nanoseconds."""
        # Within the range it is largest at a reading, or halfway between two.
        halfway = (self._time[1:] + self._time[:-1]) / 2
        inside = self.first_ns + np.concatenate([self._time, halfway]).astype(np.int64)
        inside = inside[(first_ns < inside) & (inside < last_ns)]
        # Another time in the range may be rounded by more than these are.
        return int(self.at(np.concatenate([[first_ns, last_ns], inside])).bound_ns.max()) + 1

    def _since(self, time_ns: npt.ArrayLike) -> Float64Array:
        return (np.atleast_1d(np.asarray(time_ns, np.int64)) - self.first_ns).astype(np.float64)

    def _offset_at(self, since: Float64Array) -> Float64Array:
        offset: Float64Array = np.interp(since, self._time, self._offset)
        if self._rate.any():
            offset -= np.maximum(self._time[0] - since, 0) * self._rate[0]
            offset += np.maximum(since - self._time[-1], 0) * self._rate[1]
        return offset


def _rates(rows: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Return the rate of each interval, and how well it is known: as well as the readings at both of its ends."""
    time, offset, bound = rows
    length = np.diff(time)
    return np.diff(offset) / length, (bound[1:] + bound[:-1]) / length


FAN_OUT = 32
"""How many clocks are measured against one."""
_TIME_NAMESPACE = Path("/proc/self/ns/time")


def clock_id() -> str:
    """Return the id of this process's monotonic clock: the same for all that read the same one.

    It is a hash of the boot and the time namespace, and says nothing else. If the system does not say both, the clock
    is the process's own.
    """
    try:
        boot = BOOT_ID.read_text("utf-8").strip()
        text = f"{boot} {os.readlink(_TIME_NAMESPACE)}"
    except OSError:
        text = f"{platform.uname()} {os.getpid()}"
    return hashlib.sha256(f"modtrace clock {text}".encode()).hexdigest()[:16]


class Measurement(NamedTuple):
    """One reading of a parent's clock."""

    clock: str  # the id of the own clock
    parent: str  # the id of the parent's
    reading: Reading  # how far the parent's was ahead


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
    """Return the id of the clock that a ring's times are of; None if it does not say."""
    return next((record["clock"] for record in records if record["kind"] == "clock"), None)


def parent_number(number: int) -> int | None:
    """Return which clock the one of this number is measured against; numbers count from 0, the root.

    Example:
        >>> parent_number(0), parent_number(32), parent_number(33)
        (None, 0, 1)
    """
    return None if number == 0 else (number - 1) // FAN_OUT


class ClockTree:
    """Converts the times of any measured clock to the root's; a clock's parent is that of its last measurement."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        readings: dict[str, dict[str, list[Reading]]] = {}
        for measurement in sorted(measurements, key=lambda m: m.reading.time_ns):
            readings.setdefault(measurement.clock, {}).setdefault(measurement.parent, []).append(measurement.reading)
        self._offsets: dict[str, tuple[str, ClockMap]] = {}
        for clock, by_parent in readings.items():
            parent, parent_readings = max(by_parent.items(), key=lambda item: item[1][-1].time_ns)
            self._offsets[clock] = (parent, ClockMap(parent_readings))

    def path_of(self, clock: str) -> "ClockTree":
        """Return the tree of a clock and its chain of parents alone: small in any job, so that it can travel."""
        path = ClockTree(())
        path._offsets = {link: self._offsets[link] for link in self._chain(clock) if link in self._offsets}
        return path

    def root_of(self, clock: str) -> str:
        """Return the clock at the end of a clock's chain of parents; itself if it was not measured."""
        return self._chain(clock)[-1]

    def to_root(self, clock: str, time_ns: npt.ArrayLike) -> Offset:
        """Return the offsets to add to times of a clock to get the root's, and how far they are off at most."""
        time = np.atleast_1d(np.asarray(time_ns, np.int64))
        offset, bound = np.zeros(len(time), np.int64), np.zeros(len(time), np.int64)
        for step in self._chain(clock)[:-1]:
            to_parent = self._offsets[step][1].at(time + offset)
            offset, bound = offset + to_parent.offset_ns, bound + to_parent.bound_ns
        return Offset(offset, bound)

    def largest_bound(self, clock: str, first_ns: int, last_ns: int) -> int:
        """Return how far the offsets of `to_root` can be off in a range of a clock's monotonic nanoseconds."""
        bound, ends = 0, np.array([first_ns, last_ns], np.int64)
        for step in self._chain(clock)[:-1]:
            offsets = self._offsets[step][1]
            bound += offsets.largest_bound(*ends.tolist())
            ends = ends + offsets.at(ends).offset_ns
        return bound

    def _chain(self, clock: str) -> list[str]:
        chain = [clock]
        # A file can be edited so that clocks are each other's parents.
        while (link := self._offsets.get(chain[-1])) is not None and link[0] not in chain:
            chain.append(link[0])
        return chain
