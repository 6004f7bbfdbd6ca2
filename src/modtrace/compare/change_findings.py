"""Findings of a comparison: the largest changes of any kind, with the figures of verdicts and parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from .._tables import ratio_text
from ..timeline.contents import place_in_lists
from ..timeline.summary.findings import MAX_FINDINGS, Finding, only_option
from ..timeline.summary.overview import shortened
from ..timeline.summary.slow_steps import short_ms
from .run_times import INPUTS_PREFIX, MODULE_VALUE_PREFIXES, PROGRAM_FACTS, names_around
from .verdicts import ALMOST_ALL, MIN_CHANGE, MIN_STEP_SHARE, MIN_STEPS_FOR_VERDICT, PART, Cause, Change

if TYPE_CHECKING:
    from .diff_result import Diff

MODULE_PARTS = {"forward", "backward", "recompute"}
"""Parts of the step that are reported only if no module in them is."""
_ONE_SIDED = {"added": "new", "removed": "gone"}
_MAX_NAMES = 3
_MIN_COMMON_FACTOR = 1.5
"""Minimum factor by which modules in general are slower or faster for a finding; other programs cause up to a third."""
_MIN_EXPLAINED_SHARE = 0.5
"""Share of the step's difference that other findings explain if the step is not a finding itself."""
_UNKNOWN = "whether the machine or the work changed is not known"
CAUSES: dict[Cause, list[str]] = {
    "machine": [],
    "unknown": [
        _UNKNOWN,
        "; whether the work changed instead is not known, so what takes longer than before is not called faster",
    ],
    "either": [
        _UNKNOWN,
        ", and the optimizer did not change by the same ratio: times are as measured, and a verdict holds both if the "
        "machine changed and if the work did",
    ],
    "work": [
        "most of them did other work",
        ", and most of them did other work, as calls, FLOPs, shapes or bytes show: times are as measured, and "
        "intervals allow for a machine that changed as the optimizer did",
    ],
}
"""By cause of the common change of modules, texts for the sentence and for the header."""
_EXACT = {
    INPUTS_PREFIX: "gets other inputs",
    "FLOPs of a call of ": "has other FLOPs",
    "shapes of a call of ": "gets other shapes",
}
_SAME_TIME_RATIO = 1.25
"""Maximum ratio of two times that count as the same."""
_MIN_LINES_SHARE = 0.5
"""Minimum growth between two lines that explains the difference of a part, as a share of that difference."""
_MAX_LINES_SHARE = 1.5
"""Maximum of the same share."""


def find_changes(diff: Diff) -> list[Finding]:
    """Return the findings, by the absolute difference that they make to a step."""
    changes = _Changes(diff)
    findings = sorted(changes.find(), key=lambda finding: -abs(finding.ns_per_step))[:MAX_FINDINGS]
    return [
        finding._replace(ns_per_step=0, share=0.0) if finding.what in changes.untimed else finding
        for finding in findings
    ]


def compared_words(diff: Diff) -> str:
    """Return the list of compared values; empty if there are too few steps or modules for a verdict."""
    if not diff.compared or min(diff.base_steps, diff.new_steps) < MIN_STEPS_FOR_VERDICT:
        return ""
    rows = diff.rows_in_words(len({change.fqn for change in diff.changes}))
    parts = f", {len(diff.parts)} parts of the step" if diff.parts else ""
    return f"times, calls and classes of {rows}{parts}, FLOPs and shapes where both sides have them"


def closing_words(diff: Diff, findings: Sequence[Finding], looked_at: str) -> str:
    """Return the line that nothing else changed, or the rows without a verdict: the step first, then the largest."""
    step = diff.step
    parts = [part for part in diff.parts if part.fqn not in MODULE_PARTS]
    too, other = (" too", "else ") if findings else ("", "")
    unsure = [row for row in (*parts, *diff.changes) if _is_unsure(row, step)]
    unsure.sort(key=lambda row: -abs(row.difference_ns))
    if not diff.selected and (_is_unsure(step, step) or (unsure and step.verdict == "cannot tell")):
        unsure.insert(0, step)
    advice = f"record more per side, in turns (now {diff.runs[0]:,} and {diff.runs[1]:,})"
    if diff.common_cause in {"either", "unknown"}:
        advice += ", with --flops or --shapes"
    if unsure:
        rows = [f"{row.label} ({ratio_text(row.ratio)})" for row in unsure]
        sentence = f"cannot tell whether {_names_text(rows) or rows[0]} changed{too}: {advice}"
    elif len(findings) == MAX_FINDINGS:
        return ""
    else:
        sentence = f"nothing {other}changed beyond the noise"
        if step.verdict == "cannot tell" and step.low_ns is not None and step.high_ns is not None and not diff.selected:
            ends = (ratio_text(end / max(step.base_ns, 1)) for end in (step.low_ns, step.high_ns))
            sentence += f"; the step: {ratio_text(step.ratio)}, from {' to '.join(ends)}: to tell more, {advice}"
    return sentence if findings else f"{sentence}; looked at: {looked_at}"


