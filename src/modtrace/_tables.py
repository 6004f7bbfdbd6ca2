"""Tables for people, and their forms: text, Markdown, HTML and CSV; records as JSON values.

Tables of rich are not used: they cannot leave out columns by priority.
"""

import csv
import html
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from ._terminal import cell_width, counted, padded, printable

CellKind = Literal["name", "text", "number"]

_GAP = "  "
_GOOD_NAME_WIDTH = 24
"""For names this long columns are left out."""
_MIN_NAME_WIDTH = 12
_PLAIN_NAME = re.compile(r"[\w.:\- ]+", re.ASCII)


class Table(NamedTuple):
    """A table.

    Attributes:
        headings: what stands above each column, no two alike.
        rows: the cells, as they are: whoever writes them makes them safe for its format.
        kinds: what each column holds: a "name" of a module or class, a "text" of ours, or a "number".
        hide_order: how soon each column is left out if there is no room: the highest first, and 0 only if names would
            not even have `_MIN_NAME_WIDTH`.
    """

    headings: list[str]
    rows: list[list[str]]
    kinds: list[CellKind]
    hide_order: list[int]

    def first_rows(self, limit: int | None) -> "Table":
        """Keep the first `limit` rows; None: all."""
        return self._replace(rows=self.rows[:limit])

    def beside(self, other: "Table") -> "Table":
        """Return a table with the columns of both, which have as many rows."""
        rows = [[*cells, *more] for cells, more in zip(self.rows, other.rows, strict=True)]
        return Table(self.headings + other.headings, rows, self.kinds + other.kinds, self.hide_order + other.hide_order)


def record_table(
    columns: Sequence[tuple[str, str, int]], rows: Sequence[Any], cell: Callable[[Any, str], str]
) -> Table:
    """Return a table of records, without the columns that no record has a value for.

    Args:
        columns: heading, field and `hide_order` of each; the fields `fqn` and `module_class` are names.
        rows: the records.
        cell: a value and its field → what is in the table.
    """
    has_value = {field for _, field, _ in columns if any(getattr(row, field) not in ("", None) for row in rows)}
    shown = [column for column in columns if not rows or column[1] in has_value]
    cells = [[cell(getattr(row, field), field) for _, field, _ in shown] for row in rows]
    texts = {field for _, field, _ in shown if any(isinstance(getattr(row, field), str) for row in rows)}
    kinds: list[CellKind] = [
        "name" if field in {"fqn", "module_class"} else "text" if field in texts else "number" for _, field, _ in shown
    ]
    return Table([heading for heading, _, _ in shown], cells, kinds, [rank for _, _, rank in shown])


def to_text(table: Table, width: int | None = None) -> list[str]:
    """Return the lines of a table, numbers to the right and all else to the left.

    Args:
        table: what to show.
        width: cells in a line: names of the first column are shortened from the left. None: they are not.
    """
    widths = _widths(table)
    if width is not None and table.kinds[0] != "number":
        others = sum(widths[1:]) + len(_GAP) * (len(widths) - 1)
        widths[0] = min(widths[0], max(width - others, _MIN_NAME_WIDTH))
    lines = [table.headings, *([printable(cell) for cell in cells] for cells in table.rows)]
    return [
        _GAP.join(
            cell.rjust(column_width)
            if kind == "number"
            else padded(shortened(cell, widths[0] if index == 0 else None), column_width)
            for index, (cell, kind, column_width) in enumerate(zip(cells, table.kinds, widths, strict=True))
        ).rstrip()
        for cells in lines
    ]


def first_lines(table: Table, limit: int | None, width: int | None, noun: str) -> list[str]:
    """Return the lines of the first `limit` rows, without columns that do not fit, and how many more there are."""
    shown, _ = without_columns(table.first_rows(limit), width)
    hidden = len(table.rows) - len(shown.rows)
    return [*to_text(shown, width), *([counted(hidden, f"more {noun}")] if hidden else [])]


