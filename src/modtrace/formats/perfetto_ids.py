"""Ids of clocks and packet sequences in the Perfetto traces that modtrace writes."""

from __future__ import annotations

from .limits import MAX_LINK

REALTIME_CLOCK = 1
"""Perfetto's BUILTIN_CLOCK_REALTIME, Unix time: the clock of our traces."""

INCREMENTAL_CLOCK = 64
"""A clock whose readings count from the packet before; each packet sequence has its own."""

PROFILER_SEQUENCE = 1 << 24
"""The packet sequence of the profiler's events in a merged trace; a recording's have small ids."""

PROFILER_FLOW = MAX_LINK + (1 << 61)
"""From here on ids of flows are the profiler's in a merged trace; below are a recording's links and collectives."""


class SequenceIds:
    """Ids of the packet sequences of a recording with `lanes` lanes: one for each lane, each counter, and the rest."""

    def __init__(self, lanes: int) -> None:
        self.metadata = lanes + 1
        self.marks = lanes + 2
        self._first_counter = lanes + 3

    def lane(self, index: int) -> int:
        """Return the sequence of a lane's spans."""
        return index + 1

    def lane_of(self, sequence: int) -> int:
        """Return the lane whose spans a sequence has."""
        return sequence - 1

    def counter(self, index: int) -> int:
        """Return the sequence of a counter's samples."""
        return self._first_counter + index

    def counter_of(self, sequence: int) -> int:
        """Return the counter whose samples a sequence has."""
        return sequence - self._first_counter
