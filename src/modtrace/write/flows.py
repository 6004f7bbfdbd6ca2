"""Flows of a timeline: the arrow from each call's forward span to its first backward span."""

from __future__ import annotations

import enum
from collections.abc import Iterator

import numpy as np

from .._typing import IndexArray, Int64Array, UInt8Array
from ..formats.limits import MAX_LINK
from ..timeline import BACKWARD, Columns

__all__ = ["FlowRole", "flow_pairs", "flow_roles"]

_CHUNK = 1 << 16
"""Spans, and pairs, that are looked at at a time."""


class FlowRole(enum.IntEnum):
    """How a written span says which others belong to its call: as the begin or the end of a flow, or in its args."""

    NO_LINK = 0
    LINK_ARG = 1
    BEGIN = 2
    END = 3
    # Only in JSON: the span itself carries the flow, as its `bind_id`, where a flow event would bind to another span.
    BIND_OUT = 4
    BIND_IN = 5


def flow_roles(columns: Columns) -> UInt8Array:
    """Return uint8[n], the `FlowRole` of each span, without those that only JSON has."""
    roles: UInt8Array = np.where(columns.link >= 0, np.uint8(FlowRole.LINK_ARG), np.uint8(FlowRole.NO_LINK))
    for begins, ends in flow_pairs(columns):
        roles[begins] = FlowRole.BEGIN
        roles[ends] = FlowRole.END
    return roles


def flow_pairs(columns: Columns) -> Iterator[tuple[IndexArray, IndexArray]]:
    """Yield the positions of the spans where flows begin and of those where they end, some thousand pairs at a time.

    A link has a flow if its first span that is not backward starts before its first backward span.
    """
    links = _LinkIndex(columns.link)
    begins = np.full(links.count, -1, np.int32 if len(columns) < 1 << 31 else np.int64)
    ends = begins.copy()
    for last in range(len(columns), 0, -_CHUNK):
        rows = np.arange(max(last - _CHUNK, 0), last)[::-1]
        link = columns.link[rows]
        linked = (link >= 0) & (link < MAX_LINK)
        rows, index = rows[linked], links.index(link[linked])
        backward = columns.phase[rows] == BACKWARD
        # Of several spans with one link the one written last stays, which is the first in the timeline.
        begins[index[~backward]] = rows[~backward]
        ends[index[backward]] = rows[backward]
    for first in range(0, links.count, _CHUNK):
        begin, end = begins[first : first + _CHUNK], ends[first : first + _CHUNK]
        both = (begin >= 0) & (end >= 0)
        begin, end = begin[both], end[both]
        before = columns.start[begin] < columns.start[end]
        yield begin[before].astype(np.intp), end[before].astype(np.intp)


class _LinkIndex:
    """Indices from 0 for links: the links themselves, unless they are too far apart for a table."""

    def __init__(self, link: Int64Array) -> None:
        highest = int(link.max(initial=-1))
        self._known = np.unique(link) if highest >= 2 * len(link) else None
        self.count = highest + 1 if self._known is None else len(self._known)

    def index(self, link: Int64Array) -> Int64Array:
        return link if self._known is None else np.searchsorted(self._known, link).astype(np.int64)
