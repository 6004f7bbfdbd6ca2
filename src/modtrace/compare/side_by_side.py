"""A typical step of each side in one timeline: two groups of processes whose steps start at the same time."""

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
    """A typical step of one side.

    Attributes:
        step: spans that start in it, whole, and everything else in it.
        start_ns: start, Unix nanoseconds.
        duration_ns: its duration in nanoseconds.
        renamed: names on the other side, by names on this one.
        by: compared unit: module or class.
    """

    step: Timeline
    start_ns: int
    duration_ns: int
    renamed: Mapping[str, str]
    by: GroupBy = "module"


def cut_typical_step(timeline: Timeline, by: GroupBy = "module", step_by: str | None = None) -> TypicalStep:
    """Return the typical step of a recording, see `Timeline.summary`; raises ModtraceError if no step is whole."""
    typical = find_typical_step(timeline, step_by)
    step = take_steps(timeline, typical.step, typical.step + 1, step_by)
    bounds = find_step_bounds(without_gpu(timeline), step_by)
    start_ns = int(bounds.start_ns[bounds.number == typical.step][0])
    return TypicalStep(step, start_ns, typical.duration_ns, {}, by)


def side_by_side(sides: tuple[TypicalStep, TypicalStep]) -> Timeline:
    """Return both steps from the start of the first; the texts of marks end with their side."""
    shifts = [sides[0].start_ns - side.start_ns for side in sides]
    processes = [_rename_processes(side.step, title) for side, title in zip(sides, SIDE_TITLES, strict=True)]
    # The processes of one rank follow each other.
    order = [process for pair in zip_longest(*(new_names.values() for new_names in processes)) for process in pair]
    parts = [
        _move(side, shift, new_names.__getitem__)
        for side, shift, new_names in zip(sides, shifts, processes, strict=True)
    ]
    tracks = [track for part in parts for track in part.tracks]
    return replace(
        join(parts, sorted(range(len(tracks)), key=lambda index: order.index(tracks[index].process))),
        stats=Stats(),
        marks=_join_marks(sides, shifts),
        metadata={
            f"{key} {title}": value
            for side, title in zip(sides, SIDE_TITLES, strict=True)
            for key, value in side.step.metadata.items()
        },
    )


def make_comparison(
    timeline: Timeline, sides: tuple[TypicalStep, TypicalStep], notes: Sequence[str], changes: Sequence[Change]
) -> Comparison:
    """Return for the page the row of changes for each span of `side_by_side(sides)`."""
    row_by_key = {(change.fqn, change.phase): index for index, change in enumerate(changes)}
    keys = [
        plain_fqn(name.fqn, side.renamed) if side.by == "module" else name.module_class
        for side in sides
        for name in side.step.names
    ]
    rows_by_name = np.array([[row_by_key.get((fqn, phase), -1) for phase in SAMPLED_PHASES] for fqn in keys], np.int32)
    columns = timeline.columns
    phase = columns.phase + len(PHASES) * on_gpu(timeline)
    row_by_span = rows_by_name.reshape(-1, len(SAMPLED_PHASES))[columns.name, phase]
    rows = [
        (
            *(change.fqn, change.phase, change.base_ns, change.new_ns),
            *(change.difference_ns, change.low_ns, change.high_ns),
            *(change.base_calls, change.new_calls, change.verdict),
        )
        for change in changes
    ]
    return Comparison(SIDE_TITLES, notes, rows, row_by_span)


def _rename_processes(step: Timeline, title: str) -> dict[Process, Process]:
    owners = [track.process for track in step.tracks] + [counter.process for counter in step.counters]
    return {owner: owner._replace(program=f"{title} · {owner.program}") for owner in owners}


def _move(side: TypicalStep, shift: int, process_of: Callable[[Process], Process]) -> Timeline:
    """Return the modules and counters of a side, moved by `shift` ns."""
    counters = [replace(counter, time=np.maximum(counter.time, side.start_ns)) for counter in side.step.counters]
    part = replace(modules_only(side.step), counters=counters)
    return move_times(replace_processes(part, process_of), lambda times: times + shift)


def _join_marks(sides: tuple[TypicalStep, TypicalStep], shifts: Sequence[int]) -> list[Mark]:
    marks = [
        # No mark has the kind "step": the two steps belong to different programs.
        Mark(mark.time_ns + shift, "mark", f"{'end of ' if mark.ends_step else ''}{mark.text}, {title}")
        for side, shift, title in zip(sides, shifts, SIDE_TITLES, strict=True)
        for mark in side.step.marks
        if mark.kind != "sync"
    ]
    return sorted(marks, key=lambda mark: mark.time_ns)
