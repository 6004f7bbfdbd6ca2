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
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from ._errors import ModtraceError

SortKey = Literal["gpu", "self", "total", "forward", "backward", "recompute", "mean", "p50", "p95", "calls", "name"]
SORT_KEYS: tuple[SortKey, ...] = get_args(SortKey)
"""The keys that sort the table of modules. They are here since the help of commands is read without NumPy."""


def is_terminal(stream: object) -> bool:
    """Tell whether a standard stream is a terminal.

    A closed stream is not, nor one that is None because it was closed before Python began, nor an object of the
    program's that does not say.
    """
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError, OSError):
        return False


def duration_text(seconds: float) -> str:
    """Return a duration as one reads it: `0.3 ms`, `4.2 s`, `2 min 5 s`."""
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


def counted(number: int, noun: str) -> str:
    """Return `1 span`, `1,200 spans`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ratio_text(ratio: float, form: str = "{:+.1%}", measure: str = "long") -> str:
    """Return by how much something grew, as a percentage; above 1000 % as a multiple, `243 times as long`."""
    return f"{ratio + 1:,.0f} times as {measure}" if ratio > 10 else form.format(ratio)


def wrapped(text: str, width: int | None) -> list[str]:
    """Return a text as lines of at most so many characters; as one line if there is no limit."""
    return textwrap.wrap(text, width) if width else [text] if text else []


def printable(text: str) -> str:
    """Return text with control, format and lone surrogate characters as escapes.

    So a name can neither move the cursor, nor turn the line around, nor begin a new one.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cell_width(text: str) -> int:
    """Return how many cells of a terminal a printable text takes: 2 for a wide character, 0 for a combining one."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # most texts do without

    return cell_len(text)


def padded(text: str, width: int) -> str:
    """Return a printable text with blanks after it, `width` cells wide at least."""
    return text + " " * (width - cell_width(text))


def next_step_hint(path: str) -> str:
    """Return a line that says how to read and see the file in `path`, a trace or a ring."""
    suffix = Path(path).suffix.lower()
    if suffix == ".html":
        return f"Next: open {path} in a browser; it needs no network"
    if suffix in (".folded", ".json") and path.lower().endswith((".folded", ".speedscope.json")):
        return f"Next: drop {path} onto https://www.speedscope.app"
    command, quoted = _command(), shlex.quote(path)
    if suffix == ".zip":
        return f"Next: {command} view {quoted}, or attach it to a bug report"
    hint = f"Next: {command} summary {quoted}; to see it, {command} view {quoted}"
    is_perfetto = path.lower().endswith((".json", ".json.gz", ".pftrace", ".pftrace.gz"))
    return f"{hint}, or drop {path} onto https://ui.perfetto.dev" if is_perfetto else hint


def share_hint(path: str) -> str:
    """Return a line that says how to give the recording in `path` to others."""
    if path.lower().endswith(".zip"):
        return f"To show it to others, give them {path}: they open the viewer.html in it, or run modtrace view"
    archive = f"{Path(path.removesuffix('.gz')).stem}.zip"
    return f"To give it to others: {_command()} report {shlex.quote(path)} -o {shlex.quote(archive)}"


def _command() -> str:
    """Return how to run modtrace, also where the virtual environment is not activated."""
    if shutil.which("modtrace"):
        return "modtrace"
    script = Path(sys.executable).with_name("modtrace")
    return shlex.quote(str(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m modtrace"


Form = Literal["text", "md", "html", "csv", "json", "frame"]
Value = str | Callable[[Any], Any]
"""The attribute of a row that a column shows, or what computes it of a row."""

_GAP = "  "
_GOOD_NAME_WIDTH = 24
"""For names this long columns are left out."""
_MIN_NAME_WIDTH = 12
_MIN_BRANCH_WIDTH = 8
"""Number of characters that are shown at least of a name below the lines of a tree."""
_PLAIN_NAME = re.compile(r"[\w.:\- ,;%()/'*=+]+", re.ASCII)
_MARKUP = re.compile(r"[<>&*_`\[\]@#$|\\~]|:(?=\S)")
_BRANCH = re.compile("[│├└─ ]*")


class Unit(NamedTuple):
    """The kind of a column's values, and how people read them."""

    # "module", the full name of one; another "name" of the user's; "text" of ours; or "number".
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

    heading: str  # what is above it, no two alike
    value: Value  # what it holds of each row
    unit: Unit = NUMBER  # what that is
    # How soon it is left out if there is no room: the highest first, and 0 only if names would not even have
    # `_MIN_NAME_WIDTH`.
    hide_order: int = 0
    # When people do not see it: if all rows have None or "" there, "empty", or if all have 0, "zero".
    hidden_if: Literal["never", "empty", "zero"] = "empty"
    # Values of other columns: if two or more rows all have the same here as in one of them, it is not shown.
    repeats: Sequence[Value] = ()

    def of(self, row: Any) -> Any:
        """Return what it holds of a row."""
        return _value_of(row, self.value)

    def text(self, value: Any) -> str:
        """Return such a value as a cell for people."""
        return "" if value is None else self.unit.text(value)

    def says(self, values: Sequence[Any]) -> bool:
        """Tell whether people see it with these values."""
        if self.hidden_if == "zero":
            return any(values)
        return self.hidden_if == "never" or not values or any(value not in ("", None) for value in values)


