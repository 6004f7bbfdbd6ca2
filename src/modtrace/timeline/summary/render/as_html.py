"""A summary as HTML, for notebooks."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from ...._tables import to_html
from ...._terminal import printable
from ..overview import overview_lines, steps_note
from .cells import module_table, step_table
from .device_table import device_table, device_totals

if TYPE_CHECKING:
    from ..module_summary import Summary

__all__ = ["render_html"]

MAX_STEPS = 10


def render_html(summary: Summary) -> str:
    """Return header, table of modules and the slowest steps, without script or style sheet; names are escaped."""
    parts = []
    if summary.overview is not None:
        header = overview_lines(summary.overview, summary.steps)
        parts.append("<p>" + "<br>".join(html.escape(printable(line)) for line in header) + "</p>")
    parts += to_html(module_table(summary), summary.note)
    if summary.device is not None:
        parts.append(f"<p>{html.escape(device_totals(summary.device))}</p>")
        parts += to_html(device_table(summary.device).first_rows(len(summary.rows)))
    if len(summary.steps) > 1:
        steps = step_table(summary)
        hidden = len(steps.rows) - MAX_STEPS
        note = f"{hidden:,} more steps; " if hidden > 0 else ""
        parts.append("<p>Slowest steps</p>")
        whose = f"{text}; " if (text := steps_note(summary.overview)) else ""
        parts += to_html(steps.first_rows(MAX_STEPS), f"{note}{whose}after: the optimizer runs there, and has no mark")
    return "\n".join(parts) + "\n"
