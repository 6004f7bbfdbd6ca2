"""A summary as plain text, for terminals and pipes."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ..._terminal import printable
from .cells import Table, module_table, step_table
from .module_tree import in_tree_order
from .overview import overview_lines

if TYPE_CHECKING:
    from .module_summary import Summary

__all__ = ["render_steps", "render_text", "render_tree"]

_GOOD_NAME_WIDTH = 24
"""For names this long columns are left out."""
_MIN_NAME_WIDTH = 12
_GAP = "  "


def render_text(summary: Summary, width: int | None = None) -> str:
    """Return header, table and what is not in it; names to the left and numbers to the right.

    Args:
        summary: what to show.
        width: characters in a line: first the columns that matter least are left out, then names are shortened from
            the left. None: nothing is.
    """
    table, left_out = _without_columns(module_table(summary), width)
    lines = [*_header(summary, width), *_aligned(table, width)]
    lines += _wrapped(summary.note, width)
    if left_out:
        note = f"left out for want of room: {', '.join(left_out)}; a wider terminal or a pipe has them"
        lines += _wrapped(note, width)
    return "\n".join(lines)


def render_steps(summary: Summary, limit: int | None = None, width: int | None = None) -> str:
    """Return the table of steps, slowest first, and how to read it."""
    table, _ = _without_columns(step_table(summary), width)
    shown = table._replace(rows=table.rows[:limit])
    lines = _aligned(shown, width)
    if len(shown.rows) < len(table.rows):
        lines.append(f"{len(table.rows) - len(shown.rows):,} more steps")
    lines += _wrapped("after: behind the last span, where the optimizer runs; nothing marks its own time", width)
    if not all(step.whole for step in summary.steps):
        lines += _wrapped("+: its beginning or end is not marked, so it may have been longer", width)
    return "\n".join(lines)


def render_tree(summary: Summary, width: int | None = None) -> str:
    """Return the modules as a tree, each behind its part of all steps and its total and self time in ms."""
    whole = summary.steps_ns or sum(row.self_ns for row in summary.rows) or 1
    cells = [
        [f"{100 * row.total_ns / whole:.1f}", f"{row.total_ns / 1e6:.3f}", f"{row.self_ns / 1e6:.3f}"]
        for row in summary.rows
    ]
    of_row = dict(zip((row.fqn for row in summary.rows), cells, strict=True))
    headings = ["% step", "total ms", "self"]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    lines = [_GAP.join([*map(str.rjust, headings, widths), "module"])]
    for row, path, branch in in_tree_order(summary.rows):
        numbers = _GAP.join(map(str.rjust, of_row[row.fqn], widths))
        name = printable(f"{path}: {row.module_class}" if path != row.module_class else path)
        room = None if width is None else max(width - len(numbers) - len(_GAP) - len(branch), 8)
        lines.append(f"{numbers}{_GAP}{branch}{_shortened(name, room)}")
    return "\n".join([*_header(summary, width), *lines, *_wrapped(summary.note, width)])


def _header(summary: Summary, width: int | None) -> list[str]:
    if summary.overview is None:
        return []
    header = overview_lines(summary.overview, summary.steps, summary.modules, summary.by)
    return [*(line for text in header for line in _wrapped(printable(text), width)), ""]


def _wrapped(text: str, width: int | None) -> list[str]:
    return textwrap.wrap(text, width) if width else [text] if text else []


def _without_columns(table: Table, width: int | None) -> tuple[Table, list[str]]:
    """Return the table with the columns for which there is room, and the headings of the others."""
    left_out: list[str] = []
    while width is not None and any(table.ranks) and _least_width(table) > width:
        column = max(range(len(table.ranks)), key=lambda index: (table.ranks[index], index))
        heading = table.headings[column]
        left_out.insert(0, heading if heading != "self" else f"{table.headings[column - 1]} self")
        table = Table(
            table.headings[:column] + table.headings[column + 1 :],
            [cells[:column] + cells[column + 1 :] for cells in table.rows],
            table.text_columns - (column < table.text_columns),
            table.ranks[:column] + table.ranks[column + 1 :],
        )
    return table, left_out


def _widths(table: Table) -> list[int]:
    lines = [table.headings, *([printable(cell) for cell in cells] for cells in table.rows)]
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _least_width(table: Table) -> int:
    """Return how wide the table is with its first names shortened."""
    widths = _widths(table)
    if table.text_columns:
        widths[0] = min(widths[0], _GOOD_NAME_WIDTH)
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _aligned(table: Table, width: int | None) -> list[str]:
    widths = _widths(table)
    if width is not None and table.text_columns:
        others = sum(widths[1:]) + len(_GAP) * (len(widths) - 1)
        widths[0] = min(widths[0], max(width - others, _MIN_NAME_WIDTH))
    lines = [table.headings, *([printable(cell) for cell in cells] for cells in table.rows)]
    return [
        _GAP.join(
            _shortened(cell, widths[0] if index == 0 else None).ljust(width)
            if index < table.text_columns
            else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    ]


def _shortened(name: str, width: int | None) -> str:
    """Return the end of a name that is too long: there it differs from its neighbours."""
    return name if width is None or len(name) <= width else f"…{name[len(name) - width + 1 :]}"
