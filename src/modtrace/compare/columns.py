"""The columns of a comparison's tables."""

import math

from .._tables import CHANGED_MS, MODULE, MS, NAME, NUMBER, TEXT, Column
from .._terminal import ratio_text
from .verdicts import Change


def interval_text(change: Change) -> str:
    """Return the interval of the difference in ms; empty if there is none."""
    if change.low_ns is None or change.high_ns is None:
        return ""
    return f"{change.low_ns / 1e6:+.3f} … {change.high_ns / 1e6:+.3f}"


def _percent(change: Change) -> str:
    return ratio_text(change.ratio).removesuffix("%") if math.isfinite(change.ratio) else ""


def calls_text(change: Change) -> str:
    """Return the calls in a step before, and after if they differ."""
    after = f" → {change.new_calls:g}" if change.new_calls != change.base_calls else ""
    return f"{change.base_calls:g}{after}"


DIFFERENCE = (
    Column("difference ms", "difference_ns", CHANGED_MS),
    Column("interval ms", interval_text),
    Column("%", _percent),
)
REGION_COLUMNS = (
    Column("compiled region, with all inside", "fqn", MODULE),
    Column("phase", "phase", TEXT),
    Column("modules compared", "modules", NUMBER),
    Column("before ms", "base_ns", MS),
    Column("after ms", "new_ns", MS),
    Column("difference ms", "difference_ns", CHANGED_MS),
)
PART_COLUMNS = (
    Column("part of the step", "fqn", NAME),
    Column("before ms", "base_ns", MS),
    Column("after ms", "new_ns", MS),
    *DIFFERENCE,
    Column("verdict", "verdict", TEXT),
)
