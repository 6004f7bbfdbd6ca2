"""What rings say of clocks, in records of their name tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .estimate import Reading
from .tree import Measurement

__all__ = ["clock_in", "measurement_record", "measurements_in"]


def measurement_record(measurement: Measurement) -> dict[str, Any]:
    """Return the record of a measurement, see `ring.name_table`."""
    reading = measurement.reading
    return {
        "kind": "offset",
        "clock": measurement.clock,
        "parent": measurement.parent,
        "time": reading.time_ns,
        "offset": reading.offset_ns,
        "bound": reading.bound_ns,
        "round_trip": reading.round_trip_ns,
    }


def measurements_in(records: Iterable[Mapping[str, Any]]) -> list[Measurement]:
    """Return the measurements among the records of a ring."""
    return [
        Measurement(
            record["clock"],
            record["parent"],
            Reading(record["time"], record["offset"], record["bound"], record["round_trip"]),
        )
        for record in records
        if record["kind"] == "offset"
    ]


def clock_in(records: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the id of the clock that a ring's times are of; None where it does not say."""
    return next((record["clock"] for record in records if record["kind"] == "clock"), None)
