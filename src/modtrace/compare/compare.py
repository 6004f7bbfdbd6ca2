"""The comparison of recordings: a verdict for each module and phase, and for each part of the step."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from .._errors import ArgumentError, ModtraceError
from ..read import read_timeline
from ..timeline import Timeline
from ..timeline.summary import GroupBy, outer_modules
from . import run_times
from .diff_result import Diff
from .regions import fold_regions, names_in_functions
from .run_times import RunTimes
from .side_by_side import TypicalStep, cut_typical_step
from .verdicts import PeakChange, compare_modules, compare_steps

Recorded: TypeAlias = "Timeline | str | os.PathLike[str]"


def diff(
    base: Recorded | Sequence[Recorded],
    new: Recorded | Sequence[Recorded],
    *,
    map: Mapping[str, str] | None = None,  # noqa: A002 (as `--map` of the command line)
    by: GroupBy = "module",
    step_by: str | None = None,
) -> Diff:
    """Compare the self time of each module before and after, per step and phase; and the parts of the step.

    The typical time of a module in a recording is the mean of the faster half of its steps. A difference is compared
    with the differences of typical times between recordings of one side, or, with one recording on a side, of modules
    of the same size. The machine's change is first subtracted. The first steps are left out while they are slower than
    later ones.

    Args:
        base: timeline, file that `load` reads, baseline of `save_baseline`, or several of these of one program: best
            5 or more on a side, recorded in turns.
        new: recordings after the change, in the same forms.
        map: names of modules after, by their names before: `{"GPT.blocks": "GPT.layers"}`; inner modules follow.
            `Diff.suggested` has the entries that the structure suggests.
        by: "module", or "class" to add up all modules of a class. A baseline keeps the value that it was saved with.
        step_by: kind of step, see `Timeline.summary`. A baseline keeps the steps that it was saved with.

    Returns:
        The comparison, with a `Change` per module and phase, and per part of the step; times in nanoseconds.

    Raises:
        ModtraceError: a recording has no whole steps, or a file cannot be read.
        ArgumentError: `map` names a module that no side has, or `step_by` no range and no class.

    Examples:
        >>> print(modtrace.diff("yesterday.pftrace", "today.pftrace"))
        >>> comparison = modtrace.diff([f"base{i}.pftrace" for i in range(8)], [f"new{i}.pftrace" for i in range(8)])
        >>> [(change.fqn, change.ratio) for change in comparison.changes if change.verdict == "slower"]
    """
    base_side, new_side = (measure_side(side, by, step_by) for side in (base, new))
    runs = [run for run, _ in base_side], [run for run, _ in new_side]
    comparison = compare_runs(*runs, map or {})
    # The page shows from each side the step nearest to the typical one of all its recordings.
    steps = _find_nearest_step(base_side, comparison.step.base_ns), _find_nearest_step(new_side, comparison.step.new_ns)
    comparison = replace(comparison, by=by)
    if steps[0] is None or steps[1] is None:
        return comparison
    names = {**(map or {}), **names_in_functions(*runs)}, names_in_functions(*runs[::-1])
    return replace(comparison, _sides=(steps[0]._replace(renamed=names[0]), steps[1]._replace(renamed=names[1])))


def save_baseline(
    recordings: Recorded | Sequence[Recorded],
    path: str | os.PathLike[str],
    *,
    by: GroupBy = "module",
    step_by: str | None = None,
) -> list[RunTimes]:
    """Save the times of modules to a small JSON file, which `diff` accepts as `base` or `new`.

    Args:
        recordings: timeline, file that `load` reads, or several of these of one program: best 5 or more.
        path: file to write.
        by: "module" or "class", see `diff`.
        step_by: kind of step, see `diff`.

    Returns:
        The measurements of each recording.

    Raises:
        ModtraceError: a recording has no whole steps, or a file cannot be read.
        WriteError: the file cannot be written; an existing file is intact.
    """
    runs = [run for run, _ in measure_side(recordings, by, step_by)]
    run_times.write_baseline(runs, path)
    return runs


def measure_side(
    side: Recorded | Sequence[Recorded], by: GroupBy = "module", step_by: str | None = None
) -> list[tuple[RunTimes, TypicalStep | None]]:
    """Measure the recordings of a side, one after the other, so that only one is in memory at a time.

    Return the times and the typical step of each; a baseline has no step. Raises ModtraceError if there is no
    recording, one has no whole steps, or a file cannot be read.
    """
    recorded = [side] if isinstance(side, (Timeline, str, os.PathLike)) else list(side)
    if not recorded:
        raise ModtraceError("there is nothing to compare: give a recording for each side")
    return [times for recording in recorded for times in _measure(recording, by, step_by)]


def _measure(recording: Recorded, by: GroupBy, step_by: str | None) -> list[tuple[RunTimes, TypicalStep | None]]:
    """Measure one recording, or read the recordings of a baseline; an error names the file."""
    if isinstance(recording, Timeline):
        return [(run_times.measure_run(recording, by, step_by), cut_typical_step(recording, by, step_by))]
    if run_times.is_baseline(recording):
        return [(run, None) for run in run_times.read_baseline(recording)]
    timeline = read_timeline(recording)
    try:
        return [(run_times.measure_run(timeline, by, step_by), cut_typical_step(timeline, by, step_by))]
    except ModtraceError as error:
        raise ModtraceError(f"{os.fspath(recording)}: {error}") from error


def _find_nearest_step(side: Sequence[tuple[RunTimes, TypicalStep | None]], step_ns: int) -> TypicalStep | None:
    return min((step for _, step in side if step), key=lambda step: abs(step.duration_ns - step_ns), default=None)


def compare_runs(base_runs: Sequence[RunTimes], new_runs: Sequence[RunTimes], renamed: Mapping[str, str]) -> Diff:
    """Compare measured recordings, at least one on each side; `renamed` has names after by names before.

    Raises ModtraceError if two modules get one name, or if `renamed` has the name of a missing module.
    """
    names_of = [
        {name for run in side for fqn in run.classes for name in run_times.names_around(fqn)}
        for side in (base_runs, new_runs)
    ]
    for old, new in renamed.items():
        for names, name, when in zip(names_of, (old, new), ("before", "after"), strict=True):
            if name not in names:
                raise ArgumentError(f"{old}={new} maps nothing: no module {when} is {name} or inside it")
    base_runs = [run_times.renamed_run(run, renamed) for run in base_runs]
    base_names, new_names = names_in_functions(base_runs, new_runs), names_in_functions(new_runs, base_runs)
    counts = len(base_runs), len(new_runs)
    base_runs = _without_copies([run_times.renamed_run(run, base_names) for run in base_runs])
    new_runs = _without_copies([run_times.renamed_run(run, new_names) for run in new_runs])
    folded_base, folded_new, inside = fold_regions(base_runs, new_runs)
    modules = compare_modules(folded_base, folded_new)
    return Diff(
        **modules._asdict(),
        step=compare_steps(base_runs, new_runs),
        base_steps=sum(run.steps for run in base_runs),
        new_steps=sum(run.steps for run in new_runs),
        warm_up=sum(run.warm_up for run in (*base_runs, *new_runs)),
        runs=(len(base_runs), len(new_runs)),
        copies=(counts[0] - len(base_runs), counts[1] - len(new_runs)),
        on_both_sides=sum(run in new_runs for run in base_runs),
        environment=_environments(folded_base, folded_new),
        suggested=suggest_renames(base_runs[0], new_runs[0]),
        peak_bytes=_peak_changes(base_runs, new_runs),
        classes=_changed_classes(base_runs, new_runs),
        compiled=(_compiled_in_all_of(base_runs, new_runs), _compiled_in_all_of(new_runs, base_runs)),
        inside=inside,
        lines=(base_runs[0].lines, new_runs[0].lines),
    )


def _changed_classes(base_runs: Sequence[RunTimes], new_runs: Sequence[RunTimes]) -> dict[str, tuple[str, str]]:
    """Return the classes before and after of modules whose class changed, except models: their class is their name."""
    base, new = (run_times.texts_by_key(run.classes for run in side) for side in (base_runs, new_runs))
    return {
        fqn: (min(base[fqn]), min(new[fqn]))
        for fqn in base
        if "." in fqn and fqn in new and base[fqn].isdisjoint(new[fqn])
    }


def _compiled_in_all_of(side: Sequence[RunTimes], other: Sequence[RunTimes]) -> list[str]:
    """Return the regions that torch.compile made in all recordings of a side and in none of the other."""
    regions = [fqn for fqn in side[0].compiled if all(fqn in run.compiled for run in side)]
    return [fqn for fqn in regions if not any(fqn in run.compiled for run in other)]


def _peak_changes(base_runs: Sequence[RunTimes], new_runs: Sequence[RunTimes]) -> list[PeakChange]:
    """Return the peaks that both sides know."""
    base, new = dict[str, int](), dict[str, int]()
    for peaks, side in ((base, base_runs), (new, new_runs)):
        for run in side:
            peaks |= {fqn: max(count, peaks.get(fqn, 0)) for fqn, count in run.peak_bytes.items()}
    return [PeakChange(fqn, base[fqn], new[fqn], new[fqn] - base[fqn]) for fqn in base if fqn in new]


def _without_copies(side: Sequence[RunTimes]) -> list[RunTimes]:
    """Return the recordings without copies, which say nothing about the noise."""
    return [run for index, run in enumerate(side) if run not in side[:index]]


def _environments(base_runs: Sequence[RunTimes], new_runs: Sequence[RunTimes]) -> dict[str, tuple[str, str]]:
    """Return the texts before and after of each key whose texts differ between the sides."""
    differing = dict[str, tuple[str, str]]()
    for key in dict.fromkeys(key for run in (*base_runs, *new_runs) for key in run.environment):
        # Recordings that did not count an exact value lack it.
        missing = "" if key.startswith(run_times.EXACT_VALUE_PREFIXES) else "?"
        texts = ([run.environment.get(key, missing) for run in side] for side in (base_runs, new_runs))
        base, new = (", ".join(filter(None, dict.fromkeys(side))) for side in texts)
        if base and new and base != new:
            differing[key] = base, new
    return differing


def suggest_renames(base: RunTimes, new: RunTimes) -> dict[str, str]:
    """Return likely new names by names before, for modules of the same class, place, contents and calls per step.

    If several modules of one shape vanished from a place, the same number must have appeared there; they are paired in
    the order of their calls. Names that pairs have in common are listed once: `{"Net.h": "Net.layers"}`.
    """
    vanished_groups, appeared_groups = _group_unmatched(base, new), _group_unmatched(new, base)
    pairs: dict[str, str] = {}
    stayed = base.classes.keys() & new.classes.keys()
    stayed_outer = {outer for fqn in stayed for outer in run_times.names_around(fqn)}
    for shape, vanished in vanished_groups.items():
        appeared = appeared_groups.get(shape, [])
        if len(vanished) == len(appeared):
            pairs.update(_shorten(*pair, stayed_outer) for pair in zip(vanished, appeared, strict=True))
    inside, appeared_fqns = _names_inside(base, pairs), new.classes.keys() - stayed
    # More of the inner modules must have the new name on the other side than kept their old one.
    return {
        old: to
        for old, to in pairs.items()
        if len({to + fqn[len(old) :] for fqn in inside[old]} & appeared_fqns) > len(stayed.intersection(inside[old]))
    }


def _names_inside(run: RunTimes, outer: Container[str]) -> dict[str, list[str]]:
    """Return by name in `outer` the names of that module and of those inside it."""
    inside: dict[str, list[str]] = {}
    for fqn in run.classes:
        for name in run_times.names_around(fqn):
            if name in outer:
                inside.setdefault(name, []).append(fqn)
    return inside


def _group_unmatched(run: RunTimes, other: RunTimes) -> dict[tuple[object, ...], list[str]]:
    """Return the outermost modules that the other side lacks, by their parent and contents."""
    calls: dict[str, list[tuple[str, int]]] = {}
    for (fqn, phase), module in run.modules.items():
        calls.setdefault(fqn, []).append((phase, module.calls))
    outer_names = outer_modules([*run.classes])
    outermost = {
        fqn: outer_names[fqn][:1]
        for fqn in run.classes
        if fqn not in other.classes and all(outer in other.classes for outer in outer_names[fqn])
    }
    unmatched: dict[tuple[object, ...], list[str]] = {}
    for fqn, inside in _names_inside(run, outermost).items():
        # A model's class is its name: if that changed, its contents must be the same.
        shape = [(name[len(fqn) :], run.classes[name] if "." in name else "", *calls.get(name, ())) for name in inside]
        if "." in fqn or len(inside) > 1:
            unmatched.setdefault((*outermost[fqn], *shape), []).append(fqn)
    return unmatched


def _shorten(old: str, new: str, stayed: Container[str]) -> tuple[str, str]:
    """Return both names of a module without their common end, up to a name that is in `stayed`."""
    while True:
        (old_outer, _, old_end), (new_outer, _, new_end) = old.rpartition("."), new.rpartition(".")
        if not (old_outer and new_outer) or old_end != new_end or old_outer in stayed:
            return old, new
        old, new = old_outer, new_outer
