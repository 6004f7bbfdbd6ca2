"""A summary as plain text, for terminals and pipes."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ...._tables import shortened, to_text, without_columns
from ...._terminal import printable
from ..module_tree import in_tree_order
from ..overview import overview_lines
from .cells import module_table, step_table

if TYPE_CHECKING:
    from ..module_summary import Summary

__all__ = ["render_steps", "render_text", "render_tree"]

_GAP = "  "


def render_text(summary: Summary, width: int | None = None) -> str:
    """Return header, table and what is not in it; names to the left and numbers to the right.

    Args:
        summary: what to show.
        width: characters in a line: first the columns that matter least are left out, then names are shortened from
            the left. None: nothing is.
    """
    table, left_out = without_columns(module_table(summary), width)
    lines = [*_header(summary, width), *to_text(table, width)]
    lines += _wrapped(summary.note, width)
    if left_out:
        note = f"left out for want of room: {', '.join(left_out)}; a wider terminal or a pipe has them"
        lines += _wrapped(note, width)
    return "\n".join(lines)


def render_steps(summary: Summary, limit: int | None = None, width: int | None = None) -> str:
    """Return the table of steps, slowest first, and how to read it."""
    table, _ = without_columns(step_table(summary), width)
    shown = table.first_rows(limit)
    lines = to_text(shown, width)
    hidden = len(table.rows) - len(shown.rows)
    if hidden:
        lines.append(f"{hidden:,} more {'step' if hidden == 1 else 'steps'}")
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
        lines.append(f"{numbers}{_GAP}{branch}{shortened(name, room)}")
    return "\n".join([*_header(summary, width), *lines, *_wrapped(summary.note, width)])


def _header(summary: Summary, width: int | None) -> list[str]:
    if summary.overview is None:
        return []
    header = overview_lines(summary.overview, summary.steps)
    return [*(line for text in header for line in _wrapped(printable(text), width)), ""]


def _wrapped(text: str, width: int | None) -> list[str]:
    return textwrap.wrap(text, width) if width else [text] if text else []
