"""`Measured`, which rules read, `Finding`, which they make, and the lines and tables that show findings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...._arrays import AnyArray, Int64Array
from ...._interrupts import cached_property
from ...._tables import MS, NAME, PERCENT, Column, Table, fields_of, markdown_text
from ...contents import MEMORY, OPTIMIZERS, STEP_NOTES, WHOLE_RUN
from ...nesting import union_of
from ..module_rows import ModuleTimes, outer_modules
from ..parts import DividedSteps
from ..slow_steps import short_ms
from ..step_bounds import OPTIMIZER
from ..units import GroupTimes

if TYPE_CHECKING:
    from ..module_summary import Summary

TRACE = "TRACE"
"""What commands call the file that the summary is of."""
MAX_FINDINGS = 7
NOT_LOOKED_AT = "; not at: "
"""What of `looked_at` follows this could not be looked at."""
LEAST_SHARE = 0.02
"""Share of the median step, on average: less is not worth a change, and noise of small modules is below."""
LEAST_NS = 1_000_000
"""Time in a step: shorter ones are those of tiny models, in which Python itself is most. A step of several calls of a
model, as of a `generate`, has that of each. Times Python's `pace`, as all of what Python takes."""
_SLOW_NS, _BEST_PACE = 33_000, 0.1
"""What Python takes for `LOOPS` on the machine that such times were measured on, and which part of them counts at
least."""
LEAST_STEPS = 5
"""In fewer steps torch sets up what it needs once, and the system stops one or another: no median of them is usual."""
_MOST_LOOKED = 64
"""Of how many steps a median is that needs each by itself."""
_IN_FEW = 0.5
"""From which part of its time on a module has it in few steps."""
_NEARLY = 0.101
"""How far from whole times: a first step begins late, and has no evaluation before it."""


def pace(step_notes: Mapping[str, Any]) -> float:
    """Return how many times as long Python took for a loop as on a slow machine, at most 1: 1 if that is not known."""
    loops_ns: int = step_notes.get("loops_ns", _SLOW_NS)
    return min(1.0, max(_BEST_PACE, loops_ns / _SLOW_NS))


class Finding(NamedTuple):
    """Something that stands out in a recording.

    Attributes:
        what: what it is, in a few words: `slower than its siblings`.
        where: the fully qualified name of a module, or the name of a range; None if it is neither.
        part: the part of a step that it is in, see `PartTimes`; None if it is no part of a step's time.
        ns_per_step: what it costs on average in a step, in nanoseconds; 0 if it is not a cost in time.
        share: of the time of all whole steps, from 0 to 1.
        evidence: the figures, in a sentence.
        next: a command that shows more; `TRACE` is the file.
    """

    what: str
    where: str | None
    part: str | None
    ns_per_step: int
    share: float
    evidence: str
    next: str


def ms_range(values: Iterable[float]) -> str:
    """Return `0.3-0.5 ms` for some nanoseconds, or `0.3 ms` if they are alike."""
    in_order = sorted(values)
    low, high = short_ms(in_order[0]), short_ms(in_order[-1])
    return high if low == high else f"{low.removesuffix(' ms')}-{high}"


def only_option(place: str) -> str:
    """Return the option that shows what has this name, in which `*` is for any text."""
    pattern = re.sub(r"[?\[]", r"[\g<0>]", place)
    return f"--only {shlex.quote(pattern)}"


def times_text(number: float) -> str:
    """Return `once`, `twice`, `3 times`, `1.2 times`: whole times if nearly all steps have them."""
    text = whole_text(number)
    return {"1": "once", "2": "twice"}.get(text, f"{text} times")


def whole_text(number: float) -> str:
    """Return `3` for what is 3 in nearly all steps, else `1.2`."""
    rounded = float(round(number)) if abs(number - round(number)) <= _NEARLY else round(number, 1)
    return f"{rounded:,.4g}"


_COLUMNS = (
    Column("finding", "what", NAME),
    Column("where", "where", NAME),
    Column("ms a step", "ns_per_step", MS, hidden_if="zero"),
    Column("%", "share", PERCENT, hidden_if="zero"),
    Column("evidence", "evidence", NAME),
    Column("next", "next", NAME),
)


def findings_table(findings: Sequence[Finding], looked_at: str) -> Table:
    """Return the table of findings, and what was looked at."""
    return Table(_COLUMNS, findings, fields_of(Finding), notes=[closing_line(findings, looked_at)], noun="finding")


def findings_markdown(findings: Sequence[Finding], looked_at: str, above: Sequence[str]) -> str:
    """Return the findings as GitHub has them, below a line about the recording; nothing if nothing was looked at."""
    table = findings_table(findings, looked_at)._replace(sentences=[*map(markdown_text, above)])
    if findings or not looked_at:
        return str(table.to("md")) if looked_at else ""
    return "\n\n".join([*map(markdown_text, above), *table.notes]) + "\n"


