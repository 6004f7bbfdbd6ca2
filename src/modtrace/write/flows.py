"""The arrows of a timeline: from each call's forward slice to its first backward slice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .._typing import IndexArray, Int64Array
from ..timeline import BACKWARD, Columns

__all__ = ["arrows"]


CHUNK = 1 << 16
HIGHEST = 1 << 62
"""Links from here on have no arrow: the formats leave no room for their number."""


def arrows(columns: Columns) -> Iterator[tuple[IndexArray, IndexArray]]:
    """Yield the positions of the spans where arrows leave, and of those where they arrive, some thousand pairs a time.

    A link has an arrow if its first span that is not backward begins before its first backward one.
    """
    number = _Numbers(columns.link)
    leaves = np.full(number.count, -1, np.int32 if len(columns) < 1 << 31 else np.int64)
    arrives = leaves.copy()
    for last in range(len(columns), 0, -CHUNK):
        rows = np.arange(max(last - CHUNK, 0), last)[::-1]
        link = columns.link[rows]
        linked = (link >= 0) & (link < HIGHEST)
        rows, link = rows[linked], number.of(link[linked])
        backward = columns.phase[rows] == BACKWARD
        # Of several with one link the last one written stays, which is the first in the timeline.
        leaves[link[~backward]] = rows[~backward]
        arrives[link[backward]] = rows[backward]
    for first in range(0, number.count, CHUNK):
        here, there = leaves[first : first + CHUNK], arrives[first : first + CHUNK]
        both = (here >= 0) & (there >= 0)
        here, there = here[both], there[both]
        before = columns.start[here] < columns.start[there]
        yield here[before].astype(np.intp), there[before].astype(np.intp)


class _Numbers:
    """Numbers from 0 for the links: themselves, unless they are too far apart for a table."""

    def __init__(self, link: Int64Array) -> None:
        highest = int(link.max(initial=-1))
        self._known = np.unique(link) if highest >= 2 * len(link) else None
        self.count = highest + 1 if self._known is None else len(self._known)

    def of(self, link: Int64Array) -> Int64Array:
        return link if self._known is None else np.searchsorted(self._known, link).astype(np.int64)
