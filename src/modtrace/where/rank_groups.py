"""Ranks that are in the same place, together: in a hang, the one that is elsewhere is what one looks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..timeline.open_calls import OpenCall
from .rank_state import RankState

__all__ = ["Group", "group", "headline", "path", "ranges"]

_NAMED = 2
"""Files without a rank that a group names; a line must stay readable."""

Place = tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


class Group(NamedTuple):
    """Ranks that agree.

    Attributes:
        ranks: in order.
        place: for each thread with open calls its name and the (fqn, phase) of these, outermost first.
    """

    ranks: tuple[RankState, ...]
    place: Place

    @property
    def label(self) -> str:
        """Its ranks (`ranks 0-2, 5`), or its files, of many the first ones."""
        numbers = [rank.rank for rank in self.ranks if rank.rank is not None]
        names = [rank.label for rank in self.ranks if rank.rank is None]
        if len(names) > _NAMED + 1:
            names[_NAMED:] = [f"{len(names) - _NAMED} more files"]
        if numbers:
            names.insert(0, f"{'rank' if len(numbers) == 1 else 'ranks'} {ranges(numbers)}")
        return ", ".join(names)

    @property
    def innermost(self) -> str:
        """The fqn of the innermost open module of its first thread, empty where there is none."""
        return self.place[0][1][-1][0] if self.place else ""


def group(states: Iterable[RankState]) -> list[Group]:
    """Put together the ranks with the same state, step and open modules; smaller groups first."""
    found: dict[tuple[str, int | None, Place], list[RankState]] = {}
    for state in sorted(states, key=lambda state: (state.rank is None, state.rank or 0, state.path)):
        place = tuple(
            (thread.thread, tuple((call.fqn, call.phase) for call in thread.calls))
            for thread in state.threads
            if thread.calls
        )
        found.setdefault((state.state, state.step, place), []).append(state)
    groups = [Group(tuple(ranks), place) for (_, _, place), ranks in found.items()]
    return sorted(groups, key=lambda group: len(group.ranks))


def headline(groups: Sequence[Group]) -> str:
    """Say in one line who is where (`rank 3 is in GPT.h.7.mlp, the other 63 in GPT.h.8.attn`)."""
    places: dict[str, list[RankState]] = {}
    for one in groups:
        places.setdefault(one.innermost, []).extend(one.ranks)
    together = sorted((Group(tuple(ranks), ()), where) for where, ranks in places.items())
    together.sort(key=lambda pair: len(pair[0].ranks))
    parts = []
    for at, (one, where) in enumerate(together):
        count = len(one.ranks)
        label = one.label
        if at == len(together) - 1 and at > 0 and count > 1:
            label = f"the other {count}"
        verb = "" if at else (" is" if count == 1 else " are")
        parts.append(f"{label}{verb} in {where or 'no module'}")
    return ", ".join(parts)


def path(calls: Sequence[tuple[str, str]] | Sequence[OpenCall]) -> str:
    """Show a stack in one line: each module below the one around it (`forward GPT › h.7 › mlp`)."""
    parts = []
    around, phase = "", ""
    for fqn, kind, *_ in calls:
        name = fqn.removeprefix(f"{around}.") if around else fqn
        parts.append(f" · {kind} {fqn}" if kind != phase else f" › {name}")
        around, phase = str(fqn), str(kind)
    return "".join(parts).removeprefix(" · ")


def ranges(numbers: Iterable[int]) -> str:
    """Write numbers short (`0-2, 5`)."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
