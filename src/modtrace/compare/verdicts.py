"""Verdicts: the times of all recordings → what modules and parts of the step changed by, and how sure that is.

README.md states the model. All times here are logarithms, so that a machine that runs slower adds the same to each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from .._arrays import BoolArray, Float64Array, IndexArray
from . import noise
from .noise import Estimate
from .run_times import INPUTS_PREFIX, MODULE_VALUE_PREFIXES, SAMPLED_PHASES, Key, RunTimes, texts_by_key

PART = "part"
"""The phase of a part of the step."""
CLOCK_NS = 1_000
"""Shorter times per step are below the clock's resolution: they have no verdict and no ratio."""
MODULES_OUTSIDE = 0.01
"""Probability that any module, or any part, is called changed if a program is compared with itself."""
STEP_OUTSIDE = 0.01
"""Probability that the step is called changed then."""
SHARES_OUTSIDE = 0.005
"""Probability that a share of steps is called changed if a program calls modules by chance."""
_PERIODS = 3
"""For so many periods a side lacks what comes with one on the other for that to be no chance."""
ALMOST_ALL = 0.95
"""A part in so many of the steps is in all but some."""
FLOOR = 0.005
"""Part of the step: a module that is slower by less does not fail a comparison, and is no finding."""
MIN_CHANGE = 0.02
"""Part of the time before: recordings of one program differ by that much."""
REFERENCE = "optimizer"
"""The part of the step that does the same for any batch."""
FOLLOWS = 1 / 3
"""That part follows the machine if it changes by what modules in general do, up to this share of that."""
USUAL = 0.2
"""Probability that modules in general differ by more than what needs no cause, as recordings of one side do."""
MACHINE_OUTSIDE = 0.05
"""Probability that the machine differs by more than is allowed for, if the work changed."""
_KNOWN_WITHIN = math.log(100)
"""An upper end further above the estimate is not known: the noise reaches further than times of any program do."""
MIN_STEPS = 6
"""Number of steps that a side needs for a verdict."""

Cause: TypeAlias = Literal["machine", "unknown", "either", "work"]
"""Cause of what modules in general changed by: see `Diff.common_cause`."""


class PeakChange(NamedTuple):
    """The most memory that a module took, before and after: exact.

    Attributes:
        fqn: the module's fully qualified name; empty for all that tensors held.
        base_bytes: `peak_bytes` before, of several recordings the most.
        new_bytes: the same after.
        difference_bytes: `new_bytes` less `base_bytes`.
    """

    fqn: str
    base_bytes: int
    new_bytes: int
    difference_bytes: int


class Change(NamedTuple):
    """One module in one phase, before and after; times are nanoseconds of self time per step in which it was called.

    Or one part of the step: then its whole time, per step that has it. If what was called in some steps is called in
    more or fewer of them now, times are per step.

    Times are typical ones: the mean of the faster half of the steps, which other programs change least.

    Attributes:
        fqn: the module's fully qualified name; of a part its name ("data loading"); empty for the step as a whole.
        phase: "forward", "backward" or "recompute", on the CPU; "GPU forward" and so on for what its kernels took;
            "part" for a part of the step, "step" for the step as a whole.
        base_ns: what it took before.
        new_ns: what it takes after, at the speed that the machine had before; of the step: what it took.
        difference_ns: `new_ns` less `base_ns`.
        low_ns: lower end of the confidence interval of the difference; those of all modules hold together with 99 %.
            None if there is no estimate: a side has the module in no recording or in too few, or it takes less than
            1 µs.
        high_ns: its upper end; None if it is not known, as recordings are too few and too noisy.
        base_calls: spans per step in which there are any before, the median; if these are another part of the steps
            than after, the mean over all steps (0.1: called in every tenth).
        new_calls: the same after.
        calls_changed: True if the steps before and after have different numbers of spans, but for one in twenty, or
            another part of them has any, by more than chance does.
        verdict: "slower", "faster", "same", "cannot tell", "added" or "removed".
        base_recordings: how many recordings before have it; those without it do not count for its time.
        new_recordings: how many after.
        in_steps: which part of the steps has any, and so these times; 1 if they are over all steps.
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
    verdict: str
    base_recordings: int
    new_recordings: int
    in_steps: float = 1.0

    @property
    def ratio(self) -> float:
        """The difference as a part of what it was before; infinite if that was less than 1 µs, the clock's limit."""
        if self.base_ns >= CLOCK_NS:
            return self.difference_ns / self.base_ns
        return float("inf" if self.new_ns >= CLOCK_NS else 0)

    @property
    def label(self) -> str:
        """The module and phase, the part, or the step, in words."""
        return "the step" if self.phase == "step" else self.fqn if self.phase == PART else f"{self.fqn} {self.phase}"

    def is_likely_above(self, limit: float) -> bool:
        """Whether it is slower by more midway from estimate to lower end: by chance in 1 of 10 at most."""
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

    # One per module and phase; first what is called differently, then what changed, largest cost first
    changes: list[Change]
    parts: list[Change]  # one per part of the step; none if a recording says nothing of parts
    compared: int  # how many modules and phases have an interval
    common_ratio: float  # by what factor modules in general became slower; 1 if too few modules are compared
    common_cause: Cause  # see `Diff`
    # By what part a module differs from one recording to the next, the median weighted by time; 0 if none is compared
    spread: float


