"""What a hang is, and the ranks of a job as it is looked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ...timeline import Group
from ..blocked import Blocked
from ..rank_state import RankState
from .places import format_call, format_peer_call

__all__ = ["MIN_WAIT_NS", "Hang", "Ranks"]

MIN_WAIT_NS = 1_000_000_000
"""What a rank waits for less than this is as usual: rings are not read at one moment."""


class Hang(NamedTuple):
    """A collective, a send or a receive that ranks wait in.

    Attributes:
        operator: as `torch.distributed` calls it.
        group: the group that it is called on.
        counter: which collective of the group it is, from 0; of a send or receive which one with its peer.
        waiting: the ranks that wait in it, ascending.
        not_called: the ranks that have not called it, or its other end, and run.
        dead: the ranks that died without calling it.
        called_other: (rank, operator) of those that called another one in its place.
        unknown: the ranks of the group of which there is no ring.
        wait_ns: for how long they have waited, at most.
        text: all that as a sentence.
        details: what else is known of the call.
        is_cause: whether it waits for someone who does not wait in another hang.
    """

    operator: str
    group: Group
    counter: int
    waiting: tuple[int, ...]
    not_called: tuple[int, ...]
    dead: tuple[int, ...]
    called_other: tuple[tuple[int, str], ...]
    unknown: tuple[int, ...]
    wait_ns: int
    text: str
    details: tuple[str, ...] = ()
    is_cause: bool = True

    @property
    def blamed(self) -> set[int]:
        """The ranks that keep the others waiting."""
        return {*self.not_called, *self.dead, *(rank for rank, _ in self.called_other)}


class Ranks:
    """The ranks of a job, and what each waits in.

    Args:
        states: of all ranks; those without a rank are left out.
        by_flight_recorder: the counters are the flight recorder's.

    Attributes:
        by_rank: the states.
        waits: what each rank that waits for a second or more waits in, in words.
        by_flight_recorder: as given.
        all_dead: whether no rank runs any more, or may run.
    """

    def __init__(self, states: Iterable[RankState], by_flight_recorder: bool = False) -> None:
        self.by_rank = {state.rank: state for state in states if state.rank is not None}
        self.by_flight_recorder = by_flight_recorder
        self.all_dead = all(state.state == "dead" for state in self.by_rank.values())
        self.waits: dict[int, str] = {}
        for rank, state in self.by_rank.items():
            groups, peers = state.progress.groups, state.progress.peers
            calls = [
                *((g.blocked, format_call(g.blocked, g.group, by_flight_recorder)) for g in groups if g.blocked),
                *((p.blocked, format_peer_call(p.blocked, p, by_flight_recorder)) for p in peers if p.blocked),
            ]
            long = [(call.since_ns, text) for call, text in calls if self.waits_long(rank, call)]
            if long:
                self.waits[rank] = min(long)[1]

    @property
    def source(self) -> str:
        """What tells of a rank."""
        return "flight recorder's dump" if self.by_flight_recorder else "ring"

    def waits_long(self, rank: int, blocked: Blocked) -> bool:
        """Tell whether a rank that has not ended has waited in a call for a second or more.

        Where all ranks are dead, what each waited in when it died is told: they may have been killed for that.
        """
        state = self.by_rank[rank]
        if self.all_dead:
            return True
        return state.state not in ("stopped", "dead") and state.now_ns - blocked.since_ns >= MIN_WAIT_NS

    def remembers(self, rank: int, wait_ns: int) -> bool:
        """Tell whether what was read of a rank's ring goes back for as long as others have waited."""
        state = self.by_rank[rank]
        return state.progress.first_ns is None or state.now_ns - state.progress.first_ns >= wait_ns
