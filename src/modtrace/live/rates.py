"""What the processes of a job did in the last seconds: one by one, and together."""

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from .._typing import Int64Array
from ..ring import read_ring
from ..timeline import RingAnalysis, build_timeline
from ..timeline.select import window
from ..timeline.summary import ModuleTimes, summarize
from ..timeline.summary.module_rows import fold_below
from ..timeline.time_intervals import union_of
from .rank_state import RankState, rank_state_of, read_clocks


class RankRates(NamedTuple):
    """What one process did in the last seconds, or in the last ones before it stopped."""

    state: RankState  # where it is
    steps_per_s: float | None  # until now; None if fewer than two steps have ended
    window_steps_per_s: float | None  # the same in the time that the rows are of, which can be over
    # How long the time is that the rows are of; shorter than asked for where the ring, or what was read of it, does not
    # go back so far.
    window_ns: int
    # What each module took in that time; what began before or is not over counts with its part.
    rows: tuple[ModuleTimes, ...]
    communication_ns: int  # of that time, with any thread in a call of torch.distributed or in a wait for one
    # The share of each part of a step, see `PartTimes`, in the steps that are known of that time.
    parts: Mapping[str, float] = MappingProxyType({})

    @property
    def is_quiet(self) -> bool:
        """Whether it wrote no event for longer than the window of the rows."""
        return self.state.now_ns - self.state.last_ns > max(self.window_ns, _QUIET_NS)


_QUIET_NS = 1_000_000_000


def read_rank_rates(path: str | os.PathLike[str], seconds: float, max_events: int) -> RankRates:
    """Return what a process did in the last seconds of its ring, until now or its last event, and `max_events`."""
    now = read_clocks()
    analysis = RingAnalysis(read_ring(path, max_events))
    state = rank_state_of(path, analysis, now)
    events = analysis.all_events
    if not len(events):
        return RankRates(state, None, None, 0, (), 0)
    window_ns, first_ns, last_ns = int(seconds * 1e9), int(events.time.min()), int(events.time.max())
    end_ns = state.now_ns if state.now_ns - last_ns < window_ns else last_ns
    begin_ns = max(first_ns, end_ns - window_ns)
    step_ends_ns = analysis.events.time[analysis.step_ends.event]
    rate, window_rate = (steps_per_second(step_ends_ns, until_ns, window_ns) for until_ns in (state.now_ns, end_ns))
    begin_unix_ns, end_unix_ns = analysis.clock.to_other(np.array([begin_ns, end_ns])).tolist()
    timeline = window(build_timeline(analysis), begin_unix_ns, end_unix_ns)
    communication = union_of(timeline.collectives.start, timeline.collectives.end)
    communication_ns = int((communication.end - communication.start).sum())
    summary = summarize(timeline, step_by="optimizer")
    parts = {part.part: part.share for part in summary.parts}
    return RankRates(state, rate, window_rate, end_ns - begin_ns, tuple(summary.rows), communication_ns, parts)


def steps_per_second(ends_ns: Int64Array, now_ns: int, window_ns: int) -> float | None:
    """Return how many steps end in a second, by those that ended in the window, or else by the last two.

    A step that takes more than twice as long as those before counts as if it ended now.
    """
    recent = int(np.searchsorted(ends_ns, now_ns - window_ns))
    ends = ends_ns[max(0, min(recent - 1, len(ends_ns) - 2)) :]
    if len(ends) < 2:
        return None
    steps, took_ns, since_ns = len(ends) - 1, int(ends[-1] - ends[0]), now_ns - int(ends[-1])
    if since_ns > 2 * took_ns / steps:
        took_ns += since_ns
    return 1e9 * steps / took_ns if took_ns else None


RATE_SORT_KEYS = ("self", "total", "forward", "backward", "calls", "name")


class ModuleRate(NamedTuple):
    """What one module takes, as the mean over ranks; shares are of the time that passes, 1 is all of it."""

    fqn: str  # the module's fully qualified name
    calls_per_s: float  # how often its forward runs in a second
    self_share: float  # in it and outside of modules inside it
    total_share: float  # in it, in all phases
    forward_share: float  # in forward
    backward_share: float  # in backward and recompute
    busiest_share: float  # the largest self share of a rank
    busiest_rank: int | None  # that rank; None if there is one rank only, or it is not known


def merge_ranks(ranks: Sequence[RankRates], max_depth: int | None) -> list[ModuleRate]:
    """Return what each module takes, in the order in which modules were first called."""
    measured = [rank for rank in ranks if rank.rows and rank.window_ns]
    shares_of: dict[str, list[float]] = {}
    busiest: dict[str, tuple[float, int | None]] = {}
    for rank in measured:
        rows = rank.rows if max_depth is None else fold_below(rank.rows, max_depth)
        for row in rows:
            backward_ns = row.backward_ns + row.recompute_ns
            values = [1e9 * row.calls, row.self_ns, row.total_ns, row.forward_ns, backward_ns]
            shares = [value / rank.window_ns for value in values]
            shares_of[row.fqn] = [a + b for a, b in zip(shares_of.get(row.fqn, [0.0] * 5), shares, strict=True)]
            if shares[1] >= busiest.get(row.fqn, (0.0, None))[0]:
                busiest[row.fqn] = (shares[1], rank.state.rank)
    several = len(measured) > 1
    modules = []
    for fqn, totals in shares_of.items():
        calls, own, total, forward, backward = (value / len(measured) for value in totals)
        share, rank_number = busiest[fqn]
        modules.append(ModuleRate(fqn, calls, own, total, forward, backward, share, rank_number if several else None))
    return modules


def sort_modules(modules: Sequence[ModuleRate], key: str) -> list[ModuleRate]:
    """Return modules by one of `RATE_SORT_KEYS`, the largest first; by name as names are sorted."""
    if key == "name":
        return sorted(modules)
    field = "calls_per_s" if key == "calls" else f"{key}_share"
    return sorted(modules, key=lambda module: -float(getattr(module, field)))
