"""Hangs in sends and receives: one sentence for each pair of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from ..blocked import ANY_PEER, Blocked, PeerProgress
from ..durations import format_durations
from .hang import Hang, Ranks
from .places import by_place, common_place, format_peer_call, format_ranks, global_rank, in_place

__all__ = ["find_peer_hangs"]

_OTHER_END = {"send": "recv", "recv": "send"}


def find_peer_hangs(ranks: Ranks) -> Iterator[Hang]:
    """Yield one hang for each send and each receive that a rank has waited in for a second or more."""
    for rank, state in ranks.by_rank.items():
        for progress in state.progress.peers:
            if progress.blocked is not None and ranks.waits_long(rank, progress.blocked):
                yield _hang(rank, progress, progress.blocked, ranks)


def _hang(rank: int, progress: PeerProgress, blocked: Blocked, ranks: Ranks) -> Hang:
    state, group = ranks.by_rank[rank], progress.group
    wait_ns = state.now_ns - blocked.since_ns
    peer = global_rank(group, progress.peer)
    place = common_place([state], [blocked.tid])
    what = format_peer_call(blocked, progress, ranks.by_flight_recorder)
    if ranks.all_dead:
        head = f"rank {rank} died waiting in {what}{in_place(place)}"
    else:
        head = f"rank {rank} waits in {what} for {format_durations([wait_ns / 1e9])}{in_place(place)}"
    not_called: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    other_end = _OTHER_END[progress.operator]
    if peer is None:
        text = head
    elif peer not in ranks.by_rank:
        text = f"{head}; of rank {peer} there is no {ranks.source}"
    elif _has_called(rank, progress, blocked.counter, ranks):
        text = f"{head}; rank {peer} has called {other_end}, so it does not complete"
    elif ranks.by_rank[peer].state == "dead":
        dead = (peer,)
        last = common_place([ranks.by_rank[peer]], [0])
        text = f"{head}; rank {peer} died before calling {other_end}" + in_place(last)
    elif ranks.by_rank[peer].state == "stopped":
        text = f"{head}; the recording of rank {peer} had been stopped"
    else:
        not_called = (peer,)
        ((_, where),) = by_place([ranks.by_rank[peer]], ranks.waits)
        as_far = "" if ranks.remembers(peer, wait_ns) else ", as far as its ring goes back"
        text = f"{head}; {format_ranks([peer])} has not called {other_end}{as_far}: {where}"
    return Hang(
        operator=progress.operator,
        group=group,
        counter=blocked.counter,
        waiting=(rank,),
        not_called=not_called,
        dead=dead,
        called_other=(),
        unknown=(peer,) if peer is not None and peer not in ranks.by_rank else (),
        wait_ns=wait_ns,
        text=text,
        details=blocked.details,
    )


def _has_called(rank: int, progress: PeerProgress, counter: int, ranks: Ranks) -> bool:
    """Tell whether the other end of a send or receive was called, or may have been: by a receive from any rank."""
    group = progress.group
    own = group.ranks.index(rank) if rank in group.ranks else rank
    peer = global_rank(group, progress.peer)
    assert peer is not None
    return any(
        other.peer == ANY_PEER or (other.peer == own and other.last >= counter)
        for other in ranks.by_rank[peer].progress.peers
        if other.group.name == group.name and other.operator == _OTHER_END[progress.operator]
    )
