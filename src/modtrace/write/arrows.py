"""The arrows of a timeline: from each call's forward slice to its first backward slice."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..timeline import BACKWARD, Columns

__all__ = ["arrows"]

Ints = npt.NDArray[np.int64]


def arrows(columns: Columns) -> tuple[Ints, Ints]:
    """Return the positions of the spans where arrows leave, and of those where they arrive, pair by pair.

    A link has an arrow if its first span that is not backward begins before its first backward one.
    """
    linked = np.flatnonzero(columns.link >= 0)
    link = columns.link[linked]
    highest = int(link.max(initial=-1))
    if highest >= 4 * len(link):
        values, link = np.unique(link, return_inverse=True)
        highest = len(values) - 1
    backward = columns.phase[linked] == BACKWARD
    leaves, arrives = (_first(linked[chosen], link[chosen], highest + 1) for chosen in (~backward, backward))
    pairs = np.flatnonzero((leaves >= 0) & (arrives >= 0))
    leaves, arrives = leaves[pairs], arrives[pairs]
    before = columns.start[leaves] < columns.start[arrives]
    return leaves[before], arrives[before]


def _first(rows: Ints, link: Ints, count: int) -> Ints:
    """Return for each link the first of its rows, or -1."""
    first = np.full(count, -1, np.int64)
    first[link[::-1]] = rows[::-1]  # of several, the last one written stays
    return first
