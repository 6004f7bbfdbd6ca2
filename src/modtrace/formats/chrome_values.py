"""Times and ids in the events of a Chrome trace: what they can be, and how they are read and written."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._arrays import Float64Array, Int64Array
from .._errors import TraceError

_MAX_TIME_NS = 1 << 62
"""146 years in nanoseconds. All bases and all times from them are less, so that a sum of both fits into 64 bits."""
MAX_TIME_US = _MAX_TIME_NS / 1000
"""All times are less than this, in µs."""

TrackKey = tuple[int | str, int | str]
"""pid and tid, as the trace has them."""


def base_time_ns(keys: Mapping[str, Any], path: str) -> int:
    """Return the Unix nanoseconds from which times count, 0 before torch 2.4; raises TraceError if these are none."""
    base = keys.get("baseTimeNanoseconds", 0)
    if type(base) is not int or not 0 <= base < _MAX_TIME_NS:
        raise TraceError(
            path,
            f"its baseTimeNanoseconds is {base!r} and no time in nanoseconds since 1970; "
            "write there what the profiler wrote, or take the key out where its times count from 1970 themselves",
        )
    return base


def is_int64(value: object) -> bool:
    """Return whether a value is an integer of 64 bits with a sign."""
    return type(value) is int and -(2**63) <= value < 2**63


def find_ended(opened: Sequence[int], name_of: Sequence[int], name: int) -> int:
    """Return the place of the B, of those open, that an E of a name ends, as viewers see it; -1 if it ends none.

    It is the innermost one of its name, or of all if the E has no name (0). Those inside have no E of their own.
    """
    place = len(opened) - 1
    while place >= 0 and name and name_of[opened[place]] != name:
        place -= 1
    return place


def microseconds_to_ns(microseconds: Float64Array) -> Int64Array:
    """Convert times in µs, as a JSON reader has them, to int64 ns.

    Whole microseconds and the fraction are converted separately, since a large product would be rounded.
    """
    whole = np.floor(microseconds)
    return whole.astype(np.int64) * 1000 + np.rint((microseconds - whole) * 1000.0).astype(np.int64)


def read_microseconds_array(microseconds: Float64Array) -> Int64Array:
    """Return the nanoseconds that a reader makes of numbers of µs.

    Whole microseconds stay what they are; of others it takes the nearest nanosecond of the product, halves up. Nothing
    is added to the product before it is rounded: beyond 2^52 ns a double has no room for a half.

    Example:
        >>> read_microseconds_array(np.array([1.0005, 4503599627370.499])).tolist()
        [1001, 4503599627370499]
    """
    scaled = microseconds * 1000.0
    whole, floor = np.floor(microseconds), np.floor(scaled)
    nearest = floor.astype(np.int64) + (scaled - floor >= 0.5)
    return np.where(microseconds == whole, whole.astype(np.int64) * 1000, nearest)


def microseconds_text(nanoseconds: int) -> bytes:
    """Return a time or a duration in µs with three decimals.

    Example:
        >>> microseconds_text(-1_500_007)
        b'-1500.007'
    """
    return b"%b%d.%03d" % (b"-" if nanoseconds < 0 else b"", *divmod(abs(nanoseconds), 1000))
