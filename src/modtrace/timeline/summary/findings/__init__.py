"""Findings: notable facts of a summary, sorted by their share of a step. Each file has the rules of one kind.

Rules measure nothing: all figures come from `RuleInput`, which joins the summary with figures of steps and calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...._tables import counted
from ..parts import OTHER
from .costs import find_costs
from .costs import low_mfu as low_mfu
from .finding import MAX_FINDINGS as MAX_FINDINGS
from .finding import MIN_STEPS_FOR_MEDIANS, NOT_LOOKED_AT
from .finding import TRACE as TRACE
from .finding import CallCounts as CallCounts
from .finding import Finding as Finding
from .finding import RuleInput as RuleInput
from .finding import closing_line as closing_line
from .finding import findings_lines as findings_lines
from .finding import findings_markdown as findings_markdown
from .finding import findings_table as findings_table
from .finding import only_option as only_option
from .inside import find_inside
from .noted import NotedSteps, find_noted, tensors_of
from .occasions import (
    find_calls_at_once,
    find_growing_calls,
    find_growing_steps,
    find_larger_inputs,
    find_occasions,
    find_slow_steps,
    long_calls_text,
)
from .shares import find_host_time, find_large_parts, find_reruns
from .siblings import find_outliers, find_repeated

_MIN_LINES_SHARE = 0.05
"""Minimum share of the median step at which the program lines around a part are shown."""
_NOT_COUNTED = f"{NOT_LOOKED_AT}which operators run: the Python engine counts none beside profilers, torch.compile, RPC"


def find_findings(rule_input: RuleInput) -> list[Finding]:
    """Return the findings, by their time in a step; those without a cost in time last."""
    if not rule_input.steps:
        return []
    notes = NotedSteps(rule_input.step_notes, rule_input.samples_per_step)
    occasions, outliers = list(find_occasions(rule_input)), list(find_outliers(rule_input, notes))
    occasional_parts = {finding.part for finding in occasions}
    slow_steps = list(find_slow_steps(rule_input, notes, occasional_parts))
    reruns, host_time = list(find_reruns(rule_input, notes)), find_host_time(rule_input, notes)
    reported = {finding.where for finding in (*outliers, *slow_steps)}
    inside = [finding for finding in find_inside(rule_input, notes) if finding.where not in reported]
    inside_keys = {(finding.what, finding.where) for finding in inside}
    losses = {row.fqn for row in rule_input.rows if row.module_class.endswith("Loss")}
    explained = occasional_parts | {"loss" for finding in inside if finding.where in losses}
    findings: Sequence[Finding] = (
        *occasions,
        *outliers,
        *slow_steps,
        *inside,
        *find_calls_at_once(rule_input),
        *find_growing_steps(rule_input, notes),
        *find_growing_calls(rule_input),
        *find_larger_inputs(rule_input),
        *reruns,
        *find_large_parts(rule_input, notes, explained),
        *(finding for finding in host_time if finding.where not in reported and not notes.module_operators),
        *(
            finding
            for finding in find_noted(rule_input, notes)
            if finding.where is None or finding.where not in reported
            if (finding.what, finding.where) not in inside_keys
        ),
        *find_repeated(rule_input, notes, reported | {finding.where for finding in reruns}),
        *find_costs(rule_input, notes),
    )
    return sorted(findings, key=lambda finding: -finding.ns_per_step)[:MAX_FINDINGS]


def lines_of_parts(rule_input: RuleInput) -> dict[str, str]:
    """Return by part the program lines around most of its time in no module and no range; short parts are left out.

    If calls are steps, also return a sentence if a few of them have most of the time: a longer prompt is not a finding.
    """
    notes, texts = NotedSteps(rule_input.step_notes), dict[str, str]()
    if not rule_input.steps:
        return texts
    if not rule_input.trains and (calls := long_calls_text(rule_input)):
        texts["forward"] = calls
    step_ns = float(np.median(rule_input.duration_ns + rule_input.gap_ns.sum(axis=1)))
    for part in ("loss", OTHER):
        ns_per_step = float(np.median(rule_input.part_ns(part, gaps=True)))
        if 0 < _MIN_LINES_SHARE * step_ns <= ns_per_step and (lines := notes.lines_text(part, ns_per_step)):
            operators = notes.outside_text(ns_per_step, tensors_of(rule_input.optimizers)) if part == OTHER else ""
            texts[part] = f"{part}: {lines}{operators}"
    return texts


def looked_at(rule_input: RuleInput) -> str:
    """Return the list of what the rules checked; empty if there was nothing to check."""
    summary = rule_input.summary
    if not summary.rows:
        return ""
    is_few = rule_input.steps < MIN_STEPS_FOR_MEDIANS
    few = f" (too few to tell what is usual: record {MIN_STEPS_FOR_MEDIANS + 1} or more)" if is_few else ""
    checked = [
        f"{counted(rule_input.steps, 'step')} in {'its' if rule_input.steps == 1 else 'their'} parts{few}",
        f"{counted(len(summary.rows), 'module')} and their siblings",
        *([f"{counted(len(summary.ranges), 'kind')} of ranges"] if summary.ranges else []),
    ]
    tables = ("memory", summary.memory), ("FLOPs", summary.flops), ("devices", summary.device)
    checked += [name for name, table in tables if table is not None]
    notes = NotedSteps(rule_input.step_notes)
    is_missed = rule_input.step_notes.get("steps") and not notes.is_counted and not notes.module_operators
    return ", ".join(checked) + (_NOT_COUNTED if is_missed else "")