class Common(NamedTuple):
    """The change of modules in general, and what the machine can have changed by; logarithms."""

    difference: float  # of modules in general
    cause: Cause  # whose it is
    off: float  # what is taken off each module: `difference` if it may be the machine's, else 0
    low: float  # what the machine changed by at least
    high: float  # at most
    reach: float  # what it may change by between recordings of one program
    response: float = 0.0  # the deviation of modules from `difference`, beyond their noise, that the machine may cause


class _Times(NamedTuple):
    """Modules and parts of the step that take long enough in enough recordings of both sides; times are logarithms."""

    keys: Sequence[Key]
    modules: IndexArray  # which of them are modules, and no parts
    logs: Float64Array  # float64[keys, recordings]; NaN where a recording has none
    speed: Estimate  # by how much recordings are slower than usual
    estimates: Sequence[Estimate]  # the difference of each between the sides, as at the usual speed
    size: Float64Array  # float64[keys], the time
    variance: Float64Array  # float64[keys], of each between recordings
    freedom: Float64Array  # float64[keys], the degrees of freedom of that


def compare_modules(before: Sequence[RunTimes], after: Sequence[RunTimes]) -> ModuleChanges:
    """Compare modules and parts of the step; one that few recordings lack is compared over those that have it.

    Modules say how fast the machine was, and what noise there is; parts follow that and say nothing about modules.
    """
    if all(run.parts for run in (*before, *after)):
        before, after = ([_with_parts(run) for run in side] for side in (before, after))
    keys = list(dict.fromkeys(key for run in (*before, *after) for key in run.modules))
    counts = Counter(phase == PART for _, phase in keys)
    calls = {key: compare_calls(before, after, key, counts[key[1] == PART]) for key in keys}
    times = _measure(keys, [*before, *after], len(before))
    common = _common(times, before, after, calls)
    # What else runs slows a long part by another factor than the short modules in it: by that of the step, at most.
    step = noise.estimate(*(np.log([run.step.time_ns for run in side]) for side in (before, after))).difference
    of_parts = common._replace(low=min(common.low, step), high=max(common.high, step))
    of_parts = of_parts if common.reach and common.cause != "work" else common
    alike = Counter(phase == PART for _, phase in times.keys)
    compared = {*times.keys}
    changes = [_uncompared(before, after, key, calls[key], common.off) for key in keys if key not in compared]
    for place, key in enumerate(times.keys):
        is_part, split = key[1] == PART, len(before)
        reach = noise.student_quantile(MODULES_OUTSIDE / alike[is_part], float(times.freedom[place]))
        error = math.sqrt(times.variance[place] * times.estimates[place].recordings)
        measured = noise.estimate(times.logs[place, :split], times.logs[place, split:])
        half = math.hypot(reach * error, reach * common.response, calls[key].share_reach)
        sides = [[run for run in side if key in run.modules] for side in (before, after)]
        machine = of_parts if is_part else common
        changes.append(_compared(key, sides, measured, half, machine=machine, calls=calls[key]))
    changes.sort(key=_by_cost)
    size, variance = times.size[times.modules], times.variance[times.modules]
    return ModuleChanges(
        changes=[change for change in changes if change.phase != PART],
        parts=_with_unnamed([change for change in changes if change.phase == PART]),
        compared=len(times.modules),
        common_ratio=math.exp(common.difference),
        common_cause=common.cause,
        spread=math.sqrt(noise.weighted_median(variance, np.exp(size - size.max(initial=0)))),
    )


