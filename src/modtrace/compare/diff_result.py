"""Diff: what a comparison found, and the forms it is written in."""

from __future__ import annotations

import fnmatch
import html
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .._errors import WriteError
from .._tables import CellKind, Table, to_csv, to_html, to_markdown, to_text
from .._terminal import printable
from ..write import write
from ..write.atomic_file import atomic_writer
from ..write.html import write_html
from .changes import Change
from .side_by_side import Side, compared, side_by_side

__all__ = ["SUFFIXES", "Diff", "suffix_of"]

SUFFIXES = (".html", ".csv", ".json", ".md", ".pftrace", ".pftrace.gz")
"""The suffixes that `Diff.save` knows."""

_COLUMNS: dict[str, CellKind] = {
    "module": "name",
    "phase": "text",
    "before ms": "number",
    "after ms": "number",
    "difference": "number",
    "%": "number",
    "interval ms": "number",
    "calls": "number",
    "verdict": "text",
}


@dataclass(frozen=True, slots=True)
class Diff:
    """Two sets of recordings, compared.

    Attributes:
        changes: one per module and phase: first what is called differently, then what is slower or faster, then the
            rest; of each those that cost most at the top.
        step: the step as a whole.
        base_steps: how many steps before were compared.
        new_steps: how many after.
        warm_up: how many steps at the beginnings were left out.
        independent: as how many independent steps they count, before and after; fewer than there are where the machine
            drifted.
        common_ratio: by what factor all modules changed alike; differences and verdicts are about what is beside it.
        runs: how many recordings there were, before and after.
        spread: by what part the middle module differs from one recording to the next, beside what all do alike.
        drift: by what part the last third of the steps was slower than the first, in the recording of each side in
            which the machine drifted most.
        environment: what differs between the sides: of `torch`, `cpu` and the like the texts before and after.
        suggested: names before and what they may be called after, as the structure suggests; nothing is compared by it.

    Examples:
        >>> [change.fqn for change in modtrace.diff("a.pftrace", "b.pftrace").above(0.05)]
    """

    changes: Sequence[Change]
    step: Change
    base_steps: int
    new_steps: int
    warm_up: int
    independent: tuple[float, float]
    common_ratio: float
    runs: tuple[int, int]
    spread: float
    drift: tuple[float, float]
    environment: Mapping[str, tuple[str, str]]
    suggested: Mapping[str, str]
    _sides: tuple[Side, Side] | None = field(default=None, repr=False, compare=False)
    """A typical step before and one after, which pages and traces show; None where a side is a budget."""

    def matching(self, pattern: str) -> Diff:
        """Keep the modules whose fully qualified name matches a pattern as of a shell; `*` also matches dots."""
        matches = re.compile(fnmatch.translate(pattern)).match
        return replace(self, changes=[change for change in self.changes if matches(change.fqn)])

    def above(self, limit: float) -> list[Change]:
        """Return what is slower by more than a part of its time before (0.05: 5 %), with its whole interval."""
        return [
            change
            for change in (self.step, *self.changes)
            if change.verdict == "slower" and change.low_ns > limit * change.base_ns
        ]

    @property
    def header(self) -> list[str]:
        """What was compared, how the whole step changed, and how much noise there is."""
        step, runs = self.step, self.runs
        before, after = self.independent
        return [
            f"before: {self.base_steps:,} steps of {_count(runs[0], 'recording')}; after: {self.new_steps:,} of "
            f"{_count(runs[1], 'recording')}; {self.warm_up:,} of warm-up left out; they count as {before:g} and "
            f"{after:g} independent steps",
            f"step: {step.base_ns / 1e6:.3f} ms before, {step.new_ns / 1e6:.3f} ms after "
            f"({step.ratio:+.1%}; {_interval(step)} ms): {step.verdict}",
            f"the median module changed by {self.common_ratio - 1:+.1%}, which counts as the machine's own change: "
            "differences and verdicts are about what is beside it",
            f"noise: a module differs by {self.spread:.1%} between recordings; the step drifted within one by up to "
            f"{self.drift[0]:+.1%} before and {self.drift[1]:+.1%} after",
            *(f"{key}: {old} before, {new} after" for key, (old, new) in self.environment.items()),
            *(f"{old} may be called {new} now: --map {old}={new} compares them" for old, new in self.suggested.items()),
        ]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the comparison; the suffix picks the form.

        `.csv`, `.json` and `.md` are the tables of `to_csv`, `to_json` and `to_markdown`. `.html` is the offline viewer
        with a typical step of each side, one above the other on one time axis, coloured by what changed, and the table
        beside them. `.pftrace` (also `.pftrace.gz`) holds the same two steps for Perfetto.

        Raises:
            WriteError: the suffix is not known, there is no step to show, or the file cannot be written; an existing
                file is intact.
        """
        suffix = suffix_of(path)
        if suffix in {".pftrace", ".pftrace.gz"}:
            write(side_by_side(self._shown(path)), path)
        elif suffix == ".html":
            sides = self._shown(path)
            timeline = side_by_side(sides)
            samples, step, *rest = self.header
            # What changed as a whole comes first.
            write_html(timeline, path, compared(timeline, sides, [step, samples, *rest], self.changes))
        else:
            render = {".csv": self.to_csv, ".json": self.to_json, ".md": self.to_markdown}[suffix]
            with atomic_writer(path) as file:
                file.write(render().encode())

    def _shown(self, path: str | os.PathLike[str]) -> tuple[Side, Side]:
        if self._sides is None:
            raise WriteError(f"{os.fspath(path)}: a budget holds no step to show; write .md, .csv or .json")
        return self._sides

    def to_text(self, limit: int | None = None) -> str:
        """Return header and table, self times per step in ms."""
        hidden = 0 if limit is None else len(self.changes) - limit
        table = to_text(self._table().first_rows(limit))
        return "\n".join([*map(printable, self.header), "", *table, *([f"{hidden:,} more"] if hidden > 0 else [])])

    def to_markdown(self, limit: int | None = None) -> str:
        """Return the header as a list and a GitHub table."""
        table = to_markdown(self._table().first_rows(limit))
        return "\n".join([*(f"- {html.escape(printable(line))}" for line in self.header), "", *table]) + "\n"

    def to_csv(self) -> str:
        """Return CSV with a header line; times in ns."""
        return to_csv(Change._fields, self.changes)

    def to_json(self) -> str:
        """Return a JSON object: `changes`, `step` and the other attributes; times in ns."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "_sides"}
        values |= {"changes": [change._asdict() for change in self.changes], "step": self.step._asdict()}
        return json.dumps(values, indent=2) + "\n"

    def to_html(self) -> str:
        """Return the header and one `<table>`."""
        header = "<br>".join(html.escape(printable(line)) for line in self.header)
        return "\n".join([f"<p>{header}</p>", *to_html(self._table())]) + "\n"

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return self.to_html()

    def _table(self) -> Table:
        cells = [
            [
                change.fqn,
                change.phase,
                f"{change.base_ns / 1e6:.3f}",
                f"{change.new_ns / 1e6:.3f}",
                f"{change.difference_ns / 1e6:+.3f}",
                f"{100 * change.ratio:+.1f}" if change.base_ns else "",
                _interval(change),
                f"{change.base_calls}" + (f" → {change.new_calls}" if change.new_calls != change.base_calls else ""),
                change.verdict,
            ]
            for change in self.changes
        ]
        return Table(list(_COLUMNS), cells, list(_COLUMNS.values()), [0] * len(_COLUMNS))


def suffix_of(path: str | os.PathLike[str]) -> str:
    """Return which of `SUFFIXES` a path has.

    Raises:
        WriteError: none of them.
    """
    name = os.fspath(path)
    for suffix in SUFFIXES:
        if name.lower().endswith(suffix):
            return suffix
    raise WriteError(f"{name}: the suffix must be one of {', '.join(SUFFIXES)}")


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _interval(change: Change) -> str:
    return f"{change.low_ns / 1e6:+.3f} … {change.high_ns / 1e6:+.3f}"
