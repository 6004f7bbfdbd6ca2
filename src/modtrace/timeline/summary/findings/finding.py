"""`RuleInput`, which rules read, `Finding`, which they return, and the lines and tables that show findings."""

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
    from ..overview import OperatorTotals

TRACE = "TRACE"
"""Placeholder for the path of the summarized file in commands."""
MAX_FINDINGS = 7
NOT_LOOKED_AT = "; not at: "
"""Separator in the text of `looked_at`: the text after it lists what could not be checked."""
MIN_SHARE = 0.02
"""Minimum mean share of the median step for a finding; the noise of small modules is below it."""
_MIN_NS = 1_000_000
"""Minimum cost of a finding in ns a step, or per model call if a step has several (`generate`), times
`python_slowness`. Steps of models with shorter times are mostly Python itself."""
_SLOW_LOOPS_NS = 33_000
"""Duration of `LOOPS` in ns on the slow machine on which the thresholds in ns were measured."""
_MIN_SLOWNESS = 0.1
MIN_STEPS_FOR_MEDIANS = 5
"""Minimum number of steps for medians: one-time work of torch or a stop by the system dominates fewer steps."""
_MAX_MEDIAN_STEPS = 64
"""Maximum number of steps of a median that needs the module times of each step."""
_STOPPED_SHARE = 0.5
"""Minimum share of a module's time that stops must take to be left out of its own time, see `stops_ns`."""
_WHOLE_TOLERANCE = 0.101
"""Maximum distance at which a mean count is shown as a whole number: the first step may lack calls or an evaluation."""


def python_slowness(step_notes: Mapping[str, Any]) -> float:
    """Return the duration of a Python loop relative to a slow machine, from `_MIN_SLOWNESS` to 1; 1 if not measured."""
    loops_ns: int = step_notes.get("loops_ns", _SLOW_LOOPS_NS)
    return min(1.0, max(_MIN_SLOWNESS, loops_ns / _SLOW_LOOPS_NS))


class Finding(NamedTuple):
    """Something that stands out in a recording.

    Attributes:
        what: description in a few words: `is slower than its siblings`.
        where: fully qualified name of a module, or name of a range; None if the finding concerns neither.
        part: part of a step that contains the time, see `PartTimes`; None if the time is in no single part.
        ns_per_step: mean cost in a step in ns; 0 if it does not cost time.
        share: share of the time of all whole steps, from 0 to 1.
        evidence: sentence with the figures.
        next: command that shows more; `TRACE` is the file.
    """

    what: str
    where: str | None
    part: str | None
    ns_per_step: int
    share: float
    evidence: str
    next: str


def ms_range(values: Iterable[float]) -> str:
    """Return the range of times given in ns, such as `0.3-0.5 ms`, or `0.3 ms` if all read the same."""
    in_order = sorted(values)
    low, high = short_ms(in_order[0]), short_ms(in_order[-1])
    return high if low == high else f"{low.removesuffix(' ms')}-{high}"


def only_option(name: str) -> str:
    """Return the `--only` option for a module name, in which `*` matches any text."""
    pattern = re.sub(r"[?\[]", r"[\g<0>]", name)
    return f"--only {shlex.quote(pattern)}"


def times_text(number: float) -> str:
    """Return a mean count as `once`, `twice`, `3 times` or `1.2 times`."""
    text = whole_text(number)
    return {"1": "once", "2": "twice"}.get(text, f"{text} times")


def whole_text(number: float) -> str:
    """Return a mean count as a whole number if it is near one (`3`), otherwise with a digit more (`1.2`)."""
    rounded = float(round(number)) if abs(number - round(number)) <= _WHOLE_TOLERANCE else round(number, 1)
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
    """Return the table of findings, with the closing line as its note."""
    return Table(_COLUMNS, findings, fields_of(Finding), notes=[closing_line(findings, looked_at)], noun="finding")


