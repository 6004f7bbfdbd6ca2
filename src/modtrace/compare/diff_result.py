"""`Diff`, the result of a comparison: its sentences and tables, and the forms they are written in."""

import fnmatch
import html
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._errors import WriteError
from .._files import atomic_writer
from .._tables import (
    CHANGED_MS,
    MODULE,
    MS,
    NAME,
    TEXT,
    Column,
    Form,
    Table,
    counted,
    fields_of,
    join_texts,
    json_values,
    paragraph,
    printable,
    ratio_text,
)
from ..timeline.summary import Finding, GroupBy
from ..timeline.summary.findings import findings_lines
from ..timeline.summary.overview import shortened
from ..write import write
from ..write.html import write_html
from .change_findings import CAUSES, TOLD_BY_MODULES, closing_words, compared_words, compiled_words, find_changes
from .noise import MIN_MODULES
from .regions import REGION_COLUMNS, RegionChange, region_changes
from .run_times import names_around
from .side_by_side import TypicalStep, compared, side_by_side
from .verdicts import FLOOR, MIN_STEPS, Cause, Change, PeakChange

SUFFIXES = (".html", ".csv", ".json", ".md", ".pftrace", ".pftrace.gz")
"""The suffixes that `Diff.save` knows."""

_RELATED = 0.1
_NAMED = 3
"""Number of modules that some recordings lack, and of changed parts, that are named."""
_MAX_DIFFERENCES = 10


def _interval_text(change: Change) -> str:
    """Return the interval of the difference in ms; empty if there is none."""
    if change.low_ns is None:
        return ""
    high = "not known" if change.high_ns is None else f"{change.high_ns / 1e6:+.3f}"
    return f"{change.low_ns / 1e6:+.3f} … {high}"


def _percent(change: Change) -> str:
    return ratio_text(change.ratio).removesuffix("%") if math.isfinite(change.ratio) else ""


def _calls_text(change: Change) -> str:
    """Return the calls in a step before, and after if they differ."""
    after = f" → {change.new_calls:g}" if change.new_calls != change.base_calls else ""
    return f"{change.base_calls:g}{after}"


_DIFFERENCE = (
    Column("difference ms", "difference_ns", CHANGED_MS),
    Column("interval ms", _interval_text),
    Column("%", _percent),
)
_PART_COLUMNS = (
    Column("part of the step", "fqn", NAME),
    Column("before ms", "base_ns", MS),
    Column("after ms", "new_ns", MS),
    *_DIFFERENCE,
    Column("verdict", "verdict", TEXT),
)


