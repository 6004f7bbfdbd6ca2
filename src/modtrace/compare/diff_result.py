"""Diff: what a comparison found, and the forms it is written in."""

from __future__ import annotations

import fnmatch
import html
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .._errors import WriteError
from .._tables import CellKind, Table, to_csv, to_html, to_markdown, to_text
from .._terminal import counted, printable
from ..write import write
from ..write.atomic_file import atomic_writer
from ..write.html import write_html
from .changes import Change
from .module_changes import MIN_MODULES, MIN_STEPS
from .side_by_side import Side, compared, side_by_side

__all__ = ["SUFFIXES", "Diff", "suffix_of"]

SUFFIXES = (".html", ".csv", ".json", ".md", ".pftrace", ".pftrace.gz")
"""The suffixes that `Diff.save` knows."""

_NAMED = 3
"""How many of what some recordings lack are named."""

_COLUMNS: dict[str, CellKind] = {
    "module": "name",
    "phase": "text",
    "before self ms": "number",
    "after self ms": "number",
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
        compared: how many modules and phases were compared; of fewer than 6 nobody can tell what all changed alike.
        runs: how many recordings there were, before and after, each counted once.
        copies: how many more were given that are copies of these.
        on_both_sides: how many recordings before are among those after too.
        spread: by what part the middle module differs from one recording to the next, beside what all do alike.
        drift: by what part the last third of the steps was slower than the first, in the recording of each side in
            which the machine drifted most; None where all have too few steps.
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
    compared: int
    runs: tuple[int, int]
    copies: tuple[int, int]
    on_both_sides: int
    spread: float
    drift: tuple[float | None, float | None]
    environment: Mapping[str, tuple[str, str]]
    suggested: Mapping[str, str]
    _sides: tuple[Side, Side] | None = field(default=None, repr=False, compare=False)
    """A typical step before and one after, which pages and traces show; None where a side is a budget."""
    _selected: bool = field(default=False, repr=False, compare=False)
    """True where only some modules are looked at; the step, which holds all others and the machine, is none of them."""

    def only(self, pattern: str) -> Diff:
        """Keep the modules whose fully qualified name matches a pattern as of a shell; `*` also matches dots."""
        matches = re.compile(fnmatch.translate(pattern)).match
        return replace(self, changes=[change for change in self.changes if matches(change.fqn)], _selected=True)

    def above(self, limit: float) -> list[Change]:
        """Return what is slower by more than a part of its time before (0.05: 5 %), with its whole interval.

        The step is among it, unless `matching` selected modules.
        """
        return [
            change
            for change in (*([] if self._selected else [self.step]), *self.changes)
            if change.verdict == "slower" and change.low_ns is not None and change.low_ns > limit * change.base_ns
        ]

    @property
    def header(self) -> list[str]:
        """What was compared, how the whole step changed, and how much noise there is."""
        step, runs = self.step, self.runs
        before, after = self.independent
        return [
            f"before: {self.base_steps:,} steps of {counted(runs[0], 'recording')}; after: {self.new_steps:,} of "
            f"{counted(runs[1], 'recording')}; {self.warm_up:,} of warm-up left out; they count as {before:g} and "
            f"{after:g} independent steps",
            f"step: {step.base_ns / 1e6:.3f} ms before, {step.new_ns / 1e6:.3f} ms after "
            f"({step.ratio:+.1%}; {_interval(step)} ms): {step.verdict}",
            *self._reservations(),
            *(f"{key}: {old} before, {new} after" for key, (old, new) in self.environment.items()),
            *(f"{old} may be called {new} now: --map {old}={new} compares them" for old, new in self.suggested.items()),
        ]

    def _reservations(self) -> list[str]:
        """What differences and verdicts are beside, as far as it was measured, and why there may be none."""
        notes = []
        if min(self.base_steps, self.new_steps) < MIN_STEPS:
            notes.append(f"fewer than {MIN_STEPS} steps on a side: too few for any verdict")
        if not self.compared:
            notes.append("no module is in enough recordings of both sides: no time can be compared")
        elif self.compared < MIN_MODULES:
            notes.append("too few modules to tell the machine's speed: it is in all differences")
        else:
            notes.append(
                f"the median module changed by {self.common_ratio - 1:+.1%}, which counts as the machine's own change: "
                "differences and verdicts are about what is beside it"
            )
        noise = [f"a module differs by {self.spread:.1%} between recordings"] if self.compared else []
        drifts = [
            f"{drift:+.1%} {when}"
            for drift, when in zip(self.drift, ("before", "after"), strict=True)
            if drift is not None
        ]
        if drifts:
            noise.append(f"the step drifted within one by up to {' and '.join(drifts)}")
        if noise:
            notes.append(f"noise: {'; '.join(noise)}")
        if any(self.copies):
            notes.append(f"{counted(sum(self.copies), 'recording')} left out: a copy says nothing new")
        if self.on_both_sides:
            same = (self.on_both_sides, self.on_both_sides) == self.runs
            which = f"{counted(self.on_both_sides, 'recording')} on both sides"
            notes.append(f"{'both sides hold the same recordings' if same else which}: they say nothing of a change")
        return notes + self._incomplete()

    def _incomplete(self) -> list[str]:
        """What some recordings of a side lack, and others have."""
        parts = [
            f"{change.fqn} {change.phase} ({has} of {runs} {when})"
            for change in self.changes
            for has, runs, when in (
                (change.base_recordings, self.runs[0], "before"),
                (change.new_recordings, self.runs[1], "after"),
            )
            if 0 < has < runs
        ]
        more = f" and {len(parts) - _NAMED:,} more" if len(parts) > _NAMED else ""
        return [f"not in every recording: {', '.join(parts[:_NAMED])}{more}"] if parts else []

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
        values = {name: getattr(self, name) for name in self.__slots__ if not name.startswith("_")}
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
                f"{100 * change.ratio:+.1f}" if math.isfinite(change.ratio) else "",
                _interval(change),
                f"{change.base_calls:g}"
                + (f" → {change.new_calls:g}" if change.new_calls != change.base_calls else ""),
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


def _interval(change: Change) -> str:
    if change.low_ns is None or change.high_ns is None:
        return ""
    return f"{change.low_ns / 1e6:+.3f} … {change.high_ns / 1e6:+.3f}"
