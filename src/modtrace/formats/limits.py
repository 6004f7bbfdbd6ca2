"""Bounds of the trace formats and of the programs that read them."""

from __future__ import annotations

__all__ = ["BIND_ID_OFFSET", "MAX_CHROME_NS", "MAX_LEVELS_PER_ROW", "MAX_LINK", "MAX_TIME_NS"]

MAX_LEVELS_PER_ROW = 512
"""Levels of one row; the trace processor drops deeper slices silently, so deeper spans get a row of their own."""

MAX_CHROME_NS = 10**15
"""Nanoseconds from the base (11.5 days) below which a double of µs in JSON tells every nanosecond."""

MAX_TIME_NS = 1 << 62
"""Nanoseconds from 1970 beyond which no time lies: 146 years, to both sides."""

MAX_LINK = 1 << 62
"""Links from here on get no flow: neither format has room for a larger flow id."""

BIND_ID_OFFSET = 1 << 32
"""Added to a link to make a `bind_id` of it: Perfetto counts flow events from 0 in the same space of ids."""
