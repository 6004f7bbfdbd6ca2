"""A summary as a GitHub table."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..._terminal import printable
from .cells import TEXT_COLUMNS, headings_and_cells

if TYPE_CHECKING:
    from .module_summary import Summary

__all__ = ["render_markdown"]

_PLAIN_NAME = re.compile(r"[\w.:\- ]+", re.ASCII)


def render_markdown(summary: Summary) -> str:
    """Return a table with a heading line, and the footer below it."""
    headings, rows = headings_and_cells(summary)
    rule = ["---"] * TEXT_COLUMNS + ["---:"] * (len(headings) - TEXT_COLUMNS)
    cells = [[*map(_name, cells[:TEXT_COLUMNS]), *cells[TEXT_COLUMNS:]] for cells in rows]
    lines = ["| " + " | ".join(line) + " |" for line in (headings, rule, *cells)]
    return "\n".join([*lines, *(["", summary.footer] if summary.footer else [])]) + "\n"


def _name(text: str) -> str:
    """Return plain names as code; in all others every ASCII sign as an entity, which Markdown takes as text."""
    escaped = printable(text)
    if _PLAIN_NAME.fullmatch(escaped):
        return f"`{escaped}`"
    return re.sub(r"[^\w\s]|_", lambda sign: f"&#{ord(sign[0])};", escaped)
