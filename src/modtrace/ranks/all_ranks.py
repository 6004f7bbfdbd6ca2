"""The timelines of many ranks joined into one: a process per rank, all in the time of the job."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from statistics import median_low
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .._errors import ModtraceError
from .._pools import map_in_processes
from ..record_options import StepRange
from ..timeline import Timeline
from ..timeline.contents import STEP_NOTES, WHOLE_RUN, damage_sentence
from ..timeline.join import join, move_times, replace_processes
from ..timeline.memory import allocated, format_bytes
from ..timeline.select import modules
from ..timeline.slices import MODULE, Arg, map_arg
from ..timeline.summary.findings.noted import NotedSteps
from .rank_folder import JobTime, RankRecording, RankTime, group_by_size, load_own_time

T = TypeVar("T")

_BYTES_AT_ONCE = 4 << 20
"""Maximum bytes that an executor reads in one task; Dask needs 30 ms per task, as long as for five small recordings."""
_RANKS_AT_ONCE = 32
"""Maximum number of ranks that one task reads."""


class RankTimeline(NamedTuple):
    """The timeline of one rank in the time of the job."""

    time: RankTime  # the mapping from its own times to the job's
    timeline: Timeline  # in Unix nanoseconds of the job's clock
    bound_ns: int  # maximum error of its times
    file: RankRecording  # the recording
    levels: int | None = None  # number of levels of modules that `timeline` contains; None for all

    @property
    def rank(self) -> int:
        """The rank's number in its world."""
        return self.file.rank_in_world

    @property
    def peak_bytes(self) -> int | None:
        """The maximum bytes of the rank's tensors; None if memory was not recorded."""
        peaks = [int(series.value.max()) for series in allocated(self.timeline.counters) if len(series.value)]
        return max(peaks, default=None)

    @property
    def lines(self) -> str:
        """The program lines around its longest time outside modules and ranges; empty if unknown."""
        gaps = NotedSteps(self.timeline.metadata.get(STEP_NOTES, {})).gaps
        return max(gaps, key=lambda gap: gap.ns).to_text() if gaps else ""

    @property
    def damage(self) -> str:
        """The description of the damage of its ring; empty if there is no damage."""
        return damage_sentence(self.timeline.stats.torn, self.timeline.tracks)

    @property
    def engine(self) -> str:
        """The engine that recorded it, "native" or "python"; empty if unknown."""
        return str(self.timeline.metadata.get("engine", ""))

    @property
    def job_entry(self) -> dict[str, Any]:
        """The rank's entry of the metadata `ranks`, without unknown values."""
        optional = {"role": self.file.role or None, "levels": self.levels}
        optional |= {"peak_bytes": self.peak_bytes, "damage": self.damage or None}
        entry = {"rank": self.rank, "bound_ns": self.bound_ns, "method": self.time.method, "clock": self.time.clock}
        return entry | {key: value for key, value in optional.items() if value is not None}

    def cut_to(self, levels: int) -> "RankTimeline":
        """Return a copy with at most `levels` levels of modules."""
        return self._replace(timeline=modules(self.timeline, None, levels), levels=levels)


def peak_sentence(peaks: Mapping[str, int]) -> str:
    """Return a sentence on the process (`rank 3`) with the largest peak, and its excess over the others' median.

    `peaks` are in the order of ranks; the first of equal peaks is named. Empty if `peaks` is empty.
    """
    if not peaks:
        return ""
    rank = max(peaks, key=lambda name: peaks[name])
    other_peaks = [peak for name, peak in peaks.items() if name != rank]
    if not other_peaks:
        return f"{rank} held {format_bytes(peaks[rank])} of memory at its peak"
    excess = peaks[rank] - median_low(other_peaks)
    if not excess:
        return f"no rank holds more memory than the others: {format_bytes(peaks[rank])} at the peak"
    share = f" ({excess / (peaks[rank] - excess):.1%})" if excess < peaks[rank] else ""
    compared = "the other" if len(other_peaks) == 1 else f"the median of {len(other_peaks):,} others"
    peak_text = f"{rank} held most memory: {format_bytes(peaks[rank])} at its peak"
    return f"{peak_text}, {format_bytes(excess)}{share} more than {compared}"


