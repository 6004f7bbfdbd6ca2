"""Findings of a comparison: what changed most, whatever it is; all figures are those of verdicts and parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from .._tables import ratio_text
from ..timeline.contents import place_in_lists
from ..timeline.summary.findings import MAX_FINDINGS, Finding, only_option
from ..timeline.summary.overview import shortened
from ..timeline.summary.slow_steps import short_ms
from .run_times import INPUTS_PREFIX, MODULE_VALUE_PREFIXES, PROGRAM_FACTS, names_around
from .verdicts import ALMOST_ALL, FLOOR, MIN_CHANGE, MIN_STEPS, Cause, Change

if TYPE_CHECKING:
    from .diff_result import Diff

TOLD_BY_MODULES = {"forward", "backward", "recompute"}
"""Parts of the step that are named only if no module in them is."""
_ONE_SIDED = {"added": "new", "removed": "gone"}
_NAMED = 3
_FAR = 1.5
"""Modules in general are told to be slower from this factor on: other programs make up to a third."""
_EXPLAINS = 0.5
"""The step is no finding itself if the others explain this share of its difference."""
_UNKNOWN = "whether the machine or the work changed is not known"
CAUSES: dict[Cause, list[str]] = {
    "machine": [],
    "unknown": [
        _UNKNOWN,
        "; whether the work changed instead is not known, so what takes longer than before is not called faster",
    ],
    "either": [
        _UNKNOWN,
        ", and the optimizer did not change alike: times are as measured, and a verdict is true both if the "
        "machine changed and if the work did",
    ],
    "work": [
        "most of them did other work",
        ", and most of them did other work, as calls, FLOPs, shapes or bytes show: times are as measured, and "
        "intervals allow for a machine that changed as the optimizer did",
    ],
}
"""Why modules in general changed, by cause: in the sentence, and in the header."""
_EXACT = {
    INPUTS_PREFIX: "gets other inputs",
    "FLOPs of a call of ": "has other FLOPs",
    "shapes of a call of ": "gets other shapes",
}
_ABOUT = 1.25
"""Two times are about the same if one is at most this factor longer."""
_IS_IT = 0.5, 1.5
"""The difference of a part is between two lines if theirs is from the first to the second of these times it."""


def find_changes(diff: Diff) -> list[Finding]:
    """Return what changed: what makes the most difference to a step first, then what makes none."""
    changes = _Changes(diff)
    findings = sorted(changes.find(), key=lambda finding: -abs(finding.ns_per_step))[:MAX_FINDINGS]
    return [
        finding._replace(ns_per_step=0, share=0.0) if finding.what in changes.untimed else finding
        for finding in findings
    ]


def compared_words(diff: Diff) -> str:
    """Say what was compared; nothing if there are too few steps or modules for a verdict."""
    if not diff.compared or min(diff.base_steps, diff.new_steps) < MIN_STEPS:
        return ""
    rows = diff.rows_in_words(len({change.fqn for change in diff.changes}))
    parts = f", {len(diff.parts)} parts of the step" if diff.parts else ""
    return f"times, calls and classes of {rows}{parts}, FLOPs and shapes where both sides have them"


def closing_words(diff: Diff, findings: Sequence[Finding], looked_at: str) -> str:
    """Say that nothing else changed, or of what that cannot be told: the step first, then what differs most."""
    step = diff.step
    parts = [part for part in diff.parts if part.fqn not in TOLD_BY_MODULES]
    unsure = [row for row in (*parts, *diff.changes) if _is_unsure(row, step)]
    unsure.sort(key=lambda row: -abs(row.difference_ns))
    if not diff.selected and (_is_unsure(step, step) or (unsure and step.verdict == "cannot tell")):
        unsure.insert(0, step)
    advice = f"record more a side, in turns (now {diff.runs[0]:,} and {diff.runs[1]:,})"
    if diff.common_cause in {"either", "unknown"}:
        advice += ", with --flops or --shapes"
    if unsure:
        rows = [f"{row.label} ({ratio_text(row.ratio)})" for row in unsure]
        sentence = f"cannot tell whether {_places(rows) or rows[0]} changed{' too' * bool(findings)}: {advice}"
    elif len(findings) == MAX_FINDINGS:
        return ""
    else:
        sentence = f"nothing {'else ' * bool(findings)}changed beyond the noise"
        if step.verdict == "cannot tell" and step.low_ns is not None and step.high_ns is not None and not diff.selected:
            ends = (ratio_text(end / max(step.base_ns, 1)) for end in (step.low_ns, step.high_ns))
            sentence += f"; the step: {ratio_text(step.ratio)}, from {' to '.join(ends)}: to tell more, {advice}"
    return sentence if findings else f"{sentence}; looked at: {looked_at}"


def _is_unsure(row: Change, step: Change) -> bool:
    """Whether a row differs by enough to be worth a line, and yet has no verdict."""
    least_ns = max(MIN_CHANGE * row.base_ns, FLOOR * step.base_ns)
    is_known = row.calls_changed or row.low_ns is None
    return row.verdict == "cannot tell" and not is_known and abs(row.difference_ns) > least_ns


def compiled_words(diff: Diff) -> Iterator[tuple[Sequence[str], str]]:
    """Yield the regions that are compiled, or empty, on one side alone, and which modules that hides."""
    compiled, emptied = diff.compiled, diff.emptied
    for regions, start, end in (
        (compiled[0], "not compiled: ", "have spans of their own"),
        (compiled[1], "compiled: ", "have no spans of their own"),
        (emptied[0], "", "have spans now: not compiled any more, or not called before"),
        (emptied[1], "", "have no spans now: compiled, or not called any more"),
    ):
        modules = sum(not {*regions}.isdisjoint(names_around(fqn)) for fqn in diff.in_compiled)
        if regions:
            named = shortened(regions, 1)
            subject = "module" if modules == 1 else f"{modules:,} modules"
            end = end.replace("have", "has", 1) if modules == 1 else end
            yield regions, start + (f"the {subject} inside of {named} {end}" if modules else f"{named}, by module")


class _Changes:
    """The rules. Each takes the changes that it explains, so that none is told twice."""

    def __init__(self, diff: Diff) -> None:
        self.diff = diff
        self.left = [
            change
            for change in diff.changes
            if (change.calls_changed or change.verdict in {"slower", "faster"})
            # A side may be without the times of the device.
            and not (change.phase.startswith("GPU ") and change.verdict in _ONE_SIDED)
        ]
        self.named: set[str] = set()
        self.told: set[str] = set()
        """Parts of the step, and the step, of which a finding tells why they are longer or shorter."""
        self.untimed: set[str] = set()
        """Findings that are certain, but make no difference to the step that is."""

    def find(self) -> list[Finding]:
        rules = self._compiled, self._classes, self._recompute, self._calls, self._new_and_gone, self._work, self._times
        findings = [finding for rule in rules for finding in rule()]
        findings += self._program(is_grown=not {row.verdict for row in self.diff.changes}.isdisjoint(_ONE_SIDED))
        findings += self._parts(set() if findings else TOLD_BY_MODULES)
        explained = sum(finding.ns_per_step for finding in findings) / (self.diff.step.difference_ns or 1)
        return [*findings, *(self._in_general() if explained < _EXPLAINS else ())]

    def _take(self, is_explained: Callable[[Change], bool]) -> list[Change]:
        taken, left = list[Change](), list[Change]()
        for change in self.left:
            (taken if is_explained(change) else left).append(change)
        self.left = left
        self.named.update(change.fqn for change in taken)
        return taken

    def _found(
        self, what: str, where: str | None, rows: Sequence[Change], evidence: str = "", often: float = 1.0
    ) -> Finding:
        """Return a finding that costs what these rows cost in so many of the steps; the device's times are apart."""
        of_device = all(row.phase.startswith("GPU ") for row in rows)
        rows = [row for row in rows if of_device or not row.phase.startswith("GPU ")]
        phases = dict.fromkeys(row.fqn if row.phase == "part" else row.phase for row in rows)
        before, after = (sum(times) / 1e6 for times in ([r.base_ns for r in rows], [r.new_ns for r in rows]))
        figures = f"{before:.3f} ms before, {after:.3f} ms after" if rows else ""
        cost = round(often * sum(row.difference_ns for row in rows))
        command = f"modtrace diff {self.diff.arguments} {only_option(f'{where}*') if where else '--verbose'}"
        part = next(iter(phases)) if len(phases) == 1 and "step" not in phases else None
        share = cost / max(self.diff.step.base_ns, 1)
        return Finding(what, where, part, cost, share, "; ".join(filter(None, (evidence, figures))), command)

    def _counts(self, rows: Sequence[Change]) -> bool:
        """Whether times differ by enough to be worth a line."""
        return abs(sum(row.difference_ns for row in rows)) >= FLOOR * self.diff.step.base_ns

    def _compiled(self) -> Iterator[Finding]:
        for regions, words in compiled_words(self.diff):
            rows = [row for row in self.diff.changes if not {*regions}.isdisjoint(names_around(row.fqn))]
            self._take(rows.__contains__)
            if self.diff.step.verdict not in {"slower", "faster"}:
                self.untimed.add(words)
            yield self._found(words, regions[0], rows)

    def _classes(self) -> Iterator[Finding]:
        kinds: dict[tuple[str, str], list[str]] = {}
        for fqn, kind in self.diff.classes.items():
            kinds.setdefault(kind, []).append(fqn)
        for (old, new), fqns in kinds.items():
            rows = self._take(
                lambda row, fqns=fqns: (
                    row.phase != "recompute"  # type: ignore[misc]
                    and (
                        row.fqn in fqns or (row.verdict in _ONE_SIDED and not {*fqns}.isdisjoint(names_around(row.fqn)))
                    )
                )
            )
            self.named.update(fqns)
            yield self._found(f"is {new}, was {old}", fqns[0], rows, _places(fqns))

    def _recompute(self) -> Iterator[Finding]:
        for verdict, words in (("added", "runs again in backward now (recompute)"), ("removed", "recomputes no more")):
            rows = self._take(lambda row, verdict=verdict: (row.phase, row.verdict) == ("recompute", verdict))  # type: ignore[misc]
            whole = [part for part in self.diff.parts if (part.fqn, part.verdict) == ("recompute", verdict)]
            if rows:
                fqns = _outermost(rows)
                yield self._found(words, fqns[0], whole or rows, _places(fqns))

    def _calls(self) -> Iterator[Finding]:
        while rows := [row for row in self.left if row.outcome != row.verdict]:
            first = rows[0]
            alike = self._take(
                lambda row, first=first: row.outcome == first.outcome and row.outcome != row.verdict  # type: ignore[misc]
            )
            fqns = _outermost(alike)
            yield self._found(first.outcome, fqns[0], alike, _places(fqns))

    def _new_and_gone(self) -> Iterator[Finding]:
        on_both_sides = {row.fqn for row in self.diff.changes if row.base_recordings and row.new_recordings}
        kinds: dict[tuple[str, str], list[Change]] = {}
        for row in self._take(lambda row: row.verdict in _ONE_SIDED):
            phase = f"{row.phase} " if row.fqn in on_both_sides else ""
            kinds.setdefault((phase, row.verdict), []).append(row)
        for (phase, verdict), rows in kinds.items():
            fqns = _outermost(rows)
            yield self._found(f"{phase}is {_ONE_SIDED[verdict]}", fqns[0], rows, _places(fqns))

    def _work(self) -> Iterator[Finding]:
        """Yield that most modules did other work, or which ones did."""
        exact = {
            (kind, key.removeprefix(kind)): f"{key}: {old} before, {new} after"
            for key, (old, new) in self.diff.environment.items()
            for kind in (INPUTS_PREFIX, *MODULE_VALUE_PREFIXES)
            if key.startswith(kind)
        }
        diff = self.diff
        if diff.common_cause == "work" and exact and not diff.selected:
            verdict = "slower" if diff.common_ratio >= 1 else "faster"
            rows = self._take(lambda row: row.verdict == verdict)
            is_timed = diff.step.verdict in {"slower", "faster"}
            if not (is_timed or rows):
                self.untimed.add("the work changed")
            self.told.update([diff.step.label] if is_timed else [])
            whole = rows if rows and not is_timed else [diff.step]
            yield self._found("the work changed", None, whole, next(iter(exact.values())))
            return
        unexplained = {row.fqn for row in diff.changes} - self.named
        for start, words in _EXACT.items():
            texts = {
                fqn: text for (kind, fqn), text in exact.items() if kind == start and fqn in unexplained - self.named
            }
            if texts:
                rows = self._take(lambda row, texts=texts: row.fqn in texts)  # type: ignore[misc]
                self.named.update(texts)
                fqn, text = next(iter(texts.items()))
                yield self._found(words, fqn, rows, "; ".join(filter(None, (text, _places([*texts])))))

    def _times(self) -> Iterator[Finding]:
        """Yield what is slower or faster, of siblings together."""
        fqns = {row.fqn for row in self.diff.changes}
        places = {fqn: place_in_lists(fqn, fqns) for fqn in fqns}
        while self.left:
            first = self.left[0]
            rows = self._take(
                lambda row, first=first: (
                    (places[row.fqn], row.verdict, row.phase[:3] == "GPU")  # type: ignore[misc]
                    == (places[first.fqn], first.verdict, first.phase[:3] == "GPU")
                )
            )
            if self._counts(rows):
                words = f"is {first.verdict} in {' and '.join(dict.fromkeys(row.phase for row in rows))}"
                yield self._found(words, first.fqn, rows, _places([*dict.fromkeys(row.fqn for row in rows)]))

    def _program(self, *, is_grown: bool) -> Iterator[Finding]:
        """Yield what is noted of the program and differs; modules that are new or gone have parameters of their own."""
        rows_of = {row.label: row for row in (*self.diff.parts, self.diff.step) if row.verdict in {"slower", "faster"}}
        for fact, part in PROGRAM_FACTS.items():
            if fact not in self.diff.environment or self.diff.selected or (fact == "parameters" and is_grown):
                continue
            old, new = self.diff.environment[fact]
            rows = [rows_of[part]] if part in rows_of and part not in self.told else []
            self.told.update(row.label for row in rows)
            words = f"{fact}: {new}, was {old}"
            if not rows:
                self.untimed.add(words)
            yield self._found(words, None, rows)

    def _parts(self, whole: set[str]) -> Iterator[Finding]:
        for part in self.diff.parts:
            if part.fqn in self.told or (part.fqn in TOLD_BY_MODULES and part.fqn not in whole):
                continue
            often = part.in_steps
            least_ns = FLOOR * self.diff.step.base_ns
            if (part.calls_changed or part.verdict in {"slower", "faster"}) and (
                abs(often * part.difference_ns) >= least_ns
            ):
                evidence = f"in {often:.0%} of the steps" if often < ALMOST_ALL else ""
                if part.calls_changed:
                    evidence = f"in {part.base_calls:.0%} of the steps before, in {part.new_calls:.0%} after"
                words = f"{part.fqn} is {_ONE_SIDED.get(part.verdict, part.verdict)}"
                if part.calls_changed and part.verdict not in _ONE_SIDED:
                    words = f"{part.fqn} is in {'more' if part.new_calls > part.base_calls else 'fewer'} steps"
                evidence = "; ".join(filter(None, (evidence, self._lines(part))))
                yield self._found(words, None, [part], evidence, often)

    def _lines(self, part: Change) -> str:
        """Say between which lines most of what a part takes more or less is; nothing if that is not known."""
        sides = [{where: ns for noted_part, where, ns in side if noted_part == part.fqn} for side in self.diff.lines]
        shorter, longer = sides if part.difference_ns > 0 else sides[::-1]
        least_ns, most_ns = (share * abs(part.difference_ns) for share in _IS_IT)
        # The lines of what takes about the same on both sides have moved.
        moved = [ns for where, ns in shorter.items() if where not in longer]
        growth = {
            where: ns - shorter.get(where, 0)
            for where, ns in longer.items()
            if where in shorter or not any(ns < _ABOUT * moved_ns < _ABOUT**2 * ns for moved_ns in moved)
        }
        explaining = {where: ns for where, ns in growth.items() if least_ns <= ns <= most_ns}
        where = max(explaining, key=explaining.__getitem__, default="")
        return f"{short_ms(explaining[where])} of it {where}" if where else ""

    def _in_general(self) -> Iterator[Finding]:
        diff, ratio = self.diff, self.diff.common_ratio
        if diff.common_cause not in {"either", "unknown"} or diff.selected:
            return
        if diff.step.verdict in {"slower", "faster"}:
            yield self._found(f"the step is {diff.step.verdict}", None, [diff.step], _UNKNOWN)
        elif max(ratio, 1 / ratio) >= _FAR:
            words = f"modules in general take {ratio:.2f} times as long"
            yield self._found(words, None, [diff.step], f"{_UNKNOWN}, nor by how much: FLOPs or shapes say it")


def _outermost(rows: Sequence[Change]) -> list[str]:
    fqns = dict.fromkeys(row.fqn for row in rows)
    return [fqn for fqn in fqns if fqns.keys().isdisjoint(names_around(fqn)[1:])]


def _places(fqns: Sequence[str]) -> str:
    """Name the places if there are several."""
    return shortened(fqns, _NAMED) if len(fqns) > 1 else ""
