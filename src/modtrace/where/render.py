"""Groups of ranks → a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .rank_groups import Group, headline, path
from .rank_state import RankState

__all__ = ["duration", "render"]

_COLORS = {"running": "green", "dead": "red", "stopped": "dim", "unknown": "yellow"}


def render(groups: Sequence[Group], errors: Iterable[str] = ()) -> RenderableType:
    """Return a headline where there are several ranks, a line per group and open thread, and what could not be read."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "state", "step", "thread", "in"):
        table.add_column(column, overflow="fold")
    table.add_column("for", justify="right")
    for one in groups:
        first = one.ranks[0]
        step = "" if first.step is None else str(first.step)
        head: list[RenderableType] = [one.label, Text(first.state, style=_COLORS[first.state]), step]
        for number, (thread, calls) in enumerate(one.place):
            table.add_row(*head, thread, path(calls), _times([_open_since(rank, number) for rank in one.ranks], one))
            head = ["", "", ""]
        if not one.place:
            table.add_row(*head, "", "no module", _times([rank.last_ns for rank in one.ranks], one))
    lines: list[RenderableType] = [Text(error, style="red") for error in errors]
    if sum(len(one.ranks) for one in groups) > 1:
        lines += [Text(headline(groups), style="bold"), ""]
    if groups:
        lines.append(table)
    return Lines(*lines)


def _open_since(rank: RankState, number: int) -> int:
    """Return when the innermost call of the group's n-th thread was entered."""
    return [thread.calls for thread in rank.threads if thread.calls][number][-1].since_ns


def _times(since: Sequence[int], one: Group) -> str:
    """Show for how long it has lasted; of a recording that is over, when it ended."""
    if one.ranks[0].state in ("running", "unknown"):
        return duration([(rank.now_ns - begin) / 1e9 for rank, begin in zip(one.ranks, since, strict=True)])
    return f"until {datetime.fromtimestamp(max(rank.last_wall_ns for rank in one.ranks) / 1e9):%F %T}"


def duration(seconds: Sequence[float]) -> str:
    """Show seconds, or the shortest and the longest of several."""
    least, most = _short(min(seconds)), _short(max(seconds))
    return least if least == most else f"{least} to {most}"


def _short(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