class Table(NamedTuple):
    """A table, and sentences about it."""

    columns: Sequence[Column]  # what people see
    rows: Sequence[Any]  # records
    # By name, what programs get of each row, as it is; none: the values of the columns.
    fields: Mapping[str, Value] = {}
    sentences: Sequence[str] = ()  # what is above it; an empty one is an empty line
    notes: Sequence[str] = ()  # what is below it: how to read it, and what is not in it
    noun: str = "row"  # what one row is of

    def to(self, form: Form, limit: int | None = None, width: int | None = None) -> Any:
        """Return it in a form: a DataFrame of pandas or polars for "frame", else text.

        Args:
            form: "text", "md" (Markdown of GitHub) and "html" are for people; "csv", "json" and "frame" have the values
                as they are: ns, bytes, FLOPs.
            limit: how many rows at most; None: all.
            width: characters in a line of text; a table in Markdown is as narrow as its text. The columns that matter
                least are hidden first, then names lose their beginnings. None: all is shown.

        Raises:
            ModtraceError: neither pandas nor polars is installed.
        """
        shown = self._replace(rows=self.rows[:limit])
        if form == "frame":
            return make_frame(shown.values())
        fields = self.fields or _fields_of(self.columns)
        if form == "csv":
            return to_csv(list(fields), ([_value_of(row, value) for value in fields.values()] for row in shown.rows))
        if form == "json":
            records = [{name: _value_of(row, value) for name, value in fields.items()} for row in shown.rows]
            return json.dumps(json_values(records), separators=(",", ":"), default=str) + "\n"
        hidden = len(self.rows) - len(shown.rows)
        more = [counted(hidden, f"more {self.noun}")] if hidden else []
        if form == "html":
            return "\n".join(_html_lines(shown, more)) + "\n"
        cells = _for_people(shown)
        if form == "md":
            table = "\n".join(cells.fit(width)[0].markdown_lines())
            blocks = [*map(printable, self.sentences), table, *more, *map(printable, self.notes)]
            return "\n\n".join(filter(None, blocks)) + "\n"
        cells, left_out = cells.without_root().fit(width)
        lines = [line for text in self.sentences for line in wrapped(printable(text), width) or [""]]
        hidden_columns = f"hidden: {', '.join(left_out)} (widen the terminal or pipe the output)" if left_out else ""
        below = (line for note in (*self.notes, hidden_columns) for line in wrapped(printable(note), width))
        return "\n".join([*lines, *cells.text_lines(width), *more, *below])

    def values(self) -> "dict[str, Any]":
        """Return a NumPy array per field: of numbers, or of objects (None: unknown)."""
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


def fields_of(record: type[Any], *more: str) -> dict[str, Value]:
    """Return the fields of a named tuple, and further attributes of it, for `Table.fields`."""
    return {name: name for name in (*record._fields, *more)}


