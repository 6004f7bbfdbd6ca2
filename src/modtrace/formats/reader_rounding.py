"""How readers of JSON turn a time in µs into nanoseconds: as the trace processor does, to which others are alike."""

from __future__ import annotations

import math

import numpy as np

from .._typing import Float64Array, Int64Array


def read_microseconds(microseconds: float) -> int:
    """Return the nanoseconds that a reader makes of a number of µs.

    Whole microseconds stay what they are; of others it takes the nearest nanosecond of the product, halves up. Nothing
    is added to the product before it is rounded: beyond 2^52 ns a double has no room for a half.

    Example:
        >>> read_microseconds(1.0005), read_microseconds(4503599627370.499)
        (1001, 4503599627370499)
    """
    if float(microseconds).is_integer():
        return int(microseconds) * 1000
    scaled = microseconds * 1000.0
    floor = math.floor(scaled)
    return floor + (scaled - floor >= 0.5)


def read_microseconds_array(microseconds: Float64Array) -> Int64Array:
    """Return the same for many numbers."""
    scaled = microseconds * 1000.0
    whole, floor = np.floor(microseconds), np.floor(scaled)
    nearest = floor.astype(np.int64) + (scaled - floor >= 0.5)
    return np.where(microseconds == whole, whole.astype(np.int64) * 1000, nearest)
