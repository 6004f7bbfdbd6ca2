"""The timelines of many ranks as one: a process per rank, all in the time of the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._errors import ModtraceError
from .._typing import AnyArray
from ..timeline import Collectives, Group, Mark, Process, Stats, Timeline
from ..timeline.collectives import DTYPES
from ..timeline.columns import Columns, join_columns, sort_by_start
from ..timeline.rewrite import move_times, replace_processes
from .job_time import JobTime, RankTime
from .rank_folder import RankRecording, load_own_time

__all__ = ["RankTimeline", "all_ranks_timeline", "load_rank"]


class RankTimeline(NamedTuple):
    """One rank in the time of the job.

    Attributes:
        rank: its number.
        timeline: in Unix nanoseconds of the job's clock.
        bound_ns: how far its times are off at most.
        method: how it was found where it lies, see `RankTime`.
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
        time: where its times lie.
        choose: returns the part that is wanted.

    Raises:
        ModtraceError: it cannot be read.
    """
    own = choose(load_own_time(file))
    moments = np.concatenate([own.columns.start[:1], own.columns.end, own.collectives.start, own.collectives.end])
    return RankTimeline(file.rank, move_times(own, time.move), time.bound_ns(moments), time.method, file.path)


def all_ranks_timeline(ranks: Sequence[RankTimeline], job: JobTime) -> Timeline:
    """Return one timeline of all ranks, each a process of its own even where process ids are equal.

    A rank's process says how far its times are off; the metadata hold the same of each rank, and how it was found.

    Raises:
        ModtraceError: there is nothing in any of them.
    """
    if not any(len(one.timeline.columns) or len(one.timeline.collectives) for one in ranks):
        raise ModtraceError("nothing is left of any rank")
    parts = [_named_apart(one, group_names) for one, group_names in zip(ranks, _group_names(ranks), strict=True)]
    offsets = np.cumsum([0, *(len(part.columns) for part in parts)]).tolist()
    first_track = np.cumsum([0, *(len(part.tracks) for part in parts)]).tolist()
    columns, position = sort_by_start(_join_columns(parts, first_track))
    joined = Timeline(
        columns,
        [name for part in parts for name in part.names],
        [track for part in parts for track in part.tracks],
        Stats(*(sum(part.stats[name] for part in parts) for name in Stats())),
        _joined_marks(ranks),
        [counter for part in parts for counter in part.counters],
        _metadata(ranks, job),
        {
            int(position[offset + span]): args
            for part, offset in zip(parts, offsets, strict=False)
            for span, args in part.span_args.items()
        },
    )
    collectives = _join_collectives(parts, first_track)
    passes = sorted((run for part in parts for run in part.backward_passes), key=lambda run: run.start_ns)
    return replace(joined, collectives=replace(collectives, track_names=joined.track_names), backward_passes=passes)


def _process_of(one: RankTimeline, process: Process) -> Process:
    """Return a rank's process, with the bound of its times in its name (`rank 3 · python ±12.3 µs`)."""
    bound = "" if one.bound_ns == 0 else f" ±{one.bound_ns / 1e3:,.1f} µs"
    return process._replace(rank=one.rank, program=f"{process.program}{bound}")


def _named_apart(one: RankTimeline, group_names: Mapping[str, str]) -> Timeline:
    """Return a rank's timeline with the names that its process and its groups have among those of all ranks."""
    timeline = replace_processes(one.timeline, lambda process: _process_of(one, process))
    table = timeline.collectives
    table = replace(
        table,
        names=[name._replace(group=group_names.get(name.group, name.group)) for name in table.names],
        groups=[group._replace(name=group_names[group.name]) for group in table.groups],
    )
    return replace(timeline, collectives=table)


def _group_names(ranks: Sequence[RankTimeline]) -> list[dict[str, str]]:
    """Return for each rank what its groups are called: by their names, and their ranks where those are not enough."""
    members: dict[str, dict[tuple[int, ...], None]] = {}
    for one in ranks:
        for group in one.timeline.collectives.groups:
            members.setdefault(group.name, {})[group.ranks] = None
    return [{group.name: _group_name(group, members) for group in one.timeline.collectives.groups} for one in ranks]


def _group_name(group: Group, members: Mapping[str, Mapping[tuple[int, ...], None]]) -> str:
    others = list(members[group.name])
    return group.name if len(others) == 1 else f"{group.name} ({others.index(group.ranks)})"


def _join_columns(parts: Sequence[Timeline], first_track: Sequence[int]) -> Columns:
    columns = []
    first_name = first_link = 0
    for index, part in enumerate(parts):
        link = part.columns.link
        columns.append(
            replace(
                part.columns,
                name=part.columns.name + np.int32(first_name),
                track=part.columns.track + np.int32(first_track[index]),
                link=np.where(link < 0, -1, link + first_link),
            )
        )
        first_name += len(part.names)
        first_link += int(link.max(initial=-1)) + 1
    return join_columns(columns)


def _join_collectives(parts: Sequence[Timeline], first_track: Sequence[int]) -> Collectives:
    groups: dict[str, Group] = {}
    names = [name for part in parts for name in part.collectives.names]
    arrays: dict[str, list[AnyArray]] = {field: [] for field in DTYPES}
    first_name = 0
    for index, part in enumerate(parts):
        table = part.collectives
        for group in table.groups:
            groups.setdefault(group.name, group)
        for field in DTYPES:
            arrays[field].append(getattr(table, field))
        arrays["name"][-1] = np.where(table.name < 0, -1, table.name + first_name)
        arrays["track"][-1] = table.track + first_track[index]
        first_name += len(table.names)
    columns: dict[str, Any] = {field: np.concatenate(found) for field, found in arrays.items()}
    joined = Collectives.of(names, list(groups.values()), **columns)
    return joined.take(np.lexsort((-joined.end, joined.start)))


def _joined_marks(ranks: Sequence[RankTimeline]) -> list[Mark]:
    """Return the marks of the first rank, whose steps are those of the whole."""
    return [mark for mark in ranks[0].timeline.marks if mark.kind != "sync"]


def _metadata(ranks: Sequence[RankTimeline], job: JobTime) -> dict[str, object]:
    placed = [
        {"rank": one.rank, "bound_ns": one.bound_ns, "method": one.method, "clock": job[one.rank].clock}
        for one in ranks
    ]
    return {**ranks[0].timeline.metadata, "rank": None, "ranks": placed}
