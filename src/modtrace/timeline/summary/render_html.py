"""A summary as HTML, for notebooks."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from ..._terminal import printable
from .cells import Table, module_table, step_table
from .overview import overview_lines

if TYPE_CHECKING:
    from .module_summary import Summary

__all__ = ["render_html"]

MAX_STEPS = 10


def render_html(summary: Summary) -> str:
    """Return header, table of modules and the slowest steps, without script or style sheet; names are escaped."""
    parts = []
    if summary.overview is not None:
        header = overview_lines(summary.overview, summary.steps, summary.modules, summary.by)
        parts.append("<p>" + "<br>".join(html.escape(printable(line)) for line in header) + "</p>")
    parts += _table_lines(module_table(summary), summary.note)
    if len(summary.steps) > 1:
        steps = step_table(summary)
        hidden = len(steps.rows) - MAX_STEPS
        note = f"{hidden:,} more steps; " if hidden > 0 else ""
        parts.append("<p>Slowest steps</p>")
        parts += _table_lines(
            steps._replace(rows=steps.rows[:MAX_STEPS]), f"{note}after: the optimizer runs there, and has no mark"
        )
    return "\n".join(parts) + "\n"


def _table_lines(table: Table, note: str) -> list[str]:
    lines = ["<table>", f"<thead>{_line('th', table.headings, table.text_columns)}</thead>", "<tbody>"]
    lines += [_line("td", cells, table.text_columns) for cells in table.rows]
    lines.append("</tbody>")
    if note:
        lines.append(f'<tfoot><tr><td colspan="{len(table.headings)}">{html.escape(note)}</td></tr></tfoot>')
    return [*lines, "</table>"]


def _line(tag: str, cells: list[str], text_columns: int) -> str:
    sides = ["left"] * text_columns + ["right"] * (len(cells) - text_columns)
    return "<tr>" + "".join(
        f'<{tag} style="text-align: {side}">{html.escape(printable(cell))}</{tag}>'
        for side, cell in zip(sides, cells, strict=True)
    ) + "</tr>"  # fmt: skip