def without_columns(table: Table, width: int | None) -> tuple[Table, list[str]]:
    """Return the table with the columns that `width` characters have room for, and the headings of the others.

    The first column always stays.
    """
    left_out: list[str] = []
    while width is not None and len(table.headings) > 1:
        widths = _widths(table)
        if table.kinds[0] != "number":
            widths[0] = min(widths[0], _GOOD_NAME_WIDTH if any(table.hide_order) else _MIN_NAME_WIDTH)
        if sum(widths) + len(_GAP) * (len(widths) - 1) <= width:
            break
        column = max(range(len(table.hide_order)), key=lambda index: (table.hide_order[index], index))
        left_out.insert(0, table.headings[column])
        table = Table(
            table.headings[:column] + table.headings[column + 1 :],
            [cells[:column] + cells[column + 1 :] for cells in table.rows],
            table.kinds[:column] + table.kinds[column + 1 :],
            table.hide_order[:column] + table.hide_order[column + 1 :],
        )
    return table, left_out


def shortened(name: str, width: int | None) -> str:
    """Return the end of a printable name that takes more than `width` cells: there it differs from its neighbours."""
    if width is None or cell_width(name) <= width:
        return name
    ends = accumulate(cell_width(c) for c in reversed(name))
    kept = sum(taken < width for taken in ends)
    return f"…{name[len(name) - kept :]}"


def to_markdown(table: Table) -> list[str]:
    """Return the lines of a GitHub table; no cell can break it, or render as anything but text."""
    rule = ["---:" if kind == "number" else "---" for kind in table.kinds]
    cells = [[_in_markdown(cell, kind) for cell, kind in zip(row, table.kinds, strict=True)] for row in table.rows]
    return ["| " + " | ".join(line) + " |" for line in (table.headings, rule, *cells)]


def _in_markdown(cell: str, kind: CellKind) -> str:
    """Return a name that Markdown takes as text: plain ones as code, in all others every ASCII sign as an entity."""
    if kind != "name":
        return cell
    escaped = printable(cell)
    if _PLAIN_NAME.fullmatch(escaped):
        return f"`{escaped}`"
    return re.sub(r"[^\w\s]|_", lambda sign: f"&#{ord(sign[0])};", escaped)


def to_html(table: Table, note: str = "") -> list[str]:
    """Return the lines of a `<table>` without script or style sheet, with a note at its foot where there is one."""
    lines = ["<table>", f"<thead>{_html_line('th', table.headings, table.kinds)}</thead>", "<tbody>"]
    lines += [_html_line("td", cells, table.kinds) for cells in table.rows]
    lines.append("</tbody>")
    if note:
        lines.append(f'<tfoot><tr><td colspan="{len(table.headings)}">{html.escape(note)}</td></tr></tfoot>')
    return [*lines, "</table>"]


def _html_line(tag: str, cells: Sequence[str], kinds: Sequence[CellKind]) -> str:
    return "<tr>" + "".join(
        f'<{tag} style="text-align: {"right" if kind == "number" else "left"}">{html.escape(printable(cell))}</{tag}>'
        for cell, kind in zip(cells, kinds, strict=True)
    ) + "</tr>"  # fmt: skip


def to_csv(headings: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return CSV with a header line, unprintable characters of texts as escapes."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headings)
    for row in rows:
        writer.writerow([printable(cell) if isinstance(cell, str) else cell for cell in row])
    return out.getvalue()


def json_values(value: Any) -> Any:
    """Return named tuples as objects by their fields, other sequences as lists, and so what is in them."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: json_values(inner) for key, inner in value.items()}
    return [json_values(inner) for inner in value] if isinstance(value, list | tuple) else value


def _widths(table: Table) -> list[int]:
    lines = [table.headings, *([printable(cell) for cell in cells] for cells in table.rows)]
    return [max(map(cell_width, column)) for column in zip(*lines, strict=True)]
