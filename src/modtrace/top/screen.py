"""What a job does, as lines of a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from .._tables import shortened
from .._terminal import counted, padded, printable
from ..where import RankGroup, find_hangs
from ..where.durations import format_durations
from ..where.rank_groups import format_stack
from .job_rates import ModuleRate, merge_ranks, sort_modules
from .rank_rates import RankRates
from .shown import View

__all__ = ["JobView", "render"]

_UNLIMITED = 1 << 16
_MIN_ROWS = 3
_NUMBER_WIDTH = 9


class JobView(NamedTuple):
    """What was read of a job.

    Attributes:
        ranks: in order of their ranks.
        errors: what is wrong with rings that could not be read, or that there are none yet.
        read_s: how long it took to read them.
    """

    ranks: Sequence[RankRates]
    errors: Sequence[str]
    read_s: float

    @property
    def depth(self) -> int:
        """How many levels of modules there are."""
        return max((row.fqn.count(".") + 1 for rank in self.ranks for row in rank.rows), default=1)


def render(job: JobView, view: View, width: int, height: int | None = None) -> RenderableType:
    """Return the screen: a line on the job, what is wrong with it, and a table.

    Args:
        job: what was read.
        view: what to show of it.
        width: columns of the terminal.
        height: its lines; None: as many as there are, and no help on keys.
    """
    chosen = job.ranks if view.rank is None else job.ranks[view.rank : view.rank + 1] or job.ranks[-1:]
    lines: list[RenderableType] = [_line(_headline(job, chosen, view), "bold", width)]
    alarms = [*(printable(error) for error in job.errors), *_alarms(job.ranks)]
    room = max(1, (height or _UNLIMITED) // 3)
    for number, alarm in enumerate(alarms):
        wrapped = wrap(alarm, width) or [""]
        if len(wrapped) > room:
            lines.append(
                _line(f"… and {len(alarms) - number} more", "red", width) if number else _line(alarm, "bold red", width)
            )
            break
        room -= len(wrapped)
        lines += [_line(part, "bold red", width) for part in wrapped]
    table = _rank_table(job.ranks, width) if view.by_rank else _module_table(chosen, view, width)
    if height is None:
        return Group(*lines, Text(""), *table)
    head, rows = table[0], table[1:]
    room = max(_MIN_ROWS, height - len(lines) - 3)  # beside a blank line, the table's head and the keys
    view.first = min(view.first, max(0, len(rows) - room))
    shown = rows[view.first : view.first + room]
    blank = [Text("") for _ in range(room - len(shown))]
    place = f"{view.first + 1}–{view.first + len(shown)} of {len(rows)}  " if len(rows) > room else ""
    return Group(*lines, Text(""), head, *shown, *blank, _line(place + view.help, "dim", width))


def _headline(job: JobView, chosen: Sequence[RankRates], view: View) -> str:
    states = [rank.state for rank in chosen]
    parts = []
    if states:
        label = printable(states[0].label) if len(states) == 1 else f"{len(states):,} ranks"
        counts = {state.state: 0 for state in states}
        for state in states:
            counts[state.state] += 1
        parts.append(
            label + " " + ", ".join(f"{n:,} {name}" if len(states) > 1 else name for name, n in counts.items())
        )
        steps = sorted({state.step for state in states if state.step is not None})
        if steps:
            parts.append(f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}")
        rates = sorted(rank.steps_per_s for rank in chosen if rank.steps_per_s is not None)
        if rates:
            parts.append(f"{_rate(rates[len(rates) // 2])} steps/s")
        measured = [rank for rank in chosen if rank.window_ns]
        if measured:
            waiting = sum(rank.communication_ns / rank.window_ns for rank in measured) / len(measured)
            parts.append(f"communication {waiting:.0%}")
            parts.append(f"last {format_durations([max(rank.window_ns for rank in measured) / 1e9])}")
    if view.paused:
        parts.insert(0, "PAUSED")
    if job.read_s > 1:
        parts.append(f"read in {job.read_s:.1f} s")
    return " · ".join(parts) or "no rank yet"


def _alarms(ranks: Sequence[RankRates]) -> list[str]:
    """Return who hangs, stalls or died, in sentences."""
    hangs = find_hangs(rank.state for rank in ranks)
    alarms = [printable(hang.text) for hang in hangs if hang.is_cause]
    blamed = {rank for hang in hangs for rank in (*hang.waiting, *hang.blamed)}
    for rank in ranks:
        state = rank.state
        for thread in state.threads:
            if state.seems_hung(thread) and state.rank not in blamed:
                lasted = format_durations([(state.now_ns - thread.calls[-1].since_ns) / 1e9])
                alarms.append(printable(f"{state.label} stays in {format_stack(thread.calls)} for {lasted}"))
    dead = tuple(rank.state for rank in ranks if rank.state.state == "dead")
    if dead:
        alarms.append(printable(f"{RankGroup(dead, ()).label} died"))
    return alarms


def _module_table(ranks: Sequence[RankRates], view: View, width: int) -> list[RenderableType]:
    modules = sort_modules(merge_ranks(ranks, view.max_depth), view.sort)
    several = any(module.busiest_rank is not None for module in modules)
    rates = sorted(rank.window_steps_per_s for rank in ranks if rank.window_steps_per_s)
    per_step = rates[len(rates) // 2] if rates else 0.0
    heads = ["self %", "total %", "fwd ms", "bwd ms", "calls/s", *(["most on"] if several else [])]
    sorted_by = dict(zip(("self", "total", "forward", "backward", "calls"), heads, strict=False)).get(view.sort)
    heads = [f"{head}↓" if head == sorted_by else head for head in heads]
    widths = [max(len(head), _NUMBER_WIDTH) for head in heads]
    name_width = max(12, width - sum(widths) - len(widths))
    name = ("module↓" if view.sort == "name" else "module") + (" · ms per step" if per_step else " · ms per second")
    if view.max_depth is not None:
        name += f" · {counted(view.max_depth, 'level')}"
    open_modules = {
        call.fqn for rank in ranks if rank.is_quiet for thread in rank.state.threads for call in thread.calls[-1:]
    }
    lines: list[RenderableType] = [_row(name, heads, name_width, widths, "bold underline")]
    for module in modules:
        cells = _module_cells(module, per_step, several)
        style = "bold red" if module.fqn in open_modules else ""
        lines.append(_row(printable(module.fqn), cells, name_width, widths, style))
    return lines


def _module_cells(module: ModuleRate, per_step: float, several: bool) -> list[str]:
    scale = 1e3 / per_step if per_step else 1e3
    cells = [
        f"{100 * module.self_share:.1f}",
        f"{100 * module.total_share:.1f}",
        f"{scale * module.forward_share:,.2f}",
        f"{scale * module.backward_share:,.2f}",
        f"{module.calls_per_s:,.1f}",
    ]
    if several:
        cells.append("" if module.busiest_rank is None else f"{module.busiest_rank}: {100 * module.busiest_share:.1f}")
    return cells


def _rank_table(ranks: Sequence[RankRates], width: int) -> list[RenderableType]:
    heads = ["state", "step", "steps/s", "comm %"]
    widths = [8, 8, 8, 7]
    label_width = max((len(rank.state.label) for rank in ranks), default=4)
    label_width = min(max(label_width, 4), max(4, width // 4))
    lines: list[RenderableType] = [_row("rank", [*heads, " in"], label_width, [*widths, 0], "bold underline")]
    for rank in ranks:
        state = rank.state
        thread = next((thread for thread in state.threads if thread.calls), None)
        place = "no module"
        if thread is not None:
            since = format_durations([(state.now_ns - thread.calls[-1].since_ns) / 1e9])
            place = f"{format_stack(thread.calls)} {since}"
        cells = [
            state.state,
            "" if state.step is None else f"{state.step:,}",
            "" if rank.steps_per_s is None else _rate(rank.steps_per_s),
            f"{rank.communication_ns / rank.window_ns:.0%}" if rank.window_ns else "",
        ]
        place_width = max(8, width - label_width - sum(widths) - len(widths) - 2)
        style = "bold red" if any(state.seems_hung(t) for t in state.threads) or state.state == "dead" else ""
        shown = shortened(printable(place), place_width)
        lines.append(_row(printable(state.label), [*cells, f" {shown}"], label_width, [*widths, 0], style))
    return lines


def _row(name: str, cells: Sequence[str], name_width: int, widths: Sequence[int], style: str) -> Text:
    text = padded(shortened(name, name_width), name_width)
    numbers = " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
    return Text(f"{text} {numbers}", style=style, no_wrap=True, overflow="crop")


def _line(text: str, style: str, width: int) -> Text:
    return Text(text if len(text) <= width else f"{text[: width - 1]}…", style=style, no_wrap=True, overflow="crop")


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}" if per_s >= 1 else f"{per_s:.2f}"
