"""A profiler's trace made from a recording, on a clock of which all is known: offset, drift, wandering, steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from modtrace import Timeline
from modtrace.timeline import BACKWARD, Mark

from .kineto import x

__all__ = ["DriftingClock", "call_edges", "make_trace", "with_marks"]

Times = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DriftingClock:
    """A profiler's clock that drifts against the recording's.

    Attributes:
        begin: Unix ns at which `ahead` holds.
        ahead: ns.
        drift: ns per ns.
        wander: ns, by which it swings to both sides.
        period: ns, of a swing.
        step_at: Unix ns from which on it is `step` further ahead.
        step: ns.
    """

    begin: int
    ahead: float = 0.0
    drift: float = 0.0
    wander: float = 0.0
    period: float = 1e8
    step_at: int = 1 << 62
    step: int = 0

    def __call__(self, time: Times) -> Times:
        since = (time - self.begin).astype(np.float64)
        offset = self.ahead + self.drift * since + self.wander * np.sin(2 * np.pi * since / self.period)
        return time + np.rint(offset).astype(np.int64) + np.where(time >= self.step_at, self.step, 0)


def call_edges(timeline: Timeline, tid: int) -> Times:
    """Return when calls begin and end on a thread, each moment once and in order."""
    columns = timeline.columns
    on_thread = np.array([track.tid == tid for track in timeline.tracks])[columns.track]
    chosen = on_thread & (columns.phase != BACKWARD) & columns.complete
    return np.unique(np.concatenate([columns.start[chosen], columns.end[chosen]]))


def with_marks(timeline: Timeline, every: int) -> Timeline:
    """Return the timeline with a sync mark about every so many ns, each at an edge of a call."""
    edges = call_edges(timeline, timeline.tracks[0].tid)
    numbers = (edges - edges[0]) // every
    chosen = edges[np.flatnonzero(np.diff(numbers, prepend=-1))]
    marks = [Mark(time - 50, "sync", f"modtrace.sync#{at}") for at, time in enumerate(chosen.tolist())]
    return Timeline(timeline.columns, timeline.names, timeline.tracks, marks=marks)


def make_trace(timeline: Timeline, clock: DriftingClock, base: int, seed: int) -> list[dict[str, Any]]:
    """Return events: an operator wherever a call runs code of its own, and a slice around each sync mark.

    An operator begins 0.8 µs and more after the edge before it, and ends 0.5 µs and more before the next one, by
    exponential distributions of 2 and 1.5 µs. The slice of a mark begins 2 to 20 µs before it, and ends 0.2 to 0.7 µs
    after it.
    """
    random = np.random.default_rng(seed)
    events: list[dict[str, Any]] = []
    tid = timeline.tracks[0].tid
    pid = timeline.tracks[0].process.pid
    edges = call_edges(timeline, tid)
    start = edges[:-1] + np.rint(800 + random.exponential(2000, len(edges) - 1)).astype(np.int64)
    end = edges[1:] - np.rint(500 + random.exponential(1500, len(edges) - 1)).astype(np.int64)
    columns = timeline.columns
    calls = columns.phase != BACKWARD
    begins, ends = np.sort(columns.start[calls]), np.sort(columns.end[calls])
    running = np.searchsorted(begins, edges[:-1], side="right") > np.searchsorted(ends, edges[:-1], side="right")
    rows = np.flatnonzero((end > start) & running)
    for number, (a, b) in enumerate(zip(clock(start[rows]) - base, clock(end[rows]) - base, strict=True)):
        events.append(x("cpu_op", "aten::op", int(a), int(b), pid=pid, tid=tid, Sequence_number=number))
    for mark in timeline.marks:
        a, b = (
            np.array([mark.time_ns]) - int(random.integers(2000, 20_000)),
            mark.time_ns + random.integers(200, 700, 1),
        )
        events.append(x("cpu_op", mark.text, int(clock(a)[0]) - base, int(clock(b)[0]) - base, pid=pid, tid=tid))
    return events
