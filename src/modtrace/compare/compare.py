"""The comparison: recordings of both sides → a verdict per module and phase."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from .._errors import ModtraceError
from ..read import load
from ..timeline import Timeline
from .diff_result import Diff
from .module_changes import compare_modules, compare_steps
from .renames import suggest_renames
from .run_times import RunTimes, measure_run, renamed_run
from .samples import is_inside
from .side_by_side import Side, typical_side

__all__ = ["Recorded", "compare_runs", "diff", "measure_side"]

Recorded: TypeAlias = "Timeline | str | os.PathLike[str]"


def diff(
    base: Recorded | Sequence[Recorded],
    new: Recorded | Sequence[Recorded],
    *,
    map: Mapping[str, str] | None = None,  # noqa: A002 (as `--map` of the command line)
) -> Diff:
    """Compare what modules took before and after, per step and phase, by their self times.

    Of each recording the typical time of a module is taken: the mean of the faster half of its steps. How much typical
    times differ between recordings of one side is the noise that a difference is held against; where each side is one
    recording, it is what all modules together tell. Verdicts are about what differs from what all modules changed
    alike, as they do where the machine runs slower. First steps are left out while they are slower than what follows.

    Args:
        base: a timeline, any file that `load` takes, or several of one program: best 5 or more a side, recorded in
            turns.
        new: the same, after the change.
        map: names of modules before and what they are called after: `{"GPT.blocks": "GPT.layers"}`; what they
            contain follows. `Diff.suggested` says which the structure suggests.

    Returns:
        The comparison, with a `Change` per module and phase; times in nanoseconds.

    Raises:
        ModtraceError: a recording has no whole steps, a file cannot be read, or `map` names what is not there.

    Examples:
        >>> print(modtrace.diff("yesterday.pftrace", "today.pftrace"))
        >>> found = modtrace.diff([f"base{i}.pftrace" for i in range(8)], [f"new{i}.pftrace" for i in range(8)])
        >>> [(change.fqn, change.ratio) for change in found.changes if change.verdict == "slower"]
    """
    before, after = measure_side(base), measure_side(new)
    found = compare_runs([run for run, _ in before], [run for run, _ in after], map or {})
    # What a page shows of each side is the step that is nearest the typical one of all its recordings.
    step = found.step
    return replace(
        found, _sides=(_nearest(before, step.base_ns)._replace(renamed=map or {}), _nearest(after, step.new_ns))
    )


def measure_side(side: Recorded | Sequence[Recorded]) -> list[tuple[RunTimes, Side]]:
    """Measure the recordings of a side, one after the other, so that one is in memory at a time.

    Returns:
        Of each recording its times, and its typical step.

    Raises:
        ModtraceError: there is none, one has no whole steps, or a file cannot be read.
    """
    recorded = [side] if isinstance(side, (Timeline, str, os.PathLike)) else list(side)
    if not recorded:
        raise ModtraceError("there is nothing to compare: give a recording for each side")
    return [_measure(one) for one in recorded]


def _measure(recording: Recorded) -> tuple[RunTimes, Side]:
    if isinstance(recording, Timeline):
        return measure_run(recording), typical_side(recording)
    timeline = load(recording)
    try:
        return measure_run(timeline), typical_side(timeline)
    except ModtraceError as error:
        raise ModtraceError(f"{os.fspath(recording)}: {error}") from error


def _nearest(side: Sequence[tuple[RunTimes, Side]], step_ns: int) -> Side:
    return min((shown for _, shown in side), key=lambda shown: abs(shown.duration_ns - step_ns))


def compare_runs(before: Sequence[RunTimes], after: Sequence[RunTimes], renamed: Mapping[str, str]) -> Diff:
    """Compare measured recordings; see `diff`.

    Args:
        before: at least one.
        after: at least one.
        renamed: names before and what they are called after.

    Raises:
        ModtraceError: `renamed` gives two modules one name, or names what is not there.
    """
    if renamed:
        before = _renamed(before, after, renamed)
    given = len(before), len(after)
    before, after = _without_copies(before), _without_copies(after)
    runs = [*before, *after]
    modules = compare_modules(before, after)
    return Diff(
        changes=modules.changes,
        step=compare_steps(before, after),
        base_steps=sum(run.steps for run in before),
        new_steps=sum(run.steps for run in after),
        warm_up=sum(run.warm_up for run in runs),
        independent=(_independent(before), _independent(after)),
        common_ratio=modules.common_ratio,
        compared=modules.compared,
        runs=(len(before), len(after)),
        copies=(given[0] - len(before), given[1] - len(after)),
        on_both_sides=sum(run in after for run in before),
        spread=modules.spread,
        drift=(_most_drift(before), _most_drift(after)),
        environment=_environments(before, after),
        suggested=suggest_renames(before[0], after[0]),
    )


def _without_copies(side: Sequence[RunTimes]) -> list[RunTimes]:
    """Return each recording once: a copy tells nothing of how much recordings differ."""
    return [run for index, run in enumerate(side) if run not in side[:index]]


def _renamed(before: Sequence[RunTimes], after: Sequence[RunTimes], renamed: Mapping[str, str]) -> list[RunTimes]:
    for old, new in renamed.items():
        for side, name, when in ((before, old, "before"), (after, new, "after")):
            if not any(is_inside(fqn, name) for run in side for fqn in run.classes):
                raise ModtraceError(f"{old}={new} maps nothing: no module {when} is {name} or inside it")
    return [renamed_run(run, renamed) for run in before]


def _independent(side: Sequence[RunTimes]) -> float:
    return round(sum(run.independent for run in side), 1)


def _most_drift(side: Sequence[RunTimes]) -> float | None:
    return max((run.drift for run in side if run.drift is not None), key=abs, default=None)


def _environments(before: Sequence[RunTimes], after: Sequence[RunTimes]) -> dict[str, tuple[str, str]]:
    """Return what differs between the sides: of each key the texts before and after."""
    keys = dict.fromkeys(key for run in (*before, *after) for key in run.environment)
    texts = {
        key: tuple(", ".join(dict.fromkeys(run.environment.get(key, "?") for run in side)) for side in (before, after))
        for key in keys
    }
    return {key: (old, new) for key, (old, new) in texts.items() if old != new}
