"""Which span ran on a thread at a moment, and the forward span of a call."""

import numpy as np

from .._typing import BoolArray, Int64Array
from ..timeline import FORWARD, RECOMPUTE, Columns, Timeline
from ..timeline.nesting import InnermostLookup


class CallIndex:
    """Finds a call by any of its spans: each call is known by its forward span.

    Args:
        timeline: whose calls.
    """

    def __init__(self, timeline: Timeline) -> None:
        columns = timeline.columns
        self._columns = columns
        forward = np.flatnonzero(columns.phase == FORWARD)
        calls = zip(columns.name[forward].tolist(), columns.call[forward].tolist(), strict=True)
        self._forward = dict(zip(calls, forward.tolist(), strict=True))
        self._paths: dict[int, tuple[int, ...]] = {}

    def forward_span_of(self, span: int) -> int:
        """Return the forward span of the call that a span belongs to, or the span itself where there is none."""
        columns = self._columns
        if columns.phase[span] == FORWARD:
            return span
        forward: int = self._forward.get((int(columns.name[span]), int(columns.call[span])), span)
        return forward

    def path(self, span: int) -> tuple[int, ...]:
        """Return the calls around a span's call, outermost first, itself last, each by its forward span."""
        path = self._paths.get(span)
        if path is None:
            call = self.forward_span_of(span)
            around = int(self._columns.parent[call])
            same = around >= 0 and self._columns.phase[around] == self._columns.phase[call]
            path = self._paths[span] = (*(self.path(around) if same else ()), call)
        return path


def threads_of(timeline: Timeline) -> Int64Array:
    """Return the thread of each span, from the thread of its track."""
    return np.array([track.tid for track in timeline.tracks] or [0], np.int64)[timeline.columns.track]


def runs_module_code(columns: Columns) -> BoolArray:
    """Which spans are forward or a repetition of it: what runs a module's own code."""
    chosen: BoolArray = (columns.phase == FORWARD) | (columns.phase == RECOMPUTE)
    return chosen


def innermost_spans(timeline: Timeline, chosen: BoolArray | None = None) -> InnermostLookup:
    """Return which span ran on a thread at a moment: of all, or of the chosen ones."""
    return InnermostLookup(threads_of(timeline), timeline.columns, chosen)
