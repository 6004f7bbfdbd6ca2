"""Monotonic nanoseconds → Unix nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..._typing import Int64Array
from ...ring import Record

__all__ = ["Clock"]

_MAX_DRIFT = 500e-6
"""A wall clock is slewed by at most 500 ppm; one that moved by more between two readings was set."""


class Clock:
    """Converts by the pairs of readings that a recording takes at its start and its stop.

    Args:
        records: the name table; readings are its records of kind "anchor".

    Attributes:
        first_monotonic_ns: the monotonic clock at the first reading; 0 where there is none.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        anchors = [record for record in records if record["kind"] == "anchor"]
        self.first_monotonic_ns, self._wall, self._slope = 0, 0, 0.0
        if anchors:
            first, last = anchors[0], anchors[-1]
            self.first_monotonic_ns, self._wall = int(first["monotonic"]), int(first["wall"])
            elapsed = int(last["monotonic"]) - self.first_monotonic_ns
            drift = int(last["wall"]) - self._wall - elapsed
            if elapsed > 0 and abs(drift) <= _MAX_DRIFT * elapsed:
                self._slope = drift / elapsed

    def to_unix(self, monotonic_ns: Int64Array) -> Int64Array:
        """Convert int64 monotonic nanoseconds to Unix nanoseconds; the order of times is kept."""
        elapsed = monotonic_ns - self.first_monotonic_ns
        unix_ns: Int64Array = self._wall + elapsed + np.rint(elapsed * self._slope).astype(np.int64)
        return unix_ns
