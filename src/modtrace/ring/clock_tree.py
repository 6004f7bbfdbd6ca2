"""The clocks of a job's hosts: which is measured against which, and the times of each in those of one.

A process notes in its ring how far its host's clock is from another's. `ClockTree` reads these notes.
"""

import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .clock_map import ClockMap, Offset, Reading
from .owner import BOOT_ID

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
"""What a record calls the fields of a `Reading`."""


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
        """Return the tree of a clock and its chain of parents alone: small, whatever the job, so that it can travel."""
        path = ClockTree(())
        path._offsets = {one: self._offsets[one] for one in self._chain(clock) if one in self._offsets}
        return path

    def root_of(self, clock: str) -> str:
        """Return the clock at the end of a clock's chain of parents; itself if it was not measured."""
        return self._chain(clock)[-1]

    def to_root(self, clock: str, time_ns: npt.ArrayLike) -> Offset:
        """Return what to add to times of a clock to get the root's, and how far that is off at most."""
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