def damage_sentences(damage: Mapping[str, str]) -> list[str]:
    """Return a sentence on the damage of each process's (`rank 3`) ring."""
    return [f"{name}: {text}" for name, text in damage.items()]


def load_rank(file: RankRecording, time: RankTime, steps: StepRange | None = None) -> RankTimeline:
    """Read a rank's recording and move it to the time of the job."""
    return place_rank(load_own_time(file, steps), time, file)


def read_ranks(
    extract: Callable[[RankTimeline], T],
    files: Sequence[RankRecording],
    job: JobTime,
    steps: StepRange | None = None,
    executor: Executor | None = None,
) -> list[T]:
    """Return the result of `extract` for each rank in the time of the job, in the order of the files."""
    groups = group_by_size(files, _BYTES_AT_ONCE, _RANKS_AT_ONCE)
    items = [[(file._replace(path=file.path.absolute()), job[file.rank]) for file in group] for group in groups]
    results = map_in_processes(partial(_read_group, extract, steps), items, 1, executor)
    by_rank = {time.rank: result for group, values in results for (_, time), result in zip(group, values, strict=True)}
    return [by_rank[file.rank] for file in files]


def unchanged(rank: RankTimeline) -> RankTimeline:
    """Return the rank unchanged, for `read_ranks`."""
    return rank


def _read_group(
    extract: Callable[[RankTimeline], T], steps: StepRange | None, group: Sequence[tuple[RankRecording, RankTime]]
) -> list[T]:
    return [extract(load_rank(*item, steps)) for item in group]


def place_rank(timeline: Timeline, time: RankTime, file: RankRecording) -> RankTimeline:
    """Return a timeline of a rank's recording, moved to the time of the job."""
    moments = np.concatenate([timeline.slices.start, timeline.slices.end])
    return RankTimeline(time, move_times(timeline, time.move), time.bound_ns(moments), file)


_MODULE_BYTES = 55
"""Bytes of a module's slice in a Perfetto trace."""
_OTHER_BYTES = 190
"""Bytes of any other slice there, with the arrows of collectives."""


