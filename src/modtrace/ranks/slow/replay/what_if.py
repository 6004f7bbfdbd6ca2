"""By how much shorter steps would have been had a late rank been like the others: its excess taken out of a replay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...._typing import Float64Array, Int64Array
from ..arrivals import Arrivals
from ..rank_events import RankEvents

__all__ = ["shorten", "without_excess"]


def without_excess(events: RankEvents, found: Arrivals, rows: Sequence[int]) -> Int64Array:
    """Return by how much shorter the own time before each event is without the excess of some arrivals, ns.

    What a rank took more between two of its calls is taken from where it took more than the others: from its waits in
    between on, or before them.

    Args:
        events: what the ranks did.
        found: all arrivals.
        rows: those arrivals, as indices of `found`.
    """
    shorter = np.zeros(len(events.time), np.int64)
    for row in rows:
        first, last = np.searchsorted(events.place, [found.place_before[row], found.place[row]], side="right")
        inside = slice(int(first), int(last))
        more = np.maximum(events.own[inside] - _usual(events, found, row, int(last - first)), 0)
        shorten(shorter, events, inside, more, int(found.excess[row]))
    return shorter


def shorten(shorter: Int64Array, events: RankEvents, where: slice, weights: Float64Array, duration_ns: int) -> None:
    """Take some of the own time before each of some events, in proportion to the weights, and no more than there is.

    Args:
        shorter: by how much each is shorter already; it is changed.
        events: what the ranks did.
        where: which events, of one rank.
        weights: of each of them, none below 0.
        duration_ns: how much.
    """
    total = float(weights.sum())
    if total > 0:
        part = np.rint(weights * (duration_ns / total)).astype(np.int64)
        shorter[where] = np.minimum(shorter[where] + part, events.own[where])


def _usual(events: RankEvents, found: Arrivals, row: int, count: int) -> Float64Array:
    """Return the median own time of the other ranks before each of the events that lead to an arrival."""
    begin, end = np.searchsorted(found.collective, found.collective[row] + np.arange(2))
    others = np.arange(begin, end)
    others = others[others != row]
    firsts = np.searchsorted(events.place, found.place_before[others], side="right")
    lasts = np.searchsorted(events.place, found.place[others], side="right")
    # A rank with other events in between did something else.
    firsts = firsts[(lasts - firsts == count) & (found.place_before[others] >= 0)]
    if not len(firsts):
        return np.zeros(count)
    usual: Float64Array = np.median(events.own[firsts[:, None] + np.arange(count)], axis=0)
    return usual
