"""Verdicts: how much modules and parts of the step changed between two sets of recordings, and how certain that is.

README.md states the model. All times here are logarithms: a slower machine adds the same amount to each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from .._arrays import BoolArray, Float64Array, IndexArray
from ..timeline.summary.parts import OTHER
from . import noise
from .noise import Estimate
from .run_times import INPUTS_PREFIX, MODULE_VALUE_PREFIXES, SAMPLED_PHASES, Key, RunTimes, texts_by_key

PART = "part"
"""Phase of the rows for parts of the step."""
CLOCK_NS = 1_000
"""Resolution of the clock in ns: shorter times per step have no verdict and no ratio."""
MODULES_FALSE_ALARM_RATE = 0.01
"""Probability that any module, or any part, is called changed if a program is compared with itself."""
STEP_FALSE_ALARM_RATE = 0.01
"""Probability that the step is called changed if a program is compared with itself."""
SHARES_FALSE_ALARM_RATE = 0.005
"""Probability that a share of steps is called changed if a program calls modules by chance."""
_MIN_ABSENT_PERIODS = 3
"""Minimum number of its periods for which a periodic module is absent on a side to count as gone there."""
ALMOST_ALL = 0.95
"""Minimum share of steps for a part to count as in all steps."""
MIN_STEP_SHARE = 0.005
"""Minimum share of the step by which a module is slower to fail a comparison, or to be a finding."""
MIN_CHANGE = 0.02
"""Minimum change as a share of the time before: recordings of one program differ by that much."""
REFERENCE_PART = "optimizer"
"""Part of the step that does the same work for any batch."""
MAX_REFERENCE_DEVIATION = 1 / 3
"""The optimizer follows the machine if its change deviates from the modules' common change by this share at most."""
COMMON_FALSE_ALARM_RATE = 0.2
"""Probability that the common change of modules exceeds the limit below which it needs no cause, for equal programs."""
MACHINE_FALSE_ALARM_RATE = 0.05
"""Probability that the machine differs by more than the interval allows, if the work changed."""
_MAX_LOG_ABOVE_ESTIMATE = math.log(100)
"""Maximum distance of a known upper end from the estimate: beyond it, the noise exceeds any change of a program."""
MIN_STEPS_FOR_VERDICT = 6
"""Minimum number of steps on a side for a verdict."""

Verdict: TypeAlias = Literal["slower", "faster", "same", "cannot tell", "added", "removed"]
Cause: TypeAlias = Literal["machine", "unknown", "either", "work"]
"""Cause of the common change of modules: see `Diff.common_cause`."""


class PeakChange(NamedTuple):
    """The peak of a module's memory, before and after: exact.

    Attributes:
        fqn: fully qualified name of the module; empty for the memory of all tensors.
        base_bytes: `peak_bytes` before, the maximum of several recordings.
        new_bytes: `peak_bytes` after.
        difference_bytes: `new_bytes` less `base_bytes`.
    """

    fqn: str
    base_bytes: int
    new_bytes: int
    difference_bytes: int