def _measure(keys: Sequence[Key], runs: Sequence[RunTimes], split: int) -> _Times:
    """Measure what is in enough of the recordings; the first `split` of these are those before."""
    logs, variances = np.full((2, len(keys), len(runs)), np.nan)
    for row, key in enumerate(keys):
        for column, run in enumerate(runs):
            if key in run.modules:
                time = run.modules[key].time
                logs[row, column], variances[row, column] = math.log(time.time_ns), time.variance
    has = ~np.isnan(logs)
    is_long = np.any(has & (logs >= math.log(CLOCK_NS)), axis=1)
    chosen = np.flatnonzero(_in_enough(has[:, :split]) & _in_enough(has[:, split:]) & is_long)
    kept, logs, variances = [keys[row] for row in chosen.tolist()], logs[chosen], variances[chosen]
    modules = np.flatnonzero([phase != PART for _, phase in kept])
    speeds = noise.machine_speeds(logs[modules])
    estimates = [noise.estimate(row[:split], row[split:]) for row in logs - speeds]
    size = np.array([measured.base + measured.difference / 2 for measured in estimates])
    # If something else ran beside a recording, its steps say more; it is cut from the mean of its side as well.
    within = np.nanmedian(variances, axis=1) if kept else np.zeros(0)
    variance, freedom = noise.noise_of(size, within, estimates)
    of_modules = [estimates[row] for row in modules.tolist()]
    variance[modules], freedom[modules] = noise.noise_of(size[modules], within[modules], of_modules)
    return _Times(
        kept, modules, logs, noise.estimate(speeds[:split], speeds[split:]), estimates, size, variance, freedom
    )


def _with_unnamed(parts: Sequence[Change]) -> list[Change]:
    """Return the parts, `other` without a verdict that does not hold with what one side gives a name of its own.

    That may be `other` on the other side.
    """
    named = sum(part.new_ns for part in parts if part.verdict == "added")
    unnamed = sum(part.base_ns for part in parts if part.verdict == "removed")
    return [
        part._replace(verdict="cannot tell", low_ns=None, high_ns=None)
        if part.fqn == "other"
        and part.low_ns is not None
        and (named or unnamed)
        and part.low_ns - unnamed <= 0
        and (part.high_ns is None or part.high_ns + named >= 0)
        else part
        for part in parts
    ]


