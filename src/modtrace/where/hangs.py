"""Ranks that wait in a collective, and those that keep them waiting, in a sentence for each group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..timeline import ThreadStack
from .durations import format_durations
from .rank_collectives import Blocked, GroupProgress
from .rank_groups import format_ranges, format_stack
from .rank_state import RankState

__all__ = ["MIN_WAIT_NS", "Hang", "find_hangs"]

MIN_WAIT_NS = 1_000_000_000
"""What a rank waits for less than this is as usual: rings are not read at one moment."""

_DEFAULT_GROUP = "0"


class Hang(NamedTuple):
    """A collective that ranks wait in.

    Attributes:
        operator: as `torch.distributed` calls it.
        group: the name of the group.
        counter: which collective of the group it is, from 0.
        waiting: the ranks that wait in it, ascending.
        not_called: the ranks that have not called it and run.
        dead: the ranks that died without calling it.
        called_other: (rank, operator) of those that called another one in its place.
        text: all that as a sentence.
    """

    operator: str
    group: str
    counter: int
    waiting: tuple[int, ...]
    not_called: tuple[int, ...]
    dead: tuple[int, ...]
    called_other: tuple[tuple[int, str], ...]
    text: str


def find_hangs(states: Iterable[RankState]) -> list[Hang]:
    """Return one hang for each group that ranks have waited in for a second or more, the longest first."""
    by_rank = {state.rank: state for state in states if state.rank is not None}
    members: dict[str, dict[int, GroupProgress]] = {}
    for rank, state in by_rank.items():
        for progress in state.groups:
            members.setdefault(progress.group, {})[rank] = progress
    found = []
    for group, of_rank in members.items():
        waiting = {
            rank: progress.blocked
            for rank, progress in of_rank.items()
            if progress.blocked is not None
            and by_rank[rank].state != "stopped"
            and by_rank[rank].now_ns - progress.blocked.since_ns >= MIN_WAIT_NS
        }
        waiting = {rank: blocked for rank, blocked in waiting.items() if by_rank[rank].state != "dead"}
        if waiting:
            since = max(by_rank[rank].now_ns - blocked.since_ns for rank, blocked in waiting.items())
            found.append((since, _hang(group, of_rank, waiting, by_rank)))
    return [hang for _, hang in sorted(found, key=lambda pair: -pair[0])]


def _hang(
    group: str,
    of_rank: dict[int, GroupProgress],
    waiting: dict[int, Blocked],
    by_rank: dict[int, RankState],
) -> Hang:
    first = min(blocked.counter for blocked in waiting.values())
    inside = {rank: blocked for rank, blocked in waiting.items() if blocked.counter == first}
    called = [blocked.operator for blocked in inside.values()]
    # Of two operators in one place the one that more ranks called is meant.
    operator = max(dict.fromkeys(sorted(called)), key=called.count)
    operators = {rank: progress.operators.get(first, operator) for rank, progress in of_rank.items()}
    others = sorted((rank, other) for rank, other in operators.items() if other != operator)
    agreeing = sorted(rank for rank, blocked in inside.items() if blocked.operator == operator)
    expected = next((progress.ranks for progress in of_rank.values() if progress.ranks), tuple(of_rank))
    missing = sorted(
        rank for rank in expected if rank in by_rank and (rank not in of_rank or of_rank[rank].last < first)
    )
    dead = [rank for rank in missing if by_rank[rank].state == "dead"]
    not_called = [rank for rank in missing if by_rank[rank].state != "dead"]
    unknown = sorted(rank for rank in expected if rank not in by_rank)
    description = next((progress.description for progress in of_rank.values() if progress.description), "")
    what = f"{operator} #{first}" + ("" if group == _DEFAULT_GROUP else f" of group {description or group}")
    seconds = [(by_rank[rank].now_ns - inside[rank].since_ns) / 1e9 for rank in agreeing]
    where = _places([by_rank[rank] for rank in agreeing], [inside[rank].tid for rank in agreeing])
    verb = "waits" if len(agreeing) == 1 else "wait"
    head = f"{_ranks(agreeing)} {verb} in {what} for {format_durations(seconds)}" + (f", in {where}" if where else "")
    parts = [head]
    parts += [f"rank {rank} called {other} #{first} instead" for rank, other in others]
    if dead:
        parts.append(f"{_ranks(dead)} died before calling it{_last_places(dead, by_rank)}")
    for ranks, place in _by_place(not_called, by_rank):
        parts.append(f"{_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} not called it: {place}")
    if unknown:
        parts.append(f"of {_ranks(unknown)} there is no ring")
    if len(parts) == 1:
        parts.append("all ranks called it, so it does not complete")
    hang = (tuple(agreeing), tuple(not_called), tuple(dead), tuple(others))
    return Hang(operator, group, first, *hang, "; ".join(parts))


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranges(ranks)}"


def _places(states: Sequence[RankState], tids: Sequence[int]) -> str:
    """Return the modules that the threads are in, where all agree; else nothing."""
    stacks = set()
    for state, tid in zip(states, tids, strict=True):
        thread = next((thread for thread in state.threads if thread.tid == tid), None)
        stacks.add(format_stack(thread.calls) if thread is not None else "")
    return stacks.pop() if len(stacks) == 1 else ""


def _by_place(ranks: Sequence[int], by_rank: dict[int, RankState]) -> list[tuple[list[int], str]]:
    """Return the ranks by the place they are in, with for how long, and for how long usually."""
    together: dict[str, list[int]] = {}
    for rank in ranks:
        thread = _main_thread(by_rank[rank])
        together.setdefault(format_stack(thread.calls) if thread else "", []).append(rank)
    return [(members, _describe_place(stack, members, by_rank)) for stack, members in together.items()]


def _describe_place(stack: str, ranks: Sequence[int], by_rank: dict[int, RankState]) -> str:
    states = [by_rank[rank] for rank in ranks]
    if not stack:
        return f"in no module for {format_durations([(s.now_ns - s.last_ns) / 1e9 for s in states])}"
    innermost = [(state, thread.calls[-1]) for state in states if (thread := _main_thread(state))]
    text = f"in {stack} for {format_durations([(state.now_ns - call.since_ns) / 1e9 for state, call in innermost])}"
    usual = [ns / 1e9 for state, call in innermost if (ns := state.usual_ns.get((call.fqn, call.phase))) is not None]
    return text + (f" (usually {format_durations(usual)})" if usual else "")


def _last_places(ranks: Sequence[int], by_rank: dict[int, RankState]) -> str:
    places = {format_stack(thread.calls) if (thread := _main_thread(by_rank[rank])) else "" for rank in ranks}
    place = places.pop() if len(places) == 1 else ""
    return f", in {place}" if place else ""


def _main_thread(state: RankState) -> ThreadStack | None:
    """Return the first thread that is in a module."""
    return next((thread for thread in state.threads if thread.calls), None)