class Change(NamedTuple):
    """One module in one phase, before and after; times are ns of self time per step in which it was called.

    Or one part of the step: then the time is its whole time, per step that has it. Times are per step of all steps if
    the share of steps with calls changed. They are typical times: the mean of the faster half of the steps, which
    other programs change least.

    Attributes:
        fqn: fully qualified name of the module, or name of the part ("data loading"); empty for the step as a whole.
        phase: "forward", "backward" or "recompute", on the CPU; "GPU forward" and so on for the time of its kernels;
            "part" for a part of the step, "step" for the step as a whole.
        base_ns: time before.
        new_ns: time after, at the machine's speed before; for the step: the time as measured.
        difference_ns: `new_ns` less `base_ns`.
        low_ns: lower end of the confidence interval of the difference; all modules are in theirs with 99 %. None if
            there is no estimate: too few recordings of a side have the module, or its time is below 1 µs.
        high_ns: upper end of the interval; None if it is unknown, as recordings are too few and too noisy.
        base_calls: median number of spans before in a step that has any; if the share of these steps changed, the
            mean over all steps (0.1: called in every tenth).
        new_calls: the same number after.
        calls_changed: True if steps before and after have different numbers of spans, except one step of twenty, or if
            the share of steps with calls changed beyond chance.
        verdict: "slower", "faster", "same", "cannot tell", "added" or "removed".
        base_recordings: number of recordings before that have it; others do not count for its time.
        new_recordings: number of recordings after that have it.
        in_steps: share of the steps that have any, and so these times; 1 if the times are over all steps.
    """

    fqn: str
    phase: str
    base_ns: int
    new_ns: int
    difference_ns: int
    low_ns: int | None
    high_ns: int | None
    base_calls: float
    new_calls: float
    calls_changed: bool
    verdict: Verdict
    base_recordings: int
    new_recordings: int
    in_steps: float = 1.0

    @property
    def ratio(self) -> float:
        """The difference as a share of the time before; infinite if that was below the clock's resolution of 1 µs."""
        if self.base_ns >= CLOCK_NS:
            return self.difference_ns / self.base_ns
        return float("inf" if self.new_ns >= CLOCK_NS else 0)

    @property
    def label(self) -> str:
        """The module and phase, the name of the part, or "the step"."""
        return "the step" if self.phase == "step" else self.fqn if self.phase == PART else f"{self.fqn} {self.phase}"

    @property
    def is_timed(self) -> bool:
        """Whether the time certainly changed: the verdict is "slower" or "faster"."""
        return self.verdict in {"slower", "faster"}

    @property
    def is_gpu(self) -> bool:
        """Whether kernels on a GPU took the time."""
        return self.phase.startswith("GPU ")

    def is_likely_above(self, limit: float) -> bool:
        """Return whether the middle between estimate and lower end exceeds `limit`; by chance for at most 1 of 10."""
        return self.low_ns is not None and (self.low_ns + self.difference_ns) / 2 > limit * self.base_ns

    @property
    def outcome(self) -> str:
        """The verdict; if a module ran more or less often than before, `ran 6 times a step instead of 1`."""
        if self.phase == PART or self.base_calls == self.new_calls or not (self.base_calls and self.new_calls):
            return self.verdict
        return (
            f"ran {self.new_calls:g} {'time' if self.new_calls == 1 else 'times'} a step instead of {self.base_calls:g}"
        )


class ModuleChanges(NamedTuple):
    """The changes of modules and parts; the fields are some of `Diff`."""

    changes: list[Change]  # one per module and phase: changed calls first, then changed times, largest cost first
    parts: list[Change]  # one per part of the step; empty if a recording lacks the times of parts
    compared: int  # number of modules and phases with an interval
    common_ratio: float  # factor by which modules in general became slower; 1 if too few modules are compared
    common_cause: Cause  # see `Diff`
    spread: float  # relative difference of a module between recordings, the median weighted by time; 0 without any


class CommonChange(NamedTuple):
    """The common change of modules, and limits of the machine's change; logarithms."""

    difference: float  # common change of the modules
    cause: Cause
    removed: float  # amount subtracted from each module: `difference` if the machine may have caused it, otherwise 0
    machine_low: float  # minimum change of the machine
    machine_high: float  # maximum change of the machine
    margin: float  # possible change of the machine between recordings of one program
    response: float = 0.0  # deviation of modules from `difference`, beyond their noise, that the machine may cause


class _Times(NamedTuple):
    """Modules and parts of the step with long times in enough recordings of both sides; times are logarithms."""

    keys: Sequence[Key]
    modules: IndexArray  # indices of the keys that are modules, not parts
    logs: Float64Array  # float64[keys, recordings]; NaN if a recording lacks the key
    speed: Estimate  # slowness of recordings relative to the median
    estimates: Sequence[Estimate]  # difference of each key between the sides, at the median speed
    log_time: Float64Array  # float64[keys], the time
    variance: Float64Array  # float64[keys], variance between recordings
    freedom: Float64Array  # float64[keys], degrees of freedom of the variance


