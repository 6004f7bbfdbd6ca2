"""The same timeline at other times, or with other processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .._typing import Int64Array

if TYPE_CHECKING:
    from .contents import Process
    from .timeline import Timeline


def move_times(timeline: Timeline, move: Callable[[Int64Array], Int64Array]) -> Timeline:
    """Return the timeline with all its times moved.

    Args:
        timeline: what to move.
        move: int64 nanoseconds → where they are moved to; keeps their order.
    """
    slices, details, marks = timeline.slices, timeline.collective_details, timeline.marks
    mark_times = move(np.array([mark.time_ns for mark in marks], np.int64)).tolist()
    return replace(
        timeline,
        slices=replace(slices, start=move(slices.start), end=move(slices.end)),
        collective_details=replace(details, done=np.where(details.done >= 0, move(details.done), -1)),
        marks=[mark._replace(time_ns=time) for mark, time in zip(marks, mark_times, strict=True)],
        counters=[replace(counter, time=move(counter.time)) for counter in timeline.counters],
        begin_ns=None if timeline.begin_ns is None else int(move(np.array([timeline.begin_ns]))[0]),
    )


def replace_processes(timeline: Timeline, process_of: Callable[[Process], Process]) -> Timeline:
    """Return the timeline with another process wherever it names one."""
    return replace(
        timeline,
        tracks=[track._replace(process=process_of(track.process)) for track in timeline.tracks],
        counters=[replace(counter, process=process_of(counter.process)) for counter in timeline.counters],
    )
