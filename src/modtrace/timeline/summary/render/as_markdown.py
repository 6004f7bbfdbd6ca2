"""A summary as GitHub tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...._tables import to_markdown
from .cells import module_table, step_table

if TYPE_CHECKING:
    from ..module_summary import Summary

__all__ = ["render_markdown", "render_steps_markdown"]


def render_markdown(summary: Summary) -> str:
    """Return the table of modules, and the footer below it."""
    lines = to_markdown(module_table(summary))
    return "\n".join([*lines, *(["", summary.footer] if summary.footer else [])]) + "\n"


def render_steps_markdown(summary: Summary, limit: int | None = None) -> str:
    """Return the table of steps, slowest first."""
    return "\n".join(to_markdown(step_table(summary).first_rows(limit))) + "\n"