def compare_modules(base_runs: Sequence[RunTimes], new_runs: Sequence[RunTimes]) -> ModuleChanges:
    """Compare modules and parts of the step; a key that few recordings lack is compared over the others.

    Modules give the speed of the machine and the noise; parts are judged by these.
    """
    if all(run.parts for run in (*base_runs, *new_runs)):
        base_runs, new_runs = ([_add_parts(run) for run in side] for side in (base_runs, new_runs))
    keys = list(dict.fromkeys(key for run in (*base_runs, *new_runs) for key in run.modules))
    counts = Counter(phase == PART for _, phase in keys)
    calls = {key: compare_calls(base_runs, new_runs, key, counts[key[1] == PART]) for key in keys}
    times = _measure(keys, [*base_runs, *new_runs], len(base_runs))
    common = _find_common_change(times, base_runs, new_runs, calls)
    # Other programs slow a long part by another factor than the short modules in it: up to the factor of the step.
    step = noise.estimate(*(np.log([run.step.time_ns for run in side]) for side in (base_runs, new_runs))).difference
    for_parts = common
    if common.margin and common.cause != "work":
        low, high = min(common.machine_low, step), max(common.machine_high, step)
        for_parts = common._replace(machine_low=low, machine_high=high)
    compared_counts = Counter(phase == PART for _, phase in times.keys)
    compared = {*times.keys}
    others = [key for key in keys if key not in compared]
    changes = [_change_of_uncompared(base_runs, new_runs, key, calls[key], common.removed) for key in others]
    for index, key in enumerate(times.keys):
        is_part, split = key[1] == PART, len(base_runs)
        false_alarm_rate = MODULES_FALSE_ALARM_RATE / compared_counts[is_part]
        quantile = noise.student_quantile(false_alarm_rate, float(times.freedom[index]))
        error = math.sqrt(times.variance[index] * times.estimates[index].recordings)
        estimate = noise.estimate(times.logs[index, :split], times.logs[index, split:])
        half_width = math.hypot(quantile * error, quantile * common.response, calls[key].share_reach)
        sides = [[run for run in side if key in run.modules] for side in (base_runs, new_runs)]
        machine = for_parts if is_part else common
        changes.append(_change_of_compared(key, sides, estimate, half_width, machine, calls[key]))
    changes.sort(key=_cost_key)
    log_time, variance = times.log_time[times.modules], times.variance[times.modules]
    return ModuleChanges(
        changes=[change for change in changes if change.phase != PART],
        parts=_doubt_unnamed([change for change in changes if change.phase == PART]),
        compared=len(times.modules),
        common_ratio=math.exp(common.difference),
        common_cause=common.cause,
        spread=math.sqrt(noise.weighted_median(variance, np.exp(log_time - log_time.max(initial=0)))),
    )