def _common(times: _Times, before: Sequence[RunTimes], after: Sequence[RunTimes], calls: Mapping[Key, Calls]) -> Common:
    """Say what modules in general changed by, and whose change that is."""
    modules, speed = times.modules.tolist(), times.speed
    work_changed = _work_changed(before, after, [calls[times.keys[row]].changed for row in modules])
    common = speed.difference
    variance = speed.squares / speed.freedom if speed.freedom else noise.SINGLE_STEP_SPREAD**2
    error = math.sqrt(variance * speed.recordings)
    usual = noise.student_quantile(USUAL, speed.freedom) * error if speed.freedom else 0.0
    if not work_changed and abs(common) <= max(math.log1p(MIN_CHANGE), usual):
        return Common(common, "machine", common, common, common, 0.0)
    # By that the machine may differ between the sides, as it does within them.
    reach = noise.student_quantile(MACHINE_OUTSIDE, speed.freedom or noise.SIZE_FREEDOM) * error
    # What the optimizer differs by beyond that. Another optimizer says nothing about the machine.
    optimizers = [{run.environment.get(REFERENCE) for run in side} for side in (before, after)]
    is_known = (REFERENCE, PART) in times.keys and not optimizers[0].isdisjoint(optimizers[1])
    beyond = times.estimates[times.keys.index((REFERENCE, PART))].difference if is_known else 0.0
    end = common + beyond
    if work_changed:
        # The optimizer does the same for any batch: what it changed by, the machine may have changed by.
        return Common(common, "work", 0.0, min(0.0, end) - reach, max(0.0, end) + reach, reach)
    response = _response([times.estimates[row] for row in modules], times.variance[times.modules])
    if abs(beyond) <= FOLLOWS * abs(common):
        cause: Cause = "unknown" if work_changed is None else "machine"
        return Common(common, cause, common, common, common, reach, response)
    return Common(common, "either", 0.0, min(common, -reach, end), max(common, reach, end), reach, response)


def _work_changed(before: Sequence[RunTimes], after: Sequence[RunTimes], calls_changed: Sequence[bool]) -> bool | None:
    """Return whether most modules did other work: by calls, or by FLOPs, shapes or bytes, else by inputs.

    None if it is not known: modules that get the same may do more.
    """
    if len(calls_changed) < noise.MIN_MODULES:
        return None
    if sum(calls_changed) > len(calls_changed) / 2:
        return True
    base, new = (texts_by_key(run.environment for run in side) for side in (before, after))
    equal: dict[str, bool] = {}
    for kind in MODULE_VALUE_PREFIXES:
        for key in base.keys() & new.keys():
            if key.startswith(kind) and base[key] | new[key] != {"0"}:
                module = key.removeprefix(kind)
                equal[module] = equal.get(module, True) and base[key] == new[key]
    if not equal:
        differ = [base[key].isdisjoint(new[key]) for key in base.keys() & new.keys() if key.startswith(INPUTS_PREFIX)]
        return True if sum(differ) > len(differ) / 2 else None
    return sum(equal.values()) < len(equal) / 2


def _response(estimates: Sequence[Estimate], variance: Float64Array) -> float:
    """Return by how much modules deviate from what they change by in general, beyond their noise.

    A machine does not slow all modules alike. That is the median, so a few modules that changed do not count.
    """
    if not estimates:
        return 0.0
    squares = float(np.median([measured.difference**2 for measured in estimates])) / noise.MEDIAN_OF_SQUARE
    expected = float(np.median(variance * [measured.recordings for measured in estimates]))
    return math.sqrt(max(squares - expected, 0.0))


def _with_parts(run: RunTimes) -> RunTimes:
    return run._replace(modules={**run.modules, **{(part, PART): times for part, times in run.parts.items()}})


def _in_enough(has: BoolArray) -> BoolArray:
    """Return which modules are in at least two recordings of a side, or in all but one."""
    enough: BoolArray = has.sum(axis=1) >= max(1, min(2, has.shape[1] - 1))
    return enough


def _compared(
    key: Key, sides: Sequence[Sequence[RunTimes]], measured: Estimate, half: float, *, machine: Common, calls: Calls
) -> Change:
    """Return the change of what enough recordings have; `sides` are those that have it."""
    # If it is called in more or fewer steps, what it takes per step is over all of them.
    over_all = calls.new_share != calls.base_share
    steps = min(sum(run.steps if over_all else run.modules[key].steps for run in side) for side in sides)
    base_ns = math.exp(measured.base) * calls.base_share
    raw = measured.difference + math.log(calls.new_share / calls.base_share)
    return _change(key, base_ns, raw, half, machine=machine, calls=calls, runs=[*map(len, sides)], steps=steps)


