"""The clocks of a job's hosts against each other: how they are measured, and what time one shows when another shows t.

A clock is a host's CLOCK_MONOTONIC as seen in one time namespace; the processes that share it share its measurements.
Nothing here needs torch: `track.job_clocks` measures while a recording runs, and readers of rings use the results.
"""

from __future__ import annotations

from .clock_identity import clock_id
from .estimate import Ping, Reading, estimate_offset
from .offsets import ClockOffsets, Offset
from .records import clock_in, measurement_record, measurements_in
from .tree import FAN_OUT, ClockTree, Measurement, parent_number

__all__ = [
    "FAN_OUT",
    "ClockOffsets",
    "ClockTree",
    "Measurement",
    "Offset",
    "Ping",
    "Reading",
    "clock_id",
    "clock_in",
    "estimate_offset",
    "measurement_record",
    "measurements_in",
    "parent_number",
]
