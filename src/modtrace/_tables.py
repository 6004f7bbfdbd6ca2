"""Tables and sentences for people, as text, Markdown, HTML, CSV, JSON and DataFrames; and text safe to print.

Tables of rich are not used: they cannot leave out columns by priority.
"""

import contextlib
import csv
import html
import importlib
import io
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

from ._errors import ModtraceError

SortKey = Literal["gpu", "self", "total", "forward", "backward", "recompute", "mean", "p50", "p95", "calls", "name"]
SORT_KEYS: tuple[SortKey, ...] = get_args(SortKey)
"""The keys that sort the table of modules; defined here because the help of commands is shown without NumPy."""


def is_terminal(stream: object) -> bool:
    """Return whether a standard stream is a terminal.

    A closed stream, None (closed before Python started), and a user's object without a usable `isatty` are not.
    """
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError, OSError):
        return False


def duration_text(seconds: float) -> str:
    """Return a duration for people: `0.3 ms`, `4.2 s`, `2 min 5 s`."""
    if 0 < seconds < 0.00005:
        return "<0.1 ms"
    if seconds < 0.0095:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def ms_text(ns: float) -> str:
    """Return nanoseconds as milliseconds with three decimals: `1,234.568 ms`."""
    return f"{ns / 1e6:,.3f} ms"


def counted(number: int, noun: str) -> str:
    """Return `1 span`, `1,200 spans`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ratio_text(ratio: float, form: str = "{:+.1%}", measure: str = "long") -> str:
    """Return a growth as a percentage; above 1000 % as a multiple, `243 times as long`."""
    return f"{ratio + 1:,.0f} times as {measure}" if ratio > 10 else form.format(ratio)


def wrapped(text: str, width: int | None) -> list[str]:
    """Return a text as lines of up to `width` characters; as one line if `width` is None."""
    return textwrap.wrap(text, width) if width else [text] if text else []


def printable(text: str) -> str:
    """Return text with control, format and lone surrogate characters as escapes.

    Thus a name can neither move the cursor, nor reverse the direction of the line, nor start a new line.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cell_width(text: str) -> int:
    """Return the width of a printable text in terminal cells: 2 per wide character, 0 per combining character."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # most texts do not need it

    return cell_len(text)


def padded(text: str, width: int) -> str:
    """Return a printable text, filled with blanks at its end to a minimum of `width` cells."""
    return text + " " * (width - cell_width(text))


Form = Literal["text", "md", "html", "csv", "json", "frame"]
Value = str | Callable[[Any], Any]
"""The attribute of a row that a column shows, or a function that computes the value from the row."""

_GAP = "  "
_GOOD_NAME_WIDTH = 24
"""Width of names in characters up to which columns are hidden to make room for the names."""
_MIN_NAME_WIDTH = 12
_MIN_BRANCH_WIDTH = 8
"""Minimum number of characters of a name shown after the lines of a tree."""
_PLAIN_NAME = re.compile(r"[\w.:\- ,;%()/'*=+]+", re.ASCII)
_MARKUP = re.compile(r"[<>&*_`\[\]@#$|\\~]|:(?=\S)")
_BRANCH = re.compile("[│├└─ ]*")


class Unit(NamedTuple):
    """The kind of a column's values, and how people read them."""

    # "module": fully qualified name of a module; "name": another name from the user; "text": a text of modtrace.
    kind: Literal["module", "name", "text", "number"]
    text: Callable[[Any], str] = str  # a value → its cell for people


MODULE, NAME, TEXT, NUMBER = Unit("module"), Unit("name"), Unit("text"), Unit("number")
COUNT = Unit("number", "{:,}".format)
MS = Unit("number", lambda ns: f"{ns / 1e6:.3f}")
LONG_MS = Unit("number", lambda ns: f"{ns / 1e6:,.3f}")
CHANGED_MS = Unit("number", lambda ns: f"{ns / 1e6:+.3f}")
MICROSECONDS = Unit("number", lambda ns: f"{ns / 1e3:,.1f}")
GIGA = Unit("number", lambda number: f"{number / 1e9:,.3f}")
PERCENT = Unit("number", lambda share: f"{100 * share:.1f}")