class _Cells(NamedTuple):
    """The cells of a table for people: they are made safe for a form where it is written."""

    headings: list[str]
    rows: list[list[str]]
    columns: list[Column]

    def fit(self, width: int | None) -> "tuple[_Cells, list[str]]":
        """Return it with the columns for which `width` has room, that of names always, and the headings of others."""
        left_out: list[str] = []
        cells, name_column = self, self.name_column
        kept = list(range(len(self.columns)))
        while width is not None and len(kept) > 1:
            widths = cells.widths()
            ranks = [self.columns[index].hide_order if index != name_column else -1 for index in kept]
            if name_column is not None:
                good, place = _GOOD_NAME_WIDTH if max(ranks) > 0 else _MIN_NAME_WIDTH, kept.index(name_column)
                widths[place] = min(widths[place], self.least_width(good))
            if sum(widths) + len(_GAP) * (len(widths) - 1) <= width:
                break
            column = max(range(len(kept)), key=lambda index: (ranks[index], index))
            left_out.insert(0, self.headings[kept.pop(column)])
            cells = self.keep(kept)
        return cells, left_out

    def keep(self, indices: Sequence[int]) -> "_Cells":
        rows = [[cells[index] for index in indices] for cells in self.rows]
        return _Cells([self.headings[index] for index in indices], rows, [self.columns[index] for index in indices])

    @property
    def name_column(self) -> int | None:
        """The index of the first column that has names, or text; None if all have numbers."""
        return next((index for index, column in enumerate(self.columns) if column.unit.kind != "number"), None)

    def widths(self) -> list[int]:
        lines = ([printable(cell) for cell in cells] for cells in (self.headings, *self.rows))
        return [max(map(cell_width, column)) for column in zip(*lines, strict=True)]

    def least_width(self, name: int = _MIN_NAME_WIDTH) -> int:
        """How wide the column of names is at least: as wide as a name, or in a tree wider than its lines."""
        index = self.name_column
        branch = max((_branch(row[index]) for row in self.rows), default=0) if index is not None else 0
        return branch + _MIN_BRANCH_WIDTH if branch else name

    def without_root(self) -> "_Cells":
        """Return it with the root that all names begin with in the heading instead; that of the root itself stays."""
        index = self.name_column
        if index is None or self.columns[index].unit.kind != "module":
            return self
        names = [cells[index] for cells in self.rows]
        below = {name for name in names if "." in name}
        roots = {name.partition(".")[0] for name in below}
        cut = [name.partition(".")[2] if name in below else name for name in names]
        if len(below) < 2 or len(roots) > 1 or len(set(cut)) < len(set(names)):
            return self
        headings = [*self.headings]
        headings[index] = f"{headings[index]} (in {roots.pop()})"
        rows = [[*cells[:index], name, *cells[index + 1 :]] for cells, name in zip(self.rows, cut, strict=True)]
        return self._replace(headings=headings, rows=rows)

    def text_lines(self, width: int | None) -> list[str]:
        """Return the lines, numbers to the right and all else to the left."""
        widths, name_column = self.widths(), self.name_column
        if width is not None and name_column is not None:
            room = width - sum(widths) + widths[name_column] - len(_GAP) * (len(widths) - 1)
            widths[name_column] = min(widths[name_column], max(room, self.least_width()))
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
        """Return the lines of a GitHub table; no cell can break it, or render as anything but text."""
        rule = ["---:" if column.unit.kind == "number" else "---" for column in self.columns]
        cells = [
            [_in_markdown(cell, column) for cell, column in zip(row, self.columns, strict=True)] for row in self.rows
        ]
        return ["| " + " | ".join(line) + " |" for line in ([*map(markdown_text, self.headings)], rule, *cells)]


def _for_people(table: Table) -> _Cells:
    """Return the columns that have anything to say, as text."""
    values = [[column.of(row) for row in table.rows] for column in table.columns]
    of_value = {column.value: cells for column, cells in zip(table.columns, values, strict=True)}
    shown = [
        (column, cells)
        for column, cells in zip(table.columns, values, strict=True)
        if column.says(cells) and (len(cells) < 2 or all(cells != of_value.get(twin) for twin in column.repeats))
    ]
    shown = shown or [(table.columns[0], values[0])]
    columns = [column for column, _ in shown]
    texts = [[column.text(value) for value in cells] for column, cells in shown]
    return _Cells([column.heading for column in columns], [list(cells) for cells in zip(*texts, strict=True)], columns)


def _branch(name: str) -> int:
    return len(_BRANCH.match(name)[0])  # type: ignore[index]  # it matches an empty text