@dataclass(frozen=True, slots=True)
class Diff:
    """Two sets of recordings, compared.

    Attributes:
        changes: one per module and phase: first what is called differently, then what is slower or faster, then the
            rest; the largest cost of each first.
        step: the step as a whole, at the speeds that the machine had.
        base_steps: how many steps before were compared.
        new_steps: how many after.
        warm_up: how many steps at the beginnings were left out.
        common_ratio: by what factor modules in general became slower; 1 if fewer than 6 modules and phases are
            compared.
        common_cause: what that is. "machine": `changes` and `parts` are without it; "unknown": so are they, as nothing
            says that the work changed, but what takes longer is not called faster; "either": the optimizer did not
            change alike, so they are with it, and have a verdict only if it is true in both cases; "work": FLOPs,
            shapes, calls or bytes say so, and they are with it.
        compared: how many modules and phases were compared.
        runs: how many recordings there were, before and after, each counted once.
        copies: how many more were given that are copies of these.
        on_both_sides: how many recordings before are among those after too.
        spread: by what part a module differs from one recording to the next, the median weighted by time.
        environment: what differs between the sides: of `torch`, `cpu` and the like, and of what modules cost in FLOPs
            and bytes, the texts before and after.
        suggested: names before and what they may be called after, as the structure suggests; nothing is compared by it.
        parts: one per part of the step, such as data loading, in the order of `changes`; none if a baseline has none.
        peak_bytes: the most memory that all took, and each module, before and after; none if a side has no memory.
        by: what the changes are of: a "module", or all of a "class", which `fqn` then names.
        classes: of each module that has another class after, both.
        compiled: the regions that are compiled before alone, and after alone.
        inside: the modules of one side in regions inside of which the other has no spans: they are compared as one with
            the region.
        lines: between which lines of the program a recording of each side is outside of modules and ranges: the part of
            the step, where, and nanoseconds; none if that was not noted.
        selected: True if only some modules are looked at; the step, which has all others in it, then does not count.
        arguments: of `modtrace diff`, in the commands that findings advise.

    Examples:
        >>> [change.fqn for change in modtrace.diff("a.pftrace", "b.pftrace").above(0.05)]
    """

    changes: Sequence[Change]
    step: Change
    base_steps: int
    new_steps: int
    warm_up: int
    common_ratio: float
    compared: int
    runs: tuple[int, int]
    copies: tuple[int, int]
    on_both_sides: int
    spread: float
    environment: Mapping[str, tuple[str, str]]
    suggested: Mapping[str, str]
    parts: Sequence[Change] = ()
    peak_bytes: Sequence[PeakChange] = ()
    common_cause: Cause = "machine"
    by: GroupBy = "module"
    classes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    compiled: tuple[Sequence[str], Sequence[str]] = ((), ())
    inside: Sequence[str] = ()
    lines: tuple[Sequence[tuple[str, str, int]], Sequence[tuple[str, str, int]]] = ((), ())
    selected: bool = field(default=False, compare=False)
    arguments: str = field(default="BASE NEW", compare=False)
    _sides: tuple[TypicalStep, TypicalStep] | None = field(default=None, repr=False, compare=False)
    """A typical step before and one after, which pages and traces show; None if a side is a baseline."""

    def only(self, pattern: str) -> "Diff":
        """Keep the modules whose fully qualified name matches a shell's pattern; `*` also matches dots."""
        matches = re.compile(fnmatch.translate(pattern)).match
        changes = [change for change in self.changes if matches(change.fqn)]
        peaks = [peak for peak in self.peak_bytes if not peak.fqn or matches(peak.fqn)]
        classes = {fqn: kinds for fqn, kinds in self.classes.items() if matches(fqn)}
        before, after = ([fqn for fqn in side if matches(fqn)] for side in self.compiled)
        inside = [fqn for fqn in self.inside if matches(fqn)]
        kept = replace(self, changes=changes, parts=(), peak_bytes=peaks, classes=classes, selected=True)
        return replace(kept, compiled=(before, after), inside=inside)

    def above(self, limit: float, *, floor: float = FLOOR) -> list[Change]:
        """Return changes that are slower, with the whole interval, by more than a part of the time before (0.05: 5 %).

        The step and its parts are among it, unless `only` selected modules.

        Args:
            limit: the part.
            floor: part of the step's time before: a module or a part counts only if it is slower by at least that.
        """
        least_ns = floor * self.step.base_ns
        slower = [change for change in (*self.parts, *self.changes) if change.difference_ns >= least_ns]
        return [
            change
            for change in (*([] if self.selected else [self.step]), *slower)
            if change.verdict == "slower" and change.low_ns is not None and change.low_ns > limit * change.base_ns
        ]

    def likely_above(self, limit: float, *, floor: float = FLOOR) -> list[Change]:
        """Return the step, or modules that `only` selected, if likely slower by more than `limit`, not surely."""
        least_ns, sure = floor * self.step.base_ns, self.above(limit, floor=floor)
        rows = [row for row in (self.changes if self.selected else [self.step]) if row.difference_ns >= least_ns]
        return [row for row in rows if row.is_likely_above(limit) and row not in sure]

    def peaks_above(self, limit: float, *, floor: float = FLOOR) -> list[PeakChange]:
        """Return peaks of memory that are higher by more than a part of that before (0.05: 5 %).

        The peak of all is among it, unless `only` selected modules.

        Args:
            limit: the part.
            floor: part of all that was held at most before: a module counts if its peak is higher by at least that.
        """
        least = floor * max((peak.base_bytes for peak in self.peak_bytes), default=0)
        grown = [peak for peak in self.peak_bytes if peak.difference_bytes > limit * peak.base_bytes]
        return [peak for peak in grown if (peak.difference_bytes >= least if peak.fqn else not self.selected)]

    @property
    def modules_in_common(self) -> tuple[int, int]:
        """The numbers of modules on both sides, and on at least one."""
        base, new = self._names
        return len(base & new), len(base | new)

    @property
    def unrelated(self) -> bool:
        """Whether the sides have hardly a module in common: fewer than one in ten."""
        common, modules = self.modules_in_common
        return not self.selected and common < _RELATED * (modules - len(self.in_compiled - {*self.inside}))

    @property
    def _names(self) -> tuple[set[str], set[str]]:
        """The modules before and after."""
        rows = self.changes
        return {row.fqn for row in rows if row.base_recordings}, {row.fqn for row in rows if row.new_recordings}

    @property
    def emptied(self) -> tuple[Sequence[str], Sequence[str]]:
        """The modules of one class on both sides that have modules inside after alone, and before alone.

        They may be compiled before a recording begins, which then does not know. Those in `compiled` are left out.
        """
        if self.by != "module":
            return (), ()
        names = self._names
        old, new = ({outer for fqn in side for outer in names_around(fqn)[1:]} for side in names)
        excluded = {*self.classes, *self.compiled[0], *self.compiled[1]}
        sides = [(names[0] & names[1] & filled) - empty - excluded for filled, empty in ((new, old), (old, new))]
        before, after = ([fqn for fqn in sorted(side) if side.isdisjoint(names_around(fqn)[1:])] for side in sides)
        return before, after

    @property
    def in_compiled(self) -> set[str]:
        """The modules that have spans on one side alone, as what they are in is compiled on the other, or empty."""
        names = self._names
        return {*self.inside} | {
            fqn
            for compiled, emptied, without, spans in zip(self.compiled, self.emptied, names, names[::-1], strict=True)
            for fqn in spans - without
            if not {*compiled, *emptied}.isdisjoint(names_around(fqn))
        }

    @property
    def regions(self) -> list[RegionChange]:
        """The times of regions that one side alone compiled, before and after, with all modules inside."""
        return region_changes(self.changes, [fqn for side in self.compiled for fqn in side])

    @property
    def findings(self) -> list[Finding]:
        """The largest changes of any kind, by what they cost or save in a step; at most seven."""
        return find_changes(self)

    @property
    def findings_lines(self) -> list[str]:
        """The findings as a summary has them."""
        findings, looked_at = self.findings, compared_words(self)
        lines = findings_lines(findings, looked_at, verb="changed")
        return [*lines[:-1], closing_words(self, findings, looked_at)] if lines else []

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        common, modules = self.modules_in_common
        if self.unrelated:
            return f"these are different models: {common} of {self.rows_in_words(modules)} are on both sides"
        often = [change for change in self.changes if change.outcome != change.verdict and stands_out(change)]
        parts: list[str] = []
        for verdict in ("slower", "faster"):
            rows = [change for change in self.changes if change.outcome == verdict]
            count = len({change.fqn for change in rows})
            if rows:
                of_all = f" of {self.rows_in_words(modules)}" if not parts else ""
                worst = f"{'' if count == 1 else 'most of all '}{rows[0].fqn} {rows[0].phase}, {_cost(rows[0])}"
                parts.append(f"{count:,}{of_all} {'is' if count == 1 else 'are'} {verdict}: {worst}")
        in_compiled = self.in_compiled  # once: it looks at all modules
        only = [change.verdict for change in self.changes if change.fqn not in in_compiled]
        few = min(self.base_steps, self.new_steps) < MIN_STEPS
        changed = f"{'other ' if often else ''}{self.by} of {modules:,} is slower or faster"
        parts = parts or [
            f"{MIN_STEPS} steps a side or more tell whether any {changed}" if few else f"no {changed} beyond the noise"
        ]
        further = len(often) - 1
        and_further = f", and {further:,} more {'differs' if further == 1 else 'differ'} so" if further else ""
        parts = [
            f"{change.fqn} {change.phase} {change.outcome}: {_cost(change)}{and_further}" for change in often[:1]
        ] + parts
        parts += [words for _, words in compiled_words(self)]
        parts += [f"{only.count(verdict):,} {verdict}" for verdict in ("added", "removed") if verdict in only]
        step = self.step
        change = (
            ratio_text(abs(step.ratio), f"{{:.1%}} {step.verdict}")
            if step.verdict in {"slower", "faster"}
            else "as long as before"
        )
        parts += [f"modules in general became {self._in_general}: {reason}" for reason in CAUSES[self.common_cause][:1]]
        parts.append(
            "whether the step changed is not clear" if step.verdict == "cannot tell" else f"the step is {change}"
        )
        parts += [
            f"{part.fqn} is {part.verdict}: {_cost(part)}"
            for part in self.parts
            if part.verdict in {"slower", "faster"} and part.fqn not in TOLD_BY_MODULES
        ][:_NAMED]
        return "; ".join(parts)

    @property
    def _in_general(self) -> str:
        """By how much modules in general became slower or faster, in words."""
        kind = "slower" if self.common_ratio >= 1 else "faster"
        return ratio_text(abs(self.common_ratio - 1), f"{{:.1%}} {kind}")

    @property
    def header(self) -> list[str]:
        """The answer, what was compared, how the whole step changed, and how much noise there is."""
        step, runs = self.step, self.runs
        differences = [f"{key}: {old} before, {new} after" for key, (old, new) in self.environment.items()]
        unnamed = len(differences) - _MAX_DIFFERENCES
        return [
            self.sentence,
            f"before: {self.base_steps:,} steps of {counted(runs[0], 'recording')}; after: {self.new_steps:,} of "
            f"{counted(runs[1], 'recording')}; {self.warm_up:,} of warm-up left out",
            f"step: {step.base_ns / 1e6:.3f} ms before, {step.new_ns / 1e6:.3f} ms after "
            f"({step.difference_ns / 1e6:+.3f} ms, {_interval_text(step)}; {ratio_text(step.ratio)}): {step.verdict}",
            *self._reservations(),
            *differences[:_MAX_DIFFERENCES],
            *([counted(unnamed, "more difference")] if unnamed > 0 else []),
            *self._changed_peaks(),
            *(f"{old} may be called {new} now: --map {old}={new} compares them" for old, new in self.suggested.items()),
        ]

    def _changed_peaks(self) -> list[str]:
        """The modules whose peaks differ most; that of all is among the differences."""
        peaks = [peak for peak in self.peak_bytes if peak.fqn and peak.difference_bytes]
        peaks.sort(key=lambda peak: -abs(peak.difference_bytes))
        unnamed = len(peaks) - _NAMED
        return [
            f"peak_bytes of {fqn}: {base:,} before, {new:,} after ({difference:+,})"
            for fqn, base, new, difference in peaks[:_NAMED]
        ] + ([f"peak_bytes of {counted(unnamed, 'more module')} differ"] if unnamed > 0 else [])

    def _reservations(self) -> list[str]:
        """Sentences about what was taken off differences, the noise, and why there may be no verdict."""
        notes = []
        if min(self.base_steps, self.new_steps) < MIN_STEPS:
            notes.append(f"fewer than {MIN_STEPS} steps on a side: too few for any verdict")
        if not self.compared:
            notes.append("no module is in enough recordings of both sides: no time can be compared")
        elif self.compared < MIN_MODULES:
            notes.append("too few modules to know the machine's speed: it is in all differences")
        else:
            kind = "slower" if self.common_ratio >= 1 else "faster"
            off = f", as on a {kind} machine: each module and part is compared with that, and shown without it; "
            off = f"{off}the step is not" if self.common_cause in {"machine", "unknown"} else ""
            single = "; one recording a side cannot tell it from a change of all modules" if self.runs == (1, 1) else ""
            reasons = CAUSES[self.common_cause][1:] or [single]
            notes.append(f"modules in general became {self._in_general}{off}{reasons[0]}")
        if self.parts:
            notes.append("each time is the mean of its own faster half of the steps: parts do not add up to the step")
        if self.compared:
            notes.append(f"noise: a module differs by {self.spread:.1%} between recordings")
        if any(self.copies):
            notes.append(f"{counted(sum(self.copies), 'recording')} left out: a copy says nothing new")
        if self.on_both_sides:
            same = (self.on_both_sides, self.on_both_sides) == self.runs
            shared = f"{counted(self.on_both_sides, 'recording')} on both sides"
            notes.append(f"{'both sides hold the same recordings' if same else shared}: they say nothing of a change")
        parts = [
            f"{change.fqn} {change.phase} ({has} of {runs} {when})"
            for change in self.changes
            for has, runs, when in (
                (change.base_recordings, self.runs[0], "before"),
                (change.new_recordings, self.runs[1], "after"),
            )
            if 0 < has < runs
        ]
        return notes + ([f"not in every recording: {shortened(parts, _NAMED)}"] if parts else [])

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
            write_html(timeline, path, compared(timeline, sides, [*self.findings_lines, *self.header], self.changes))
        else:
            render = {".csv": self.to_csv, ".json": self.to_json, ".md": self.to_markdown}[suffix]
            with atomic_writer(path) as file:
                file.write(render().encode())

    def _shown(self, path: str | os.PathLike[str]) -> tuple[TypicalStep, TypicalStep]:
        if self._sides is None:
            raise WriteError(f"{os.fspath(path)}: a baseline has no step to show; write .md, .csv or .json")
        return self._sides

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name; `Table.to` takes the form.

        They are "parts" of the step, if they are known, "regions", if one side alone compiled any, and "modules".
        """
        return self._tables(verbose=True)

    def _tables(self, *, verbose: bool) -> dict[str, Table]:
        rows = [change for change in self.changes if verbose or stands_out(change)]
        quiet = len({change.fqn for change in self.changes} - {change.fqn for change in rows})
        notes = [f"{self.rows_in_words(quiet)}: no difference beyond the noise"] if quiet else []
        columns = (
            Column(self.by, "fqn", MODULE),
            Column("phase", "phase", TEXT),
            Column("before self ms", "base_ns", MS),
            Column("after self ms", "new_ns", MS),
            *_DIFFERENCE,
            Column("calls", _calls_text),
            Column("verdict", "outcome", TEXT),
        )
        fields = fields_of(Change)
        parts = {"parts": Table(_PART_COLUMNS, self.parts, fields)} if self.parts else {}
        parts |= {"regions": Table(REGION_COLUMNS, self.regions, fields_of(RegionChange))} if self.regions else {}
        return parts | {"modules": Table(columns, rows, fields, notes=notes)}

    def to_text(self, limit: int | None = None, *, verbose: bool = False) -> str:
        """Return findings, header, table of the parts of the step, and table of modules, self times per step in ms.

        Args:
            limit: how many rows of modules at most.
            verbose: list modules without a difference beyond the noise too.
        """
        return join_texts(self.findings_lines, [join_texts(self.header, self._rendered("text", limit, verbose))])

    def to_markdown(self, limit: int | None = None, *, verbose: bool = False) -> str:
        """Return findings and the header as lists and GitHub tables; see `to_text`."""
        header = "\n".join(f"- {html.escape(printable(line))}" for line in self.header)
        findings = "\n".join(html.escape(printable(line)) for line in self.findings_lines)
        return "\n".join([f"{findings}\n"] * bool(findings) + [f"{header}\n", *self._rendered("md", limit, verbose)])

    def _rendered(self, form: Form, limit: int | None, verbose: bool) -> list[str]:
        tables = self._tables(verbose=verbose)
        return [
            table.to(form, limit if name == "modules" else None) if table.rows else "\n".join(table.notes)
            for name, table in tables.items()
        ]

    def to_csv(self) -> str:
        """Return CSV with a header line, the parts of the step last; times in ns."""
        return str(self.tables["modules"]._replace(rows=[*self.changes, *self.parts]).to("csv"))

    def to_dict(self) -> dict[str, Any]:
        """Return all as JSON values: `findings`, `sentence`, `changes`, `parts`, `step` and the rest; times in ns."""
        values: dict[str, Any] = {"findings": json_values(self.findings), "sentence": self.sentence}
        values |= {name: json_values(getattr(self, name)) for name in self.__slots__ if not name.startswith("_")}
        return values | {"regions": json_values(self.regions)}

    def to_json(self) -> str:
        """Return what `to_dict` does as JSON text."""
        return json.dumps(self.to_dict(), separators=(",", ":")) + "\n"

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        """Show in a notebook findings, the header, and tables of the parts of the step and of modules."""
        above = [*paragraph(self.findings_lines), *paragraph(self.header)]
        return "".join([*above, "\n", *self._rendered("html", None, verbose=True)])

    def rows_in_words(self, count: int) -> str:
        """Return `1 module`, `2 modules`, or so many classes."""
        plural = {"module": "modules", "class": "classes"}[self.by]
        return f"{count:,} {self.by if count == 1 else plural}"


def suffix_of(path: str | os.PathLike[str]) -> str:
    """Return which of `SUFFIXES` a path has; raises WriteError if it has none."""
    suffix = next((suffix for suffix in SUFFIXES if os.fspath(path).lower().endswith(suffix)), None)
    if suffix is None:
        raise WriteError(f"{os.fspath(path)}: the suffix must be one of {', '.join(SUFFIXES)}")
    return suffix


def stands_out(change: Change) -> bool:
    """Return whether a row is more than noise: it is called otherwise, or has a verdict that says so."""
    return change.calls_changed or change.verdict not in {"same", "cannot tell"}


def _cost(change: Change) -> str:
    ratio = f" ({ratio_text(abs(change.ratio), '{:.0%}')})" if math.isfinite(change.ratio) else ""
    return f"{change.difference_ns / 1e6:+.3f} ms{ratio}"
