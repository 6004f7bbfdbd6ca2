"""Hangs that flight recorders tell, beside those that the rings tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..timeline import Group
from .blocked import Blocked
from .flight_recorder import FlightRecord
from .hangs import Hang, find_hangs, order_hangs
from .hangs.places import by_place, format_ranks
from .rank_progress import RankProgress
from .rank_state import RankState

__all__ = ["find_all_hangs"]


_DEFAULT_GROUP = "default_pg"
"""What torch says of the group of all ranks."""


def find_all_hangs(states: Sequence[RankState], records: Sequence[FlightRecord] = ()) -> list[Hang]:
    """Return the hangs that the rings tell, with what flight recorders know of them, and those that only these tell.

    The modules that ranks are in are the rings'. A ring's own counters come first: it also sees what gloo's flight
    recorder does not, sends and receives.
    """
    hangs = find_hangs(states)
    if not records:
        return hangs
    by_rank = {state.rank: state for state in states if state.rank is not None}
    groups = _Groups(by_rank, records)
    joined = [_join(record, by_rank.get(record.rank), groups) for record in records]
    by_recorder = {_key(hang): hang for hang in find_hangs(joined, by_flight_recorder=True)}
    found = []
    for hang in hangs:
        same = by_recorder.pop(_key(hang), None)
        if same is not None:
            hang = hang._replace(text=f"{hang.text}; {_what_is_said(same, hang)}", details=same.details)
        found.append(hang)
    for hang in by_recorder.values():
        text = "; ".join((hang.text, *hang.details))
        elsewhere = by_place([by_rank[rank] for rank in hang.unknown if rank in by_rank], {})
        text += "".join(f"; by the ring, {format_ranks(ranks)}: {place}" for ranks, place in elsewhere)
        found.append(hang._replace(text=text))
    return order_hangs(found)


def _what_is_said(by_recorder: Hang, by_ring: Hang) -> str:
    """Return what the flight recorder says of a hang; of whom, where it has no dump of those that wait by the rings."""
    others = set(by_recorder.waiting).isdisjoint(by_ring.waiting)
    of_whom = f" of {format_ranks(by_recorder.waiting)}" if others else ""
    what = ", ".join((f"{by_recorder.operator} #{by_recorder.counter}", *by_recorder.details))
    return f"the flight recorder says{of_whom} {what}"


class _Groups:
    """The groups of a job, with their ranks wherever anyone knows them: gloo's recorder does not."""

    def __init__(self, states: Mapping[int, RankState], records: Sequence[FlightRecord]) -> None:
        # Torch gave one name to several groups that share no rank.
        self._by_name: dict[str, dict[int, Group]] = {}
        for state in states.values():
            for group in (progress.group for progress in state.progress.groups):
                if group.ranks:
                    self._by_name.setdefault(group.name, {})[group.ranks[0]] = group
        self._all_ranks = tuple(sorted({*states, *(record.rank for record in records)}))

    def with_ranks(self, group: Group, rank: int) -> Group:
        if group.ranks:
            return group
        if group.description == _DEFAULT_GROUP and group.name not in self._by_name:
            return group._replace(ranks=self._all_ranks)
        return next((known for known in self._by_name.get(group.name, {}).values() if rank in known.ranks), group)


def _join(record: FlightRecord, ring: RankState | None, groups: _Groups) -> RankState:
    """Return the state of a rank with what its recorder says; times count back from when that was written."""
    if ring is None:
        ring = RankState(
            path=record.path,
            rank=record.rank,
            pid=0,
            engine="",
            state="unknown",
            step=None,
            threads=(),
            now_ns=record.dumped_ns,
            last_unix_ns=record.dumped_ns,
        )
    later_ns = record.dumped_ns - ring.now_ns

    def moved(blocked: Blocked | None) -> Blocked | None:
        return None if blocked is None else blocked._replace(since_ns=blocked.since_ns - later_ns)

    collectives = (p._replace(group=groups.with_ranks(p.group, record.rank)) for p in record.groups)
    peers = (p._replace(group=groups.with_ranks(p.group, record.rank)) for p in record.peers)
    progress = RankProgress(
        tuple(p._replace(blocked=moved(p.blocked)) for p in collectives),
        tuple(p._replace(blocked=moved(p.blocked)) for p in peers),
    )
    return ring._replace(progress=progress)


def _key(hang: Hang) -> tuple[Group, str, tuple[int, ...], tuple[int, ...]]:
    """Return what tells a hang from others: its group, and of a send or receive who waits for whom."""
    group = hang.group._replace(description="")
    if hang.operator not in ("send", "recv"):
        return group, "", (), ()
    return group, hang.operator, hang.waiting, (*hang.not_called, *hang.dead, *hang.unknown)
