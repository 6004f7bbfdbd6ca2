"""The timelines of many ranks as one: a process per rank, all in the time of the job."""

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
"""The bytes that an executor reads in one task: Dask takes 30 ms for a task, as long as five small recordings do."""
_RANKS_AT_ONCE = 32
"""The most ranks that one task reads."""


class RankTimeline(NamedTuple):
    """One rank in the time of the job."""

    time: RankTime  # the place of its own times in the job's
    timeline: Timeline  # in Unix nanoseconds of the job's clock
    bound_ns: int  # how far its times are off at most
    file: RankRecording  # the recording
    levels: int | None = None  # how many levels of modules are left; None: all

    @property
    def rank(self) -> int:
        """The rank's number among those of its world."""
        return self.file.rank_in_world

    @property
    def peak_bytes(self) -> int | None:
        """The most that tensors of the rank held; None if it recorded no memory."""
        held = [int(series.value.max()) for series in allocated(self.timeline.counters) if len(series.value)]
        return max(held, default=None)

    @property
    def lines(self) -> str:
        """Between which lines of the program it is longest in no module and no range; empty if that is not known."""
        gaps = NotedSteps(self.timeline.metadata.get(STEP_NOTES, {})).gaps
        return max(gaps, key=lambda gap: gap.ns).to_text() if gaps else ""

    @property
    def damage(self) -> str:
        """The damage of its ring, in words; empty if it is whole."""
        return damage_sentence(self.timeline.stats.torn, self.timeline.tracks)

    @property
    def engine(self) -> str:
        """The engine that recorded it, "native" or "python"; empty if that is not known."""
        return str(self.timeline.metadata.get("engine", ""))

    @property
    def placed(self) -> dict[str, Any]:
        """The place of the rank in the job's time, as the metadata `ranks` say it, without what is not known."""
        optional = {"role": self.file.role or None, "levels": self.levels}
        optional |= {"peak_bytes": self.peak_bytes, "damage": self.damage or None}
        place = {"rank": self.rank, "bound_ns": self.bound_ns, "method": self.time.method, "clock": self.time.clock}
        return place | {key: value for key, value in optional.items() if value is not None}

    def cut_to(self, levels: int) -> "RankTimeline":
        """Return it with so many levels of modules."""
        return self._replace(timeline=modules(self.timeline, None, levels), levels=levels)


def peak_sentence(peaks: Mapping[str, int]) -> str:
    """Say which process (`rank 3`) held most memory, and how much more than the median of the others.

    `peaks` are in the order of ranks: of equals the first is named. Empty if none is known.
    """
    if not peaks:
        return ""
    rank = max(peaks, key=lambda name: peaks[name])
    others = [peak for name, peak in peaks.items() if name != rank]
    if not others:
        return f"{rank} held {format_bytes(peaks[rank])} of memory at its peak"
    more = peaks[rank] - median_low(others)
    if not more:
        return f"no rank holds more memory than the others: {format_bytes(peaks[rank])} at the peak"
    share = f" ({more / (peaks[rank] - more):.1%})" if more < peaks[rank] else ""
    than = "the other" if len(others) == 1 else f"the median of {len(others):,} others"
    most, by = format_bytes(peaks[rank]), format_bytes(more)
    return f"{rank} held most memory: {most} at its peak, {by}{share} more than {than}"


def damage_sentences(damage: Mapping[str, str]) -> list[str]:
    """Say of each process (`rank 3`) what is damaged of its ring."""
    return [f"{name}: {text}" for name, text in damage.items()]


def load_rank(file: RankRecording, time: RankTime, steps: StepRange | None = None) -> RankTimeline:
    """Read a rank's recording and move it to the time of the job."""
    return place_rank(load_own_time(file, steps), time, file)


def read_ranks(
    take: Callable[[RankTimeline], T],
    files: Sequence[RankRecording],
    job: JobTime,
    steps: StepRange | None = None,
    executor: Executor | None = None,
) -> list[T]:
    """Return the result of `take` for each rank in the time of the job, in the order of the files."""
    groups = group_by_size(files, _BYTES_AT_ONCE, _RANKS_AT_ONCE)
    items = [[(file._replace(path=file.path.absolute()), job[file.rank]) for file in group] for group in groups]
    taken = map_in_processes(partial(_read_group, take, steps), items, 1, executor)
    by_rank = {time.rank: result for group, results in taken for (_, time), result in zip(group, results, strict=True)}
    return [by_rank[file.rank] for file in files]


def whole(rank: RankTimeline) -> RankTimeline:
    """Take all of a rank, see `read_ranks`."""
    return rank


def _read_group(
    take: Callable[[RankTimeline], T], steps: StepRange | None, group: Sequence[tuple[RankRecording, RankTime]]
) -> list[T]:
    return [take(load_rank(*placed, steps)) for placed in group]


def place_rank(timeline: Timeline, time: RankTime, file: RankRecording) -> RankTimeline:
    """Move what was read of a rank's recording to the time of the job."""
    moments = np.concatenate([timeline.slices.start, timeline.slices.end])
    return RankTimeline(time, move_times(timeline, time.move), time.bound_ns(moments), file)


