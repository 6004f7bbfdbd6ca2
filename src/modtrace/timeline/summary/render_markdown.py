"""A summary as GitHub tables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..._terminal import printable
from .cells import Table, module_table, step_table

if TYPE_CHECKING:
    from .module_summary import Summary

__all__ = ["render_markdown", "render_steps_markdown"]

_PLAIN_NAME = re.compile(r"[\w.:\- ]+", re.ASCII)


def render_markdown(summary: Summary) -> str:
    """Return the table of modules, and the footer below it."""
    lines = _table_lines(module_table(summary))
    return "\n".join([*lines, *(["", summary.footer] if summary.footer else [])]) + "\n"


def render_steps_markdown(summary: Summary, limit: int | None = None) -> str:
    """Return the table of steps, slowest first."""
    table = step_table(summary)
    return "\n".join(_table_lines(table._replace(rows=table.rows[:limit]))) + "\n"


def _table_lines(table: Table) -> list[str]:
    names = table.text_columns
    rule = ["---"] * names + ["---:"] * (len(table.headings) - names)
    cells = [[*map(_name, cells[:names]), *cells[names:]] for cells in table.rows]
    return ["| " + " | ".join(line) + " |" for line in (table.headings, rule, *cells)]


def _name(text: str) -> str:
    """Return plain names as code; in all others every ASCII sign as an entity, which Markdown takes as text."""
    escaped = printable(text)
    if _PLAIN_NAME.fullmatch(escaped):
        return f"`{escaped}`"
    return re.sub(r"[^\w\s]|_", lambda sign: f"&#{ord(sign[0])};", escaped)