def findings_markdown(findings: Sequence[Finding], looked_at: str, above: Sequence[str]) -> str:
    """Return the findings in Markdown, below the lines `above`; empty if nothing was checked."""
    table = findings_table(findings, looked_at)._replace(sentences=[*map(markdown_text, above)])
    if findings or not looked_at:
        return str(table.to("md")) if looked_at else ""
    return "\n\n".join([*map(markdown_text, above), *table.notes]) + "\n"


def closing_line(findings: Sequence[Finding], looked_at: str, verb: str = "stands out") -> str:
    """Return the line that ends the list of findings; empty if the list may have been cut."""
    if len(findings) < MAX_FINDINGS:
        not_checked = "".join(looked_at.partition(NOT_LOOKED_AT)[1:])
        return f"nothing else {verb}{not_checked}" if findings else f"nothing {verb}; looked at: {looked_at}"
    return ""


def findings_lines(
    findings: Sequence[Finding],
    looked_at: str,
    limit: int | None = None,
    evidence_lines: int | None = None,
    verb: str = "stands out",
) -> list[str]:
    """Return a line for each finding, an evidence line for the first `evidence_lines`, and a last; [] without a check.

    Costs have a sign if the verb is `changed`.
    """
    if not looked_at:
        return []
    lines = []
    for number, finding in enumerate(findings[:limit], 1):
        ns, share = finding.ns_per_step, finding.share
        cost = (
            f"{short_ms(ns)} a step, {share:.1%}" if verb != "changed" else f"{ns / 1e6:+.3f} ms a step, {share:+.1%}"
        )
        where = f"{finding.where} · " if finding.where else ""
        lines.append(f"{number}. {where}{finding.what}{f': {cost}' if ns else ''}")
        if evidence_lines is None or number <= evidence_lines:
            lines.append(f"   {'; next: '.join(filter(None, (finding.evidence, finding.next)))}")
    hidden = len(findings[limit:]) if limit is not None else 0
    return [*lines, f"{hidden} more" if hidden else closing_line(findings, looked_at, verb)]


def _gaps_before(divided: DividedSteps) -> Int64Array:
    """Return int64[steps, parts], gap before each step; 0 if marks end steps, or several threads have steps."""
    bounds, gaps, gap_ns = divided.bounds, divided.gaps, np.zeros_like(divided.ns)
    if bounds.step_by != OPTIMIZER and len(gaps.end_ns) and len(np.unique(bounds.tid)) == 1:
        gap_index = np.minimum(np.searchsorted(gaps.end_ns, bounds.start_ns), len(gaps.end_ns) - 1)
        has_gap = gaps.end_ns[gap_index] == bounds.start_ns
        gap_ns[has_gap] = divided.gap_ns[gap_index[has_gap]]
    return gap_ns


class CallCounts(NamedTuple):
    """Counts and times of module calls in whole steps, without evaluations and calls in backward; int64[rows] each."""

    calls: Int64Array
    calls_with_backward: Int64Array
    calls_with_unused_nodes: Int64Array  # calls with `UNUSED_NODES`
    forward_ns_without_backward: Int64Array  # forward time of calls without a backward
    forward_ns_with_backward: Int64Array  # forward time of calls with one
    own_nodes: Int64Array  # sum of `OWN_NODES` over all calls
    unused_in_evaluations: Int64Array  # calls with `UNUSED_NODES` in evaluations
    extra_passes: Int64Array  # of outermost modules, number of backwards in one more pass over a kept graph
    extra_pass_ns: Int64Array  # time of these backwards
    own_forward_ns: Int64Array  # forward time of all calls, outside inner modules
    growth_in_steps_ns: Int64Array  # of outermost modules, forward time beyond the time of a step's first calls


