"""Summary: what each module of a timeline took, as a table."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._typing import BoolArray, Int64Array
from ..columns import BACKWARD, FORWARD, PHASES, RECOMPUTE, Columns

if TYPE_CHECKING:
    from rich.table import Table

    from ..timeline import Timeline

__all__ = ["SORT_KEYS", "Row", "Summary", "markdown", "printable", "summarize"]

SORT_KEYS = ("self", "forward", "backward", "recompute", "calls", "name")
"""What a summary can be sorted by; times and calls descending, names ascending."""


class Row(NamedTuple):
    """What one module took over the whole timeline; times are integer nanoseconds.

    A total counts a call within a call of the same module once; a self time leaves out what inner modules took.

    Attributes:
        fqn: the module's fully qualified name.
        module_class: the name of its class.
        calls: how often its forward ran; a recompute is not a call.
        forward_ns: total of forward.
        forward_self_ns: of it, outside inner modules.
        backward_ns: total of backward, recompute inside it included.
        backward_self_ns: of it, outside inner modules and recompute.
        recompute_ns: total of recompute.
        recompute_self_ns: of it, outside inner modules.
    """

    fqn: str
    module_class: str
    calls: int
    forward_ns: int
    forward_self_ns: int
    backward_ns: int
    backward_self_ns: int
    recompute_ns: int
    recompute_self_ns: int

    @property
    def self_ns(self) -> int:
        """The self times of all phases together."""
        return self.forward_self_ns + self.backward_self_ns + self.recompute_self_ns


@dataclass(frozen=True, slots=True)
class Summary:
    """One row per module, in the order in which the modules were first called.

    Attributes:
        rows: the rows shown.
        modules: how many rows there were before any limit.
        incomplete: slices whose enter or exit is missing; they count with the time that is known of them.
        overwritten: events that the ring had to drop, which no row can count.

    Examples:
        >>> print(timeline.summary().top("backward", 10))
        >>> Path("summary.md").write_text(timeline.summary().to_markdown())
    """

    rows: Sequence[Row]
    modules: int
    incomplete: int = 0
    overwritten: int = 0

    def top(self, key: str = "self", limit: int | None = None) -> Summary:
        """Sort by one of `SORT_KEYS` and keep the first `limit` rows.

        Raises:
            ValueError: the key is not one of them.
        """
        if key not in SORT_KEYS:
            raise ValueError(f"a summary sorts by {', '.join(SORT_KEYS)}, not by {key!r}")
        if key == "name":
            rows = sorted(self.rows, key=lambda row: row.fqn)
        else:
            field = "calls" if key == "calls" else f"{key}_ns"
            rows = sorted(self.rows, key=lambda row: getattr(row, field), reverse=True)
        return replace(self, rows=rows[:limit])

    @property
    def note(self) -> str:
        """What the reader has to know about rows and time that are missing; empty where nothing is."""
        hidden = self.modules - len(self.rows)
        parts = [
            (hidden, f"{hidden} more modules"),
            (self.incomplete, f"{self.incomplete} slices incomplete"),
            (self.overwritten, f"{self.overwritten} events overwritten"),
        ]
        return ", ".join(text for count, text in parts if count)

    def to_markdown(self) -> str:
        """Return a GitHub table, times in ms; module names can neither break it nor render as anything but text."""
        headings, *rows = self._table(markdown)
        rules = ["---"] * 2 + ["---:"] * (len(headings) - 2)
        lines = ["| " + " | ".join(cells) + " |" for cells in (headings, rules, *rows)]
        return "\n".join([*lines, *(["", self.note] if self.note else [])]) + "\n"

    def to_csv(self) -> str:
        """Return CSV with a header line; times in ns, unprintable characters of names as escapes."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows([printable(row.fqn), printable(row.module_class), *row[2:]] for row in self.rows)
        return out.getvalue()

    def to_json(self) -> str:
        """Return a JSON object: `rows` (times in ns), `modules`, `incomplete`, `overwritten`."""
        document = {
            "rows": [row._asdict() for row in self.rows],
            "modules": self.modules,
            "incomplete": self.incomplete,
            "overwritten": self.overwritten,
        }
        return json.dumps(document, indent=2) + "\n"

    def __rich__(self) -> Table:
        from rich.table import Table  # a summary can be made and written without rich
        from rich.text import Text

        table = Table(caption=self.note or None, caption_justify="left", header_style="bold", box=None, pad_edge=False)
        headings, *rows = self._table(printable)
        for index, heading in enumerate(headings):
            title = heading.replace(" ms", "\nms")
            table.add_column(title, justify="left" if index < 2 else "right", overflow="fold", no_wrap=index >= 2)
        for cells in rows:
            table.add_row(*map(Text, cells))
        return table

    def __str__(self) -> str:
        cells = self._table(printable)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if index < 2 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        return "\n".join([*lines, *([self.note] if self.note else [])])

    def _table(self, text: Callable[[str], str]) -> list[list[str]]:
        """Lay out headings and one line of cells per row; recompute is shown where there is any."""
        shown = HEADINGS if any(row.recompute_ns for row in self.rows) else HEADINGS[:-1]
        return [list(shown), *(_cells(row, text)[: len(shown)] for row in self.rows)]


