"""Collectives that threads of the CPU run, as gloo's, and the modules whose backward launched them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..._typing import Int8Array, Int64Array
from ...timeline import Timeline
from ...timeline.ranges import union_of
from ..trace.event_columns import ProfilerEvents
from .call_lookup import InnermostLookup
from .gpu_work import Reason, steps_at

__all__ = ["CpuCollectives", "find_cpu_collectives"]


@dataclass(frozen=True)
class CpuCollectives:
    """Collectives that the CPU ran; columns of equal length.

    Attributes:
        start: int64[n], ns from the trace's base.
        end: int64[n].
        span: int64[n], the innermost span in which each was launched, or -1.
        reason: int8[n], a `Reason`: why there is none.
        step: int64[n], the step in which it was launched.
        overlap: int64[n], ns of it while any module ran on another thread.
    """

    start: Int64Array
    end: Int64Array
    span: Int64Array
    reason: Int8Array
    step: Int64Array
    overlap: Int64Array


def find_cpu_collectives(
    timeline: Timeline, events: ProfilerEvents, threads: Int64Array, running: InnermostLookup
) -> CpuCollectives:
    """Find the collectives, and for each the call that launched it.

    Nothing in a trace joins the two. Of one name they run in the order in which they were launched, so the first
    belongs to the first, as long as there are as many of both.

    Args:
        timeline: the recording, in the trace's time.
        events: the trace's.
        threads: the OS thread of each of the trace's tracks, or -1.
        running: which of its spans, of any phase, ran on a thread at a moment.
    """
    ran = events.cpu_collectives
    launches = events.collectives.take(events.collectives.other == 1)
    span = np.full(len(ran), -1, np.int64)
    reason = np.full(len(ran), Reason.NO_LAUNCH, np.int8)
    time = ran.start.copy()
    for name in np.unique(ran.value).tolist():
        here, launched = np.flatnonzero(ran.value == name), np.flatnonzero(launches.value == name)
        if len(here) != len(launched):
            continue
        here = here[np.argsort(ran.start[here], kind="stable")]
        launched = launched[np.argsort(launches.start[launched], kind="stable")]
        time[here] = launches.start[launched]
        reason[here] = Reason.OUTSIDE
        span[here] = running.on_threads(threads[launches.track[launched]], time[here])
    reason[span >= 0] = Reason.KNOWN
    columns = timeline.columns
    outermost = columns.parent < 0
    busy = union_of(columns.start[outermost], columns.end[outermost])
    return CpuCollectives(
        start=ran.start,
        end=ran.end,
        span=span,
        reason=reason,
        step=steps_at(timeline, events, time),
        overlap=busy.time_within(ran.start, ran.end),
    )
