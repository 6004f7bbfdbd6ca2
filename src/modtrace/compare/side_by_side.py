"""A step of each side as one timeline: two groups of processes whose steps begin at the same time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from ..timeline import PHASES, Mark, Process, Stats, Timeline
from ..timeline.join import join, move_times, replace_processes
from ..timeline.select import modules_only, on_gpu, without_gpu
from ..timeline.summary import GroupBy, find_step_bounds, find_typical_step, take_steps
from ..write.html import Comparison
from .run_times import SAMPLED_PHASES, plain_fqn
from .verdicts import Change

SIDE_TITLES = ("before", "after")


class TypicalStep(NamedTuple):
    """A typical step of one side."""

    step: Timeline  # the spans that began in it, whole, and all else that is in it
    start_ns: int  # when it began, Unix nanoseconds
    duration_ns: int  # what it took
    renamed: Mapping[str, str]  # names of modules here, and what they are called on the other side
    by: GroupBy = "module"  # what is compared, modules or classes


def cut_typical_step(timeline: Timeline, by: GroupBy = "module", step_by: str | None = None) -> TypicalStep:
    """Return the typical step of a recording, as of `Timeline.summary`; raises ModtraceError if no step is whole."""
    typical = find_typical_step(timeline, step_by)
    step = take_steps(timeline, typical.step, typical.step + 1, step_by)
    bounds = find_step_bounds(without_gpu(timeline), step_by)
    start_ns = int(bounds.start[bounds.number == typical.step][0])
    return TypicalStep(step, start_ns, typical.duration_ns, {}, by)


def side_by_side(sides: tuple[TypicalStep, TypicalStep]) -> Timeline:
    """Return both steps in the time of the first, which the other is moved to; marks say whose they are."""
    shifts = [sides[0].start_ns - side.start_ns for side in sides]
    processes = [_processes(side.step, title) for side, title in zip(sides, SIDE_TITLES, strict=True)]
    # Those of one rank above each other.
    order = [process for pair in zip_longest(*(named.values() for named in processes)) for process in pair]
    parts = [
        _moved(side, shift, named.__getitem__) for side, shift, named in zip(sides, shifts, processes, strict=True)
    ]
    tracks = [track for part in parts for track in part.tracks]
    return replace(
        join(parts, sorted(range(len(tracks)), key=lambda index: order.index(tracks[index].process))),
        stats=Stats(),
        marks=_marks(sides, shifts),
        metadata={
            f"{key} {title}": value
            for side, title in zip(sides, SIDE_TITLES, strict=True)
            for key, value in side.step.metadata.items()
        },
    )


def compared(
    timeline: Timeline, sides: tuple[TypicalStep, TypicalStep], notes: Sequence[str], changes: Sequence[Change]
) -> Comparison:
    """Say for the page how each span of `side_by_side(sides)` changed."""
    row_of = {(change.fqn, change.phase): index for index, change in enumerate(changes)}
    keys = [
        plain_fqn(name.fqn, side.renamed) if side.by == "module" else name.module_class
        for side in sides
        for name in side.step.names
    ]
    of_name = np.array([[row_of.get((fqn, phase), -1) for phase in SAMPLED_PHASES] for fqn in keys], np.int32)
    columns = timeline.columns
    phase = columns.phase + len(PHASES) * on_gpu(timeline)
    of_span = of_name.reshape(-1, len(SAMPLED_PHASES))[columns.name, phase]
    rows = [
        (
            *(change.fqn, change.phase, change.base_ns, change.new_ns),
            *(change.difference_ns, change.low_ns, change.high_ns),
            *(change.base_calls, change.new_calls, change.verdict),
        )
        for change in changes
    ]
    return Comparison(SIDE_TITLES, notes, rows, of_span)


def _processes(step: Timeline, title: str) -> dict[Process, Process]:
    owners = [track.process for track in step.tracks] + [counter.process for counter in step.counters]
    return {owner: owner._replace(program=f"{title} · {owner.program}") for owner in owners}


def _moved(side: TypicalStep, shift: int, process_of: Callable[[Process], Process]) -> Timeline:
    """Return the modules of a side, and its counters, later by `shift` ns."""
    counters = [replace(counter, time=np.maximum(counter.time, side.start_ns)) for counter in side.step.counters]
    part = replace(modules_only(side.step), counters=counters)
    return move_times(replace_processes(part, process_of), lambda times: times + shift)


def _marks(sides: tuple[TypicalStep, TypicalStep], shifts: Sequence[int]) -> list[Mark]:
    marks = [
        # None is of kind "step": the two steps are not of one program.
        Mark(mark.time_ns + shift, "mark", f"{'end of ' if mark.ends_step else ''}{mark.text}, {title}")
        for side, shift, title in zip(sides, shifts, SIDE_TITLES, strict=True)
        for mark in side.step.marks
        if mark.kind != "sync"
    ]
    return sorted(marks, key=lambda mark: mark.time_ns)