def _is_unsure(row: Change, step: Change) -> bool:
    """Return whether a row without a verdict differs by enough to be reported."""
    min_ns = max(MIN_CHANGE * row.base_ns, MIN_STEP_SHARE * step.base_ns)
    is_known = row.calls_changed or row.low_ns is None
    return row.verdict == "cannot tell" and not is_known and abs(row.difference_ns) > min_ns


def compiled_words(diff: Diff) -> Iterator[tuple[Sequence[str], str]]:
    """Yield the regions that only one side compiled, or left empty, with a phrase about the modules that this hides."""
    compiled, emptied = diff.compiled, diff.emptied
    for regions, start, end in (
        (compiled[0], "not compiled: ", "have spans of their own"),
        (compiled[1], "compiled: ", "have no spans of their own"),
        (emptied[0], "", "have spans now: not compiled any more, or not called before"),
        (emptied[1], "", "have no spans now: compiled, or not called any more"),
    ):
        modules = sum(not {*regions}.isdisjoint(names_around(fqn)) for fqn in diff.in_compiled)
        if regions:
            names = shortened(regions, 1)
            subject = "module" if modules == 1 else f"{modules:,} modules"
            end = end.replace("have", "has", 1) if modules == 1 else end
            yield regions, start + (f"the {subject} inside of {names} {end}" if modules else f"{names}, by module")


