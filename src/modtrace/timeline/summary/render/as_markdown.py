"""A summary as GitHub tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...._tables import to_markdown
from ..overview import steps_note
from .cells import module_table, step_table
from .device_table import device_table, device_totals

if TYPE_CHECKING:
    from ..module_summary import Summary

__all__ = ["render_markdown", "render_steps_markdown"]


def render_markdown(summary: Summary) -> str:
    """Return the table of modules, the footer below it, and what devices did where that is known."""
    lines = to_markdown(module_table(summary))
    lines += [*_paragraph(summary.footer), *_paragraph(steps_note(summary.overview))]
    if summary.device is not None:
        devices = device_table(summary.device).first_rows(len(summary.rows))
        lines += ["", device_totals(summary.device), "", *to_markdown(devices)]
    return "\n".join(lines) + "\n"


def render_steps_markdown(summary: Summary, limit: int | None = None) -> str:
    """Return the table of steps, slowest first."""
    lines = to_markdown(step_table(summary).first_rows(limit))
    return "\n".join([*lines, *_paragraph(steps_note(summary.overview))]) + "\n"


def _paragraph(text: str) -> list[str]:
    return ["", text] if text else []