def closing_line(findings: Sequence[Finding], looked_at: str, verb: str = "stands out") -> str:
    """Say that nothing else stands out, or of all that was looked at nothing."""
    if len(findings) < MAX_FINDINGS:
        missed = "".join(looked_at.partition(NOT_LOOKED_AT)[1:])
        return f"nothing else {verb}{missed}" if findings else f"nothing {verb}; looked at: {looked_at}"
    return ""


def findings_lines(
    findings: Sequence[Finding],
    looked_at: str,
    limit: int | None = None,
    evidence: int | None = None,
    verb: str = "stands out",
) -> list[str]:
    """Return a line for each finding, another for the first `evidence`, one at the end; nothing without a look.

    If what is listed `changed`, costs have a sign.
    """
    if not looked_at:
        return []
    lines = []
    for number, found in enumerate(findings[:limit], 1):
        ns, share = found.ns_per_step, found.share
        cost = (
            f"{short_ms(ns)} a step, {share:.1%}" if verb != "changed" else f"{ns / 1e6:+.3f} ms a step, {share:+.1%}"
        )
        lines.append(f"{number}. {f'{found.where} · ' if found.where else ''}{found.what}{f': {cost}' if ns else ''}")
        if evidence is None or number <= evidence:
            lines.append(f"   {'; next: '.join(filter(None, (found.evidence, found.next)))}")
    hidden = len(findings[limit:]) if limit is not None else 0
    return [*lines, f"{hidden} more" if hidden else closing_line(findings, looked_at, verb)]


def _gaps_before(divided: DividedSteps) -> Int64Array:
    """Return int64[steps, parts]: the gap before each step; 0 if several threads have steps, or marks end them."""
    bounds, gaps, before = divided.bounds, divided.gaps, np.zeros_like(divided.ns)
    if bounds.step_by != OPTIMIZER and len(gaps.end) and len(np.unique(bounds.tid)) == 1:
        at = np.minimum(np.searchsorted(gaps.end, bounds.start), len(gaps.end) - 1)
        has = gaps.end[at] == bounds.start
        before[has] = divided.gap_ns[at[has]]
    return before


class Runs(NamedTuple):
    """How modules ran in whole steps, without evaluations and what runs in backward; int64[rows] each."""

    calls: Int64Array
    backed: Int64Array  # calls with a backward
    unused: Int64Array  # calls with `UNUSED_NODES`
    alone_ns: Int64Array  # what the forward of calls without a backward took
    backed_ns: Int64Array  # what that of the others took
    own_nodes: Int64Array  # `OWN_NODES` of all calls
    unused_in_evaluations: Int64Array  # calls with `UNUSED_NODES` in evaluations
    passes_again: Int64Array  # of outermost modules, how often a backward ran in one more pass
    passes_again_ns: Int64Array  # what these took
    own_ns: Int64Array  # what the forward of all calls took outside of inner modules