def _measure(keys: Sequence[Key], runs: Sequence[RunTimes], split: int) -> _Times:
    """Measure the keys that enough recordings have; the first `split` runs are those before."""
    logs, variances = np.full((2, len(keys), len(runs)), np.nan)
    for row, key in enumerate(keys):
        for column, run in enumerate(runs):
            if key in run.modules:
                time = run.modules[key].time
                logs[row, column], variances[row, column] = math.log(time.time_ns), time.variance
    has_time = ~np.isnan(logs)
    is_long = np.any(has_time & (logs >= math.log(CLOCK_NS)), axis=1)
    rows = np.flatnonzero(_is_measured(has_time[:, :split]) & _is_measured(has_time[:, split:]) & is_long)
    keys, logs, variances = [keys[row] for row in rows.tolist()], logs[rows], variances[rows]
    modules = np.flatnonzero([phase != PART for _, phase in keys])
    speeds = noise.machine_speeds(logs[modules])
    estimates = [noise.estimate(row[:split], row[split:]) for row in logs - speeds]
    log_time = np.array([estimate.base + estimate.difference / 2 for estimate in estimates])
    # A recording that another program disturbed has larger variances; the mean of its side leaves it out, too.
    within = np.nanmedian(variances, axis=1) if keys else np.zeros(0)
    variance, freedom = noise.noise_of(log_time, within, estimates)
    module_estimates = [estimates[row] for row in modules.tolist()]
    variance[modules], freedom[modules] = noise.noise_of(log_time[modules], within[modules], module_estimates)
    speed = noise.estimate(speeds[:split], speeds[split:])
    return _Times(keys, modules, logs, speed, estimates, log_time, variance, freedom)


def _doubt_unnamed(parts: Sequence[Change]) -> list[Change]:
    """Return the parts, with "cannot tell" for `other` if parts that only one side names could explain its change."""
    added_ns = sum(part.new_ns for part in parts if part.verdict == "added")
    removed_ns = sum(part.base_ns for part in parts if part.verdict == "removed")
    return [
        part._replace(verdict="cannot tell", low_ns=None, high_ns=None)
        if part.fqn == OTHER
        and part.low_ns is not None
        and (added_ns or removed_ns)
        and part.low_ns - removed_ns <= 0
        and (part.high_ns is None or part.high_ns + added_ns >= 0)
        else part
        for part in parts
    ]


def _find_common_change(
    times: _Times, base_runs: Sequence[RunTimes], new_runs: Sequence[RunTimes], calls: Mapping[Key, Calls]
) -> CommonChange:
    """Return the common change of modules, and its cause."""
    modules, speed = times.modules.tolist(), times.speed
    work_changed = _work_changed(base_runs, new_runs, [calls[times.keys[row]].has_changed for row in modules])
    change = speed.difference
    variance = speed.squares / speed.freedom if speed.freedom else noise.SINGLE_STEP_SPREAD**2
    error = math.sqrt(variance * speed.recordings)
    usual = noise.student_quantile(COMMON_FALSE_ALARM_RATE, speed.freedom) * error if speed.freedom else 0.0
    if not work_changed and abs(change) <= max(math.log1p(MIN_CHANGE), usual):
        return CommonChange(change, "machine", change, change, change, 0.0)
    # Possible difference of the machine between the sides, judged by its differences within a side.
    margin = noise.student_quantile(MACHINE_FALSE_ALARM_RATE, speed.freedom or noise.SIZE_FREEDOM) * error
    # The optimizer's deviation from the common change. Another optimizer says nothing about the machine.
    optimizers = [{run.environment.get(REFERENCE_PART) for run in side} for side in (base_runs, new_runs)]
    is_known = (REFERENCE_PART, PART) in times.keys and not optimizers[0].isdisjoint(optimizers[1])
    deviation = times.estimates[times.keys.index((REFERENCE_PART, PART))].difference if is_known else 0.0
    reference = change + deviation
    if work_changed:
        # The optimizer does the same for any batch, so the machine may have changed by the optimizer's change.
        low, high = min(0.0, reference) - margin, max(0.0, reference) + margin
        return CommonChange(change, "work", 0.0, low, high, margin)
    response = _machine_response([times.estimates[row] for row in modules], times.variance[times.modules])
    if abs(deviation) <= MAX_REFERENCE_DEVIATION * abs(change):
        cause: Cause = "unknown" if work_changed is None else "machine"
        return CommonChange(change, cause, change, change, change, margin, response)
    low, high = min(change, -margin, reference), max(change, margin, reference)
    return CommonChange(change, "either", 0.0, low, high, margin, response)


