"""Find the call that was running on a thread at a moment, and the forward span of a call."""

from __future__ import annotations

import numpy as np

from .._typing import BoolArray, Int64Array
from ..timeline import FORWARD, RECOMPUTE, Columns, Timeline


class InnermostLookup:
    """The innermost span of each thread at any moment.

    Args:
        thread: int64[n], the thread of each span; spans of one thread nest on each of its tracks.
        track: int64[n].
        start: int64[n].
        end: int64[n].
        parent: int64[n], the span around each on its track, or -1.
        chosen: the spans that count; those around them on their track have to be among them, or nothing is found.
    """

    def __init__(
        self,
        thread: Int64Array,
        track: Int64Array,
        start: Int64Array,
        end: Int64Array,
        parent: Int64Array,
        chosen: BoolArray,
    ) -> None:
        self._start, self._end, self._parent, self._chosen = start, end, parent, chosen
        self._rows: dict[int, list[Int64Array]] = {}
        index = np.flatnonzero(chosen)
        for track_id in np.unique(track[index]).tolist():
            rows = index[track[index] == track_id]
            # Of spans that begin together the innermost comes last.
            rows = rows[np.lexsort((rows, start[rows]))]
            self._rows.setdefault(int(thread[rows[0]]), []).append(rows)

    def on_thread(self, thread: int, time: Int64Array) -> Int64Array:
        """Return for each moment the index of the innermost span, or -1; of two tracks' the one begun last."""
        best = np.full(len(time), -1, np.int64)
        for rows in self._rows.get(thread, []):
            position = np.searchsorted(self._start[rows], time, side="right") - 1
            found = np.where(position >= 0, rows[np.maximum(position, 0)], -1)
            while True:
                ended = (found >= 0) & ((self._end[found] <= time) | ~self._chosen[found])
                if not ended.any():
                    break
                found[ended] = self._parent[found[ended]]
            later = (found >= 0) & ((best < 0) | (self._start[found] > self._start[best]))
            best[later] = found[later]
        return best

    def on_threads(self, thread: Int64Array, time: Int64Array) -> Int64Array:
        """Return the same for moments of several threads."""
        found = np.full(len(time), -1, np.int64)
        for thread_id in np.unique(thread).tolist():
            here = thread == thread_id
            found[here] = self.on_thread(int(thread_id), time[here])
        return found


class CallIndex:
    """Finds a call by any of its spans: each call is known by its forward span.

    Args:
        timeline: whose calls.
    """

    def __init__(self, timeline: Timeline) -> None:
        columns = timeline.columns
        self._columns = columns
        self._parent = columns.parent
        self._phase = columns.phase
        forward = np.flatnonzero(columns.phase == FORWARD)
        self._forward = {
            (name, call): index
            for name, call, index in zip(
                columns.name[forward].tolist(), columns.call[forward].tolist(), forward.tolist(), strict=True
            )
        }
        self._paths: dict[int, tuple[int, ...]] = {}

    def forward_span_of(self, span: int) -> int:
        """Return the forward span of the call that a span belongs to, or the span itself where there is none."""
        columns = self._columns
        if columns.phase[span] == FORWARD:
            return span
        found: int = self._forward.get((int(columns.name[span]), int(columns.call[span])), span)
        return found

    def path(self, span: int) -> tuple[int, ...]:
        """Return the calls around a span's call, outermost first, itself last, each by its forward span."""
        path = self._paths.get(span)
        if path is None:
            call = self.forward_span_of(span)
            around = int(self._parent[call])
            same = around >= 0 and (self._phase[around] == self._phase[call])
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
    columns = timeline.columns
    return InnermostLookup(
        threads_of(timeline),
        columns.track.astype(np.int64),
        columns.start,
        columns.end,
        columns.parent,
        np.ones(len(columns), np.bool_) if chosen is None else chosen,
    )
