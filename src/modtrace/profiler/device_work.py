"""GPU work and the calls that asked for it: a kernel's launch is known, and so the call in which it was launched.

Collectives that threads of the CPU run, as gloo's, are found in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from .._typing import Int8Array, Int64Array
from ..timeline import Timeline
from ..timeline.nesting import InnermostLookup
from ..timeline.time_intervals import union_of
from .event_columns import ApiCall, ProfilerEvents
from .launches import CudaGraphCapture, map_replays, processes_of
from .recorded_part import steps_of_profile

KINDS = ("kernel", "memcpy", "memset")
"""What `DeviceWork.kind` counts."""

NO_MODULE = "(no module)"
"""What is called so belongs to no module."""


class NoModuleReason(IntEnum):
    """Why a piece of GPU work has no module."""

    KNOWN, OUTSIDE, NO_LAUNCH, GRAPH, NO_CORRELATION, OTHER_PROCESS = range(6)

    @property
    def text(self) -> str:
        """The reason in words."""
        return _REASON_TEXTS[self]


_REASON_TEXTS = (
    "",
    "launched outside modules",
    "launch not in the trace",
    "graph launch, capture not known",
    "no correlation id",
    "launched by another process",
)


def no_module_name(reason: int) -> str:
    """Return what the row of a summary is called that has the work without a module for one reason."""
    return f"{NO_MODULE[:-1]}: {NoModuleReason(reason).text})"


@dataclass(frozen=True)
class WorkOwners:
    """Whose each piece of GPU work is; columns as long as `ProfilerEvents.work`.

    Attributes:
        span: int64[n], the innermost span in which it was launched, or -1.
        reason: int8[n], a `NoModuleReason`: why there is none.
        collective: int64[n], index into `ProfilerEvents.collective_names`; -1 where it computes.
        replay: int64[n], the row of the launch that replayed it as part of a graph, or -1.
        step: int64[n], the step in which it was launched.
    """

    span: Int64Array
    reason: Int8Array
    collective: Int64Array
    replay: Int64Array
    step: Int64Array


def attribute_device_work(
    timeline: Timeline,
    events: ProfilerEvents,
    launch: Int64Array,
    threads: Int64Array,
    running: InnermostLookup,
    graphs: Sequence[CudaGraphCapture] = (),
) -> WorkOwners:
    """Find for each piece of GPU work the innermost span in which it was launched, or why there is none.

    Args:
        timeline: the recording, in the trace's time.
        events: the trace's.
        launch: int64[n], for each piece of work the row of its launch, or -1.
        threads: the OS thread of each of the trace's tracks, or -1.
        running: which of its spans, of any phase, ran on a thread at a moment.
        graphs: captured graphs that are known; what they replay belongs to the spans that they were captured in.
    """
    work, launches = events.work, events.launches
    found = np.full(len(work), -1, np.int64)
    launched = np.flatnonzero(launch >= 0)
    rows = launch[launched]
    found[launched] = running.on_threads(threads[launches.track[rows]], launches.start[rows])
    is_replay = np.zeros(len(work), np.bool_)
    is_replay[launched] = launches.call[rows] == ApiCall.GRAPH
    captured = map_replays(events, launch, graphs)
    found = np.where(captured >= 0, captured, found)
    time = work.start.copy()
    time[launched] = launches.start[rows]
    reason = np.full(len(work), NoModuleReason.OUTSIDE, np.int8)
    process_of = processes_of(events)
    recorded = np.unique(process_of[threads >= 0])
    reason[launched[~np.isin(process_of[launches.track[rows]], recorded)]] = NoModuleReason.OTHER_PROCESS
    reason[is_replay & (reason == NoModuleReason.OUTSIDE)] = NoModuleReason.GRAPH
    reason[launch < 0] = NoModuleReason.NO_LAUNCH
    reason[work.correlation < 0] = NoModuleReason.NO_CORRELATION
    reason[found >= 0] = NoModuleReason.KNOWN
    return WorkOwners(
        span=found,
        reason=reason,
        collective=_collectives(events, launch),
        replay=np.where(captured >= 0, launch, -1),
        step=steps_of_work(timeline, events, time),
    )


def steps_of_work(timeline: Timeline, events: ProfilerEvents, time: Int64Array) -> Int64Array:
    """Return the step that each moment is in, by the marks of the timeline, else by the profiler's own.

    What comes behind the last step in which a module ran counts to that one.
    """
    marks = np.array([mark.time_ns for mark in timeline.marks if mark.kind == "step"], np.int64)
    columns = timeline.columns
    if not len(marks) or not len(columns):
        return steps_of_profile(events, time)
    first = int(columns.step[0]) - int(np.searchsorted(marks, columns.start[0], side="right"))
    last = max(int(columns.step.max()), first + len(marks) - 1, 0)
    return np.clip(first + np.searchsorted(marks, time, side="right"), 0, last)


def _collectives(events: ProfilerEvents, launch: Int64Array) -> Int64Array:
    """Return for each piece of work the collective that it is part of, or -1.

    By the name of a kernel; else by the range of a collective in which it was launched, as copies of NCCL are.
    """
    launched = np.flatnonzero(launch >= 0)
    rows = launch[launched]
    around = np.full(len(launch), -1, np.int64)
    ranges = events.collectives.take(events.collectives.is_operator == 0)
    order = np.lexsort((-ranges.duration, ranges.start, ranges.track))
    ranges = ranges.take(order)
    for track in np.unique(ranges.track).tolist():
        of_track = np.flatnonzero(ranges.track == track)
        here = np.flatnonzero(events.launches.track[rows] == track)
        time = events.launches.start[rows[here]]
        # Ranges inside others are of the same collective: the last one begun is the one, or all have ended.
        index = np.searchsorted(ranges.start[of_track], time, side="right") - 1
        reached = np.maximum.accumulate(ranges.end[of_track])
        inside = (index >= 0) & (reached[np.maximum(index, 0)] > time)
        around[launched[here[inside]]] = ranges.name[of_track[index[inside]]]
    return np.where(events.work.collective >= 0, events.work.collective, around)


@dataclass(frozen=True)
class CpuCollectives:
    """Collectives that the CPU ran; columns of equal length.

    Attributes:
        start: int64[n], ns from the trace's base.
        end: int64[n].
        span: int64[n], the innermost span in which each was launched, or -1.
        reason: int8[n], a `NoModuleReason`: why there is none.
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
    launches = events.collectives.take(events.collectives.is_operator == 1)
    span = np.full(len(ran), -1, np.int64)
    reason = np.full(len(ran), NoModuleReason.NO_LAUNCH, np.int8)
    time = ran.start.copy()
    for name in np.unique(ran.name).tolist():
        here, launched = np.flatnonzero(ran.name == name), np.flatnonzero(launches.name == name)
        if len(here) != len(launched):
            continue
        here = here[np.argsort(ran.start[here], kind="stable")]
        launched = launched[np.argsort(launches.start[launched], kind="stable")]
        time[here] = launches.start[launched]
        reason[here] = NoModuleReason.OUTSIDE
        span[here] = running.on_threads(threads[launches.track[launched]], time[here])
    reason[span >= 0] = NoModuleReason.KNOWN
    columns = timeline.columns
    outermost = columns.parent < 0
    busy = union_of(columns.start[outermost], columns.end[outermost])
    return CpuCollectives(
        start=ran.start,
        end=ran.end,
        span=span,
        reason=reason,
        step=steps_of_work(timeline, events, time),
        overlap=busy.time_within(ran.start, ran.end),
    )
