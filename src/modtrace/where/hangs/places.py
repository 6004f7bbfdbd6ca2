"""Where the ranks that a hang names are, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ...timeline import Group, ThreadStack
from ..blocked import ANY_PEER, Blocked, PeerProgress
from ..durations import format_durations
from ..rank_groups import format_ranges, format_stack
from ..rank_state import RankState

__all__ = ["by_place", "common_place", "format_call", "format_peer_call", "format_ranks", "global_rank", "in_place"]

_DEFAULT_GROUP = "0"
_TOWARDS = {"send": "to", "recv": "from"}


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as a subject (`rank 3`, `ranks 0-2, 5`)."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranges(ranks)}"


def format_call(call: Blocked, group: Group, by_flight_recorder: bool = False) -> str:
    """Return which collective it is (`all_reduce #812 of group mesh_tp`)."""
    numbered_by = " (the flight recorder's number)" if by_flight_recorder else ""
    return f"{call.operator} #{call.counter}{numbered_by}{_format_group(group)}"


def format_peer_call(call: Blocked, progress: PeerProgress, by_flight_recorder: bool = False) -> str:
    """Return which send or receive it is (`recv #5 from rank 1`)."""
    peer = global_rank(progress.group, progress.peer)
    # A flight recorder does not know how many came before.
    number = "" if by_flight_recorder else f" #{call.counter}"
    text = f"{progress.operator}{number}{_format_group(progress.group)}"
    return f"{text} {_TOWARDS[progress.operator]} " + ("any rank" if peer is None else f"rank {peer}")


def global_rank(group: Group, rank_in_group: int) -> int | None:
    """Return the global rank of a peer; None for any rank."""
    if rank_in_group == ANY_PEER:
        return None
    return group.ranks[rank_in_group] if rank_in_group < len(group.ranks) else rank_in_group


def _format_group(group: Group) -> str:
    return "" if group.name == _DEFAULT_GROUP else f" of group {group.description or group.name}"


def in_place(place: str) -> str:
    """Return a place as the end of a part of a sentence; empty for none."""
    if not place:
        return ""
    return f", {place}" if place.startswith("most in ") else f", in {place}"


def common_place(states: Sequence[RankState], tids: Sequence[int]) -> str:
    """Return the modules that the threads are in, where more than half agree; else nothing.

    A thread of id 0 is the first one that is in a module.
    """
    stacks = Counter(_stack_of(state, tid) for state, tid in zip(states, tids, strict=True))
    stack, count = stacks.most_common(1)[0]
    if not stack or count == len(states):
        return stack
    return f"most in {stack}" if 2 * count > len(states) else ""


def _stack_of(state: RankState, tid: int) -> str:
    thread = next((thread for thread in state.threads if thread.tid == tid), None) if tid else _main_thread(state)
    return format_stack(thread.calls) if thread is not None else ""


def by_place(states: Sequence[RankState], waits: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Return ranks by the place they are in, with for how long, and for how long usually.

    Args:
        states: of the ranks.
        waits: what ranks wait in elsewhere.
    """
    together: dict[tuple[str, str], list[RankState]] = {}
    for state in states:
        thread = _main_thread(state)
        wait = waits.get(state.rank, "") if state.rank is not None else ""
        together.setdefault((format_stack(thread.calls) if thread else "", wait), []).append(state)
    return [
        ([state.rank for state in members if state.rank is not None], _describe_place(stack, wait, members))
        for (stack, wait), members in together.items()
    ]


def _describe_place(stack: str, wait: str, states: Sequence[RankState]) -> str:
    if wait:
        verb = "it waits" if len(states) == 1 else "they wait"
        return f"{verb} in {wait}" + (f", in {stack}" if stack else "")
    if not any(state.threads for state in states):
        return "no ring tells where"
    if not stack:
        return f"in no module for {format_durations([(s.now_ns - s.last_ns) / 1e9 for s in states])}"
    innermost = [(state, thread.calls[-1]) for state in states if (thread := _main_thread(state))]
    text = f"in {stack} for {format_durations([(state.now_ns - call.since_ns) / 1e9 for state, call in innermost])}"
    usual = [ns / 1e9 for state, call in innermost if (ns := state.usual_ns.get((call.fqn, call.phase))) is not None]
    return text + (f" (usually {format_durations(usual)})" if usual else "")


def _main_thread(state: RankState) -> ThreadStack | None:
    """Return the first thread that is in a module."""
    return next((thread for thread in state.threads if thread.calls), None)