def cut_middle(line: str, longest: int) -> str:
    """Return a line of at most so many bytes, `…` instead of what is in its middle: names begin it, figures end it."""
    data = line.encode()
    if len(data) <= longest:
        return line
    half = (longest - len("…".encode())) // 2
    return f"{data[:half].decode(errors='ignore')}…{data[len(data) - half :].decode(errors='ignore')}"


def cut_json(value: Any, characters: int, entries: int) -> Any:
    """Return JSON values with short texts, and with the first entries of lists and of objects with values of one kind.

    A text is as long as JSON has it: a name is cut at its beginning, a sentence at its end.
    """
    if isinstance(value, str):
        is_name, room = " " not in value, characters - len(json.dumps("…")) + 2
        lengths = accumulate(len(json.dumps(c)) - 2 for c in (reversed(value) if is_name else value))
        kept = sum(length <= room for length in lengths)
        if len(json.dumps(value)) - 2 <= characters:
            return value
        return f"…{value[len(value) - kept :]}" if is_name else f"{value[:kept]}…"
    if isinstance(value, Mapping):
        kinds = {type(inner) if type(inner) is not float else int for inner in value.values()}
        kept = entries if len(kinds) == 1 else len(value)
        return {
            cut_json(key, characters, entries): cut_json(inner, characters, entries)
            for key, inner in [*value.items()][:kept]
        }
    return [cut_json(inner, characters, entries) for inner in value[:entries]] if isinstance(value, list) else value


def cut_to_width(name: str, width: int | None) -> str:
    """Return the end of a printable name that takes more than `width` cells; names differ most at their ends.

    The lines of a tree in front of it stay.
    """
    if width is None or cell_width(name) <= width:
        return name
    branch = _branch(name)
    ends = accumulate(cell_width(c) for c in reversed(name[branch:]))
    kept = sum(taken < width - branch for taken in ends)
    return f"{name[:branch]}…{name[len(name) - kept :]}"


def _in_markdown(cell: str, column: Column) -> str:
    """Return a name that Markdown takes as text: plain ones as code, in all others every ASCII sign as an entity."""
    if column.unit.kind not in ("name", "module"):
        return cell
    escaped = printable(cell)
    if _PLAIN_NAME.fullmatch(escaped):
        return f"`{escaped}`"
    return re.sub(r"[^\w\s]|_", lambda sign: f"&#{ord(sign[0])};", escaped)


def markdown_text(text: str) -> str:
    """Return a sentence, which may hold names, as Markdown that renders as its text."""
    return _MARKUP.sub(lambda sign: f"&#{ord(sign[0])};", printable(text))


def _html_lines(table: Table, more: Sequence[str]) -> list[str]:
    """Return the lines of a paragraph and a `<table>`, notes at its foot, without script or style sheet."""
    cells = _for_people(table)
    note = "; ".join(filter(None, [*more, *table.notes]))
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
    """Return the sentences, those that are not empty, as lines of one paragraph of HTML; nothing without any."""
    text = "<br>".join(html.escape(printable(line)) for line in sentences if line)
    return [f"<p>{text}</p>"] if text else []


def join_texts(sentences: Iterable[str], tables: Iterable[str], width: int | None = None) -> str:
    """Return sentences, a line each or folded to `width`, and the texts of tables, with empty lines between them."""
    lines = [line for text in sentences for line in wrapped(printable(text), width)]
    return "\n\n".join(filter(None, ["\n".join(lines), *tables]))


def to_csv(headings: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Return CSV with a header line, unprintable characters of texts as escapes."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headings)
    for row in rows:
        writer.writerow([printable(cell) if isinstance(cell, str) else cell for cell in row])
    return out.getvalue()


def make_frame(columns: Mapping[str, Any]) -> Any:
    """Return a DataFrame of pandas or polars: of the program's own library, if it uses one."""
    for library in sorted(("pandas", "polars"), key=lambda name: name not in sys.modules):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(library).DataFrame(columns)
    raise ModtraceError("a DataFrame needs pandas or polars: pip install pandas")


def json_values(value: Any) -> Any:
    """Return named tuples as objects by their fields, other sequences as lists, and so what is in them."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: json_values(inner) for key, inner in value.items()}
    return [json_values(inner) for inner in value] if isinstance(value, list | tuple) else value