def _work_changed(base_runs: Sequence[RunTimes], new_runs: Sequence[RunTimes], changed: Sequence[bool]) -> bool | None:
    """Return whether most modules did other work, by calls, FLOPs, shapes or bytes; without these, by inputs.

    None if it is unknown: modules with equal inputs may do more work.
    """
    if len(changed) < noise.MIN_MODULES:
        return None
    if sum(changed) > len(changed) / 2:
        return True
    base, new = (texts_by_key(run.environment for run in side) for side in (base_runs, new_runs))
    equal: dict[str, bool] = {}
    for prefix in MODULE_VALUE_PREFIXES:
        for key in base.keys() & new.keys():
            if key.startswith(prefix) and base[key] | new[key] != {"0"}:
                module = key.removeprefix(prefix)
                equal[module] = equal.get(module, True) and base[key] == new[key]
    if not equal:
        differ = [base[key].isdisjoint(new[key]) for key in base.keys() & new.keys() if key.startswith(INPUTS_PREFIX)]
        return True if sum(differ) > len(differ) / 2 else None
    return sum(equal.values()) < len(equal) / 2


def _machine_response(estimates: Sequence[Estimate], variance: Float64Array) -> float:
    """Return the median deviation of modules from the common change, beyond their noise.

    A machine does not slow all modules alike. A median ignores a few modules that changed.
    """
    if not estimates:
        return 0.0
    squares = float(np.median([estimate.difference**2 for estimate in estimates])) / noise.MEDIAN_OF_SQUARE
    expected = float(np.median(variance * [estimate.recordings for estimate in estimates]))
    return math.sqrt(max(squares - expected, 0.0))


def _add_parts(run: RunTimes) -> RunTimes:
    return run._replace(modules={**run.modules, **{(part, PART): times for part, times in run.parts.items()}})


def _is_measured(has_time: BoolArray) -> BoolArray:
    """Return which rows are in at least two recordings of a side, or in all but one."""
    return np.asarray(has_time.sum(axis=1) >= max(1, min(2, has_time.shape[1] - 1)))


def _change_of_compared(
    key: Key, sides: list[list[RunTimes]], estimate: Estimate, half_width: float, machine: CommonChange, calls: Calls
) -> Change:
    """Return the change of a key with times in enough recordings; `sides` are the recordings that have it."""
    # If the share of steps with calls changed, the time per step is over all steps.
    is_per_step = calls.new_share != calls.base_share
    steps = min(sum(run.steps if is_per_step else run.modules[key].steps for run in side) for side in sides)
    base_ns = math.exp(estimate.base) * calls.base_share
    log_ratio = estimate.difference + math.log(calls.new_share / calls.base_share)
    return _make_change(key, base_ns, log_ratio, half_width, machine, calls, [*map(len, sides)], steps)


def _make_change(
    key: Key,
    base_ns: float,
    log_ratio: float,
    half_width: float,
    machine: CommonChange,
    calls: Calls,
    runs: list[int],
    steps: int,
) -> Change:
    """Return a change; `log_ratio` is as measured, with the machine's change; `half_width` belongs to its interval."""
    corrected = log_ratio - machine.removed
    base, new = round(base_ns), round(base_ns * math.exp(min(corrected, noise.MAX_LOG)))
    ends = (log_ratio - machine.machine_high - half_width, log_ratio - machine.machine_low + half_width)
    low, high = (round(base_ns * math.expm1(min(end, noise.MAX_LOG))) for end in ends)
    measured_ns = base_ns * math.expm1(min(log_ratio, noise.MAX_LOG))
    verdict: Verdict = "cannot tell"
    if steps >= MIN_STEPS_FOR_VERDICT:
        verdict = _verdict(base_ns, measured_ns, (low, new - base, high), machine)
    known_high = high if ends[1] - corrected <= _MAX_LOG_ABOVE_ESTIMATE else None
    change = Change(*key, base, new, new - base, low, known_high, *calls[:2], calls.has_changed, verdict, *runs)
    return change._replace(in_steps=calls.in_steps)


