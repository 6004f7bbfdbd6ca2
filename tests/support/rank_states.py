"""States of ranks that hang, made without a ring."""

from __future__ import annotations

from typing import Any

from modtrace.live.rank_state import (
    Blocked,
    GroupProgress,
    PeerProgress,
    RankProgress,
    read_rank_progress,
)
from modtrace.live.where import RankState
from modtrace.timeline import Group, OpenCall, RingAnalysis, ThreadStack
from tests.support.event_script import EventScript

SECOND = 10**9


NOW = 100 * SECOND


def called(*operators: str, waits_s: float | None = None, group: str = "0", ranks: int = 4) -> GroupProgress:
    """Progress after these collectives, the last of which has been waited in for so many seconds."""
    last = len(operators) - 1
    blocked = None if waits_s is None else Blocked(operators[-1], last, NOW - int(waits_s * SECOND), 7)
    known = Group(group, tuple(range(ranks)), "default_pg")
    return GroupProgress(known, last, operators, blocked)


def state(rank: int, *progress: GroupProgress | PeerProgress, **fields: Any) -> RankState:
    known = {"state": "running", "usual_ns": {}, "stack": (), "first_ns": None} | fields
    thread = ThreadStack("MainThread", 7, known["stack"], NOW - 25 * SECOND)
    groups = tuple(one for one in progress if isinstance(one, GroupProgress))
    peers = tuple(one for one in progress if isinstance(one, PeerProgress))
    return RankState(
        path=f"{rank}.modtrace",
        rank=rank,
        pid=100 + rank,
        engine="native",
        state=known["state"],
        step=3,
        threads=(thread,),
        now_ns=NOW,
        last_unix_ns=0,
        usual_ns=known["usual_ns"],
        progress=RankProgress(groups, peers, known["first_ns"]),
    )


def calls(*fqns: str, phase: str = "forward", since_s: float = 25) -> tuple[OpenCall, ...]:
    return tuple(OpenCall(fqn, phase, NOW - int(since_s * SECOND)) for fqn in fqns)


def progress(script: EventScript) -> GroupProgress:
    (group,) = read_rank_progress(RingAnalysis(script.snapshot())).groups
    return group
