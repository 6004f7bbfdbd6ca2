"""A summary as plain text, for terminals and pipes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...._tables import shortened, to_text, without_columns
from ...._terminal import counted, printable, wrapped
from ..module_tree import in_tree_order
from ..overview import overview_lines, steps_note
from .cells import module_table, step_table

if TYPE_CHECKING:
    from ..module_summary import Summary

__all__ = ["render_steps", "render_text", "render_tree"]

_GAP = "  "
_MIN_TREE_NAME_WIDTH = 8


def render_text(summary: Summary, width: int | None = None) -> str:
    """Return header, table and what is not in it; names to the left and numbers to the right.

    Args:
        summary: what to show.
        width: characters in a line: first the columns that matter least are left out, then names are shortened from
            the left. None: nothing is.
    """
    table, left_out = without_columns(module_table(summary), width)
    lines = [*_header(summary, width), *to_text(table, width)]
    lines += wrapped(summary.note, width)
    if "% step" in table.headings:
        lines += _share_notes(summary, width)
    lines += _left_out(left_out, width)
    return "\n".join(lines)


def render_steps(summary: Summary, limit: int | None = None, width: int | None = None) -> str:
    """Return the table of steps, slowest first, and how to read it."""
    table, left_out = without_columns(step_table(summary), width)
    shown = table.first_rows(limit)
    lines = to_text(shown, width)
    hidden = len(table.rows) - len(shown.rows)
    if hidden:
        lines.append(counted(hidden, "more step"))
    lines += wrapped(steps_note(summary.overview), width)
    if "after" in table.headings:
        lines += wrapped("after: behind the last span, where the optimizer runs; nothing marks its own time", width)
    if "backward()" in table.headings:
        waiting = ", with waiting for other ranks" if summary.overview and summary.overview.communication else ""
        lines += wrapped(f"backward(): from its call to its return{waiting}", width)
    if not all(step.whole for step in summary.steps):
        lines += wrapped("+: its beginning or end is not marked, so it may have been longer", width)
    lines += _left_out(left_out, width)
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
    drawn = in_tree_order(summary.rows)
    least = max((len(branch) for _, _, branch in drawn), default=0) + _MIN_TREE_NAME_WIDTH
    while width is not None and len(widths) > 1 and sum(widths) + len(_GAP) * len(widths) + least > width:
        widths.pop()
    shown = len(widths)
    lines = [_GAP.join([*map(str.rjust, headings[:shown], widths), "module"])]
    for row, path, branch in drawn:
        numbers = _GAP.join(map(str.rjust, of_row[row.fqn][:shown], widths))
        name = printable(f"{path}: {row.module_class}" if path != row.module_class else path)
        room = None if width is None else max(width - len(numbers) - len(_GAP) - len(branch), _MIN_TREE_NAME_WIDTH)
        lines.append(f"{numbers}{_GAP}{branch}{shortened(name, room)}")
    return "\n".join(
        [
            *_header(summary, width),
            *lines,
            *wrapped(summary.note, width),
            *_share_notes(summary, width),
            *_left_out(headings[shown:], width),
        ]
    )


def _share_notes(summary: Summary, width: int | None) -> list[str]:
    """Say what 100 % is, where that is more than the steps shown or a row is above it."""
    notes: list[str] = []
    if summary.others_ns:
        notes += wrapped("% step: of the time of all processes, each from its first span to its last", width)
    if summary.steps_ns and any(row.total_ns > summary.steps_ns for row in summary.rows):
        notes += wrapped("% step above 100: threads ran at once, and each counts", width)
    return notes


def _header(summary: Summary, width: int | None) -> list[str]:
    if summary.overview is None:
        return []
    header = overview_lines(summary.overview, summary.steps)
    return [*(line for text in header for line in wrapped(printable(text), width)), ""]


def _left_out(headings: Sequence[str], width: int | None) -> list[str]:
    if not headings:
        return []
    return wrapped(f"left out for want of room: {', '.join(headings)}; a wider terminal or a pipe has them", width)
