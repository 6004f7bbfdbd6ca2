"""One ring → what its process did in the last seconds."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from .._typing import Int64Array
from ..ring import RingSnapshot, read_ring
from ..timeline import build_timeline
from ..timeline.decode import Clock, step_ends
from ..timeline.ranges import union_of
from ..timeline.summary import ModuleTimes
from ..where import RankState, rank_state_of

__all__ = ["RankRates", "read_rank_rates", "steps_per_second"]


class RankRates(NamedTuple):
    """What one process did in the last seconds, or in the last ones before it stopped.

    Attributes:
        state: where it is.
        steps_per_s: until now; None where fewer than two steps have ended.
        window_steps_per_s: the same in the time that the rows are of, which can be over.
        window_ns: how long the time is that the rows are of; shorter than asked for where the ring, or what was read of
            it, does not go back so far.
        rows: what each module took in that time; what began before or is not over counts with its part.
        communication_ns: of that time, with any thread in a call of torch.distributed or in a wait for one.
    """

    state: RankState
    steps_per_s: float | None
    window_steps_per_s: float | None
    window_ns: int
    rows: tuple[ModuleTimes, ...]
    communication_ns: int

    @property
    def is_quiet(self) -> bool:
        """Whether it wrote no event for longer than the time that the rows are of."""
        return self.state.now_ns - self.state.last_ns > max(self.window_ns, _QUIET_NS)


_QUIET_NS = 1_000_000_000


def read_rank_rates(path: str | os.PathLike[str], seconds: float, max_events: int) -> RankRates:
    """Read the end of a ring file and tell what its process did.

    Args:
        path: the file.
        seconds: how far to look back from now; from its last event where none is that young.
        max_events: read no more than about so many.

    Raises:
        RingError: it cannot be read, or is no ring file.
    """
    snapshot = read_ring(path, max_events)
    state = rank_state_of(path, snapshot)
    events = snapshot.slots.events
    if not len(events):
        return RankRates(state, None, None, 0, (), 0)
    window_ns, first_ns, last_ns = int(seconds * 1e9), int(events.time.min()), int(events.time.max())
    end_ns = state.now_ns if state.now_ns - last_ns < window_ns else last_ns
    begin_ns = max(first_ns, end_ns - window_ns)
    step_ends_ns = events.time[step_ends(events).event]
    rate, window_rate = (steps_per_second(step_ends_ns, until_ns, window_ns) for until_ns in (state.now_ns, end_ns))
    rows, communication_ns = _measure(snapshot, begin_ns, end_ns)
    return RankRates(state, rate, window_rate, end_ns - begin_ns, rows, communication_ns)


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


def _measure(snapshot: RingSnapshot, begin_ns: int, end_ns: int) -> tuple[tuple[ModuleTimes, ...], int]:
    begin_unix_ns, end_unix_ns = Clock(snapshot.records).to_unix(np.array([begin_ns, end_ns])).tolist()
    timeline = build_timeline(snapshot).window(begin_unix_ns, end_unix_ns)
    communication = union_of(timeline.collectives.start, timeline.collectives.end)
    return tuple(timeline.summary().rows), int((communication.end - communication.start).sum())
