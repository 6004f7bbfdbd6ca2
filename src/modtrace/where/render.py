"""Groups of ranks → a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .._terminal import printable
from .rank_groups import RankGroup, format_stack, headline
from .rank_state import RankState

__all__ = ["format_durations", "render"]

_COLORS = {"running": "green", "dead": "red", "stopped": "dim", "unknown": "yellow"}


def render(groups: Sequence[RankGroup], errors: Iterable[str] = ()) -> RenderableType:
    """Return a headline where there are several ranks, a line per group and open thread, and what could not be read."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "state", "step", "thread", "in"):
        table.add_column(column, overflow="fold")
    table.add_column("for", justify="right")
    for group in groups:
        first = group.ranks[0]
        step = "" if first.step is None else str(first.step)
        head: list[RenderableType] = [
            _text(group.label),
            Text(first.state, style=_COLORS[first.state]),
            step,
        ]
        for thread_index, (thread, calls) in enumerate(group.stacks):
            since_ns = [_open_since(rank, thread_index) for rank in group.ranks]
            table.add_row(*head, _text(thread), _text(format_stack(calls)), _lasted(since_ns, group))
            head = ["", "", ""]
        if not group.stacks:
            table.add_row(*head, "", "no module", _lasted([rank.last_ns for rank in group.ranks], group))
    lines: list[RenderableType] = [_text(error, "red") for error in errors]
    if sum(len(group.ranks) for group in groups) > 1:
        lines += [_text(headline(groups), "bold"), ""]
    if groups:
        lines.append(table)
    return Group(*lines)


def _text(text: str, style: str = "") -> Text:
    """Return a text of unknown origin, without markup and with what a terminal would obey as escapes."""
    return Text(printable(text), style=style)


def _open_since(rank: RankState, thread_index: int) -> int:
    """Return when the innermost call of the group's n-th thread was entered."""
    return [thread.calls for thread in rank.threads if thread.calls][thread_index][-1].since_ns


def _lasted(since_ns: Sequence[int], group: RankGroup) -> str:
    """Return for how long it has lasted; of a recording that is over, when it ended."""
    if group.ranks[0].state in ("running", "unknown"):
        durations = [(rank.now_ns - begin_ns) / 1e9 for rank, begin_ns in zip(group.ranks, since_ns, strict=True)]
        return format_durations(durations)
    return f"until {datetime.fromtimestamp(max(rank.last_unix_ns for rank in group.ranks) / 1e9):%F %T}"


def format_durations(seconds: Sequence[float]) -> str:
    """Return seconds for people, of several the shortest and the longest."""
    shortest, longest = _format_seconds(min(seconds)), _format_seconds(max(seconds))
    return shortest if shortest == longest else f"{shortest} to {longest}"


def _format_seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