def _change(
    key: Key, base_ns: float, raw: float, half: float, *, machine: Common, calls: Calls, runs: Sequence[int], steps: int
) -> Change:
    """Return a change; `raw` is the difference with the machine's in it, and `half` half the interval: logarithms."""
    base, new = round(base_ns), round(base_ns * math.exp(min(raw - machine.off, noise.MAX_LOG)))
    ends = (raw - machine.high - half, raw - machine.low + half)
    low, high = (round(base_ns * math.expm1(min(end, noise.MAX_LOG))) for end in ends)
    raw_ns = base_ns * math.expm1(min(raw, noise.MAX_LOG))
    verdict = _verdict(base_ns, raw_ns, (low, new - base, high), machine)
    verdict = verdict if steps >= MIN_STEPS else "cannot tell"
    known_high = high if ends[1] - (raw - machine.off) <= _KNOWN_WITHIN else None
    change = Change(*key, base, new, new - base, low, known_high, calls.base, calls.new, calls.changed, verdict, *runs)
    return change._replace(in_steps=calls.in_steps)


def _uncompared(before: Sequence[RunTimes], after: Sequence[RunTimes], key: Key, calls: Calls, off: float) -> Change:
    """Return the change of what too few recordings have, or what takes no time."""
    times = [[run.modules[key].time.time_ns for run in side if key in run.modules] for side in (before, after)]
    shares = (1.0, 1.0) if all(times) else (calls.base_share, calls.new_share)
    base, new = (round(float(np.mean(side)) * share) if side else 0 for side, share in zip(times, shares, strict=True))
    new = round(new / math.exp(off))
    verdict = "cannot tell" if all(times) else "removed" if times[0] else "added"
    recordings = (len(side) for side in times)
    return Change(*key, base, new, new - base, None, None, calls.base, calls.new, calls.changed, verdict, *recordings)


def compare_steps(before: Sequence[RunTimes], after: Sequence[RunTimes]) -> Change:
    """Return how the step as a whole changed, machine and all.

    Several recordings a side show how much the machine's speed differs between them. One a side does not.
    """
    measured = noise.estimate(*(np.log([run.step.time_ns for run in side]) for side in (before, after)))
    variance = measured.squares / measured.freedom if measured.freedom else noise.SINGLE_STEP_SPREAD**2
    variance = max(variance, float(np.mean([run.step.variance for run in (*before, *after)])))
    reach = noise.student_quantile(STEP_OUTSIDE, measured.freedom or noise.SIZE_FREEDOM)
    half = reach * math.sqrt(variance * measured.recordings)
    steps = min(sum(run.steps for run in side) for side in (before, after))
    runs, machine = (len(before), len(after)), Common(0, "machine", off=0, low=0, high=0, reach=0)
    base_ns, raw, calls = math.exp(measured.base), measured.difference, Calls(0, 0, changed=False)
    return _change(("", "step"), base_ns, raw, half, machine=machine, calls=calls, runs=runs, steps=steps)


def _verdict(base_ns: float, raw_ns: float, interval: tuple[int, int, int], common: Common) -> str:
    """Say what the interval of the difference allows; this rule alone decides what is slower.

    A module that takes what it took did not change, although all others did. `raw_ns` is the difference with what the
    machine changed by, `interval` (low end, estimate, high end) without it.
    """
    limit = MIN_CHANGE * base_ns
    low, difference, high = interval
    # What changed the other way than modules in general, if it is not known why these did.
    is_against = common.cause == "unknown" and (low > 0) != (common.difference > 0)
    least_ns = max(limit, base_ns * math.expm1(common.reach)) if is_against else limit
    if max(low, -high) > 0 and abs(difference) > limit and abs(raw_ns) > least_ns:
        return "slower" if low > 0 else "faster" if raw_ns < 0 or not is_against else "cannot tell"
    return "same" if -limit <= low and high <= limit else "cannot tell"


def _by_cost(change: Change) -> tuple[bool, bool, int, str, int]:
    """Return a key that puts what is called differently first: that is certain, and often the reason of the rest."""
    settled = change.verdict in {"same", "cannot tell"}
    order = (*SAMPLED_PHASES, PART).index(change.phase)
    return not change.calls_changed, settled, -abs(change.difference_ns), change.fqn, order