class Measured:
    """A summary before it is sorted or shortened, and what its steps and calls are.

    Attributes:
        summary: its rows are of all modules.
        low_ns: int64[rows], what a module takes at least in 9 of 10 steps: a busy machine stops threads so often, and
            in the same code, that medians differ.
        runs: how modules ran.
        collections: int64[2, triggers, generations], how many garbage collections there were, and what they freed.
        memory: what the recording says of memory, see `MEMORY`; empty if nothing.
        optimizers: what it says of optimizers, see `OPTIMIZERS`.
        stepped: how many stepped, rounded down to 8, 16, 32 …; 0: fewer.
        first_tensors: how many different first tensors these had.
        all_steps: how many steps there were, those that were overwritten too.
        step_notes: what was noted of few steps, see `STEP_NOTES`.
        number: int64[steps], the number of each counted step.
        ns: int64[steps, parts].
        gap_ns: the same of the time before each step that is a call or a range, on its thread; else 0.
        parts: their names.
        other_ns: what of the part `other` follows each part, in all steps.
        duration_ns: int64[steps], without evaluations.
        threads: how many have steps; 0 if steps are the whole process's.
        at_once: how many steps run at a time on average, while any does.
        whole_ns: of these steps together, with evaluations.
    """

    def __init__(
        self,
        summary: Summary,
        divided: DividedSteps,
        *,
        low_ns: Int64Array,
        runs: Runs,
        collections: Int64Array,
        metadata: Mapping[str, Any],
        in_steps: Sequence[GroupTimes] = (),
        order: Sequence[int] = (),
    ) -> None:
        self.summary, self.low_ns, self.runs, self.collections = summary, low_ns, runs, collections
        self._in_steps, self._order = in_steps, order
        self.memory: Mapping[str, Any] = metadata.get(MEMORY, {})
        optimizers: Sequence[Mapping[str, Any]] = metadata.get(OPTIMIZERS, ())
        self.optimizers = [one for one in optimizers if "stepped" not in one]
        self.stepped = max((one["stepped"] for one in optimizers if "stepped" in one), default=0)
        self.first_tensors = max((one.get("first_tensors", 0) for one in optimizers), default=0)
        self.all_steps = max(metadata.get(WHOLE_RUN, {}).get("steps") or 0, len(divided.bounds.number))
        self.step_notes: Mapping[str, Any] = metadata.get(STEP_NOTES, {})
        counted, self.parts = np.flatnonzero(divided.bounds.counted), list(divided.names)
        self.number, self.ns = divided.bounds.number[counted], divided.ns[counted]
        bounds = divided.bounds.take(counted)
        any_ns = int(np.subtract(*union_of(bounds.start, bounds.end)[::-1]).sum())
        self.threads = len(np.unique(bounds.tid[bounds.tid >= 0]))
        self.at_once = int((bounds.end - bounds.start).sum()) / max(any_ns, 1)
        self.gap_ns = _gaps_before(divided)[counted]
        self.other_ns = dict(zip(self.parts, divided.other_ns.tolist(), strict=True))
        self.duration_ns = self.ns.sum(axis=1) - self.of_part("evaluation")
        self.whole_ns = int(self.ns.sum())
        self._ends_by_marks = divided.bounds.step_by == OPTIMIZER
        self.trains = self._ends_by_marks and bool(runs.backed.any())

    @property
    def rows(self) -> Sequence[ModuleTimes]:
        """The rows of the summary."""
        return self.summary.rows

    @property
    def steps(self) -> int:
        """How many steps count."""
        return len(self.number)

    @cached_property
    def usual_ns(self) -> float:
        """The median of the steps, in nanoseconds."""
        return float(np.median(self.duration_ns)) if self.steps else 0.0

    def low_step_ns(self, *, gaps: bool = False) -> float:
        """Return what a step takes in the shortest tenth of each part: a busy machine stops nearly each step."""
        ns = self.ns * (np.array(self.parts) != "evaluation") + self.gap_ns * gaps
        whole_ns = float(np.percentile(ns.sum(axis=1), 10))
        # A server's calls and the waits between them have no parts that come in each.
        return min(whole_ns, float(np.percentile(ns, 10, axis=0).sum())) if self._ends_by_marks else whole_ns

    @property
    def graph_of_evaluations(self) -> str:
        """Says that evaluations build a graph; nothing if they build none."""
        builds = any(
            count and row.fqn not in self.casts
            for count, row in zip(self.runs.unused_in_evaluations, self.rows, strict=True)
        )
        return "; it builds a graph, without torch.no_grad()" if builds else ""

    @cached_property
    def casts(self) -> Collection[str]:
        """The modules in which nodes were made without gradients: autocast makes some where it casts weights."""
        noted: Sequence[str] = self.step_notes.get("casts", ())
        return frozenset(noted)

    @property
    def least_ns(self) -> float:
        """What a finding has to cost in a step, in nanoseconds."""
        return LEAST_SHARE * self.usual_ns

    @cached_property
    def brief_ns(self) -> float:
        """What is too short for a finding, whatever share of a step it is: see `LEAST_NS`."""
        return LEAST_NS * pace(self.step_notes)

    @property
    def growing(self) -> dict[str, int]:
        """By how many bytes a step what each holds grows, by name."""
        by: dict[str, int] = self.memory.get("grows_by", {})
        return by

    @cached_property
    def calls(self) -> AnyArray:
        """float64[rows], how often each module runs in a step."""
        return np.asarray(self.runs.calls / max(self.steps, 1))

    @cached_property
    def looks(self) -> float:
        """How many of what the recording looked at, see `StepNotes`, a step has: a `generate` has several calls."""
        outermost = [index for index, row in enumerate(self.rows) if not self.outer[row.fqn]]
        return 1.0 if self._ends_by_marks else max(1.0, float(self.calls[outermost].sum()))

    @cached_property
    def step_ns(self) -> Int64Array:
        """int64[rows], the median of what each module takes in a step."""
        return np.array([row.step_p50_ns for row in self.rows], np.int64)

    @cached_property
    def own_low_ns(self) -> AnyArray:
        """float64[rows], of `low_ns` what is in no inner module."""
        return self._with_inner(self.low_ns, -1)

    @cached_property
    def own_usual_ns(self) -> AnyArray:
        """float64[rows], the median of what each module takes in a step in no inner module, of few steps if many."""
        steps = np.unique(np.linspace(0, self.steps - 1, min(self.steps, _MOST_LOOKED)).astype(np.int64))
        return np.asarray(np.median([self._with_inner(ns, -1) for ns in self._ns_in(steps)], axis=0))

    def own_ns(self, index: int) -> tuple[float, float]:
        """Return what a module takes itself in a step in forward, and in backward: usually, and in 9 of 10 steps.

        If most of all its time is in few steps, as where it is compiled, neither has its share of that.
        """
        row, low_ns = self.rows[index], max(float(self.own_low_ns[index]), 0.0)
        stops_ns = self.stops_ns(index)
        stops_ns *= stops_ns > _IN_FEW * row.in_steps_ns
        # Evaluations are forward alone, and no part of steps.
        forward_ns = int(self.runs.own_ns[index])
        own_ns = row.self_ns - row.forward_self_ns + forward_ns
        own, whole = min(low_ns, own_ns / max(self.steps, 1)), max(own_ns - stops_ns, 1.0)
        forward, backward = (max(0.0, ns - stops_ns) for ns in (forward_ns, row.backward_self_ns))
        return own * min(1.0, forward / whole), own * min(1.0, backward / whole)

    def stops_ns(self, index: int) -> float:
        """Return what a module takes more in all steps than in as many usual ones, as where something stops it."""
        return max(0.0, self.rows[index].in_steps_ns - float(self.step_ns[index]) * self.steps)

    @cached_property
    def inner_calls(self) -> AnyArray:
        """float64[rows], how many inner modules each calls in a step."""
        return self._with_inner(self.calls, 1) - self.calls

    def _with_inner(self, values: AnyArray, times: int) -> AnyArray:
        """Return float64[rows], to each the values of the modules just inside, so many times."""
        index_of = {row.fqn: index for index, row in enumerate(self.rows)}
        inner = [index for index, row in enumerate(self.rows) if self.outer[row.fqn]]
        around = [index_of[self.outer[self.rows[index].fqn][0]] for index in inner]
        total = values.astype(np.float64)
        np.add.at(total, around, times * values[inner])
        return total

    @cached_property
    def outer(self) -> dict[str, list[str]]:
        """The modules around each, the innermost first."""
        return outer_modules([row.fqn for row in self.rows])

    @cached_property
    def holders(self) -> frozenset[str]:
        """The modules that hold others."""
        return frozenset(around[0] for around in self.outer.values() if around)

    def is_wrapper(self, row: ModuleTimes) -> bool:
        """Whether a model with a name of its own runs inside, as in DistributedDataParallel.

        What such a wrapper takes itself in a step is not known, and is no work of the user's.
        """
        return row.fqn not in self.holders and row.forward_self_ns != row.forward_ns

    def of_part(self, part: str, *, gaps: bool = False) -> Int64Array:
        """Return int64[steps], what a part takes in each step, with the gap before it if that is asked for."""
        if part not in self.parts:
            return np.zeros(self.steps, np.int64)
        index = self.parts.index(part)
        return self.ns[:, index] + self.gap_ns[:, index] if gaps else self.ns[:, index]

    def module_ns(self, steps: Int64Array) -> AnyArray:
        """Return float64[rows], the mean of what each module takes in some steps, which are indices."""
        return np.asarray(self._ns_in(steps).sum(axis=0) / max(len(steps), 1))

    def _ns_in(self, steps: Int64Array) -> AnyArray:
        """Return float64[steps, rows], what each module takes in each of some steps, which are indices."""
        numbers, total = np.sort(self.number[steps]), np.zeros((len(steps), max(self._order, default=-1) + 1))
        for times in self._in_steps:
            own = times.take(np.isin(times.step, numbers) & (times.group < total.shape[1]))
            np.add.at(total, (np.searchsorted(numbers, own.step), own.group), own.ns)
        return total[:, list(self._order)]

    def share(self, ns: float, *, gaps: bool = False) -> float:
        """Return which share of all steps, or of these and the gaps, so much is, if each step has it."""
        whole_ns = self.whole_ns + int(self.gap_ns.sum()) * gaps
        return min(1.0, float(ns) * self.steps / whole_ns) if whole_ns else 0.0

    def finding(
        self,
        what: str,
        where: str | None = None,
        part: str | None = None,
        *,
        evidence: str,
        show: str,
        ns: float = 0.0,
        gaps: bool = False,
    ) -> Finding:
        """Return a finding that costs `ns` in a step, see `Finding`; `show`: which options of a summary show more."""
        next_command = f"modtrace summary {TRACE} {show}"
        return Finding(what, where, part, round(ns), self.share(ns, gaps=gaps), evidence, next_command)

    def ranges_of(self, part: str) -> list[Any]:
        """Return the ranges of a part, the longest total first."""
        return [each for each in self.summary.ranges if each.part == part]
