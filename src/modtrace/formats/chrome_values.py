"""Times and ids in the events of a Chrome trace: valid values, reading and writing."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._arrays import Float64Array, Int64Array
from .._errors import TraceError

_MAX_TIME_NS = 1 << 62
"""Limit in ns (146 years) for bases and for times from a base: the sum of both fits into 64 bits."""
MAX_TIME_US = _MAX_TIME_NS / 1000
"""Limit for times in µs."""

TrackKey = tuple[int | str, int | str]
"""pid and tid from the trace."""


def base_time_ns(keys: Mapping[str, Any], path: str) -> int:
    """Return the Unix ns from which times count, 0 before torch 2.4; raises TraceError if they are not a time."""
    base = keys.get("baseTimeNanoseconds", 0)
    if type(base) is not int or not 0 <= base < _MAX_TIME_NS:
        raise TraceError(
            path,
            f"its baseTimeNanoseconds is {base!r}, which is not a time in nanoseconds since 1970; "
            "restore the profiler's value, or remove the key if the times count from 1970 themselves",
        )
    return base


def is_int64(value: object) -> bool:
    """Return whether a value is an integer of 64 bits with a sign."""
    return type(value) is int and -(2**63) <= value < 2**63


def find_open_begin(open_begins: Sequence[int], name_of: Sequence[int], name: int) -> int:
    """Return the index of the open B event that an E event closes, as viewers pair them; -1 if it closes none.

    It is the innermost B with the name of the E, or the innermost of all if the E has no name (0).
    """
    index = len(open_begins) - 1
    while index >= 0 and name and name_of[open_begins[index]] != name:
        index -= 1
    return index


def microseconds_to_ns(microseconds: Float64Array) -> Int64Array:
    """Convert times in µs, as a JSON reader has them, to int64 ns.

    Integer part and fraction are converted separately, since a large product would be rounded.
    """
    integer = np.floor(microseconds)
    return integer.astype(np.int64) * 1000 + np.rint((microseconds - integer) * 1000.0).astype(np.int64)


def read_microseconds_array(microseconds: Float64Array) -> Int64Array:
    """Return the times in ns that a reader computes from numbers of µs.

    Integers are exact; other products are rounded to the nearest nanosecond, halves up. Nothing is added to a product
    before it is rounded: beyond 2^52 ns a double cannot represent a half.

    Example:
        >>> read_microseconds_array(np.array([1.0005, 4503599627370.499])).tolist()
        [1001, 4503599627370499]
    """
    scaled = microseconds * 1000.0
    integer, floor = np.floor(microseconds), np.floor(scaled)
    nearest = floor.astype(np.int64) + (scaled - floor >= 0.5)
    return np.where(microseconds == integer, integer.astype(np.int64) * 1000, nearest)


def microseconds_text(nanoseconds: int) -> bytes:
    """Return a time or a duration in µs with three decimals.

    Example:
        >>> microseconds_text(-1_500_007)
        b'-1500.007'
    """
    return b"%b%d.%03d" % (b"-" if nanoseconds < 0 else b"", *divmod(abs(nanoseconds), 1000))
