"""Which span ran on a thread at a moment, and the forward span of a call."""

import numpy as np

from .._typing import BoolArray, Int64Array
from ..timeline import FORWARD, RECOMPUTE, Slices, Timeline
from ..timeline.nesting import InnermostLookup


class CallIndex:
    """Finds a call by any of its spans: each call is known by its forward span."""

    def __init__(self, timeline: Timeline) -> None:
        columns = timeline.columns
        self._columns = columns
        forward = np.flatnonzero(columns.phase == FORWARD)
        calls = zip(columns.name[forward].tolist(), columns.call[forward].tolist(), strict=True)
        self._forward = dict(zip(calls, forward.tolist(), strict=True))
        self._paths: dict[int, tuple[int, ...]] = {}

    def forward_span_of(self, span: int) -> int:
        """Return the forward span of the call that a span belongs to, or the span itself if there is none."""
        columns = self._columns
        if columns.phase[span] == FORWARD:
            return span
        forward: int = self._forward.get((int(columns.name[span]), int(columns.call[span])), span)
        return forward

    def path(self, span: int) -> tuple[int, ...]:
        """Return the call stack of a span, outermost first, as indices of forward spans."""
        path = self._paths.get(span)
        if path is None:
            call = self.forward_span_of(span)
            around = int(self._columns.parent[call])
            in_same_phase = around >= 0 and self._columns.phase[around] == self._columns.phase[call]
            path = self._paths[span] = (*(self.path(around) if in_same_phase else ()), call)
        return path


def threads_of(timeline: Timeline) -> Int64Array:
    """Return the thread of each span, from the thread of its track."""
    return np.array([track.tid for track in timeline.tracks] or [0], np.int64)[timeline.columns.track]


def runs_module_code(columns: Slices) -> BoolArray:
    """Return which spans are forward or recompute: these run a module's own code."""
    is_module_code: BoolArray = (columns.phase == FORWARD) | (columns.phase == RECOMPUTE)
    return is_module_code


def innermost_spans(timeline: Timeline, is_candidate: BoolArray | None = None) -> InnermostLookup:
    """Return the lookup of the innermost span on a thread at a moment, among all spans or the candidates."""
    return InnermostLookup(threads_of(timeline), timeline.columns, is_candidate)
