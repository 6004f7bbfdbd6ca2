"""A summary as an HTML table, for notebooks."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from ..._terminal import printable
from .cells import TEXT_COLUMNS, headings_and_cells

if TYPE_CHECKING:
    from .module_summary import Summary

__all__ = ["render_html"]


def render_html(summary: Summary) -> str:
    """Return one `<table>` without script or style sheet; names are escaped."""
    headings, rows = headings_and_cells(summary)
    lines = ["<table>", f"<thead>{_line('th', headings)}</thead>", "<tbody>"]
    lines += [_line("td", cells) for cells in rows]
    lines.append("</tbody>")
    if summary.footer:
        lines.append(f'<tfoot><tr><td colspan="{len(headings)}">{html.escape(summary.footer)}</td></tr></tfoot>')
    return "\n".join([*lines, "</table>"]) + "\n"


def _line(tag: str, cells: list[str]) -> str:
    sides = ["left"] * TEXT_COLUMNS + ["right"] * (len(cells) - TEXT_COLUMNS)
    return "<tr>" + "".join(
        f'<{tag} style="text-align: {side}">{html.escape(printable(cell))}</{tag}>'
        for side, cell in zip(sides, cells, strict=True)
    ) + "</tr>"  # fmt: skip