class _Changes:
    """The rules. Each removes the changes that it explains from `remaining`, so that none is reported twice."""

    def __init__(self, diff: Diff) -> None:
        self.diff = diff
        self.remaining = [
            change
            for change in diff.changes
            if (change.calls_changed or change.is_timed)
            # One side may lack the times of the device.
            and not (change.is_gpu and change.verdict in _ONE_SIDED)
        ]
        self.reported: set[str] = set()
        """Names of the modules that findings report."""
        self.explained: set[str] = set()
        """Labels of parts, and of the step, whose difference a finding explains."""
        self.untimed: set[str] = set()
        """Findings that are certain, but make no certain difference to the step."""

    def find(self) -> list[Finding]:
        rules = (
            self._find_compiled,
            self._find_classes,
            self._find_recompute,
            self._find_calls,
            self._find_new_and_gone,
            self._find_work,
            self._find_times,
        )
        findings = [finding for rule in rules for finding in rule()]
        findings += self._find_program(is_grown=not {row.verdict for row in self.diff.changes}.isdisjoint(_ONE_SIDED))
        findings += self._find_parts(set() if findings else MODULE_PARTS)
        explained = sum(finding.ns_per_step for finding in findings) / (self.diff.step.difference_ns or 1)
        return [*findings, *(self._find_general_change() if explained < _MIN_EXPLAINED_SHARE else ())]

    def _take(self, is_explained: Callable[[Change], bool]) -> list[Change]:
        explained, remaining = list[Change](), list[Change]()
        for change in self.remaining:
            (explained if is_explained(change) else remaining).append(change)
        self.remaining = remaining
        self.reported.update(change.fqn for change in explained)
        return explained

    def _make_finding(
        self, title: str, where: str | None, rows: Sequence[Change], evidence: str = "", step_share: float = 1.0
    ) -> Finding:
        """Return a finding with the cost of the rows in `step_share` of the steps; GPU rows count only if all are."""
        is_gpu = all(row.is_gpu for row in rows)
        rows = [row for row in rows if is_gpu or not row.is_gpu]
        phases = dict.fromkeys(row.fqn if row.phase == PART else row.phase for row in rows)
        base_ms, new_ms = sum(row.base_ns for row in rows) / 1e6, sum(row.new_ns for row in rows) / 1e6
        figures = f"{base_ms:.3f} ms before, {new_ms:.3f} ms after" if rows else ""
        cost = round(step_share * sum(row.difference_ns for row in rows))
        command = f"modtrace diff {self.diff.arguments} {only_option(f'{where}*') if where else '--verbose'}"
        part = next(iter(phases)) if len(phases) == 1 and "step" not in phases else None
        share = cost / max(self.diff.step.base_ns, 1)
        return Finding(title, where, part, cost, share, "; ".join(filter(None, (evidence, figures))), command)

    def _is_large(self, rows: Sequence[Change]) -> bool:
        """Return whether the times of the rows differ by enough to be reported."""
        return abs(sum(row.difference_ns for row in rows)) >= MIN_STEP_SHARE * self.diff.step.base_ns

    def _find_compiled(self) -> Iterator[Finding]:
        for regions, words in compiled_words(self.diff):
            rows = [row for row in self.diff.changes if not {*regions}.isdisjoint(names_around(row.fqn))]
            self._take(rows.__contains__)
            if not self.diff.step.is_timed:
                self.untimed.add(words)
            yield self._make_finding(words, regions[0], rows)

    def _find_classes(self) -> Iterator[Finding]:
        fqns_by_classes: dict[tuple[str, str], list[str]] = {}
        for fqn, base_and_new in self.diff.classes.items():
            fqns_by_classes.setdefault(base_and_new, []).append(fqn)
        for (base, new), fqns in fqns_by_classes.items():
            rows = self._take(
                lambda row, fqns=fqns: (
                    row.phase != "recompute"  # type: ignore[misc]
                    and (
                        row.fqn in fqns or (row.verdict in _ONE_SIDED and not {*fqns}.isdisjoint(names_around(row.fqn)))
                    )
                )
            )
            self.reported.update(fqns)
            yield self._make_finding(f"is {new}, was {base}", fqns[0], rows, _names_text(fqns))

    def _find_recompute(self) -> Iterator[Finding]:
        for verdict, words in (("added", "runs again in backward now (recompute)"), ("removed", "recomputes no more")):
            rows = self._take(lambda row, verdict=verdict: (row.phase, row.verdict) == ("recompute", verdict))  # type: ignore[misc]
            parts = [part for part in self.diff.parts if (part.fqn, part.verdict) == ("recompute", verdict)]
            if rows:
                fqns = _outermost(rows)
                yield self._make_finding(words, fqns[0], parts or rows, _names_text(fqns))

    def _find_calls(self) -> Iterator[Finding]:
        while rows := [row for row in self.remaining if row.outcome != row.verdict]:
            first = rows[0]
            rows_alike = self._take(
                lambda row, first=first: row.outcome == first.outcome and row.outcome != row.verdict  # type: ignore[misc]
            )
            fqns = _outermost(rows_alike)
            yield self._make_finding(first.outcome, fqns[0], rows_alike, _names_text(fqns))

    def _find_new_and_gone(self) -> Iterator[Finding]:
        on_both_sides = {row.fqn for row in self.diff.changes if row.base_recordings and row.new_recordings}
        rows_by_change: dict[tuple[str, str], list[Change]] = {}
        for row in self._take(lambda row: row.verdict in _ONE_SIDED):
            phase = f"{row.phase} " if row.fqn in on_both_sides else ""
            rows_by_change.setdefault((phase, row.verdict), []).append(row)
        for (phase, verdict), rows in rows_by_change.items():
            fqns = _outermost(rows)
            yield self._make_finding(f"{phase}is {_ONE_SIDED[verdict]}", fqns[0], rows, _names_text(fqns))

    def _find_work(self) -> Iterator[Finding]:
        """Yield a finding if most modules did other work, or one for each kind of work that single modules changed."""
        exact = {
            (prefix, key.removeprefix(prefix)): f"{key}: {base} before, {new} after"
            for key, (base, new) in self.diff.environment.items()
            for prefix in (INPUTS_PREFIX, *MODULE_VALUE_PREFIXES)
            if key.startswith(prefix)
        }
        diff = self.diff
        if diff.common_cause == "work" and exact and not diff.selected:
            verdict = "slower" if diff.common_ratio >= 1 else "faster"
            rows = self._take(lambda row: row.verdict == verdict)
            is_timed = diff.step.is_timed
            if not (is_timed or rows):
                self.untimed.add("the work changed")
            self.explained.update([diff.step.label] if is_timed else [])
            rows_of_cost = rows if rows and not is_timed else [diff.step]
            yield self._make_finding("the work changed", None, rows_of_cost, next(iter(exact.values())))
            return
        unexplained = {row.fqn for row in diff.changes} - self.reported
        for start, words in _EXACT.items():
            texts = {
                fqn: text
                for (prefix, fqn), text in exact.items()
                if prefix == start and fqn in unexplained - self.reported
            }
            if texts:
                rows = self._take(lambda row, texts=texts: row.fqn in texts)  # type: ignore[misc]
                self.reported.update(texts)
                fqn, text = next(iter(texts.items()))
                yield self._make_finding(words, fqn, rows, "; ".join(filter(None, (text, _names_text([*texts])))))

    def _find_times(self) -> Iterator[Finding]:
        """Yield a finding for each slower or faster module, or for its siblings together."""
        fqns = {row.fqn for row in self.diff.changes}
        patterns = {fqn: place_in_lists(fqn, fqns) for fqn in fqns}
        while self.remaining:
            first = self.remaining[0]
            rows = self._take(
                lambda row, first=first: (
                    (patterns[row.fqn], row.verdict, row.is_gpu)  # type: ignore[misc]
                    == (patterns[first.fqn], first.verdict, first.is_gpu)
                )
            )
            if self._is_large(rows):
                words = f"is {first.verdict} in {' and '.join(dict.fromkeys(row.phase for row in rows))}"
                yield self._make_finding(words, first.fqn, rows, _names_text([*dict.fromkeys(row.fqn for row in rows)]))

    def _find_program(self, *, is_grown: bool) -> Iterator[Finding]:
        """Yield the facts about the program that differ; new or missing modules explain changed parameters."""
        row_by_label = {row.label: row for row in (*self.diff.parts, self.diff.step) if row.is_timed}
        for fact, part in PROGRAM_FACTS.items():
            if fact not in self.diff.environment or self.diff.selected or (fact == "parameters" and is_grown):
                continue
            base, new = self.diff.environment[fact]
            rows = [row_by_label[part]] if part in row_by_label and part not in self.explained else []
            self.explained.update(row.label for row in rows)
            words = f"{fact}: {new}, was {base}"
            if not rows:
                self.untimed.add(words)
            yield self._make_finding(words, None, rows)

    def _find_parts(self, module_parts: set[str]) -> Iterator[Finding]:
        for part in self.diff.parts:
            if part.fqn in self.explained or (part.fqn in MODULE_PARTS and part.fqn not in module_parts):
                continue
            share = part.in_steps
            is_large = abs(share * part.difference_ns) >= MIN_STEP_SHARE * self.diff.step.base_ns
            if is_large and (part.calls_changed or part.is_timed):
                evidence = f"in {share:.0%} of the steps" if share < ALMOST_ALL else ""
                if part.calls_changed:
                    evidence = f"in {part.base_calls:.0%} of the steps before, in {part.new_calls:.0%} after"
                words = f"{part.fqn} is {_ONE_SIDED.get(part.verdict, part.verdict)}"
                if part.calls_changed and part.verdict not in _ONE_SIDED:
                    words = f"{part.fqn} is in {'more' if part.new_calls > part.base_calls else 'fewer'} steps"
                evidence = "; ".join(filter(None, (evidence, self._lines(part))))
                yield self._make_finding(words, None, [part], evidence, share)

    def _lines(self, part: Change) -> str:
        """Return a phrase with the lines between which most of a part's difference is; empty if they are unknown."""
        sides = [{where: ns for lines_part, where, ns in side if lines_part == part.fqn} for side in self.diff.lines]
        shorter, longer = sides if part.difference_ns > 0 else sides[::-1]
        min_ns, max_ns = (share * abs(part.difference_ns) for share in (_MIN_LINES_SHARE, _MAX_LINES_SHARE))
        # Other lines with the same time have moved in the file.
        moved = [ns for where, ns in shorter.items() if where not in longer]
        growth = {
            where: ns - shorter.get(where, 0)
            for where, ns in longer.items()
            if where in shorter
            or not any(ns < _SAME_TIME_RATIO * moved_ns < _SAME_TIME_RATIO**2 * ns for moved_ns in moved)
        }
        explaining = {where: ns for where, ns in growth.items() if min_ns <= ns <= max_ns}
        where = max(explaining, key=explaining.__getitem__, default="")
        return f"{short_ms(explaining[where])} of it {where}" if where else ""

    def _find_general_change(self) -> Iterator[Finding]:
        diff, ratio = self.diff, self.diff.common_ratio
        if diff.common_cause not in {"either", "unknown"} or diff.selected:
            return
        if diff.step.is_timed:
            yield self._make_finding(f"the step is {diff.step.verdict}", None, [diff.step], _UNKNOWN)
        elif max(ratio, 1 / ratio) >= _MIN_COMMON_FACTOR:
            words = f"modules in general take {ratio:.2f} times as long"
            yield self._make_finding(words, None, [diff.step], f"{_UNKNOWN}, nor by how much: FLOPs or shapes say it")


def _outermost(rows: Sequence[Change]) -> list[str]:
    fqns = dict.fromkeys(row.fqn for row in rows)
    return [fqn for fqn in fqns if fqns.keys().isdisjoint(names_around(fqn)[1:])]


def _names_text(fqns: Sequence[str]) -> str:
    """Return the names if there are several; otherwise empty."""
    return shortened(fqns, _MAX_NAMES) if len(fqns) > 1 else ""
