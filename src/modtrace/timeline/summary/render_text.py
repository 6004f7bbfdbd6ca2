"""A summary as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._terminal import printable
from .cells import TEXT_COLUMNS, headings_and_cells

if TYPE_CHECKING:
    from .module_summary import Summary

__all__ = ["render_text"]


def render_text(summary: Summary) -> str:
    """Return aligned columns, names to the left and numbers to the right, and the footer."""
    headings, rows = headings_and_cells(summary)
    lines = [headings, *([printable(cell) for cell in cells] for cells in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            cell.ljust(width) if index < TEXT_COLUMNS else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    ]
    return "\n".join([*aligned, *([summary.footer] if summary.footer else [])])
