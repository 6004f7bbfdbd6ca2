"""The comparison: recordings of both sides → a verdict per module and phase."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from .._errors import ModtraceError
from .._typing import Float64Array
from ..read import load
from ..timeline import Timeline
from .changes import Change
from .diff_result import Diff
from .renames import suggest_renames
from .run_times import RunTimes, measure_run, renamed_run
from .samples import SAMPLED_PHASES, Key
from .side_by_side import Side, typical_side
from .spread import Spread, measure_spread, student_quantile, trimmed_mean

__all__ = ["Recorded", "compare_runs", "diff", "measure_side"]

Recorded: TypeAlias = "Timeline | str | os.PathLike[str]"

MODULES_OUTSIDE, STEP_OUTSIDE = 0.04, 0.01
"""How often, of comparisons of a program with itself, a module and the step may be called changed: 5 % together."""
MIN_CHANGE = 0.02
"""Part of the time before: what is less is no change; runs of one program differ by that much."""
MIN_STEPS = 6
"""How many steps a side must have for a verdict."""
MIN_MODULES = 6
"""Of fewer modules and phases nobody can tell whether the machine or the modules changed."""


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
        ModtraceError: a recording has no whole steps, or a file cannot be read.

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
    timelines = (one if isinstance(one, Timeline) else load(one) for one in recorded)
    return [(measure_run(timeline), typical_side(timeline)) for timeline in timelines]


def _nearest(side: Sequence[tuple[RunTimes, Side]], step_ns: int) -> Side:
    return min((shown for _, shown in side), key=lambda shown: abs(shown.duration_ns - step_ns))


def compare_runs(before: Sequence[RunTimes], after: Sequence[RunTimes], renamed: Mapping[str, str]) -> Diff:
    """Compare measured recordings; see `diff`.

    Args:
        before: at least one.
        after: at least one.
        renamed: names before and what they are called after.

    Raises:
        ModtraceError: `renamed` gives two modules one name.
    """
    if renamed:
        before = [renamed_run(run, renamed) for run in before]
    runs = [*before, *after]
    keys = list(dict.fromkeys(key for run in runs for key in run.modules))
    shared = [key for key in keys if all(key in run.modules for run in runs)]
    logs = np.array([[math.log(run.modules[key].time.time_ns) for run in runs] for key in shared]).reshape(
        -1, len(runs)
    )
    speeds = np.zeros(len(runs))
    if len(shared) >= MIN_MODULES:
        speeds = np.median(logs - np.median(logs, axis=1, keepdims=True), axis=0)
    base_speed, new_speed = (float(trimmed_mean(side[None]).mean[0]) for side in np.split(speeds, [len(before)]))
    common_ratio = math.exp(new_speed - base_speed)
    spread = _spread_of(shared, logs - speeds, runs, len(before)) if shared else None
    enough = min(sum(run.steps for run in side) for side in (before, after)) >= MIN_STEPS
    changes = [_unshared(key, before, after) for key in keys if key not in set(shared)]
    if spread is not None:
        reach = student_quantile(MODULES_OUTSIDE / len(shared), spread.freedom) * spread.error
        base_logs, new_logs = (trimmed_mean(side).mean for side in np.split(logs, [len(before)], axis=1))
        for index, key in enumerate(shared):
            times = math.exp(base_logs[index]), math.exp(new_logs[index])
            interval = spread.difference[index] + np.array([-reach[index], 0, reach[index]])
            counted = enough and min(_steps(side, key) for side in (before, after)) >= MIN_STEPS
            calls = _calls(before, after, key)
            changes.append(_change(key, times, interval, common_ratio, calls, counted))
    return Diff(
        changes=sorted(changes, key=_by_cost),
        step=_step_change(before, after, enough),
        base_steps=sum(run.steps for run in before),
        new_steps=sum(run.steps for run in after),
        warm_up=sum(run.warm_up for run in runs),
        independent=(_independent(before), _independent(after)),
        common_ratio=common_ratio,
        runs=(len(before), len(after)),
        spread=float(np.median(spread.spread)) if spread is not None else 0.0,
        drift=(_most_drift(before), _most_drift(after)),
        environment=_environments(before, after),
        suggested=suggest_renames(before[0], after[0]),
    )


def _independent(side: Sequence[RunTimes]) -> float:
    return round(sum(run.independent for run in side), 1)


def _most_drift(side: Sequence[RunTimes]) -> float:
    return max((run.drift for run in side), key=abs)


def _spread_of(keys: Sequence[Key], logs: Float64Array, runs: Sequence[RunTimes], base_runs: int) -> Spread:
    within = np.array([np.mean([run.modules[key].time.variance for run in runs]) for key in keys])
    freedom = float(np.median([sum(run.modules[key].time.freedom for run in runs) for key in keys]))
    return measure_spread(logs, within, freedom, base_runs)


def _change(
    key: Key,
    times: tuple[float, float],
    interval: Float64Array,
    common_ratio: float,
    calls: tuple[int, int, bool],
    counted: bool,
) -> Change:
    """Return the change of a module.

    Args:
        key: the module and phase.
        times: ns before and after.
        interval: float64[3], of the difference of their logarithms, beside the common one: low end, estimate, high end.
        common_ratio: by what factor all modules changed alike.
        calls: as `_calls` returns them.
        counted: False where there are too few steps for a verdict.
    """
    base_ns, new_ns = map(round, times)
    low, difference, high = (times[0] * common_ratio * np.expm1(interval)).tolist()
    verdict = _verdict(base_ns, new_ns, (low, difference, high)) if counted else "cannot tell"
    return Change(
        *key, base_ns, new_ns, round(difference), round(low), round(high), calls[0], calls[1], calls[2], verdict
    )


def _unshared(key: Key, before: Sequence[RunTimes], after: Sequence[RunTimes]) -> Change:
    """Return the change of what some recordings do not have."""
    found = [[run.modules[key].time.time_ns for run in side if key in run.modules] for side in (before, after)]
    base_ns, new_ns = (round(float(np.mean(times))) if times else 0 for times in found)
    verdict = "cannot tell" if all(found) else "removed" if found[0] else "added"
    difference_ns = new_ns - base_ns
    base_calls, new_calls, changed = _calls(before, after, key)
    return Change(
        *key, base_ns, new_ns, difference_ns, difference_ns, difference_ns, base_calls, new_calls, changed, verdict
    )


def _step_change(before: Sequence[RunTimes], after: Sequence[RunTimes], enough: bool) -> Change:
    """Return how the step as a whole changed, machine and all.

    Recordings of a side tell how much the machine's speed differs. Where there is one a side, its thirds do: they
    differ at least as much as recordings made one after the other.
    """
    base, new = (trimmed_mean(np.log([[run.step.time_ns for run in side]])) for side in (before, after))
    freedom = base.kept + new.kept - 2
    if freedom:
        variance = float(base.squares[0] + new.squares[0]) / freedom
    else:
        parts = [np.log(run.step_parts) for run in (*before, *after) if run.step_parts]
        freedom = sum(len(part) - 1 for part in parts)
        variance = sum(float(((part - part.mean()) ** 2).sum()) for part in parts) / max(freedom, 1)
    least = float(np.mean([run.step.variance for run in (*before, *after)]))
    error = math.sqrt(max(variance, least) * (1 / base.kept + 1 / new.kept))
    reach = student_quantile(STEP_OUTSIDE, max(freedom, 1)) * error
    interval = float(new.mean[0] - base.mean[0]) + np.array([-reach, 0, reach])
    times = math.exp(base.mean[0]), math.exp(new.mean[0])
    return _change(("", "step"), times, interval, 1.0, (0, 0, False), enough)


def _steps(side: Sequence[RunTimes], key: Key) -> int:
    return sum(run.modules[key].steps for run in side)


def _calls(before: Sequence[RunTimes], after: Sequence[RunTimes], key: Key) -> tuple[int, int, bool]:
    """Return the usual number of spans in a step in which there is any, before and after, and whether it changed."""
    base, new = ([run.modules[key] for run in side if key in run.modules] for side in (before, after))
    base_calls, new_calls = (
        round(float(np.median([run.calls for run in side]))) if side else 0 for side in (base, new)
    )
    if not (base and new):
        return base_calls, new_calls, True
    more = min(run.fewest_calls for run in new) > max(run.most_calls for run in base)
    fewer = max(run.most_calls for run in new) < min(run.fewest_calls for run in base)
    return base_calls, new_calls, more or fewer


def _verdict(base_ns: int, new_ns: int, interval: tuple[float, float, float]) -> str:
    """Say what the interval of the difference allows: a change is one that is also larger than what runs differ by.

    What only did not follow all other modules, and takes what it took, did not change.
    """
    limit = MIN_CHANGE * base_ns
    low, difference, high = interval
    if low > 0 and min(difference, new_ns - base_ns) > limit:
        return "slower"
    if high < 0 and max(difference, new_ns - base_ns) < -limit:
        return "faster"
    return "same" if -limit <= low and high <= limit else "cannot tell"


def _environments(before: Sequence[RunTimes], after: Sequence[RunTimes]) -> dict[str, tuple[str, str]]:
    """Return what differs between the sides: of each key the texts before and after."""
    keys = dict.fromkeys(key for run in (*before, *after) for key in run.environment)
    texts = {
        key: tuple(", ".join(dict.fromkeys(run.environment.get(key, "?") for run in side)) for side in (before, after))
        for key in keys
    }
    return {key: (old, new) for key, (old, new) in texts.items() if old != new}


def _by_cost(change: Change) -> tuple[bool, bool, int, str, int]:
    """What is called differently comes first: that is certain, and often the reason of the rest."""
    settled = change.verdict in {"same", "cannot tell"}
    order = SAMPLED_PHASES.index(change.phase)
    return not change.calls_changed, settled, -abs(change.difference_ns), change.fqn, order
