"""Groups of ranks → a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .._terminal import printable
from ..timeline import ThreadStack
from .durations import format_durations
from .hangs import find_hangs
from .rank_groups import RankGroup, format_stack, headline
from .rank_state import RankState

__all__ = ["render"]

_MAX_PIDS = 2
_COLORS = {"running": "green", "dead": "red", "stopped": "dim", "unknown": "yellow"}


def render(groups: Sequence[RankGroup], errors: Iterable[str] = ()) -> RenderableType:
    """Return headline and hangs where there are several ranks, a line per group and open thread, and the errors."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "pid", "state", "step", "thread", "in"):
        table.add_column(column, overflow="fold")
    for column in ("for", "usually"):
        table.add_column(column, justify="right")
    for group in groups:
        first = group.ranks[0]
        step = "" if first.step is None else str(first.step)
        head: list[RenderableType] = [
            _text(group.label),
            _pids(group),
            Text(first.state, style=_COLORS[first.state]),
            step,
        ]
        for thread_index, (thread, calls) in enumerate(group.stacks):
            threads = [_open_thread(rank, thread_index) for rank in group.ranks]
            since_ns = [stack.calls[-1].since_ns for stack in threads]
            hung = any(rank.seems_hung(stack) for rank, stack in zip(group.ranks, threads, strict=True))
            style = "bold red" if hung else ""
            module_class = threads[0].calls[-1].module_class
            where = format_stack(calls) + (f" ({module_class})" if module_class else "")
            duration = _text(_lasted(since_ns, group), style)
            table.add_row(*head, _text(thread), _text(where, style), duration, _usually(group, *calls[-1]))
            head = ["", "", "", ""]
        if not group.stacks:
            table.add_row(*head, "", "no module", _lasted([rank.last_ns for rank in group.ranks], group), "")
    lines: list[RenderableType] = [_text(error, "red") for error in errors]
    if sum(len(group.ranks) for group in groups) > 1:
        lines.append(_text(headline(groups), "bold"))
        hangs = find_hangs(rank for group in groups for rank in group.ranks)
        lines += [*(_text(hang.text, "bold red") for hang in hangs), ""]
    if groups:
        lines.append(table)
    return Group(*lines)


def _text(text: str, style: str = "") -> Text:
    """Return a text of unknown origin, without markup and with what a terminal would obey as escapes."""
    return Text(printable(text), style=style)


def _pids(group: RankGroup) -> str:
    """Return the process ids, of many the first."""
    pids = [str(rank.pid) for rank in group.ranks]
    return ", ".join(pids) if len(pids) <= _MAX_PIDS else f"{pids[0]} …"


def _open_thread(rank: RankState, thread_index: int) -> ThreadStack:
    """Return the group's n-th thread with open calls, of one of its ranks."""
    return [thread for thread in rank.threads if thread.calls][thread_index]


def _usually(group: RankGroup, fqn: str, phase: str) -> str:
    """Return what the call usually takes, where any of the rings knows it."""
    known = [rank.usual_ns[fqn, phase] / 1e9 for rank in group.ranks if (fqn, phase) in rank.usual_ns]
    return format_durations(known) if known else ""


def _lasted(since_ns: Sequence[int], group: RankGroup) -> str:
    """Return for how long it has lasted; of a recording that is over, when it ended."""
    if group.ranks[0].state in ("running", "unknown"):
        durations = [(rank.now_ns - begin_ns) / 1e9 for rank, begin_ns in zip(group.ranks, since_ns, strict=True)]
        return format_durations(durations)
    return f"until {datetime.fromtimestamp(max(rank.last_unix_ns for rank in group.ranks) / 1e9):%F %T}"