class Column(NamedTuple):
    """A column of a table."""

    heading: str  # text above the column, unique in the table
    value: Value  # source of the column's value in each row
    unit: Unit = NUMBER  # kind and text form of the values
    # Columns with the highest number are hidden first if the table is too wide. Columns with 0 are hidden only if
    # names would get less than `_MIN_NAME_WIDTH`.
    hide_order: int = 0
    # People do not see the column if all rows have None or "" ("empty"), or if all rows have 0 ("zero").
    hidden_if: Literal["never", "empty", "zero"] = "empty"
    # Values of other columns: the column is hidden if it equals one of these in each of two or more rows.
    repeats: Sequence[Value] = ()

    def value_in(self, row: Any) -> Any:
        """Return the column's value in a row."""
        return _value_of(row, self.value)

    def text(self, value: Any) -> str:
        """Return a value of the column as a cell for people."""
        return "" if value is None else self.unit.text(value)

    def is_shown_for(self, values: Sequence[Any]) -> bool:
        """Return whether people see the column if it has these values."""
        if self.hidden_if == "zero":
            return any(values)
        return self.hidden_if == "never" or not values or any(value not in ("", None) for value in values)


class Table(NamedTuple):
    """A table, and sentences about it.

    Attributes:
        columns: the columns for people.
        rows: the records, one per row.
        fields: the raw values that CSV, JSON and DataFrames contain for a row, by name; empty: the values of the
            columns.
        sentences: lines above the table; an empty sentence is an empty line.
        notes: lines below the table, such as how to read it or which data it lacks.
        noun: the thing that a row describes.
    """

    columns: Sequence[Column]
    rows: Sequence[Any]
    fields: Mapping[str, Value] = {}
    sentences: Sequence[str] = ()
    notes: Sequence[str] = ()
    noun: str = "row"

    def to(self, form: Form, limit: int | None = None, width: int | None = None) -> Any:
        """Return the table in a form: a DataFrame of pandas or polars for "frame", text for all others.

        Args:
            form: "text", "md" (GitHub Markdown) and "html" are for people; "csv", "json" and "frame" contain the raw
                values: ns, bytes, FLOPs.
            limit: maximum number of rows; None: all.
            width: characters in a line of text; a table in Markdown is as narrow as its text. The least important
                columns are hidden first, then names lose their beginnings. None: everything is shown.

        Raises:
            ModtraceError: neither pandas nor polars is installed.
        """
        visible = self._replace(rows=self.rows[:limit])
        if form == "frame":
            return make_frame(visible.values())
        fields = self.fields or _fields_of(self.columns)
        if form == "csv":
            return to_csv(list(fields), ([_value_of(row, value) for value in fields.values()] for row in visible.rows))
        if form == "json":
            records = [{name: _value_of(row, value) for name, value in fields.items()} for row in visible.rows]
            return json_text(json_values(records), default=str)
        hidden_rows = len(self.rows) - len(visible.rows)
        row_notes = [counted(hidden_rows, f"more {self.noun}")] if hidden_rows else []
        if form == "html":
            return "\n".join(_html_lines(visible, row_notes)) + "\n"
        cells = _visible_cells(visible)
        if form == "md":
            table = "\n".join(cells.fit(width)[0].markdown_lines())
            blocks = [*map(printable, self.sentences), table, *row_notes, *map(printable, self.notes)]
            return "\n\n".join(filter(None, blocks)) + "\n"
        cells, headings = cells.without_root().fit(width)
        lines = [line for text in self.sentences for line in wrapped(printable(text), width) or [""]]
        hidden_columns = f"hidden: {', '.join(headings)} (widen the terminal or pipe the output)" if headings else ""
        note_lines = (line for note in (*self.notes, hidden_columns) for line in wrapped(printable(note), width))
        return "\n".join([*lines, *cells.text_lines(width), *row_notes, *note_lines])

    def values(self) -> "dict[str, Any]":
        """Return one NumPy array per field: numbers, or objects (None: unknown)."""
        import numpy as np  # the command line shows its help without it

        columns: dict[str, Any] = {}
        for name, field in (self.fields or _fields_of(self.columns)).items():
            values = [_value_of(row, field) for row in self.rows]
            are_numbers = all(isinstance(value, int | float) for value in values)
            columns[name] = np.array(values, (None if values else np.int64) if are_numbers else np.object_)
        return columns


