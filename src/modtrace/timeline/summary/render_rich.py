"""A summary as a table of rich, for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ..._terminal import printable
from .cells import TEXT_COLUMNS, headings_and_cells

if TYPE_CHECKING:
    from .module_summary import Summary

__all__ = ["render_rich"]


def render_rich(summary: Summary) -> Table:
    """Return the table; names that are too long for the terminal are folded, numbers are not."""
    caption = summary.footer or None
    table = Table(caption=caption, caption_justify="left", header_style="bold", box=None, pad_edge=False)
    headings, rows = headings_and_cells(summary)
    for index, heading in enumerate(headings):
        is_text = index < TEXT_COLUMNS
        title = heading.replace(" ", "\n")
        table.add_column(title, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for cells in rows:
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table
