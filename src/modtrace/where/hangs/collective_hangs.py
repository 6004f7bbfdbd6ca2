"""Hangs in collectives: one sentence for each group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...timeline import Group
from ..blocked import Blocked, GroupProgress
from ..durations import format_durations
from .hang import Hang, Ranks
from .places import by_place, common_place, format_call, format_ranks, in_place

__all__ = ["find_collective_hangs"]


def find_collective_hangs(ranks: Ranks) -> Iterator[Hang]:
    """Yield one hang for each group that ranks have waited in for a second or more."""
    for group, members in _groups(ranks):
        waiting = {
            rank: progress.blocked
            for rank, progress in members.items()
            if progress.blocked is not None and ranks.waits_long(rank, progress.blocked)
        }
        if waiting:
            yield _hang(group, members, waiting, ranks)


def _groups(ranks: Ranks) -> list[tuple[Group, dict[int, GroupProgress]]]:
    """Return the groups with the progress of their ranks; torch gives one name to groups that share no rank."""
    by_name: dict[str, list[tuple[Group, dict[int, GroupProgress]]]] = {}
    progress = [(rank, found) for rank, state in ranks.by_rank.items() for found in state.progress.groups]
    # Those that know the ranks of their group first: of the others, a ring has lost the record.
    for rank, found in sorted(progress, key=lambda item: not item[1].group.ranks):
        known = by_name.setdefault(found.group.name, [])
        members = next(
            (m for g, m in known if g.ranks == found.group.ranks or (not found.group.ranks and rank in g.ranks)), None
        )
        if members is None:
            known.append((found.group, members := {}))
        members[rank] = found
    return [pair for pairs in by_name.values() for pair in pairs]


def _hang(group: Group, members: dict[int, GroupProgress], waiting: dict[int, Blocked], ranks: Ranks) -> Hang:
    by_rank = ranks.by_rank
    first = min(blocked.counter for blocked in waiting.values())
    inside = {rank: blocked for rank, blocked in waiting.items() if blocked.counter == first}
    called = [blocked.operator for blocked in inside.values()]
    # Of two operators in one place the one that more ranks called is meant.
    operator = max(dict.fromkeys(sorted(called)), key=called.count)
    operators = {rank: progress.operator(first) or operator for rank, progress in members.items()}
    others = sorted((rank, other) for rank, other in operators.items() if other != operator)
    agreeing = sorted(rank for rank, blocked in inside.items() if blocked.operator == operator)
    waits_ns = [by_rank[rank].now_ns - inside[rank].since_ns for rank in agreeing]
    expected = group.ranks or tuple(members)
    missing = sorted(
        rank for rank in expected if rank in by_rank and (rank not in members or members[rank].last < first)
    )
    dead = [rank for rank in missing if by_rank[rank].state == "dead"]
    stopped = [rank for rank in missing if by_rank[rank].state == "stopped"]
    not_called = [rank for rank in missing if by_rank[rank].state not in ("dead", "stopped")]
    place = common_place([by_rank[rank] for rank in agreeing], [inside[rank].tid for rank in agreeing])
    verb = "died waiting" if ranks.all_dead else "waits" if len(agreeing) == 1 else "wait"
    what = format_call(inside[agreeing[0]], group, ranks.by_flight_recorder)
    waited = "" if ranks.all_dead else f" for {format_durations([ns / 1e9 for ns in waits_ns])}"
    parts = [f"{format_ranks(agreeing)} {verb} in {what}{waited}" + in_place(place)]
    parts += _others(others, first)
    if dead:
        last = common_place([by_rank[rank] for rank in dead], [0] * len(dead))
        parts.append(f"{format_ranks(dead)} died before calling it" + in_place(last))
    for found, where in by_place([by_rank[rank] for rank in not_called], ranks.waits):
        has = "has" if len(found) == 1 else "have"
        known = all(ranks.remembers(rank, max(waits_ns)) for rank in found)
        as_far = "" if known else ", as far as its ring goes back"
        parts.append(f"{format_ranks(found)} {has} not called it{as_far}: {where}")
    if stopped:
        parts.append(f"the recording of {format_ranks(stopped)} had been stopped")
    unknown = sorted(rank for rank in expected if rank not in by_rank)
    if unknown:
        parts.append(f"of {format_ranks(unknown)} there is no {ranks.source}")
    if len(parts) == 1:
        parts.append("all ranks called it, so it does not complete")
    return Hang(
        operator=operator,
        group=group,
        counter=first,
        waiting=tuple(agreeing),
        not_called=tuple(not_called),
        dead=tuple(dead),
        called_other=tuple(others),
        unknown=tuple(unknown),
        wait_ns=max(waits_ns),
        text="; ".join(parts),
        details=inside[agreeing[0]].details,
    )


def _others(others: Sequence[tuple[int, str]], counter: int) -> list[str]:
    """Return a part for each operator that ranks called in its place."""
    by_operator: dict[str, list[int]] = {}
    for rank, operator in others:
        by_operator.setdefault(operator, []).append(rank)
    return [f"{format_ranks(found)} called {operator} #{counter} instead" for operator, found in by_operator.items()]
