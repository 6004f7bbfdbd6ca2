"""A summary as a table of rich, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from ..._terminal import printable
from .cells import TEXT_COLUMNS, headings_and_cells

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from .module_summary import Summary

__all__ = ["render_rich"]

_MIN_NAME_WIDTH = 16
_MAX_CLASS_WIDTH = 24
_GAP = 2
"""Spaces between two columns."""


class _SummaryTable:
    """The table, laid out once the width of the terminal is known."""

    def __init__(self, summary: Summary) -> None:
        self._summary = summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        caption = self._summary.footer or None
        table = Table(
            caption=caption,
            caption_justify="left",
            header_style="bold",
            box=None,
            pad_edge=False,
            padding=(0, _GAP, 0, 0),
        )
        headings, rows = headings_and_cells(self._summary)
        titles = [heading.replace(" ", "\n") for heading in headings]
        cells = [[printable(cell) for cell in row] for row in rows]
        widths = _text_widths(titles, cells, options.max_width)
        for index, title in enumerate(titles):
            table.add_column(title, justify="left" if index < TEXT_COLUMNS else "right", no_wrap=True)
        for row in cells:
            names = [_shorten(cell, width) for cell, width in zip(row, widths, strict=False)]
            table.add_row(*map(Text, [*names, *row[TEXT_COLUMNS:]]))
        yield table


def render_rich(summary: Summary) -> RenderableType:
    """Return the table; where the terminal is narrow, names are shortened from the left: their ends tell them apart."""
    return _SummaryTable(summary)


def _text_widths(titles: Sequence[str], rows: Sequence[Sequence[str]], max_width: int) -> tuple[int, int]:
    """Return how wide the columns of names and of classes may be, so that the numbers fit beside them."""
    widths = [
        max(map(cell_len, [*title.split("\n"), *(row[index] for row in rows)])) for index, title in enumerate(titles)
    ]
    name, module_class = widths[:TEXT_COLUMNS]
    left = max_width - sum(widths[TEXT_COLUMNS:]) - _GAP * len(widths)
    if name + module_class <= left:
        return name, module_class
    module_class = min(module_class, _MAX_CLASS_WIDTH, max(left // 3, 1))
    return max(left - module_class, min(name, _MIN_NAME_WIDTH)), module_class


def _shorten(text: str, width: int) -> str:
    """Return the end of a text that is too wide, behind an ellipsis."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) >= width:
        text = text[1:]
    return f"…{text}"
