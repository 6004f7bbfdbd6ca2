"""What each module changed by: the logarithms of its times in all recordings that have it → a verdict per phase."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._typing import BoolArray, Float64Array, IndexArray
from .calls import Calls, compare_calls
from .changes import CLOCK_NS, Change
from .run_times import RunTimes
from .samples import SAMPLED_PHASES, Key
from .spread import SINGLE_FREEDOM, Spread, measure_spread, student_quantile, trimmed_mean

__all__ = ["MIN_MODULES", "MIN_STEPS", "ModuleChanges", "compare_modules", "compare_steps"]

MODULES_OUTSIDE, STEP_OUTSIDE = 0.04, 0.01
"""How often, of comparisons of a program with itself, a module and the step may be called changed: 5 % together."""
SINGLE_STEP_SPREAD = 0.1
"""By what part whole steps are taken to differ between recordings where each side is one: machines that are shared, or
run slower when they are hot, do."""
MIN_CHANGE = 0.02
"""Part of the time before: what is less is no change; runs of one program differ by that much."""
MIN_STEPS = 6
"""How many steps a side must have for a verdict."""
_MOST = 40.0
"""Logarithm of what nothing becomes slower by: an interval that ends nowhere is written as a number too."""
MIN_MODULES = 6
"""Of fewer modules and phases nobody can tell whether the machine or the modules changed."""


class ModuleChanges(NamedTuple):
    """What the modules changed by.

    Attributes:
        changes: one per module and phase; first what is called differently, then what changed, largest cost first.
        compared: how many of them have an interval.
        common_ratio: by what factor all changed alike; 1 where too few are compared to tell.
        spread: by what part the middle one differs from one recording to the next; 0 where none is compared.
    """

    changes: list[Change]
    compared: int
    common_ratio: float
    spread: float


class _Times(NamedTuple):
    """What each module and phase took in each recording; NaN where it is not in one.

    Attributes:
        keys: modules and phases.
        logs: float64[keys, recordings], logarithms of times.
        variance: float64[keys, recordings], their relative variances as the steps tell them.
        freedom: float64[keys, recordings], the degrees of freedom of these.
    """

    keys: list[Key]
    logs: Float64Array
    variance: Float64Array
    freedom: Float64Array


class _Group(NamedTuple):
    """Modules that the same recordings have, compared over these.

    Attributes:
        rows: which of `_Times.keys`.
        base_logs: float64[rows], the logarithm of the time before.
        new_logs: the same after.
        common: the logarithm of the factor that all modules changed by.
        spread: how they differ.
    """

    rows: list[int]
    base_logs: Float64Array
    new_logs: Float64Array
    common: float
    spread: Spread


def compare_modules(before: Sequence[RunTimes], after: Sequence[RunTimes]) -> ModuleChanges:
    """Compare modules; one that few recordings lack is compared over those that have it."""
    times = _times_of([*before, *after])
    groups = list(_groups(times, len(before)))
    compared = sum(len(group.rows) for group in groups)
    calls = [compare_calls(before, after, key, len(times.keys)) for key in times.keys]
    found: dict[int, Change] = {}
    for group in groups:
        reach = student_quantile(MODULES_OUTSIDE / compared, group.spread.freedom)
        for place, row in enumerate(group.rows):
            found[row] = _compared_module(before, after, times.keys[row], calls[row], group, place, reach)
    changes = [
        found[row] if row in found else _uncompared_module(before, after, key, calls[row])
        for row, key in enumerate(times.keys)
    ]
    # What most modules are compared by is what is said of the machine.
    largest = max(groups, key=lambda group: len(group.spread.spread), default=None)
    return ModuleChanges(
        sorted(changes, key=_by_cost),
        compared,
        math.exp(largest.common) if largest else 1.0,
        float(np.median(largest.spread.spread)) if largest else 0.0,
    )


def _times_of(runs: Sequence[RunTimes]) -> _Times:
    keys = list(dict.fromkeys(key for run in runs for key in run.modules))
    index = {key: row for row, key in enumerate(keys)}
    logs, variance, freedom = np.full((3, len(keys), len(runs)), np.nan)
    for column, run in enumerate(runs):
        for key, module in run.modules.items():
            row = index[key]
            logs[row, column] = math.log(module.time.time_ns)
            variance[row, column], freedom[row, column] = module.time.variance, module.time.freedom
    return _Times(keys, logs, variance, freedom)


def _groups(times: _Times, base_runs: int) -> Iterator[_Group]:
    has = ~np.isnan(times.logs)
    measurable = _in_enough(has[:, :base_runs]) & _in_enough(has[:, base_runs:])
    # Nobody can say how long something took that is shorter than the clock tells.
    measurable &= np.where(has, times.logs, -np.inf).max(axis=1, initial=-np.inf) >= math.log(CLOCK_NS)
    for recordings in np.unique(has[measurable], axis=0):
        columns = np.flatnonzero(recordings)
        rows = np.flatnonzero(measurable & has[:, columns].all(axis=1))
        base = int(recordings[:base_runs].sum())
        group = _compare_group(times, rows.tolist(), columns, base)
        own = np.flatnonzero((has[rows] == recordings).all(axis=1))
        spread = group.spread
        yield group._replace(
            rows=rows[own].tolist(),
            base_logs=group.base_logs[own],
            new_logs=group.new_logs[own],
            spread=spread._replace(difference=spread.difference[own], error=spread.error[own]),
        )


def _in_enough(has: BoolArray) -> BoolArray:
    """Return which modules are in at least two recordings of a side, or in all but one."""
    runs = has.shape[1]
    enough: BoolArray = has.sum(axis=1) >= max(1, min(2, runs - 1))
    return enough


def _compare_group(times: _Times, rows: list[int], columns: IndexArray, base_runs: int) -> _Group:
    """Compare modules over recordings that all have them, of which the first `base_runs` are those before."""
    part = np.ix_(np.array(rows), columns)
    logs = times.logs[part]
    speeds = np.zeros(len(columns))
    if len(rows) >= MIN_MODULES:
        speeds = np.median(logs - np.median(logs, axis=1, keepdims=True), axis=0)
    base_speed, new_speed = (float(trimmed_mean(side[None]).mean[0]) for side in np.split(speeds, [base_runs]))
    freedom = float(np.median(times.freedom[part].sum(axis=1)))
    spread = measure_spread(logs - speeds, times.variance[part].mean(axis=1), freedom, base_runs)
    base_logs, new_logs = (trimmed_mean(side).mean for side in np.split(logs, [base_runs], axis=1))
    return _Group(rows, base_logs, new_logs, new_speed - base_speed, spread)


def _compared_module(
    before: Sequence[RunTimes],
    after: Sequence[RunTimes],
    key: Key,
    calls: Calls,
    group: _Group,
    place: int,
    reach: float,
) -> Change:
    """Return the change of the module at a place of its group; `reach` is in standard errors."""
    difference, error = group.spread.difference[place], group.spread.error[place]
    # Where it is called in more or fewer steps, what it takes per step is over all of them.
    difference += math.log(calls.new_share / calls.base_share)
    beyond = math.hypot(reach * error, calls.share_reach)
    times = (
        math.exp(group.base_logs[place]) * calls.base_share,
        math.exp(group.new_logs[place]) * calls.new_share,
    )
    steps = (_steps(side, key, calls) for side in (before, after))
    interval = difference + np.array([-beyond, 0, beyond])
    return _change(key, times, interval, calls, _recordings(before, after, key), min(steps) >= MIN_STEPS)


def _steps(side: Sequence[RunTimes], key: Key, calls: Calls) -> int:
    """Return how many steps tell of a module: those in which it is called, or all where how many these are changed."""
    return sum(run.steps if calls.share_changed else run.modules[key].steps for run in side if key in run.modules)


def _recordings(before: Sequence[RunTimes], after: Sequence[RunTimes], key: Key) -> tuple[int, int]:
    return sum(key in run.modules for run in before), sum(key in run.modules for run in after)


def _change(
    key: Key,
    times: tuple[float, float],
    interval: Float64Array,
    calls: Calls,
    recordings: tuple[int, int],
    counted: bool,
) -> Change:
    """Return a change.

    Args:
        key: the module and phase.
        times: ns before and after.
        interval: float64[3], of the difference of their logarithms, beside the common one: low end, estimate, high end.
        calls: how often it is called.
        recordings: how many have it, before and after.
        counted: False where there are too few steps for a verdict.
    """
    base_ns, new_ns = map(round, times)
    low, difference, high = (times[0] * np.expm1(np.minimum(interval, _MOST))).tolist()
    verdict = _verdict(base_ns, new_ns, (low, difference, high)) if counted else "cannot tell"
    ends = round(difference), round(low), round(high)
    return Change(*key, base_ns, new_ns, *ends, calls.base, calls.new, calls.changed, verdict, *recordings)


def _uncompared_module(before: Sequence[RunTimes], after: Sequence[RunTimes], key: Key, calls: Calls) -> Change:
    """Return the change of what too few recordings have, or what takes no time."""
    found = [[run.modules[key].time.time_ns for run in side if key in run.modules] for side in (before, after)]
    base_ns, new_ns = (round(float(np.mean(times))) if times else 0 for times in found)
    verdict = "cannot tell" if all(found) else "removed" if found[0] else "added"
    recordings = _recordings(before, after, key)
    change = _change(key, (base_ns, new_ns), np.zeros(3), calls, recordings, False)
    return change._replace(difference_ns=new_ns - base_ns, low_ns=None, high_ns=None, verdict=verdict)


def compare_steps(before: Sequence[RunTimes], after: Sequence[RunTimes]) -> Change:
    """Return how the step as a whole changed, machine and all.

    Recordings of a side tell how much the machine's speed differs between them. One a side does not, however even its
    steps are.
    """
    base, new = (trimmed_mean(np.log([[run.step.time_ns for run in side]])) for side in (before, after))
    freedom = float(base.kept + new.kept - 2)
    variance = float(base.squares[0] + new.squares[0]) / freedom if freedom else SINGLE_STEP_SPREAD**2
    least = float(np.mean([run.step.variance for run in (*before, *after)]))
    error = math.sqrt(max(variance, least) * (1 / base.kept + 1 / new.kept))
    reach = student_quantile(STEP_OUTSIDE, freedom or SINGLE_FREEDOM) * error
    interval = float(new.mean[0] - base.mean[0]) + np.array([-reach, 0, reach])
    times = math.exp(base.mean[0]), math.exp(new.mean[0])
    enough = min(sum(run.steps for run in side) for side in (before, after)) >= MIN_STEPS
    return _change(("", "step"), times, interval, Calls(0, 0, False), (len(before), len(after)), enough)


def _verdict(base_ns: int, new_ns: int, interval: tuple[float, float, float]) -> str:
    """Say what the interval of the difference allows: a change is one that is also larger than what runs differ by.

    What only did not follow all other modules, and takes what it took, did not change.
    """
    limit = MIN_CHANGE * base_ns
    low, difference, high = interval
    stayed = abs(new_ns - base_ns) <= limit
    if low > 0 and difference > limit and not stayed:
        return "slower"
    if high < 0 and difference < -limit and not stayed:
        return "faster"
    return "same" if -limit <= low and high <= limit else "cannot tell"


def _by_cost(change: Change) -> tuple[bool, bool, int, str, int]:
    """What is called differently comes first: that is certain, and often the reason of the rest."""
    settled = change.verdict in {"same", "cannot tell"}
    order = SAMPLED_PHASES.index(change.phase)
    return not change.calls_changed, settled, -abs(change.difference_ns), change.fqn, order