_MODULE_BYTES = 55
"""The size of a module's slice in a Perfetto trace."""
_OTHER_BYTES = 190
"""The size of another slice there, with the arrows of collectives."""


def read_fitting(
    files: Sequence[RankRecording],
    job: JobTime,
    steps: StepRange | None,
    executor: Executor | None,
    bytes_per_step: int,
) -> list[RankTimeline]:
    """Read as many ranks, and of each role as many levels of modules, as fit into a Perfetto trace.

    The first ranks of each role come before the second. All have one level at least, and what one role does not need
    for all of its levels is for others. Ranks that do not fit are not read, but for a few.
    """
    by_role: dict[str, list[RankRecording]] = {}
    for file in files:
        by_role.setdefault(file.role, []).append(file)
    waiting = [file for together in zip_longest(*by_role.values()) for file in together if file]
    kept: dict[str, list[tuple[RankTimeline, list[int]]]] = {}
    left, known_steps, count = 0, 0, _RANKS_AT_ONCE
    while waiting:
        read, waiting = read_ranks(whole, waiting[:count], job, steps, executor), waiting[count:]
        more_steps = max(0, *(len(np.unique(rank.timeline.slices.step)) - known_steps for rank in read))
        left, known_steps = left + more_steps * bytes_per_step, known_steps + more_steps
        full = set[str]()
        for rank in read:
            cost = _cost_by_levels(rank)
            if rank.file.role not in full and (cost[0] <= left or not kept):
                kept.setdefault(rank.file.role, []).append((rank, cost))
                left -= cost[0]
            else:
                full.add(rank.file.role)
        waiting = [file for file in waiting if file.role not in full]
        least_costs = [cost[0] for members in kept.values() for _, cost in members]
        count = max(_RANKS_AT_ONCE, left // max(sum(least_costs) // len(least_costs), 1))
    fitting, unfitted = [], len(least_costs)
    for members in sorted(kept.values(), key=lambda members: sum(cost[-1] for _, cost in members) / len(members)):
        share, unfitted = left * len(members) // unfitted, unfitted - len(members)
        deepest = max(len(cost) for _, cost in members)
        more = [sum(cost[:level][-1] - cost[0] for _, cost in members) for level in range(1, deepest + 1)]
        levels = max(level for level in range(1, deepest + 1) if more[level - 1] <= max(share, 0))
        left -= more[levels - 1]
        fitting += [rank if len(cost) <= levels else rank.cut_to(levels) for rank, cost in members]
    return sorted(fitting, key=lambda rank: rank.file.rank)


def _cost_by_levels(rank: RankTimeline) -> list[int]:
    """Return the bytes of a rank in a Perfetto trace with one level of modules, with two, and so on."""
    slices = rank.timeline.slices
    of_level = np.bincount(slices.depth[slices.kind == MODULE], minlength=1)
    others = (len(slices) - int(of_level.sum())) * _OTHER_BYTES
    costs: list[int] = (others + np.cumsum(of_level * _MODULE_BYTES)).tolist()
    return costs


def all_ranks_timeline(ranks: Sequence[RankTimeline], left_out: int = 0) -> Timeline:
    """Return one timeline of all ranks, each a process of its own even where process ids are equal.

    A rank's process says how far its times are off; the metadata hold the same of each rank, and how it was found.
    Raises ModtraceError if there is nothing in any of them.
    """
    if not any(len(rank.timeline.slices) for rank in ranks):
        raise ModtraceError("nothing is left of any rank")
    parts = [_named_apart(rank, group_names) for rank, group_names in zip(ranks, _group_names(ranks), strict=True)]
    # The steps of the first rank are those of the whole.
    marks = [mark for mark in ranks[0].timeline.marks if mark.kind != "sync"]
    metadata = {key: value for key, value in ranks[0].timeline.metadata.items() if key != WHOLE_RUN}
    metadata |= {"rank": None, "role": None, "ranks": [rank.placed for rank in ranks], "left_out": left_out}
    return replace(join(parts), marks=marks, metadata=metadata)


def _named_apart(rank: RankTimeline, group_names: Mapping[str, str]) -> Timeline:
    """Return a rank's timeline with the names that its process and its groups have among those of all ranks.

    The bound of its times is in the name of the process (`rank 3 · python ±12.3 µs`).
    """
    bound = "" if rank.bound_ns == 0 else f" ±{rank.bound_ns / 1e3:,.1f} µs"
    timeline = replace_processes(rank.timeline, lambda p: p._replace(rank=rank.rank, program=f"{p.program}{bound}"))
    args = map_arg(
        timeline.slices.args, Arg.GROUP, lambda groups: groups.with_texts(lambda name: group_names.get(name, name))
    )
    groups = [group._replace(name=group_names[group.name]) for group in timeline.groups]
    return replace(timeline, slices=replace(timeline.slices, args=args), groups=groups)


def _group_names(ranks: Sequence[RankTimeline]) -> list[dict[str, str]]:
    """Return for each rank what its groups are called: by their names, and their ranks where those are not enough."""
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
