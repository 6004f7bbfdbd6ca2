"""Findings of a comparison: what changed most, whatever it is; all figures are those of verdicts and parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from ..timeline.summary.findings import MAX_FINDINGS, Finding
from .run_times import OF_MODULES, names_around
from .verdicts import MIN_STEPS, Change

if TYPE_CHECKING:
    from .diff_result import Diff

TOLD_BY_MODULES = {"forward", "backward", "recompute"}
"""Parts of the step that are named only if no module in them is."""
_ONE_SIDED = {"added": "new", "removed": "gone"}
_NAMED = 3
_EXACT = {"FLOPs of a call of ": "has other FLOPs", "shapes of a call of ": "gets other shapes"}


def find_changes(diff: Diff) -> list[Finding]:
    """Return what changed: what makes the most difference to a step first, then what makes none."""
    return sorted(_Changes(diff).find(), key=lambda found: -abs(found.ns_per_step))[:MAX_FINDINGS]


def compared_words(diff: Diff) -> str:
    """Say what was compared; nothing if there are too few steps or modules for a verdict."""
    if not diff.compared or min(diff.base_steps, diff.new_steps) < MIN_STEPS:
        return ""
    rows = diff.rows_in_words(len({change.fqn for change in diff.changes}))
    parts = f", {len(diff.parts)} parts of the step" if diff.parts else ""
    return f"times, calls and classes of {rows}{parts}, FLOPs and shapes where both sides have them"


def compiled_words(diff: Diff) -> Iterator[tuple[Sequence[str], str]]:
    """Yield the regions that are compiled on one side alone, and which modules that hides."""
    for regions, kind, have in zip(diff.compiled, ("not compiled", "compiled"), ("spans", "no spans"), strict=True):
        inside = sum(not {*regions}.isdisjoint(names_around(fqn)) for fqn in diff.in_compiled)
        if regions:
            more = f" and {len(regions) - 1:,} more" if len(regions) > 1 else ""
            which = "module" if inside == 1 else f"{inside:,} modules"
            yield regions, f"{kind}: the {which} inside of {regions[0]}{more} have {have} of their own"


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

    def find(self) -> list[Finding]:
        rules = self._compiled, self._classes, self._recompute, self._calls, self._new_and_gone, self._work, self._times
        found = [each for rule in rules for each in rule()]
        found += self._parts(set() if found else TOLD_BY_MODULES)
        return [*found, *(self._in_general() if not found else ())]

    def _take(self, is_explained: Callable[[Change], bool]) -> list[Change]:
        taken = [change for change in self.left if is_explained(change)]
        self.left = [change for change in self.left if change not in taken]
        self.named.update(change.fqn for change in taken)
        return taken

    def _found(self, what: str, where: str | None, rows: Sequence[Change], evidence: str = "") -> Finding:
        """Return a finding that costs what these rows cost; the device's times are beside those of the CPU."""
        of_device = all(row.phase.startswith("GPU ") for row in rows)
        rows = [row for row in rows if of_device or not row.phase.startswith("GPU ")]
        phases = dict.fromkeys(row.fqn if row.phase == "part" else row.phase for row in rows)
        before, after = (sum(times) / 1e6 for times in ([r.base_ns for r in rows], [r.new_ns for r in rows]))
        figures = f"{before:.3f} ms before, {after:.3f} ms after" if rows else ""
        cost = sum(row.difference_ns for row in rows)
        command = f"modtrace diff BASE NEW --only '{where}*'" if where else "modtrace diff BASE NEW --verbose"
        part = next(iter(phases)) if len(phases) == 1 and "step" not in phases else None
        share = cost / max(self.diff.step.base_ns, 1)
        return Finding(what, where, part, cost, share, "; ".join(filter(None, (evidence, figures))), command)

    def _compiled(self) -> Iterator[Finding]:
        for regions, words in compiled_words(self.diff):
            rows = [row for row in self.diff.changes if not {*regions}.isdisjoint(names_around(row.fqn))]
            self._take(rows.__contains__)
            found = self._found(words, regions[0], rows)
            # That is certain, and whether it makes a difference is the step's verdict.
            is_timed = self.diff.step.verdict in {"slower", "faster"}
            yield found if is_timed else found._replace(ns_per_step=0, share=0.0)

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
        for verdict, what in (("added", "runs again in backward now (recompute)"), ("removed", "recomputes no more")):
            rows = self._take(lambda row, verdict=verdict: (row.phase, row.verdict) == ("recompute", verdict))  # type: ignore[misc]
            whole = [part for part in self.diff.parts if (part.fqn, part.verdict) == ("recompute", verdict)]
            if rows:
                fqns = _outermost(rows)
                yield self._found(what, fqns[0], whole or rows, _places(fqns))

    def _calls(self) -> Iterator[Finding]:
        while rows := [row for row in self.left if row.outcome != row.verdict]:
            first = rows[0]
            alike = self._take(
                lambda row, first=first: row.outcome == first.outcome and row.outcome != row.verdict  # type: ignore[misc]
            )
            fqns = _outermost(alike)
            yield self._found(first.outcome, fqns[0], alike, _places(fqns))

    def _new_and_gone(self) -> Iterator[Finding]:
        there = {row.fqn for row in self.diff.changes if row.base_recordings and row.new_recordings}
        kinds: dict[tuple[str, str], list[Change]] = {}
        for row in self._take(lambda row: row.verdict in _ONE_SIDED):
            phase = f"{row.phase} " if row.fqn in there else ""
            kinds.setdefault((phase, row.verdict), []).append(row)
        for (phase, verdict), rows in kinds.items():
            fqns = _outermost(rows)
            yield self._found(f"{phase}is {_ONE_SIDED[verdict]}", fqns[0], rows, _places(fqns))

    def _work(self) -> Iterator[Finding]:
        """Yield that most modules did other work, or which ones did."""
        exact = {
            (kind, key.removeprefix(kind)): f"{key}: {old} before, {new} after"
            for key, (old, new) in self.diff.environment.items()
            for kind in OF_MODULES
            if key.startswith(kind)
        }
        diff = self.diff
        if diff.common_cause == "work" and exact and not diff.selected:
            verdict = "slower" if diff.common_ratio >= 1 else "faster"
            rows = self._take(lambda row: row.verdict == verdict)
            whole = [diff.step] if diff.step.verdict in {"slower", "faster"} else rows
            yield self._found("the work changed", None, whole, next(iter(exact.values())))
            return
        there = {row.fqn for row in diff.changes} - self.named
        for start, what in _EXACT.items():
            texts = {fqn: text for (kind, fqn), text in exact.items() if kind == start and fqn in there - self.named}
            if texts:
                rows = self._take(lambda row, texts=texts: row.fqn in texts)  # type: ignore[misc]
                self.named.update(texts)
                fqn, text = next(iter(texts.items()))
                yield self._found(what, fqn, rows, "; ".join(filter(None, (text, _places([*texts])))))

    def _times(self) -> Iterator[Finding]:
        while self.left:
            first = self.left[0]
            rows = self._take(
                lambda row, first=first: (
                    (row.fqn, row.verdict, row.phase[:3] == "GPU")  # type: ignore[misc]
                    == (first.fqn, first.verdict, first.phase[:3] == "GPU")
                )
            )
            yield self._found(
                f"is {first.verdict} in {' and '.join(dict.fromkeys(row.phase for row in rows))}", first.fqn, rows
            )

    def _parts(self, whole: set[str]) -> Iterator[Finding]:
        for part in self.diff.parts:
            if part.fqn in TOLD_BY_MODULES and part.fqn not in whole:
                continue
            if part.calls_changed or part.verdict in {"slower", "faster"}:
                often = f"in {part.base_calls:.0%} of the steps before, in {part.new_calls:.0%} after"
                what = f"{part.fqn} is {_ONE_SIDED.get(part.verdict, part.verdict)}"
                if part.calls_changed and part.verdict not in _ONE_SIDED:
                    what = f"{part.fqn} is in {'more' if part.new_calls > part.base_calls else 'fewer'} steps"
                yield self._found(what, None, [part], often if part.calls_changed else "")

    def _in_general(self) -> Iterator[Finding]:
        step = self.diff.step
        if self.diff.common_cause != "machine" and step.verdict in {"slower", "faster"} and not self.diff.selected:
            yield self._found(
                f"the step is {step.verdict}", None, [step], "whether the machine or the work changed is not known"
            )


def _outermost(rows: Sequence[Change]) -> list[str]:
    fqns = dict.fromkeys(row.fqn for row in rows)
    return [fqn for fqn in fqns if fqns.keys().isdisjoint(names_around(fqn)[1:])]


def _places(fqns: Sequence[str]) -> str:
    """Name the places if there are several."""
    more = f" and {len(fqns) - _NAMED:,} more" if len(fqns) > _NAMED else ""
    return f"{', '.join(fqns[:_NAMED])}{more}" if len(fqns) > 1 else ""