def summarize(timeline: Timeline) -> Summary:
    """Add up calls and times per module, from the columns."""
    columns = timeline.columns
    fqns: dict[str, int] = {}
    for name in timeline.names:
        fqns.setdefault(name.fqn, len(fqns))
    classes = {name.fqn: name.module_class for name in reversed(timeline.names)}
    module = np.array([fqns[name.fqn] for name in timeline.names], np.int64)[columns.name]
    totals, own, calls = _add_up(columns, module, len(fqns))
    seen, first = np.unique(module, return_index=True)
    by_code = list(fqns)
    rows = [
        Row(
            fqn := by_code[code],
            classes[fqn],
            int(calls[code]),
            *(int(part[phase, code]) for phase in (FORWARD, BACKWARD, RECOMPUTE) for part in (totals, own)),
        )
        for code in seen[np.argsort(first)].tolist()
    ]
    return Summary(rows, len(rows), int(np.count_nonzero(~columns.complete)), timeline.stats.overwritten)


def _add_up(columns: Columns, module: Int64Array, modules: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Total and self time as int64[phase, module] in ns, and forward calls as int64[module]."""
    phase = columns.phase.astype(np.int64)
    duration = columns.end - columns.start
    inside = np.zeros(len(columns), np.int64)
    nested = columns.parent >= 0
    np.add.at(inside, columns.parent[nested], duration[nested])
    totals = np.zeros((len(PHASES), modules), np.int64)
    own = np.zeros_like(totals)
    outermost = ~_within_itself(columns, module)
    np.add.at(totals, (phase[outermost], module[outermost]), duration[outermost])
    np.add.at(own, (phase, module), duration - inside)
    calls = np.bincount(module[phase == FORWARD], minlength=modules)
    return totals, own, calls


def _within_itself(columns: Columns, module: Int64Array) -> BoolArray:
    """Which spans lie inside a span of the same module and phase, at any distance."""
    within = np.zeros(len(columns), np.bool_)
    span = np.flatnonzero(columns.parent >= 0)
    around = columns.parent[span]
    while len(span):
        same = (module[around] == module[span]) & (columns.phase[around] == columns.phase[span])
        within[span[same]] = True
        around = columns.parent[around]
        on = ~same & (around >= 0)
        span, around = span[on], around[on]
    return within


HEADINGS = ("module", "class", "calls", "forward ms", "self", "backward ms", "self", "recompute ms")


def _cells(row: Row, text: Callable[[str], str]) -> list[str]:
    times = (row.forward_ns, row.forward_self_ns, row.backward_ns, row.backward_self_ns, row.recompute_ns)
    return [text(row.fqn), text(row.module_class), str(row.calls), *(f"{time / 1e6:.3f}" for time in times)]


def printable(text: str) -> str:
    """Control, format and lone surrogate characters as escapes: a name cannot move the cursor or flip the line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


PLAIN = re.compile(r"[\w.:\- ]+", re.ASCII)


def markdown(text: str) -> str:
    """Plain names as code; in all others every ASCII sign as an entity, which Markdown takes as text."""
    shown = printable(text)
    if PLAIN.fullmatch(shown):
        return f"`{shown}`"
    return re.sub(r"[^\w\s]|_", lambda sign: f"&#{ord(sign[0])};", shown)