def read_fitting(
    files: Sequence[RankRecording],
    job: JobTime,
    steps: StepRange | None,
    executor: Executor | None,
    bytes_per_step: int,
) -> list[RankTimeline]:
    """Read the ranks, and for each role the levels of modules, that fit into a Perfetto trace.

    The first ranks of all roles come before the second ones. All ranks have at least one level; bytes that a role does
    not need for all of its levels go to the other roles. Only a few of the ranks that do not fit are read.
    """
    by_role: dict[str, list[RankRecording]] = {}
    for file in files:
        by_role.setdefault(file.role, []).append(file)
    unread = [file for round_files in zip_longest(*by_role.values()) for file in round_files if file]
    groups: dict[str, list[tuple[RankTimeline, list[int]]]] = {}
    remaining_bytes, known_steps, count = 0, 0, _RANKS_AT_ONCE
    while unread:
        read, unread = read_ranks(unchanged, unread[:count], job, steps, executor), unread[count:]
        more_steps = max(0, *(len(np.unique(rank.timeline.slices.step)) - known_steps for rank in read))
        remaining_bytes, known_steps = remaining_bytes + more_steps * bytes_per_step, known_steps + more_steps
        full_roles = set[str]()
        for rank in read:
            cost = _cost_by_levels(rank)
            if rank.file.role not in full_roles and (cost[0] <= remaining_bytes or not groups):
                groups.setdefault(rank.file.role, []).append((rank, cost))
                remaining_bytes -= cost[0]
            else:
                full_roles.add(rank.file.role)
        unread = [file for file in unread if file.role not in full_roles]
        min_costs = [cost[0] for members in groups.values() for _, cost in members]
        count = max(_RANKS_AT_ONCE, remaining_bytes // max(sum(min_costs) // len(min_costs), 1))
    fitting, ranks_to_fit = [], len(min_costs)
    for members in sorted(groups.values(), key=lambda members: sum(cost[-1] for _, cost in members) / len(members)):
        role_bytes, ranks_to_fit = remaining_bytes * len(members) // ranks_to_fit, ranks_to_fit - len(members)
        deepest = max(len(cost) for _, cost in members)
        extra_bytes = [sum(cost[:level][-1] - cost[0] for _, cost in members) for level in range(1, deepest + 1)]
        levels = max(level for level in range(1, deepest + 1) if extra_bytes[level - 1] <= max(role_bytes, 0))
        remaining_bytes -= extra_bytes[levels - 1]
        fitting += [rank if len(cost) <= levels else rank.cut_to(levels) for rank, cost in members]
    return sorted(fitting, key=lambda rank: rank.file.rank)


def _cost_by_levels(rank: RankTimeline) -> list[int]:
    """Return the bytes of a rank in a Perfetto trace with one, two and more levels of modules."""
    slices = rank.timeline.slices
    modules_by_level = np.bincount(slices.depth[slices.kind == MODULE], minlength=1)
    other_bytes = (len(slices) - int(modules_by_level.sum())) * _OTHER_BYTES
    costs: list[int] = (other_bytes + np.cumsum(modules_by_level * _MODULE_BYTES)).tolist()
    return costs


def all_ranks_timeline(ranks: Sequence[RankTimeline], left_out: int = 0) -> Timeline:
    """Return one timeline of all ranks, each a separate process even if process ids are equal.

    The name of a rank's process and the metadata contain the bound of its times. Raises ModtraceError if all are empty.
    """
    if not any(len(rank.timeline.slices) for rank in ranks):
        raise ModtraceError("no rank recorded anything in the chosen steps")
    parts = [_uniquely_named(rank, names) for rank, names in zip(ranks, _group_names(ranks), strict=True)]
    # The joined timeline has the steps of the first rank.
    marks = [mark for mark in ranks[0].timeline.marks if mark.kind != "sync"]
    metadata = {key: value for key, value in ranks[0].timeline.metadata.items() if key != WHOLE_RUN}
    metadata |= {"rank": None, "role": None, "ranks": [rank.job_entry for rank in ranks], "left_out": left_out}
    return replace(join(parts), marks=marks, metadata=metadata)


def _uniquely_named(rank: RankTimeline, group_names: Mapping[str, str]) -> Timeline:
    """Return a rank's timeline with unique group names, and with the bound in the process name (`python ±12.3 µs`)."""
    bound = "" if rank.bound_ns == 0 else f" ±{rank.bound_ns / 1e3:,.1f} µs"
    timeline = replace_processes(rank.timeline, lambda p: p._replace(rank=rank.rank, program=f"{p.program}{bound}"))
    args = map_arg(
        timeline.slices.args, Arg.GROUP, lambda groups: groups.with_texts(lambda name: group_names.get(name, name))
    )
    groups = [group._replace(name=group_names[group.name]) for group in timeline.groups]
    return replace(timeline, slices=replace(timeline.slices, args=args), groups=groups)


def _group_names(ranks: Sequence[RankTimeline]) -> list[dict[str, str]]:
    """Return the unique names of each rank's groups, by their names; groups of one name get a number."""
    members: dict[str, dict[tuple[str, tuple[int, ...]], None]] = {}
    for rank in ranks:
        for group in rank.timeline.groups:
            members.setdefault(group.name, {})[rank.file.world, group.ranks] = None
    return [
        {
            group.name: group.name
            if len(groups) == 1
            else f"{group.name} ({groups.index((rank.file.world, group.ranks))})"
            for group in rank.timeline.groups
            for groups in [list(members[group.name])]
        }
        for rank in ranks
    ]