class RuleInput:
    """The input of all rules: a summary before it is sorted or shortened, with figures of its steps and calls.

    Attributes:
        summary: summary with the rows of all modules.
        p10_ns: int64[rows], 10th percentile over steps of a module's time; a busy machine changes medians.
        call_counts: counts and times of module calls of the first process, whose steps these are.
        communication: its collectives by operator.
        collections: int64[2, triggers, generations], number of garbage collections, and of objects that they freed.
        memory: memory figures of the recording, see `MEMORY`; empty if there are none.
        optimizers: descriptions of optimizers, see `OPTIMIZERS`.
        optimizer_count: number of optimizers that stepped, rounded down to 8, 16, 32 …; 0 if fewer.
        first_tensor_count: number of different first tensors of these optimizers.
        run_steps: number of steps in the run, including overwritten ones.
        step_notes: notes of the sampled steps, see `STEP_NOTES`.
        step_numbers: int64[steps], number of each counted step.
        part_times_ns: int64[steps, parts], time of each part.
        gap_ns: int64[steps, parts], time before each step, if all are calls or ranges of one thread; otherwise 0.
        part_names: names of the parts.
        other_ns_after: by part, the time of `other` that follows it, in all steps.
        duration_ns: int64[steps], without evaluations.
        thread_count: number of threads with steps; 0 if the whole process has steps.
        mean_concurrency: mean number of steps that run at the same time, while any does.
        total_ns: total time of the counted steps, with evaluations.
    """

    def __init__(
        self,
        summary: Summary,
        divided: DividedSteps,
        *,
        p10_ns: Int64Array,
        call_counts: CallCounts,
        communication: Mapping[str, OperatorTotals],
        collections: Int64Array,
        metadata: Mapping[str, Any],
        in_steps: Sequence[GroupTimes] = (),
        order: Sequence[int] = (),
    ) -> None:
        self.summary, self.p10_ns, self.call_counts, self.collections = summary, p10_ns, call_counts, collections
        self._times_in_steps, self._order, self.communication = in_steps, order, communication
        self.memory: Mapping[str, Any] = metadata.get(MEMORY, {})
        optimizers: Sequence[Mapping[str, Any]] = metadata.get(OPTIMIZERS, ())
        self.optimizers = [notes for notes in optimizers if "stepped" not in notes]
        self.optimizer_count = max((notes["stepped"] for notes in optimizers if "stepped" in notes), default=0)
        self.first_tensor_count = max((notes.get("first_tensors", 0) for notes in optimizers), default=0)
        self.run_steps = max(metadata.get(WHOLE_RUN, {}).get("steps") or 0, len(divided.bounds.number))
        self.step_notes: Mapping[str, Any] = metadata.get(STEP_NOTES, {})
        counted_steps, self.part_names = np.flatnonzero(divided.bounds.counted), list(divided.names)
        self.step_numbers, self.part_times_ns = divided.bounds.number[counted_steps], divided.ns[counted_steps]
        bounds = divided.bounds.take(counted_steps)
        busy_ns = int(np.subtract(*union_of(bounds.start_ns, bounds.end_ns)[::-1]).sum())
        self.thread_count = len(np.unique(bounds.tid[bounds.tid >= 0]))
        self.mean_concurrency = int((bounds.end_ns - bounds.start_ns).sum()) / max(busy_ns, 1)
        self.gap_ns = _gaps_before(divided)[counted_steps]
        self.other_ns_after = dict(zip(self.part_names, divided.other_ns.tolist(), strict=True))
        self.duration_ns = self.part_times_ns.sum(axis=1) - self.part_ns("evaluation")
        self.total_ns = int(self.part_times_ns.sum())
        self._ends_by_marks = divided.bounds.step_by == OPTIMIZER
        self.trains = self._ends_by_marks and bool(call_counts.calls_with_backward.any())

    @property
    def rows(self) -> Sequence[ModuleTimes]:
        """The rows of the summary."""
        return self.summary.rows

    @property
    def steps(self) -> int:
        """Number of counted steps."""
        return len(self.step_numbers)

    @cached_property
    def median_step_ns(self) -> float:
        """Median duration of the steps in ns."""
        return float(np.median(self.duration_ns)) if self.steps else 0.0

    def p10_step_ns(self, *, gaps: bool = False) -> float:
        """Return the sum of the parts' 10th percentiles in ns, since a busy machine stops nearly each step."""
        ns = self.part_times_ns * (np.array(self.part_names) != "evaluation") + self.gap_ns * gaps
        p10_ns = float(np.percentile(ns.sum(axis=1), 10))
        # Parts differ between the calls of a server: there the 10th percentile of whole calls counts.
        return min(p10_ns, float(np.percentile(ns, 10, axis=0).sum())) if self._ends_by_marks else p10_ns

    @property
    def graph_of_evaluations(self) -> str:
        """Clause that evaluations build a graph; empty if they do not."""
        builds_graph = any(
            count and row.fqn not in self.cast_modules
            for count, row in zip(self.call_counts.unused_in_evaluations, self.rows, strict=True)
        )
        return "; it builds a graph, without torch.no_grad()" if builds_graph else ""

    @cached_property
    def cast_modules(self) -> Collection[str]:
        """Modules in which autocast made nodes, by casting weights, although gradients were off."""
        fqns: Sequence[str] = self.step_notes.get("casts", ())
        return frozenset(fqns)

    @property
    def min_share_ns(self) -> float:
        """Minimum cost of a finding in ns a step, as a share of the median step."""
        return MIN_SHARE * self.median_step_ns

    @cached_property
    def min_ns(self) -> float:
        """Minimum cost of a finding in ns a step, whatever its share: see `_MIN_NS`."""
        return _MIN_NS * python_slowness(self.step_notes)

    @property
    def growth_by_holder(self) -> dict[str, int]:
        """By name of a holder, the growth of its memory in bytes a step."""
        growth: dict[str, int] = self.memory.get("grows_by", {})
        return growth

    @cached_property
    def calls(self) -> AnyArray:
        """float64[rows], mean number of a module's calls in a step."""
        return np.asarray(self.call_counts.calls / max(self.steps, 1))

    @cached_property
    def samples_per_step(self) -> float:
        """Number of units in a step that `StepNotes` samples: a `generate` has several outermost calls."""
        outermost = [index for index, row in enumerate(self.rows) if not self.outer[row.fqn]]
        return 1.0 if self._ends_by_marks else max(1.0, float(self.calls[outermost].sum()))

    @cached_property
    def module_median_ns(self) -> Int64Array:
        """int64[rows], median time of a module in a step."""
        return np.array([row.step_p50_ns for row in self.rows], np.int64)

    @cached_property
    def own_p10_ns(self) -> AnyArray:
        """float64[rows], `p10_ns` minus the `p10_ns` of inner modules."""
        return self._add_inner(self.p10_ns, -1)

    @cached_property
    def own_median_ns(self) -> AnyArray:
        """float64[rows], median time of a module in a step outside inner modules; of `_MAX_MEDIAN_STEPS` if more."""
        steps = np.unique(np.linspace(0, self.steps - 1, min(self.steps, _MAX_MEDIAN_STEPS)).astype(np.int64))
        return np.asarray(np.median([self._add_inner(ns, -1) for ns in self._ns_in(steps)], axis=0))

    def own_ns(self, index: int) -> tuple[float, float]:
        """Return a module's own usual time in a step in ns: in forward, and in backward.

        The 10th percentile is divided in proportion to the own times of forward and backward. If most of the module's
        time is in few steps, for example while it is compiled, these times are taken without that excess.
        """
        row, p10_ns = self.rows[index], max(float(self.own_p10_ns[index]), 0.0)
        stops_ns = self.stops_ns(index)
        if stops_ns <= _STOPPED_SHARE * row.in_steps_ns:
            stops_ns = 0.0
        # Evaluations run only forward, and are not in the steps.
        forward_ns = int(self.call_counts.own_forward_ns[index])
        self_ns = row.self_ns - row.forward_self_ns + forward_ns
        step_ns, unstopped_ns = min(p10_ns, self_ns / max(self.steps, 1)), max(self_ns - stops_ns, 1.0)
        forward, backward = (max(0.0, ns - stops_ns) for ns in (forward_ns, row.backward_self_ns))
        return step_ns * min(1.0, forward / unstopped_ns), step_ns * min(1.0, backward / unstopped_ns)

    def stops_ns(self, index: int) -> float:
        """Return how much a module's time in all steps exceeds its median times the steps, as if it was stopped."""
        return max(0.0, self.rows[index].in_steps_ns - float(self.module_median_ns[index]) * self.steps)

    @cached_property
    def inner_calls(self) -> AnyArray:
        """float64[rows], mean number of calls of inner modules in a step."""
        return self._add_inner(self.calls, 1) - self.calls

    def _add_inner(self, values: AnyArray, factor: int) -> AnyArray:
        """Return float64[rows], the values plus `factor` times the values of the modules directly inside."""
        index_of = {row.fqn: index for index, row in enumerate(self.rows)}
        inner = [index for index, row in enumerate(self.rows) if self.outer[row.fqn]]
        parents = [index_of[self.outer[self.rows[index].fqn][0]] for index in inner]
        total = values.astype(np.float64)
        np.add.at(total, parents, factor * values[inner])
        return total

    @cached_property
    def outer(self) -> dict[str, list[str]]:
        """By module, those that contain it, the innermost first."""
        return outer_modules([row.fqn for row in self.rows])

    @cached_property
    def holders(self) -> frozenset[str]:
        """Modules that contain others."""
        return frozenset(fqns[0] for fqns in self.outer.values() if fqns)

    def is_wrapper(self, row: ModuleTimes) -> bool:
        """Return whether a model with a name of its own runs inside, such as in DistributedDataParallel.

        Such a wrapper's own time in a step is unknown, and is not spent in the user's code.
        """
        return row.fqn not in self.holders and row.forward_self_ns != row.forward_ns

    def part_ns(self, part: str, *, gaps: bool = False) -> Int64Array:
        """Return int64[steps], time of a part in each step, with `gaps` also in the gap before the step."""
        if part not in self.part_names:
            return np.zeros(self.steps, np.int64)
        index = self.part_names.index(part)
        return self.part_times_ns[:, index] + self.gap_ns[:, index] if gaps else self.part_times_ns[:, index]

    def module_ns(self, steps: Int64Array) -> AnyArray:
        """Return float64[rows], mean time of each module in the steps with the given indices."""
        return np.asarray(self._ns_in(steps).sum(axis=0) / max(len(steps), 1))

    def _ns_in(self, steps: Int64Array) -> AnyArray:
        """Return float64[steps, rows], time of each module in the steps with the given indices."""
        numbers, total = np.sort(self.step_numbers[steps]), np.zeros((len(steps), max(self._order, default=-1) + 1))
        for group_times in self._times_in_steps:
            chosen_times = group_times.take(np.isin(group_times.step, numbers) & (group_times.group < total.shape[1]))
            np.add.at(total, (np.searchsorted(numbers, chosen_times.step), chosen_times.group), chosen_times.ns)
        return total[:, list(self._order)]

    def share(self, ns: float, *, gaps: bool = False) -> float:
        """Return the share of a mean step that `ns` is; with `gaps`, of a mean step and the gap before it."""
        total_ns = self.total_ns + (int(self.gap_ns.sum()) if gaps else 0)
        return min(1.0, float(ns) * self.steps / total_ns) if total_ns else 0.0

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
        """Return a finding that costs `ns` in a step; `show`: options with which `modtrace summary` shows more."""
        next_command = f"modtrace summary {TRACE} {show}"
        return Finding(what, where, part, round(ns), self.share(ns, gaps=gaps), evidence, next_command)

    def ranges_of(self, part: str) -> list[Any]:
        """Return the ranges of a part, the longest total first."""
        return [range_times for range_times in self.summary.ranges if range_times.part == part]

    @property
    def has_workers(self) -> bool:
        """Whether a loader has workers, processes that load data."""
        return any("MultiProcessing" in range_times.range for range_times in self.ranges_of("data loading"))
