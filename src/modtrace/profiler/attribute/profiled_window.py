"""What of a recording a profiler's trace is about: the calls in its window, and the steps that the profiler counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..._typing import Int64Array
from ...timeline import Mark, Timeline
from ...timeline.select import keep_tracks, whole_spans
from ..trace.event_columns import ProfilerEvents

__all__ = ["clip_to_profile", "drop_unused", "profiled_window", "steps_of_profile", "with_profiled_steps"]


def profiled_window(events: ProfilerEvents) -> tuple[int, int] | None:
    """Return start and end of what was profiled, in ns from the trace's base; None where the trace does not say.

    It reaches from the profiler's start to its stop, and as far as its slices do.
    """
    ends = [events.window] if events.window is not None else []
    ends += [(events.first, events.last)] if events.first <= events.last else []
    return (min(start for start, _ in ends), max(end for _, end in ends)) if ends else None


def clip_to_profile(timeline: Timeline, window: tuple[int, int] | None) -> Timeline:
    """Return what ran while the profiler did: calls at its edges are whole, and one that ran throughout is in too.

    Args:
        timeline: the recording, in the trace's time.
        window: see `profiled_window`; None keeps all.
    """
    return timeline if window is None else whole_spans(timeline, *window)


def drop_unused(timeline: Timeline) -> Timeline:
    """Return the timeline without the names, tracks and counters that nothing in it refers to.

    A long recording has seen threads and modules that did not run while the profiler did.
    """
    used = np.zeros(len(timeline.tracks), np.bool_)
    used[timeline.columns.track] = used[timeline.collectives.track] = True
    if not used.any():
        return timeline
    timeline = keep_tracks(timeline, used)
    columns = timeline.columns
    used_names, name = np.unique(columns.name, return_inverse=True)
    return replace(
        timeline,
        columns=replace(columns, name=name.astype(np.int32)),
        names=[timeline.names[index] for index in used_names.tolist()],
        counters=[counter for counter in timeline.counters if len(counter.time)],
    )


def steps_of_profile(events: ProfilerEvents, time: Int64Array) -> Int64Array:
    """Return the step in which each moment lies, by the `ProfilerStep#` ranges; 0 for all where there are none.

    Args:
        events: the trace's.
        time: int64[n], ns from the trace's base.
    """
    steps = events.steps
    if not len(steps):
        return np.zeros(len(time), np.int64)
    order = np.argsort(steps.start, kind="stable")
    number = steps.value[order]
    index = np.searchsorted(steps.start[order], time, side="right") - 1
    return np.where(index >= 0, number[np.maximum(index, 0)], np.maximum(number[0] - 1, 0))


def with_profiled_steps(timeline: Timeline, events: ProfilerEvents) -> Timeline:
    """Return the timeline with the steps that the profiler counted, where the recording counted none.

    Args:
        timeline: the recording, in the trace's time.
        events: the trace's.
    """
    columns, steps = timeline.columns, events.steps
    counted = any(mark.kind == "step" for mark in timeline.marks) or bool(columns.step.any())
    if counted or not len(steps) or not len(columns):
        return timeline
    order = np.argsort(steps.start, kind="stable")
    start, number = steps.start[order], steps.value[order]
    # A step ends where the next begins, and the last one with its own range.
    ends = [*zip(start[1:].tolist(), number[:-1].tolist(), strict=True), (int(steps.end.max()), int(number[-1]))]
    if number[0] > 0 and columns.start[0] < start[0]:
        ends.insert(0, (int(start[0]), int(number[0]) - 1))
    marks = [Mark(time, "step", f"step {step}") for time, step in ends]
    return replace(
        timeline,
        columns=replace(columns, step=steps_of_profile(events, columns.start)),
        collectives=replace(timeline.collectives, step=steps_of_profile(events, timeline.collectives.start)),
        marks=sorted([*timeline.marks, *marks], key=lambda mark: mark.time_ns),
    )
