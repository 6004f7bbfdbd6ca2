"""Ranks that wait in a collective, a send or a receive, and those that keep them waiting, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..rank_state import RankState
from .collective_hangs import find_collective_hangs
from .hang import MIN_WAIT_NS, Hang, Ranks
from .peer_hangs import find_peer_hangs
from .places import format_ranks

__all__ = ["MIN_WAIT_NS", "Hang", "find_hangs", "format_ranks", "order_hangs"]


def find_hangs(states: Iterable[RankState], *, by_flight_recorder: bool = False) -> list[Hang]:
    """Return one hang for each group, and each pair, that ranks have waited in for a second or more.

    Those that others follow from come first, and of these the longest.

    Args:
        states: of all ranks; those without a rank are left out.
        by_flight_recorder: the counters are the flight recorder's.
    """
    ranks = Ranks(states, by_flight_recorder)
    return order_hangs([*find_collective_hangs(ranks), *find_peer_hangs(ranks)])


def order_hangs(hangs: Sequence[Hang]) -> list[Hang]:
    """Tell causes from what follows from them, and put them in order."""
    stuck = {rank for hang in hangs for rank in hang.waiting}
    found = [hang._replace(is_cause=not hang.blamed or not hang.blamed <= stuck) for hang in hangs]
    if not any(hang.is_cause for hang in found):
        found = [hang._replace(is_cause=True) for hang in found]  # ranks that wait for each other
    return sorted(found, key=lambda h: (not h.is_cause, not h.blamed.isdisjoint(stuck), -h.wait_ns, h.waiting))