def _change_of_uncompared(
    base_runs: Sequence[RunTimes], new_runs: Sequence[RunTimes], key: Key, calls: Calls, removed: float
) -> Change:
    """Return the change of a key that too few recordings have, or whose time is below the clock's resolution."""
    times = [[run.modules[key].time.time_ns for run in side if key in run.modules] for side in (base_runs, new_runs)]
    shares = (1.0, 1.0) if all(times) else (calls.base_share, calls.new_share)
    base, new = (round(float(np.mean(side)) * share) if side else 0 for side, share in zip(times, shares, strict=True))
    new = round(new / math.exp(removed))
    verdict: Verdict = "cannot tell" if all(times) else "removed" if times[0] else "added"
    recordings = (len(side) for side in times)
    return Change(
        *key, base, new, new - base, None, None, calls.base, calls.new, calls.has_changed, verdict, *recordings
    )


def compare_steps(base_runs: Sequence[RunTimes], new_runs: Sequence[RunTimes]) -> Change:
    """Return the change of the step as a whole, including the machine's.

    Several recordings on a side show how much the machine's speed varies between them; a single one does not.
    """
    estimate = noise.estimate(*(np.log([run.step.time_ns for run in side]) for side in (base_runs, new_runs)))
    variance = estimate.squares / estimate.freedom if estimate.freedom else noise.SINGLE_STEP_SPREAD**2
    variance = max(variance, float(np.mean([run.step.variance for run in (*base_runs, *new_runs)])))
    quantile = noise.student_quantile(STEP_FALSE_ALARM_RATE, estimate.freedom or noise.SIZE_FREEDOM)
    half_width = quantile * math.sqrt(variance * estimate.recordings)
    steps = min(sum(run.steps for run in side) for side in (base_runs, new_runs))
    runs, machine = [len(base_runs), len(new_runs)], CommonChange(0, "machine", 0, 0, 0, 0)
    base_ns, log_ratio, calls = math.exp(estimate.base), estimate.difference, Calls(0, 0, has_changed=False)
    return _make_change(("", "step"), base_ns, log_ratio, half_width, machine, calls, runs, steps)


def _verdict(base_ns: float, measured_ns: float, interval: tuple[int, int, int], common: CommonChange) -> Verdict:
    """Return the verdict that the interval of the difference allows; only this rule decides what is slower.

    A module whose measured time is the same as before did not change, even if all others did. `measured_ns` is this
    difference, `interval` (low end, estimate, high end) is without the machine's change.
    """
    min_change_ns = MIN_CHANGE * base_ns
    low, difference, high = interval
    # The module changed in the other direction than modules in general, whose cause is unknown.
    is_against = common.cause == "unknown" and (low > 0) != (common.difference > 0)
    min_measured_ns = max(min_change_ns, base_ns * math.expm1(common.margin)) if is_against else min_change_ns
    if max(low, -high) > 0 and abs(difference) > min_change_ns and abs(measured_ns) > min_measured_ns:
        return "slower" if low > 0 else "faster" if measured_ns < 0 or not is_against else "cannot tell"
    return "same" if -min_change_ns <= low and high <= min_change_ns else "cannot tell"


def _cost_key(change: Change) -> tuple[bool, bool, int, str, int]:
    """Return a sort key that puts changed calls first: they are certain, and often the reason for other changes."""
    is_unchanged = change.verdict in {"same", "cannot tell"}
    order = (*SAMPLED_PHASES, PART).index(change.phase)
    return not change.calls_changed, is_unchanged, -abs(change.difference_ns), change.fqn, order


class Calls(NamedTuple):
    """The calls of a module before and after."""

    base: float  # median spans before in a step that has any; if the share of these steps changed, mean over all steps
    new: float  # the same number after
    has_changed: bool  # True if the numbers differ, or one side has no calls, beyond chance
    base_share: float = 1.0  # share of steps with calls before; 1 if it did not change beyond chance
    new_share: float = 1.0  # share of steps with calls after
    share_reach: float = 0.0  # half the interval of the logarithm of `new_share / base_share`
    in_steps: float = 1.0  # see `Change.in_steps`


