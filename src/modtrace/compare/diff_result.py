"""`Diff`, the result of a comparison: its sentences and tables, and the formats that it writes."""

import fnmatch
import html
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
    json_text,
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
from .change_findings import CAUSES, MODULE_PARTS, closing_words, compared_words, compiled_words, find_changes
from .noise import MIN_MODULES
from .regions import REGION_COLUMNS, RegionChange, region_changes
from .run_times import names_around
from .side_by_side import TypicalStep, make_comparison, side_by_side
from .verdicts import MIN_STEP_SHARE, MIN_STEPS_FOR_VERDICT, Cause, Change, PeakChange

SUFFIXES = (".html", ".csv", ".json", ".md", ".pftrace", ".pftrace.gz")
"""Suffixes of the formats that `Diff.save` writes."""
_MIN_COMMON_SHARE = 0.1
_MAX_NAMES = 3
"""Maximum number of names of modules that some recordings lack, of changed parts, and of changed peaks."""
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
        changes: one per module and phase: first modules with changed calls, then slower or faster ones, then the
            others; the largest cost of each first.
        step: the step as a whole, as measured, with the machine's change.
        base_steps: number of compared steps before.
        new_steps: number of compared steps after.
        warm_up: number of first steps that were left out.
        common_ratio: factor by which modules in general became slower; 1 if fewer than 6 modules and phases are
            compared.
        common_cause: cause of that change. "machine": `changes` and `parts` are without it; "unknown": they are
            without it too, as no figure shows that the work changed, but a longer time is not called faster;
            "either": the optimizer did not change alike, so they include it, and have a verdict only if it is true in
            both cases; "work": FLOPs, shapes, calls or bytes show that the work changed, and they include it.
        compared: number of compared modules and phases.
        runs: number of recordings before and after, without copies.
        copies: number of copies of recordings before and after.
        on_both_sides: number of recordings before that are also among those after.
        spread: relative difference of a module between recordings, the median weighted by time.
        environment: texts before and after of each key that differs: `torch`, `cpu` and the like, and the FLOPs and
            bytes of modules.
        suggested: likely new names by names before, by the structure of modules; the comparison does not use them.
        parts: one per part of the step, such as data loading, in the order of `changes`; empty if a baseline has none.
        peak_bytes: peaks of memory before and after, of all tensors and of each module; empty if a side has no memory.
        by: unit of the changes: a "module", or all modules of a "class", whose name is then in `fqn`.
        classes: classes before and after of each module whose class changed.
        compiled: regions that are compiled only before, and only after.
        inside: modules of one side in regions in which the other has no spans: each region is compared as a whole.
        lines: program lines around time outside modules and ranges, of a recording of each side: part of the step,
            phrase with the lines, ns; empty if they were not noted.
        selected: True if `only` selected modules; the step, which contains all others, then does not count.
        arguments: arguments of `modtrace diff`, for the commands in findings.

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
    """Typical steps before and after, for pages and traces; None if a side is a baseline."""

    def only(self, pattern: str) -> "Diff":
        """Return the comparison of modules whose full name matches a shell pattern; `*` also matches dots."""
        matches = re.compile(fnmatch.translate(pattern)).match
        changes = [change for change in self.changes if matches(change.fqn)]
        peaks = [peak for peak in self.peak_bytes if not peak.fqn or matches(peak.fqn)]
        classes = {fqn: old_and_new for fqn, old_and_new in self.classes.items() if matches(fqn)}
        base, new = ([fqn for fqn in side if matches(fqn)] for side in self.compiled)
        inside = [fqn for fqn in self.inside if matches(fqn)]
        selection = replace(self, changes=changes, parts=(), peak_bytes=peaks, classes=classes, selected=True)
        return replace(selection, compiled=(base, new), inside=inside)

    def above(self, limit: float, *, floor: float = MIN_STEP_SHARE) -> list[Change]:
        """Return the changes whose whole interval is slower by more than a share of the time before (0.05: 5 %).

        They include the step and its parts, unless `only` selected modules.

        Args:
            limit: maximum share.
            floor: minimum difference of a module or a part, as a share of the step's time before.
        """
        min_ns = floor * self.step.base_ns
        slower = [change for change in (*self.parts, *self.changes) if change.difference_ns >= min_ns]
        return [
            change
            for change in (*([] if self.selected else [self.step]), *slower)
            if change.verdict == "slower" and change.low_ns is not None and change.low_ns > limit * change.base_ns
        ]

    def likely_above(self, limit: float, *, floor: float = MIN_STEP_SHARE) -> list[Change]:
        """Return the step, or selected modules, that are likely but not certainly slower by more than `limit`."""
        min_ns, certain = floor * self.step.base_ns, self.above(limit, floor=floor)
        rows = [row for row in (self.changes if self.selected else [self.step]) if row.difference_ns >= min_ns]
        return [row for row in rows if row.is_likely_above(limit) and row not in certain]

    def peaks_above(self, limit: float, *, floor: float = MIN_STEP_SHARE) -> list[PeakChange]:
        """Return the peaks of memory that are higher by more than a share of the peak before (0.05: 5 %).

        They include the peak of all tensors, unless `only` selected modules.

        Args:
            limit: maximum share.
            floor: minimum difference of a module's peak, as a share of the largest peak before.
        """
        min_bytes = floor * max((peak.base_bytes for peak in self.peak_bytes), default=0)
        grown = [peak for peak in self.peak_bytes if peak.difference_bytes > limit * peak.base_bytes]
        return [peak for peak in grown if (peak.difference_bytes >= min_bytes if peak.fqn else not self.selected)]

    @property
    def modules_in_common(self) -> tuple[int, int]:
        """Number of modules on both sides, and on any side."""
        base, new = self._names
        return len(base & new), len(base | new)

    @property
    def unrelated(self) -> bool:
        """Whether the sides have fewer than one module in ten in common."""
        common, modules = self.modules_in_common
        return not self.selected and common < _MIN_COMMON_SHARE * (modules - len(self.in_compiled - {*self.inside}))

    @property
    def _names(self) -> tuple[set[str], set[str]]:
        """Names of the modules before and after."""
        rows = self.changes
        return {row.fqn for row in rows if row.base_recordings}, {row.fqn for row in rows if row.new_recordings}

    @property
    def emptied(self) -> tuple[Sequence[str], Sequence[str]]:
        """Modules of one class on both sides with inner modules only after, and only before, without `compiled` ones.

        They may have been compiled before the recording started, which it cannot know.
        """
        if self.by != "module":
            return (), ()
        names = self._names
        base, new = ({outer for fqn in side for outer in names_around(fqn)[1:]} for side in names)
        excluded = {*self.classes, *self.compiled[0], *self.compiled[1]}
        sides = [(names[0] & names[1] & filled) - empty - excluded for filled, empty in ((new, base), (base, new))]
        in_new, in_base = ([fqn for fqn in sorted(side) if side.isdisjoint(names_around(fqn)[1:])] for side in sides)
        return in_new, in_base

    @property
    def in_compiled(self) -> set[str]:
        """Modules with spans on one side only, since the other side has a region around them compiled, or empty."""
        names = self._names
        return {*self.inside} | {
            fqn
            for compiled, emptied, without, spans in zip(self.compiled, self.emptied, names, names[::-1], strict=True)
            for fqn in spans - without
            if not {*compiled, *emptied}.isdisjoint(names_around(fqn))
        }

    @property
    def regions(self) -> list[RegionChange]:
        """Times before and after of regions that only one side compiled, with all modules inside."""
        return region_changes(self.changes, [fqn for side in self.compiled for fqn in side])

    @property
    def findings(self) -> list[Finding]:
        """Up to seven largest changes of any kind, by their cost or saving in a step."""
        return find_changes(self)

    @property
    def findings_lines(self) -> list[str]:
        """Lines of the findings, as in a summary."""
        findings, looked_at = self.findings, compared_words(self)
        lines = findings_lines(findings, looked_at, verb="changed")
        return [*lines[:-1], closing_words(self, findings, looked_at)] if lines else []

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        common, modules = self.modules_in_common
        if self.unrelated:
            return f"these are different models: {common} of {self.rows_in_words(modules)} are on both sides"
        other_counts = [change for change in self.changes if change.outcome != change.verdict and stands_out(change)]
        parts: list[str] = []
        for verdict in ("slower", "faster"):
            rows = [change for change in self.changes if change.outcome == verdict]
            count = len({change.fqn for change in rows})
            if rows:
                total = f" of {self.rows_in_words(modules)}" if not parts else ""
                worst = f"{'' if count == 1 else 'most of all '}{rows[0].fqn} {rows[0].phase}, {_cost(rows[0])}"
                parts.append(f"{count:,}{total} {'is' if count == 1 else 'are'} {verdict}: {worst}")
        in_compiled = self.in_compiled  # computed once, as it goes over all modules
        verdicts = [change.verdict for change in self.changes if change.fqn not in in_compiled]
        is_few = min(self.base_steps, self.new_steps) < MIN_STEPS_FOR_VERDICT
        changed = f"{'other ' if other_counts else ''}{self.by} of {modules:,} is slower or faster"
        parts = parts or [
            f"record {MIN_STEPS_FOR_VERDICT} or more steps a side to see whether any {changed}"
            if is_few
            else f"no {changed} beyond the noise"
        ]
        further = len(other_counts) - 1
        and_further = f", and {further:,} more {'differs' if further == 1 else 'differ'} so" if further else ""
        parts = [
            f"{change.fqn} {change.phase} {change.outcome}: {_cost(change)}{and_further}" for change in other_counts[:1]
        ] + parts
        parts += [words for _, words in compiled_words(self)]
        parts += [f"{verdicts.count(verdict):,} {verdict}" for verdict in ("added", "removed") if verdict in verdicts]
        step = self.step
        change = ratio_text(abs(step.ratio), f"{{:.1%}} {step.verdict}") if step.is_timed else "as long as before"
        parts += [
            f"modules in general became {self._common_change}: {reason}" for reason in CAUSES[self.common_cause][:1]
        ]
        parts.append(
            "whether the step changed is not clear" if step.verdict == "cannot tell" else f"the step is {change}"
        )
        parts += [
            f"{part.fqn} is {part.verdict}: {_cost(part)}"
            for part in self.parts
            if part.is_timed and part.fqn not in MODULE_PARTS
        ][:_MAX_NAMES]
        return "; ".join(parts)

    @property
    def _common_change(self) -> str:
        """Common change of the modules, as `5.0% slower`."""
        direction = "slower" if self.common_ratio >= 1 else "faster"
        return ratio_text(abs(self.common_ratio - 1), f"{{:.1%}} {direction}")

    @property
    def header(self) -> list[str]:
        """Lines with the answer, the compared recordings, the change of the step, the noise, and other differences."""
        step, runs = self.step, self.runs
        differences = [f"{key}: {base} before, {new} after" for key, (base, new) in self.environment.items()]
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
        """Lines with the modules whose peaks differ most; the peak of all tensors is in `environment`."""
        peaks = [peak for peak in self.peak_bytes if peak.fqn and peak.difference_bytes]
        peaks.sort(key=lambda peak: -abs(peak.difference_bytes))
        unnamed = len(peaks) - _MAX_NAMES
        return [
            f"peak_bytes of {fqn}: {base:,} before, {new:,} after ({difference:+,})"
            for fqn, base, new, difference in peaks[:_MAX_NAMES]
        ] + ([f"peak_bytes of {counted(unnamed, 'more module')} differ"] if unnamed > 0 else [])

    def _reservations(self) -> list[str]:
        """Sentences about the machine's change, the noise, and reasons for a missing verdict."""
        notes = []
        if min(self.base_steps, self.new_steps) < MIN_STEPS_FOR_VERDICT:
            notes.append(f"a side has fewer than {MIN_STEPS_FOR_VERDICT} steps: there are no verdicts; record more")
        if not self.compared:
            notes.append("no module is in enough recordings of both sides, so no times are compared")
        elif self.compared < MIN_MODULES:
            notes.append("too few modules to measure the machine's speed, which changes all differences")
        else:
            direction = "slower" if self.common_ratio >= 1 else "faster"
            machine = f", as on a {direction} machine: each module and part is compared with this, "
            machine = (
                f"{machine}and shown without it; the step is not" if self.common_cause in {"machine", "unknown"} else ""
            )
            single = (
                "; with one recording a side, a change of all modules looks the same" if self.runs == (1, 1) else ""
            )
            reasons = CAUSES[self.common_cause][1:] or [single]
            notes.append(f"modules in general became {self._common_change}{machine}{reasons[0]}")
        if self.parts:
            notes.append(
                "each time is the mean of the faster half of its steps, so the parts do not add up to the step"
            )
        if self.compared:
            notes.append(f"noise: a module differs by {self.spread:.1%} between recordings")
        if any(self.copies):
            notes.append(f"{counted(sum(self.copies), 'recording')} left out as copies of others")
        if self.on_both_sides:
            is_same = (self.on_both_sides, self.on_both_sides) == self.runs
            shared = f"{counted(self.on_both_sides, 'recording')} on both sides"
            notes.append(f"{'both sides have the same recordings' if is_same else shared}: they cannot show a change")
        parts = [
            f"{change.fqn} {change.phase} ({count} of {runs} {side})"
            for change in self.changes
            for count, runs, side in (
                (change.base_recordings, self.runs[0], "before"),
                (change.new_recordings, self.runs[1], "after"),
            )
            if 0 < count < runs
        ]
        return notes + ([f"not in every recording: {shortened(parts, _MAX_NAMES)}"] if parts else [])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the comparison in the format of the suffix.

        `.csv`, `.json` and `.md` contain the tables of `to_csv`, `to_json` and `to_markdown`. `.html` is the offline
        viewer with a typical step of each side, one above the other on one time axis, coloured by change, next to the
        table. `.pftrace` (also `.pftrace.gz`) contains the same two steps for Perfetto.

        Raises:
            WriteError: the suffix is unknown, there is no step to show, or the file cannot be written; an existing
                file is intact.
        """
        suffix = suffix_of(path)
        if suffix in {".pftrace", ".pftrace.gz"}:
            write(side_by_side(self._typical_steps(path)), path)
        elif suffix == ".html":
            sides = self._typical_steps(path)
            timeline = side_by_side(sides)
            notes = [*self.findings_lines, *self.header]
            write_html(timeline, path, make_comparison(timeline, sides, notes, self.changes))
        else:
            render = {".csv": self.to_csv, ".json": self.to_json, ".md": self.to_markdown}[suffix]
            with atomic_writer(path) as file:
                file.write(render().encode())

    def _typical_steps(self, path: str | os.PathLike[str]) -> tuple[TypicalStep, TypicalStep]:
        if self._sides is None:
            raise WriteError(f"{os.fspath(path)}: a baseline has no step to show; write .md, .csv or .json")
        return self._sides

    @property
    def tables(self) -> dict[str, Table]:
        """Tables by name: "parts" of the step, if known, "regions", if only one side compiled any, and "modules"."""
        return self._tables(verbose=True)

    def _tables(self, *, verbose: bool) -> dict[str, Table]:
        rows = [change for change in self.changes if verbose or stands_out(change)]
        hidden = len({change.fqn for change in self.changes} - {change.fqn for change in rows})
        notes = [f"{self.rows_in_words(hidden)}: no difference beyond the noise"] if hidden else []
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
            limit: maximum number of rows of modules.
            verbose: whether to list modules without a difference beyond the noise.
        """
        return join_texts(self.findings_lines, [join_texts(self.header, self._render("text", limit, verbose))])

    def to_markdown(self, limit: int | None = None, *, verbose: bool = False) -> str:
        """Return findings, header and tables in Markdown; see `to_text`."""
        header = "\n".join(f"- {html.escape(printable(line))}" for line in self.header)
        findings = "\n".join(html.escape(printable(line)) for line in self.findings_lines)
        above = [f"{findings}\n"] if findings else []
        return "\n".join([*above, f"{header}\n", *self._render("md", limit, verbose)])

    def _render(self, form: Form, limit: int | None, verbose: bool) -> list[str]:
        tables = self._tables(verbose=verbose)
        return [
            table.to(form, limit if name == "modules" else None) if table.rows else "\n".join(table.notes)
            for name, table in tables.items()
        ]

    def to_csv(self) -> str:
        """Return CSV with a header line, the parts of the step last; times in ns."""
        return str(self.tables["modules"]._replace(rows=[*self.changes, *self.parts]).to("csv"))

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values, with its findings, sentence and regions; times in ns."""
        values: dict[str, Any] = {"findings": json_values(self.findings), "sentence": self.sentence}
        values |= {name: json_values(getattr(self, name)) for name in self.__slots__ if not name.startswith("_")}
        return values | {"regions": json_values(self.regions)}

    def to_json(self) -> str:
        """Return the values of `to_dict` as JSON text."""
        return json_text(self.to_dict())

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: findings, header, and tables of parts and modules."""
        above = [*paragraph(self.findings_lines), *paragraph(self.header)]
        return "".join([*above, "\n", *self._render("html", None, verbose=True)])

    def rows_in_words(self, count: int) -> str:
        """Return a count of modules or classes, such as `1 module` or `2 classes`."""
        plural = {"module": "modules", "class": "classes"}[self.by]
        return f"{count:,} {self.by if count == 1 else plural}"


def suffix_of(path: str | os.PathLike[str]) -> str:
    """Return the suffix of a path that is in `SUFFIXES`; raises WriteError if none is."""
    suffix = next((suffix for suffix in SUFFIXES if os.fspath(path).lower().endswith(suffix)), None)
    if suffix is None:
        raise WriteError(f"{os.fspath(path)}: the suffix must be one of {', '.join(SUFFIXES)}")
    return suffix


def stands_out(change: Change) -> bool:
    """Return whether a change is more than noise, by its calls or its verdict."""
    return change.calls_changed or change.verdict not in {"same", "cannot tell"}


def _cost(change: Change) -> str:
    ratio = f" ({ratio_text(abs(change.ratio), '{:.0%}')})" if math.isfinite(change.ratio) else ""
    return f"{change.difference_ns / 1e6:+.3f} ms{ratio}"
