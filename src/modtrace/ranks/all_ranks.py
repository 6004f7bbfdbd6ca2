"""The timelines of many ranks as one: a process per rank, all in the time of the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .._errors import ModtraceError
from ..timeline import Group, Mark, Process, Timeline
from ..timeline.contents import WHOLE_RUN
from ..timeline.join import join
from ..timeline.rewrite import move_times, replace_processes
from .job_time import JobTime, RankTime
from .rank_folder import RankRecording, load_own_time


class RankTimeline(NamedTuple):
    """One rank in the time of the job.

    Attributes:
        rank: its number.
        timeline: in Unix nanoseconds of the job's clock.
        bound_ns: how far its times are off at most.
        method: how its place in time was found, see `RankTime`.
        path: the recording.
    """

    rank: int
    timeline: Timeline
    bound_ns: int
    method: str
    path: Path


def load_rank(
    file: RankRecording, time: RankTime, choose: Callable[[Timeline], Timeline] = lambda timeline: timeline
) -> RankTimeline:
    """Read a rank's recording and move it to the time of the job.

    Args:
        file: the recording.
        time: the place of its times in the job's time.
        choose: returns the part that is wanted.

    Raises:
        ModtraceError: it cannot be read.
    """
    own = choose(load_own_time(file))
    moments = np.concatenate([own.slices.start, own.slices.end])
    return RankTimeline(file.rank, move_times(own, time.move), time.bound_ns(moments), time.method, file.path)


def all_ranks_timeline(ranks: Sequence[RankTimeline], job: JobTime) -> Timeline:
    """Return one timeline of all ranks, each a process of its own even where process ids are equal.

    A rank's process says how far its times are off; the metadata hold the same of each rank, and how it was found.

    Raises:
        ModtraceError: there is nothing in any of them.
    """
    if not any(len(one.timeline.slices) for one in ranks):
        raise ModtraceError("nothing is left of any rank")
    parts = [_named_apart(one, group_names) for one, group_names in zip(ranks, _group_names(ranks), strict=True)]
    return replace(join(parts), marks=_joined_marks(ranks), metadata=_metadata(ranks, job))


def _process_of(one: RankTimeline, process: Process) -> Process:
    """Return a rank's process, with the bound of its times in its name (`rank 3 · python ±12.3 µs`)."""
    bound = "" if one.bound_ns == 0 else f" ±{one.bound_ns / 1e3:,.1f} µs"
    return process._replace(rank=one.rank, program=f"{process.program}{bound}")


def _named_apart(one: RankTimeline, group_names: Mapping[str, str]) -> Timeline:
    """Return a rank's timeline with the names that its process and its groups have among those of all ranks."""
    timeline = replace_processes(one.timeline, lambda process: _process_of(one, process))
    details = timeline.collective_details
    details = replace(
        details,
        names=[name._replace(group=group_names.get(name.group, name.group)) for name in details.names],
        groups=[group._replace(name=group_names[group.name]) for group in details.groups],
    )
    return replace(timeline, collective_details=details)


def _group_names(ranks: Sequence[RankTimeline]) -> list[dict[str, str]]:
    """Return for each rank what its groups are called: by their names, and their ranks where those are not enough."""
    members: dict[str, dict[tuple[int, ...], None]] = {}
    for one in ranks:
        for group in one.timeline.collective_details.groups:
            members.setdefault(group.name, {})[group.ranks] = None
    return [
        {group.name: _group_name(group, members) for group in one.timeline.collective_details.groups} for one in ranks
    ]


def _group_name(group: Group, members: Mapping[str, Mapping[tuple[int, ...], None]]) -> str:
    others = list(members[group.name])
    return group.name if len(others) == 1 else f"{group.name} ({others.index(group.ranks)})"


def _joined_marks(ranks: Sequence[RankTimeline]) -> list[Mark]:
    """Return the marks of the first rank, whose steps are those of the whole."""
    return [mark for mark in ranks[0].timeline.marks if mark.kind != "sync"]


def _metadata(ranks: Sequence[RankTimeline], job: JobTime) -> dict[str, object]:
    placed = [
        {"rank": one.rank, "bound_ns": one.bound_ns, "method": one.method, "clock": job[one.rank].clock}
        for one in ranks
    ]
    return {**ranks[0].timeline.metadata, WHOLE_RUN: None, "rank": None, "ranks": placed}
