"""Compiled regions against an eager model: a region is compared as a whole if one side has no spans inside it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from .._tables import CHANGED_MS, MODULE, MS, NUMBER, TEXT, Column
from ..timeline.contents import COMPILED_CLASS
from .run_times import MODULE_VALUE_PREFIXES, SAMPLED_PHASES, Key, ModuleRun, RunTimes, Typical, names_around
from .verdicts import Change


class RegionChange(NamedTuple):
    """A region that only one side compiled, in one phase, with all modules inside; times per step.

    Attributes:
        fqn: fully qualified name of the region.
        phase: one of `SAMPLED_PHASES`, as in `Change`.
        modules: number of modules inside that are compared one by one; 0 if the region is compared as a whole.
        base_ns: time of the region and all modules inside before.
        new_ns: the same time after.
        difference_ns: `new_ns` less `base_ns`.
    """

    fqn: str
    phase: str
    modules: int
    base_ns: int
    new_ns: int
    difference_ns: int


REGION_COLUMNS = (
    Column("compiled region, with all inside", "fqn", MODULE),
    Column("phase", "phase", TEXT),
    Column("modules compared", "modules", NUMBER),
    Column("before ms", "base_ns", MS),
    Column("after ms", "new_ns", MS),
    Column("difference ms", "difference_ns", CHANGED_MS),
)


def region_changes(changes: Sequence[Change], regions: Sequence[str]) -> list[RegionChange]:
    """Return the times of each region before and after, in each phase."""
    rows: dict[tuple[str, str], list[Change]] = {}
    for change in changes:
        for region in regions:
            if region in names_around(change.fqn):
                rows.setdefault((region, change.phase), []).append(change)
    changed = []
    for (region, phase), members in rows.items():
        inner = {row.fqn for row in members if row.base_recordings and row.new_recordings} - {region}
        base_ns, new_ns = sum(row.base_ns for row in members), sum(row.new_ns for row in members)
        changed.append(RegionChange(region, phase, len(inner), base_ns, new_ns, new_ns - base_ns))
    return sorted(changed, key=lambda row: (regions.index(row.fqn), SAMPLED_PHASES.index(row.phase)))


def names_in_functions(side: Sequence[RunTimes], other: Sequence[RunTimes]) -> dict[str, str]:
    """Return the other side's names for modules that compiled functions call there, by their names on this side."""
    called, other_called = ({fqn for run in runs for fqn in run.classes} for runs in (side, other))
    names = {fqn: inner for run in other for fqn, inner in run.in_functions.items()}
    return {fqn: inner for fqn, inner in names.items() if fqn in called - other_called and inner not in called}


def fold_regions(
    base_runs: Sequence[RunTimes], new_runs: Sequence[RunTimes]
) -> tuple[Sequence[RunTimes], Sequence[RunTimes], list[str]]:
    """Return both sides, with modules added to regions in which the other side has no spans, and these modules."""
    folded: dict[str, None] = {}
    sides = [base_runs, new_runs]
    for region in dict.fromkeys(fqn for run in (*base_runs, *new_runs) for fqn in run.compiled):
        inner = [{fqn for run in side for fqn in run.classes if region in names_around(fqn)[1:]} for side in sides]
        for side, other in ((0, 1), (1, 0)):
            if inner[side] and not inner[other] and all(region in run.compiled for run in sides[other]):
                phases = {phase for run in sides[other] for fqn, phase in run.modules if fqn == region}
                sides[side] = [_fold(run, region, phases) for run in sides[side]]
                folded |= dict.fromkeys(sorted(inner[side]))
    return sides[0], sides[1], [*folded]


def _fold(run: RunTimes, region: str, phases: set[str]) -> RunTimes:
    """Return a recording with one row for a region and all modules inside; recompute counts as backward in `phases`."""
    modules: dict[Key, ModuleRun] = {}
    parts: dict[str, list[ModuleRun]] = defaultdict(list)
    for (fqn, phase), module in run.modules.items():
        if region not in names_around(fqn):
            modules[fqn, phase] = module
            continue
        backward = phase.replace("recompute", "backward")
        parts[backward if phase not in phases and backward in phases else phase].append(module)
    for phase, members in parts.items():
        modules[region, phase] = _sum(members, run.modules.get((region, phase)))
    inner_fqns = {fqn for fqn in run.classes if region in names_around(fqn)[1:]}
    own_keys = tuple(f"{prefix}{fqn}" for prefix in MODULE_VALUE_PREFIXES for fqn in (region, *inner_fqns))
    classes = {fqn: module_class for fqn, module_class in run.classes.items() if fqn not in inner_fqns}
    return run._replace(
        modules=modules,
        classes=classes if region in classes or not parts else classes | {region: COMPILED_CLASS},
        environment={key: text for key, text in run.environment.items() if key not in own_keys},
        peak_bytes={fqn: peak for fqn, peak in run.peak_bytes.items() if fqn not in inner_fqns},
    )


def _sum(modules: Sequence[ModuleRun], region: ModuleRun | None) -> ModuleRun:
    """Return the sum of the modules' times in a step with calls of the region; `region` is the region's own row."""
    steps = region.steps if region else max(module.steps for module in modules)
    times = [module.time.time_ns * module.steps / steps for module in modules]
    total = math.fsum(times)
    variance = math.fsum(time**2 * module.time.variance for time, module in zip(times, modules, strict=True))
    return (region or ModuleRun(Typical(0, 0), steps, 1, 1, 1))._replace(time=Typical(total, variance / total**2))