def compare_calls(base_runs: Sequence[RunTimes], new_runs: Sequence[RunTimes], key: Key, keys: int) -> Calls:
    """Compare the calls of one of `keys` modules or parts; each side has at least one recording."""
    base, new = ([run.modules[key] for run in side if key in run.modules] for side in (base_runs, new_runs))
    base_calls, new_calls = (round(np.median([run.calls for run in side])) if side else 0 for side in (base, new))
    if not (base and new):
        (module_runs, runs), absent_runs = ((base, base_runs), new_runs) if base else ((new, new_runs), base_runs)
        share = min(sum(run.steps for run in module_runs) / sum(run.steps for run in runs), 1.0)
        # A module of a few steps may be on one side by chance, unless it comes with a period.
        absent_steps, periods = sum(run.steps for run in absent_runs), [run.period for run in module_runs]
        is_period_missed = all(periods) and absent_steps >= _MIN_ABSENT_PERIODS * max(periods)
        is_certain = (1 - share) ** absent_steps <= SHARES_FALSE_ALARM_RATE / keys or is_period_missed
        share = 1.0 if share >= ALMOST_ALL else share
        return Calls(round(base_calls * share, 2), round(new_calls * share, 2), is_certain, share, share)
    shares = _changed_shares(base_runs, new_runs, key, keys)
    if shares is not None:
        base_share, new_share, reach = shares
        base_mean, new_mean = round(base_calls * base_share, 2), round(new_calls * new_share, 2)
        return Calls(base_mean, new_mean, True, base_share, new_share, reach)
    is_more = min(run.fewest_calls for run in new) > max(run.most_calls for run in base)
    is_fewer = max(run.most_calls for run in new) < min(run.fewest_calls for run in base)
    in_steps = sum(run.steps for run in (*base, *new)) / sum(run.steps for run in (*base_runs, *new_runs))
    return Calls(base_calls, new_calls, is_more or is_fewer, in_steps=min(1.0, in_steps))


def _changed_shares(
    base_runs: Sequence[RunTimes], new_runs: Sequence[RunTimes], key: Key, keys: int
) -> tuple[float, float, float] | None:
    """Return the shares of steps in which a module is called before and after, and `share_reach`.

    None unless each recording of one side has a lower share than each of the other, by more than chance: each step may
    or may not have the module, independently of others.
    """
    periods = [{run.modules[key].period if key in run.modules else 0 for run in side} for side in (base_runs, new_runs)]
    counts = [
        np.array([[run.modules[key].steps if key in run.modules else 0, run.steps] for run in side], np.float64)
        for side in (base_runs, new_runs)
    ]
    base, new = (np.minimum(side[:, 0] / side[:, 1], 1) for side in counts)
    if not (base.max() < new.min() or new.max() < base.min()):
        return None
    called, steps = np.array([side.sum(axis=0) for side in counts]).T
    base_share, new_share = np.minimum(called / steps, 1).tolist()
    pooled = min(float(called.sum() / steps.sum()), 1.0)
    rarity = float((1 / steps).sum())
    errors = NormalDist().inv_cdf(1 - SHARES_FALSE_ALARM_RATE / keys / 2)
    # A step more or less on either side is half a step off on average. Another period is never by chance.
    is_regular = all(map(all, periods)) and periods[0].isdisjoint(periods[1])
    max_by_chance = errors * math.sqrt(pooled * (1 - pooled) * rarity)
    if not is_regular and abs(new_share - base_share) - rarity / 2 <= max_by_chance:
        return None
    return base_share, new_share, errors * math.sqrt(float(((1 - np.array([base_share, new_share])) / called).sum()))