class Calls(NamedTuple):
    """The calls of a module before and after."""

    # Spans per step before, the median of the steps in which there is any; if the share of these steps changed, the
    # mean over all steps
    base: float
    new: float  # the same after
    changed: bool  # True if that is another number, or a side has none, beyond chance
    base_share: float = 1.0  # in which part of the steps it is called; 1 if that did not change beyond chance
    new_share: float = 1.0  # the same after
    share_reach: float = 0.0  # by how much chance may have changed the logarithm of `new_share / base_share`
    in_steps: float = 1.0  # see `Change.in_steps`


def compare_calls(before: Sequence[RunTimes], after: Sequence[RunTimes], key: Key, keys: int) -> Calls:
    """Compare how often a module is called, one of so many `keys`; each side has at least one recording."""
    base, new = ([run.modules[key] for run in side if key in run.modules] for side in (before, after))
    base_calls, new_calls = (
        round(float(np.median([run.calls for run in side]))) if side else 0 for side in (base, new)
    )
    if not (base and new):
        (has, runs), others = ((base, before), after) if base else ((new, after), before)
        share = min(sum(run.steps for run in has) / sum(run.steps for run in runs), 1.0)
        # What is in a few steps alone may be on one side by chance, but not if it comes with a period.
        without, periods = sum(run.steps for run in others), [run.period for run in has]
        sure = (1 - share) ** without <= SHARES_OUTSIDE / keys or (all(periods) and without >= _PERIODS * max(periods))
        share = 1.0 if share >= ALMOST_ALL else share
        return Calls(round(base_calls * share, 2), round(new_calls * share, 2), sure, share, share)
    shares = _changed_shares(before, after, key, keys)
    if shares is not None:
        base_share, new_share, reach = shares
        return Calls(
            round(base_calls * base_share, 2), round(new_calls * new_share, 2), True, base_share, new_share, reach
        )
    is_more = min(run.fewest_calls for run in new) > max(run.most_calls for run in base)
    is_fewer = max(run.most_calls for run in new) < min(run.fewest_calls for run in base)
    in_steps = sum(run.steps for run in (*base, *new)) / sum(run.steps for run in (*before, *after))
    return Calls(base_calls, new_calls, is_more or is_fewer, in_steps=min(1.0, in_steps))


def _changed_shares(
    before: Sequence[RunTimes], after: Sequence[RunTimes], key: Key, keys: int
) -> tuple[float, float, float] | None:
    """Return in which part of the steps a module is called before and after, and `share_reach`.

    None unless all recordings of one side have less of it than all of the other, by more than chance does: each step
    may have the module or not, by itself.
    """
    periods = [{run.modules[key].period if key in run.modules else 0 for run in side} for side in (before, after)]
    counts = [
        np.array([[run.modules[key].steps if key in run.modules else 0, run.steps] for run in side], np.float64)
        for side in (before, after)
    ]
    base, new = (np.minimum(side[:, 0] / side[:, 1], 1) for side in counts)
    if not (base.max() < new.min() or new.max() < base.min()):
        return None
    called, steps = np.array([side.sum(axis=0) for side in counts]).T
    base_share, new_share = np.minimum(called / steps, 1).tolist()
    pooled = min(float(called.sum() / steps.sum()), 1.0)
    rarity = float((1 / steps).sum())
    errors = NormalDist().inv_cdf(1 - SHARES_OUTSIDE / keys / 2)
    # A step more or less on either side is half a step off on average. What has another period is no chance.
    is_regular = all(map(all, periods)) and periods[0].isdisjoint(periods[1])
    if not is_regular and abs(new_share - base_share) - rarity / 2 <= errors * math.sqrt(
        pooled * (1 - pooled) * rarity
    ):
        return None
    return base_share, new_share, errors * math.sqrt(float(((1 - np.array([base_share, new_share])) / called).sum()))