def _fields_of(columns: Sequence[Column]) -> dict[str, Value]:
    return {column.value if isinstance(column.value, str) else column.heading: column.value for column in columns}


def _value_of(row: Any, value: Value) -> Any:
    if callable(value):
        return value(row)
    return row.get(value) if isinstance(row, Mapping) else getattr(row, value)


def fields_of(record: type[Any], *attributes: str) -> dict[str, Value]:
    """Return the fields of a named tuple, and further attributes, for `Table.fields`."""
    return {name: name for name in (*record._fields, *attributes)}


class _Cells(NamedTuple):
    """The cells of a table for people, not yet escaped: each form escapes them as it is written."""

    headings: list[str]
    rows: list[list[str]]
    columns: list[Column]

    def fit(self, width: int | None) -> "tuple[_Cells, list[str]]":
        """Return the columns that fit into `width`, always with the names, and the headings of the hidden columns."""
        hidden_headings: list[str] = []
        cells, name_column = self, self.name_column
        visible_columns = list(range(len(self.columns)))
        while width is not None and len(visible_columns) > 1:
            widths = cells.widths()
            ranks = [self.columns[index].hide_order if index != name_column else -1 for index in visible_columns]
            if name_column is not None:
                name_width = _GOOD_NAME_WIDTH if max(ranks) > 0 else _MIN_NAME_WIDTH
                position = visible_columns.index(name_column)
                widths[position] = min(widths[position], self.min_name_width(name_width))
            if sum(widths) + len(_GAP) * (len(widths) - 1) <= width:
                break
            column = max(range(len(visible_columns)), key=lambda index: (ranks[index], index))
            hidden_headings.insert(0, self.headings[visible_columns.pop(column)])
            cells = self.select(visible_columns)
        return cells, hidden_headings

    def select(self, indices: Sequence[int]) -> "_Cells":
        rows = [[cells[index] for index in indices] for cells in self.rows]
        return _Cells([self.headings[index] for index in indices], rows, [self.columns[index] for index in indices])

    @property
    def name_column(self) -> int | None:
        """Index of the first column with names or text; None if all columns have numbers."""
        return next((index for index, column in enumerate(self.columns) if column.unit.kind != "number"), None)

    def widths(self) -> list[int]:
        lines = ([printable(cell) for cell in cells] for cells in (self.headings, *self.rows))
        return [max(map(cell_width, column)) for column in zip(*lines, strict=True)]

    def min_name_width(self, name_width: int = _MIN_NAME_WIDTH) -> int:
        """Return the minimum width of the column of names: `name_width`, or in a tree enough for its lines."""
        index = self.name_column
        branch = max((_branch(row[index]) for row in self.rows), default=0) if index is not None else 0
        return branch + _MIN_BRANCH_WIDTH if branch else name_width

    def without_root(self) -> "_Cells":
        """Return the cells with the root module, if all names share one, moved from the names to the heading."""
        index = self.name_column
        if index is None or self.columns[index].unit.kind != "module":
            return self
        names = [cells[index] for cells in self.rows]
        below = {name for name in names if "." in name}
        roots = {name.partition(".")[0] for name in below}
        short_names = [name.partition(".")[2] if name in below else name for name in names]
        if len(below) < 2 or len(roots) > 1 or len(set(short_names)) < len(set(names)):
            return self
        headings = [*self.headings]
        headings[index] = f"{headings[index]} (in {roots.pop()})"
        rows = [[*row[:index], name, *row[index + 1 :]] for row, name in zip(self.rows, short_names, strict=True)]
        return self._replace(headings=headings, rows=rows)

    def text_lines(self, width: int | None) -> list[str]:
        """Return the lines, with numbers aligned to the right and text to the left."""
        widths, name_column = self.widths(), self.name_column
        if width is not None and name_column is not None:
            free_width = width - sum(widths) + widths[name_column] - len(_GAP) * (len(widths) - 1)
            widths[name_column] = min(widths[name_column], max(free_width, self.min_name_width()))
        headings = [
            text if len(text) <= w else f"{text[: w - 1]}…"
            for text, w in zip(map(printable, self.headings), widths, strict=True)
        ]
        lines = [headings, *([printable(cell) for cell in cells] for cells in self.rows)]
        return [
            _GAP.join(
                cell.rjust(column_width)
                if column.unit.kind == "number"
                else padded(cut_to_width(cell, column_width if index == name_column else None), column_width)
                for index, (cell, column, column_width) in enumerate(zip(cells, self.columns, widths, strict=True))
            ).rstrip()
            for cells in lines
        ]

    def markdown_lines(self) -> list[str]:
        """Return the lines of a GitHub table; a cell can neither break the table nor render as markup."""
        rule = ["---:" if column.unit.kind == "number" else "---" for column in self.columns]
        cells = [
            [_escape_markdown(cell, column) for cell, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]
        return ["| " + " | ".join(line) + " |" for line in ([*map(markdown_text, self.headings)], rule, *cells)]


def _visible_cells(table: Table) -> _Cells:
    """Return the visible columns as text."""
    values = [[column.value_in(row) for row in table.rows] for column in table.columns]
    by_value = {column.value: cells for column, cells in zip(table.columns, values, strict=True)}
    visible = [
        (column, cells)
        for column, cells in zip(table.columns, values, strict=True)
        if column.is_shown_for(cells) and not (len(cells) > 1 and any(cells == by_value.get(v) for v in column.repeats))
    ]
    visible = visible or [(table.columns[0], values[0])]
    columns = [column for column, _ in visible]
    texts = [[column.text(value) for value in cells] for column, cells in visible]
    return _Cells([column.heading for column in columns], [list(cells) for cells in zip(*texts, strict=True)], columns)


def _branch(name: str) -> int:
    return len(_BRANCH.match(name)[0])  # type: ignore[index]  # it matches an empty text


def cut_middle(line: str, max_bytes: int) -> str:
    """Return a line of up to `max_bytes`, its middle replaced by `…`: its start has the name, its end the figures."""
    data = line.encode()
    if len(data) <= max_bytes:
        return line
    half = (max_bytes - len("…".encode())) // 2
    return f"{data[:half].decode(errors='ignore')}…{data[len(data) - half :].decode(errors='ignore')}"


def cut_json(value: Any, characters: int, entries: int) -> Any:
    """Return a JSON value with texts of up to `characters` in JSON, and lists and uniform objects of up to `entries`.

    A name loses its beginning, a sentence its end. An object is uniform if its values are of one type.
    """
    if isinstance(value, str):
        is_name, max_length = " " not in value, characters - len(json.dumps("…")) + 2
        lengths = accumulate(len(json.dumps(c)) - 2 for c in (reversed(value) if is_name else value))
        kept_characters = sum(length <= max_length for length in lengths)
        if len(json.dumps(value)) - 2 <= characters:
            return value
        return f"…{value[len(value) - kept_characters :]}" if is_name else f"{value[:kept_characters]}…"
    if isinstance(value, Mapping):
        types = {type(inner) if type(inner) is not float else int for inner in value.values()}
        max_entries = entries if len(types) == 1 else len(value)
        return {
            cut_json(key, characters, entries): cut_json(inner, characters, entries)
            for key, inner in [*value.items()][:max_entries]
        }
    return [cut_json(inner, characters, entries) for inner in value[:entries]] if isinstance(value, list) else value


def cut_to_width(name: str, width: int | None) -> str:
    """Return a printable name, cut at its beginning if it is wider than `width` cells: names differ most at their ends.

    The lines of a tree before the name stay.
    """
    if width is None or cell_width(name) <= width:
        return name
    branch = _branch(name)
    widths = accumulate(cell_width(c) for c in reversed(name[branch:]))
    kept_characters = sum(end_width < width - branch for end_width in widths)
    return f"{name[:branch]}…{name[len(name) - kept_characters :]}"


def _escape_markdown(cell: str, column: Column) -> str:
    """Return a name that Markdown renders as text: plain names as code, others with each ASCII sign as an entity."""
    if column.unit.kind not in ("name", "module"):
        return cell
    escaped = printable(cell)
    if _PLAIN_NAME.fullmatch(escaped):
        return f"`{escaped}`"
    return re.sub(r"[^\w\s]|_", lambda sign: f"&#{ord(sign[0])};", escaped)


def markdown_text(text: str) -> str:
    """Return a sentence, which may contain names, as Markdown that renders as its text."""
    return _MARKUP.sub(lambda sign: f"&#{ord(sign[0])};", printable(text))


def _html_lines(table: Table, extra_notes: Sequence[str]) -> list[str]:
    """Return the lines of a paragraph and a `<table>` with notes in its footer, without scripts and style sheets."""
    cells = _visible_cells(table)
    note = "; ".join(filter(None, [*extra_notes, *table.notes]))
    lines = [*paragraph(table.sentences), "<table>", f"<thead>{_html_line('th', cells.headings, cells)}</thead>"]
    lines += ["<tbody>", *(_html_line("td", row, cells) for row in cells.rows), "</tbody>"]
    if note:
        lines.append(f'<tfoot><tr><td colspan="{len(cells.headings)}">{html.escape(printable(note))}</td></tr></tfoot>')
    return [*lines, "</table>"]


def _html_line(tag: str, texts: Sequence[str], cells: _Cells) -> str:
    aligned = ("right" if column.unit.kind == "number" else "left" for column in cells.columns)
    return "<tr>" + "".join(
        f'<{tag} style="text-align: {side}">{html.escape(printable(text))}</{tag}>'
        for text, side in zip(texts, aligned, strict=True)
    ) + "</tr>"  # fmt: skip


def paragraph(sentences: Iterable[str]) -> list[str]:
    """Return the nonempty sentences as lines of one HTML paragraph; an empty list if there are none."""
    text = "<br>".join(html.escape(printable(line)) for line in sentences if line)
    return [f"<p>{text}</p>"] if text else []


def join_texts(sentences: Iterable[str], tables: Iterable[str], width: int | None = None) -> str:
    """Return sentences, one per line or folded to `width`, and the texts of tables, separated by empty lines."""
    lines = [line for text in sentences for line in wrapped(printable(text), width)]
    return "\n\n".join(filter(None, ["\n".join(lines), *tables]))


def to_csv(headings: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return CSV with a header line; unprintable characters in texts become escapes."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headings)
    for row in rows:
        writer.writerow([printable(cell) if isinstance(cell, str) else cell for cell in row])
    return out.getvalue()


def make_frame(columns: Mapping[str, Any]) -> Any:
    """Return a DataFrame of pandas or polars, preferably of the library that the program has imported."""
    for library in sorted(("pandas", "polars"), key=lambda name: name not in sys.modules):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(library).DataFrame(columns)
    raise ModtraceError("a DataFrame needs pandas or polars: pip install pandas")


def json_text(values: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return JSON values as one line of text; `default` converts other values."""
    text = io.StringIO()  # `json.dumps` keeps each token of a million steps until it joins them
    json.dump(values, text, separators=(",", ":"), default=default)
    text.write("\n")
    return text.getvalue()


def json_values(value: Any) -> Any:
    """Return a value for JSON: recursively, named tuples become objects and other sequences lists."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: json_values(inner) for key, inner in value.items()}
    return [json_values(inner) for inner in value] if isinstance(value, list | tuple) else value
