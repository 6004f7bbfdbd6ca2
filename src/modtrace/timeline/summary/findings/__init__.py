"""Findings: what stands out in a summary, ranked by how much of a step it explains; a file for each kind of rule.

Rules measure nothing: all figures are the summary's own, and what `RuleInput` joins to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...._tables import counted
from ..parts import OTHER
from .costs import find_costs
from .costs import low_mfu as low_mfu
from .finding import MAX_FINDINGS as MAX_FINDINGS
from .finding import MIN_STEPS, NOT_LOOKED_AT
from .finding import TRACE as TRACE
from .finding import Finding as Finding
from .finding import RuleInput as RuleInput
from .finding import Runs as Runs
from .finding import closing_line as closing_line
from .finding import findings_lines as findings_lines
from .finding import findings_markdown as findings_markdown
from .finding import findings_table as findings_table
from .finding import only_option as only_option
from .inside import find_inside
from .noted import NotedSteps, find_noted, tensors_of
from .occasions import (
    find_calls_at_once,
    find_growing_steps,
    find_larger_inputs,
    find_occasions,
    find_slow_steps,
    long_calls_text,
)
from .shares import find_host_time, find_large_parts, find_reruns
from .siblings import find_outliers

_LARGE_PART = 0.05
"""From which share of a step on it is said where a part is."""
_NOT_COUNTED = f"{NOT_LOOKED_AT}which operators run: the Python engine counts none beside profilers, torch.compile, RPC"


def find_findings(measured: RuleInput) -> list[Finding]:
    """Return what stands out: what costs the most time in a step first, then what costs none."""
    if not measured.steps:
        return []
    notes = NotedSteps(measured.step_notes, measured.samples_per_step)
    occasions, outliers = list(find_occasions(measured)), list(find_outliers(measured, notes))
    slow_steps = list(find_slow_steps(measured, notes, {each.part for each in occasions}))
    named = {found.where for found in (*outliers, *slow_steps)}
    inside = [each for each in find_inside(measured, notes) if each.where not in named]
    said = {(each.what, each.where) for each in inside}
    losses = {row.fqn for row in measured.rows if row.module_class.endswith("Loss")}
    explained = {each.part for each in occasions} | {"loss" for each in inside if each.where in losses}
    found: Sequence[Finding] = (
        *occasions,
        *outliers,
        *slow_steps,
        *inside,
        *find_calls_at_once(measured),
        *find_growing_steps(measured, notes),
        *find_larger_inputs(measured),
        *find_reruns(measured),
        *find_large_parts(measured, notes, explained),
        *(each for each in find_host_time(measured, notes) if each.where not in named and not notes.inside),
        *(
            each
            for each in find_noted(measured, notes)
            if (each.where is None or each.where not in named) and (each.what, each.where) not in said
        ),
        *find_costs(measured),
    )
    return sorted(found, key=lambda each: -each.ns_per_step)[:MAX_FINDINGS]


def lines_of_parts(measured: RuleInput) -> dict[str, str]:
    """Say of what is in no module and no range between which lines of the program most of it is, by part.

    Parts that take little are left out, and those of which most is elsewhere. Of calls that are steps, it says too
    whether few of them take most of the time: a longer prompt is no finding.
    """
    notes, said = NotedSteps(measured.step_notes), dict[str, str]()
    if not measured.steps:
        return said
    if not measured.trains and (calls := long_calls_text(measured)):
        said["forward"] = calls
    step_ns = float(np.median(measured.duration_ns + measured.gap_ns.sum(axis=1)))
    for part in ("loss", OTHER):
        per_step = float(np.median(measured.part_ns(part, gaps=True)))
        if 0 < _LARGE_PART * step_ns <= per_step and (text := notes.lines_text(part, per_step)):
            runs = notes.outside_text(per_step, tensors_of(measured.optimizers)) if part == OTHER else ""
            said[part] = f"{part}: {text}{runs}"
    return said


def looked_at(measured: RuleInput) -> str:
    """Say what there was to look at; nothing if there was nothing."""
    summary = measured.summary
    if not summary.rows:
        return ""
    is_few = measured.steps < MIN_STEPS
    few = f" (too few to tell what is usual: record {MIN_STEPS + 1} or more)" if is_few else ""
    known = [
        f"{counted(measured.steps, 'step')} in {'its' if measured.steps == 1 else 'their'} parts{few}",
        f"{counted(len(summary.rows), 'module')} beside their siblings",
        *(f"{counted(len(summary.ranges), 'kind')} of ranges" for _ in summary.ranges[:1]),
        *("memory" for _ in [summary.memory] if summary.memory is not None),
        *("FLOPs" for _ in [summary.flops] if summary.flops is not None),
        *("devices" for _ in [summary.device] if summary.device is not None),
    ]
    notes = NotedSteps(measured.step_notes)
    is_missed = measured.step_notes.get("steps") and not notes.is_counted and not notes.inside
    return ", ".join(known) + (_NOT_COUNTED if is_missed else "")
