"""Rules for differences between steps: occasional parts, slow or growing steps, and waits. Shares are of the median."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterator

import numpy as np

from ...._arrays import AnyArray, BoolArray, Int64Array
from ...._tables import counted
from ...contents import WITHOUT_GRADIENTS, is_sampled_step
from ..parts import OTHER
from ..slow_steps import SlowPart, short_ms
from ..step_times import warm_up_steps
from .finding import MIN_SHARE, MIN_STEPS_FOR_MEDIANS, Finding, RuleInput, times_text
from .noted import NotedSteps
from .siblings import list_pattern

_MIN_CONCURRENCY = 1.5
"""Minimum mean number of calls that run at the same time; with fewer, most run without others."""
_MAX_UNHINDERED_SHARE = 0.6
"""Maximum ratio of the modules' medians to a usual call: long inputs slow all modules alike, a stop only one."""


def find_calls_at_once(rule_input: RuleInput) -> Iterator[Finding]:
    """Yield a finding if calls on several threads last far longer than the medians of their modules."""
    concurrency, median_ns = rule_input.mean_concurrency, rule_input.median_step_ns
    if concurrency < _MIN_CONCURRENCY or rule_input.steps < MIN_STEPS_FOR_MEDIANS or median_ns < rule_input.min_ns:
        return
    rows = zip(rule_input.rows, rule_input.calls.tolist(), strict=True)
    leaves = [(row, calls) for row, calls in rows if row.fqn not in rule_input.holders]
    mean_ns = sum(calls * row.self_ns / max(row.calls, 1) for row, calls in leaves)
    # Time outside the leaves has no median of its own; stops are assumed to be as frequent there.
    share = sum(min(calls, 1.0) * row.step_p50_ns for row, calls in leaves) / max(mean_ns, 1.0)
    unhindered_ns = share * float(rule_input.duration_ns.mean())
    if unhindered_ns > _MAX_UNHINDERED_SHARE * median_ns:
        return
    evidence = (
        f"{concurrency:.1f} calls run at a time; one takes {short_ms(median_ns)}, but only {short_ms(unhindered_ns)} "
        "if each module takes its median: something stops a thread now and then, the GIL (Python runs one thread at a "
        "time) or too few processors"
    )
    title = f"calls of {rule_input.thread_count} threads wait for each other"
    yield rule_input.finding(title, evidence=evidence, show="--by step", ns=median_ns - unhindered_ns)


_MIN_RUN_STEPS = 12
"""Minimum number of steps in a run, for quarters of three."""
_MIN_RUNS_SHARE = 0.75
"""Minimum share of all steps that are in such runs."""
_FALL_STEPS = 8
"""Number of steps before, and after, a step that are compared to find the end of a run."""
_MAX_FALL_RATIO = 0.75
"""A run ends at a step if median(next `_FALL_STEPS`) <= `_MAX_FALL_RATIO` * p25(previous `_FALL_STEPS`)."""
_MIN_GROWTH_RATIO = 1.5
"""Minimum ratio of the level in the last quarters of runs to the level in the first quarters."""
_FEW_RUNS = 2
"""Maximum number of runs for a higher minimum of that ratio: a machine can get busier twice."""
_MIN_GROWTH_RATIO_OF_FEW_RUNS = 2.0
"""Minimum ratio of these levels if there are at most `_FEW_RUNS` runs."""
_MIN_QUARTER_SHARE = 0.1
"""Minimum share of the growth in each quarter: a second length of inputs grows in one jump."""
_MIN_LONGER_PAIRS_SHARE = 0.9
"""Minimum share of pairs of steps in the first and last quarter in which the last is longer: levels rise by chance."""
_MIN_LARGER_INPUTS_RATIO = 1.2
"""Minimum ratio of steps with larger inputs to others, of medians and of 10th percentiles."""
_MIN_CALL_GROWTH_SHARE = 0.05
"""Minimum share of the median step that calls take beyond the first ones, if their inputs grow: the cause is known."""
_MIN_GROWN_SHARE = 0.7
"""Minimum share of the growth in a part or a module for it to be named."""


def find_growing_steps(rule_input: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield a finding if steps get longer and longer in each run, with the part or the modules that grow."""
    ns = rule_input.duration_ns
    runs = [run for run in _split_at_falls(ns) if len(run) >= _MIN_RUN_STEPS]
    if sum(map(len, runs)) < _MIN_RUNS_SHARE * max(rule_input.steps, 1):
        return
    quarters = [np.concatenate(parts) for parts in zip(*(np.array_split(run[1:], 4) for run in runs), strict=True)]
    # 25th percentiles, as a busy machine only lengthens steps.
    levels = np.array([np.percentile(ns[quarter], 25) for quarter in quarters])
    min_ratio = _MIN_GROWTH_RATIO if len(runs) > _FEW_RUNS else _MIN_GROWTH_RATIO_OF_FEW_RUNS
    if levels[-1] < min_ratio * levels[0] or np.diff(levels).min() < _MIN_QUARTER_SHARE * (levels[-1] - levels[0]):
        return
    first, last = quarters[0], quarters[-1]
    if np.searchsorted(np.sort(ns[first]), ns[last]).mean() < _MIN_LONGER_PAIRS_SHARE * len(first):
        return
    first_ns, last_ns = float(np.median(ns[first])), float(np.median(ns[last]))
    ns_per_step = sum(float(np.maximum(ns[run] - first_ns, 0).sum()) for run in runs) / rule_input.steps
    delays = dict(rule_input.step_notes.get("delays", ()))
    if sum(delays.values()) >= _CPU_WAIT_SHARE * ns_per_step * rule_input.steps:
        return
    growth_ns = rule_input.part_times_ns[last].mean(axis=0) - rule_input.part_times_ns[first].mean(axis=0)
    total_ns = float(growth_ns.sum())
    part = rule_input.part_names[int(np.argmax(growth_ns))] if growth_ns.max() >= _MIN_GROWN_SHARE * total_ns else None
    evidence = f"from {short_ms(first_ns)} to {short_ms(last_ns)} in "
    evidence += f"{counted(len(runs), 'run')} of {max(map(len, runs))} steps" if len(runs) > 1 else f"{len(ns)} steps"
    added_ns = rule_input.module_ns(last) - rule_input.module_ns(first)
    pattern, where, inner = _grown_pattern(rule_input, added_ns, total_ns)
    if part == "backward":
        evidence += ", only in backward: without detach(), the graphs of earlier steps stay in memory"
    elif where is not None:
        is_inner = inner >= _MIN_GROWN_SHARE
        evidence += f", in {pattern}, {'in all modules inside' if is_inner else 'in its own time'}"
        if is_inner and not rule_input.trains:
            evidence += ": inputs grow, as in generation without a KV cache"
        evidence += "" if is_inner else notes.growth_text(where)
    elif part == OTHER:
        evidence += f", outside of modules and ranges{notes.longest_gap_text(part, ns_per_step)}"
        evidence += notes.outside_text(ns_per_step, 0)
    if part is not None and where is None:
        ranges = rule_input.ranges_of(part)
        where = ranges[0].range if ranges else None
    title = "takes longer from step to step"
    yield rule_input.finding(title, where, part, evidence=evidence, show="--by step", ns=ns_per_step)


def find_larger_inputs(rule_input: RuleInput) -> Iterator[Finding]:
    """Yield a finding if steps are longer from the step on at which the model gets larger inputs for good."""
    number, ns = rule_input.step_numbers, rule_input.duration_ns
    for fqn, samples in rule_input.step_notes.get("inputs", {}).items():
        shapes = [shape for _, shape in samples]
        count = shapes.count(shapes[0]) if shapes else 0
        if shapes[:count] != shapes[:1] * count or len({*shapes[count:]}) != 1:
            continue
        last_small, first_large = samples[count - 1][0], samples[count][0]
        small_ns, large_ns = ns[number <= last_small], ns[number >= first_large]
        if min(len(small_ns), len(large_ns)) < MIN_STEPS_FOR_MEDIANS:
            continue
        (small_p10, small_median), (large_p10, large_median) = (
            np.percentile(step_ns, (10, 50)).tolist() for step_ns in (small_ns, large_ns)
        )
        if min(large_p10 / max(small_p10, 1), large_median / max(small_median, 1)) >= _MIN_LARGER_INPUTS_RATIO:
            evidence = f"it gets {shapes[-1]} from step {first_large} on, {shapes[0]} until step {last_small}: a step "
            evidence += f"takes {short_ms(large_median)}, {short_ms(small_median)} before"
            ns_per_step = (large_median - small_median) * len(large_ns) / rule_input.steps
            title = "gets larger inputs after some steps"
            yield rule_input.finding(title, fqn, evidence=evidence, show="--by step", ns=ns_per_step)


def find_growing_calls(rule_input: RuleInput) -> Iterator[Finding]:
    """Yield a finding for each model whose input grows from call to call in a step, as the calls get longer."""
    growth_by_fqn = {
        row.fqn: float(ns) / max(rule_input.steps, 1)
        for row, ns in zip(rule_input.rows, rule_input.call_counts.growth_in_steps_ns, strict=True)
    }
    min_ns = max(_MIN_CALL_GROWTH_SHARE * rule_input.median_step_ns, rule_input.min_ns)
    for fqn, samples in rule_input.step_notes.get("changing_inputs", {}).items():
        ns_per_step = growth_by_fqn.get(fqn, 0.0)
        if (
            rule_input.steps >= MIN_STEPS_FOR_MEDIANS
            and ns_per_step >= min_ns
            and all(itertools.starmap(_is_grown, samples))
        ):
            calls, first, last = samples[-1]
            evidence = (
                f"the inputs of {calls} calls in a step grow from {first} to {last}, and calls take longer: as in "
            )
            evidence += "generation without a KV cache, which computes all earlier positions again"
            title = "gets a longer input in each call of a step"
            yield rule_input.finding(title, fqn, "forward", evidence=evidence, show="--by step", ns=ns_per_step)


def _is_grown(calls: int, first: str, last: str) -> bool:
    """Return whether the first tensor grew in one dimension, by half of the number of calls or more."""
    (first_dtype, first_sizes), (last_dtype, last_sizes) = (_sizes(shapes) for shapes in (first, last))
    if first_dtype != last_dtype or len(first_sizes) != len(last_sizes):
        return False
    grown = [last - first for first, last in zip(first_sizes, last_sizes, strict=True) if first != last]
    return len(grown) == 1 and 2 * grown[0] >= calls


def _sizes(shapes: str) -> tuple[str, list[int]]:
    """Return the dtype and the sizes of the first tensor in a text such as `int64[2, 8], bool[2, 8]`."""
    dtype, _, sizes = shapes.partition("]")[0].partition("[")
    return dtype, [int(size) for size in sizes.split(", ") if size.isdecimal()]


def _grown_pattern(rule_input: RuleInput, added_ns: AnyArray, total_ns: float) -> tuple[str, str | None, float]:
    """Return the innermost pattern with most of the added time, its module or parent, and the inner modules' share."""
    rows_by_pattern: dict[str, list[int]] = {}
    for index, row in enumerate(rule_input.rows):
        rows_by_pattern.setdefault(list_pattern(rule_input, row.fqn), []).append(index)
    pattern_ns = {pattern: float(added_ns[members].sum()) for pattern, members in rows_by_pattern.items()}
    grown = [pattern for pattern, ns in pattern_ns.items() if ns >= _MIN_GROWN_SHARE * total_ns > 0]
    if not grown:
        return "", None, 0.0
    pattern = max(grown, key=lambda pattern: (pattern.count("."), pattern_ns[pattern]))
    fqns = {rule_input.rows[index].fqn for index in rows_by_pattern[pattern]}
    inner = [index for index, row in enumerate(rule_input.rows) if fqns.intersection(rule_input.outer[row.fqn][:1])]
    first = rule_input.rows[rows_by_pattern[pattern][0]].fqn
    where = next(iter(rule_input.outer[first]), None) if len(fqns) > 1 else first
    return pattern, where, float(added_ns[inner].sum()) / pattern_ns[pattern]


def _split_at_falls(ns: Int64Array) -> list[Int64Array]:
    """Return the indices of the steps in each run; a new run starts where steps are short again."""
    if len(ns) < 2 * _FALL_STEPS:
        return [np.arange(len(ns))]
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(ns, _FALL_STEPS), axis=1)
    ratios = np.ones(len(ns))
    medians, p25 = windows[_FALL_STEPS:, _FALL_STEPS // 2], windows[:-_FALL_STEPS, _FALL_STEPS // 4]
    ratios[_FALL_STEPS : 1 - _FALL_STEPS] = medians / np.maximum(p25, 1)
    falling = np.flatnonzero(ratios <= _MAX_FALL_RATIO).tolist()
    starts = [step for step in falling if ratios[step] == ratios[step - _FALL_STEPS + 1 : step + _FALL_STEPS].min()]
    return np.split(np.arange(len(ns)), starts)


_MIN_EXCESS_SHARE = 0.05
"""Minimum excess of an occasional part over its own median, as a share of the median step."""
_MIN_OCCASION_RATIO = 3
"""Minimum ratio of an occasional part to its own median."""
_RECOMPILATION = re.compile(r"torch\.compile \d+/[1-9]")
_LAZY_BACKWARD = ": lazy backward"
"""End of the names of compilations that come with the first backward of a graph, and give no reason."""
MIN_EVALUATION_SHARE = 0.10
"""Minimum share of evaluation, as a mean or in most steps: every training evaluates."""
_MIN_PERIOD_STEPS = 3
"""Minimum number of steps at equal distances for a period."""
_CORE_PARTS = ("forward", "backward", "recompute", "loss", OTHER)
"""Parts that are in all steps, so that only a much longer one counts: see `StepParts.cause`."""
LOADER_START = "DataLoader.__iter__"
"""End of the name of the range in which a loader shuffles, and starts its workers."""
_FREQUENT_PARTS = ("data loading", "optimizer", "communication")
"""Parts that count as core parts if most steps have them."""
_MIN_SLOW_EXCESS = 3.0
"""Minimum excess of a slow step, in median steps."""
_MIN_SLOW_LAYER_EXCESS = 2.0
"""Minimum excess of a step that a module of a list makes slow, in median steps, if waits for a CPU are known."""
_MIN_STALL_NS = 15_000_000
"""Minimum excess of a slow step in ns: threads of Python wait for each other, 5 ms for each."""
_MIN_OUTLAST_RATIO = 3
"""Minimum ratio of the excess to the excess by any other cause, on a busy machine."""
_CPU_WAIT_SHARE = 0.5
"""Minimum share of the excess that a thread waits for a CPU if the machine made the step slow."""
_LARGER_WORK_RATIO = 3.0
"""Minimum ratio of forward and backward to their medians if there is more to compute."""
_LONG_EXCESS_NS = 50_000_000
"""Minimum excess in ns at which the total wait of all calls must be `_MIN_WAITS_RATIO` times the excess."""
_MIN_WAITS_RATIO = 4.0
"""Minimum ratio of that total wait to a long excess to explain it."""
_MIN_LONG_CALL_RATIO = 4.0
"""Minimum ratio of a long call to the median call."""
_MIN_LONG_CALLS_SHARE = 0.2
"""Minimum share of long calls in the time of all."""
_MAX_SAMPLING_NS = 50_000_000
"""Maximum time in ns of a slow part that the Python engine's sampling of steps 1, 2, 4, 8 … explains in any case."""
_MAX_SAMPLING_RATIO = 5.0
"""Maximum ratio of that time to the median step: each operator of a sampled step costs the engine some time."""
_MIN_SLOW_SHARE = 0.04
"""Minimum excess of slow steps by one cause, as a mean over all steps."""
_TRIGGER_TEXTS = "", ", automatic", " by gc.collect()"
"""Words for each of `TRIGGERS`."""


def find_occasions(rule_input: RuleInput) -> Iterator[Finding]:
    """Yield the parts that are long only in some steps, and repeated compilations."""
    if rule_input.steps < MIN_STEPS_FOR_MEDIANS:
        return
    compiles = _is_long(rule_input, rule_input.part_ns("compile", gaps=True))
    for part in rule_input.part_names:
        part_ns = rule_input.part_ns(part, gaps=True)
        median_ns, is_long = float(np.median(part_ns)), _is_long(rule_input, part_ns)
        if part == "gc":  # a compilation's garbage is its own cost
            is_long &= ~compiles
        count, excess_ns = int(np.count_nonzero(is_long)), part_ns[is_long] - median_ns
        ns_per_step = float(excess_ns.sum()) / rule_input.steps
        min_ns = (MIN_EVALUATION_SHARE if part == "evaluation" else MIN_SHARE) * rule_input.median_step_ns
        if not 0 < count <= rule_input.steps / 2 or ns_per_step < min_ns:
            continue
        if rule_input.share(ns_per_step, gaps=True) < MIN_SHARE or (part == "evaluation" and _is_rollout(rule_input)):
            continue
        # Collections are in each step, but short ones.
        is_in_all = part != "gc" and median_ns > _MIN_EXCESS_SHARE * rule_input.median_step_ns
        if part in _CORE_PARTS or (part in _FREQUENT_PARTS and median_ns) or is_in_all:
            continue
        ranges = rule_input.ranges_of(part)
        recompilations = [range_times for range_times in ranges if _RECOMPILATION.match(range_times.range)]
        if (count == 1 and part not in ("evaluation", "compile")) or (part == "compile" and not recompilations):
            continue  # a single long one is a slow step; a first compilation is necessary
        long_ns, longest_ns = float(np.median(part_ns[is_long])), int(part_ns[is_long].max())
        evidence = f"{when_text(rule_input.step_numbers, is_long)}, {short_ms(long_ns)} each"
        evidence += (
            f" (median, {short_ms(longest_ns)} the longest)" if longest_ns > _MIN_OCCASION_RATIO * long_ns else ""
        )
        evidence += f", {short_ms(ns_per_step)} a step on average"
        where = ranges[0].range if ranges and part != "gc" else None
        evidence += rule_input.graph_of_evaluations if part == "evaluation" else ""
        title = f"{part} comes now and then"
        if part == "gc":
            title, evidence = "garbage collection comes now and then", f"{evidence}; {collections_text(rule_input)}"
        elif part == "compile":
            with_reason = [
                range_times for range_times in recompilations if not range_times.range.endswith(_LAZY_BACKWARD)
            ] or recompilations
            where, title = with_reason[0].range, "is compiled again"
            evidence += f"; compiled again {times_text(sum(range_times.calls for range_times in with_reason))}, "
            evidence += f"{short_ms(sum(range_times.total_ns for range_times in recompilations))} in all"
        elif part == where:
            title = "comes now and then"
        show = "--by step" if where is None else "--ranges"
        yield rule_input.finding(title, where, part, evidence=evidence, show=show, ns=ns_per_step, gaps=True)


def _is_rollout(rule_input: RuleInput) -> bool:
    """Return whether evaluations are rollouts of a policy: in training mode, with one before the first step."""
    ranges, parts_before = rule_input.ranges_of("evaluation"), rule_input.summary.around.before
    return "evaluation" in parts_before and any(range_times.range == WITHOUT_GRADIENTS for range_times in ranges[:1])


def _is_long(rule_input: RuleInput, part_ns: Int64Array) -> BoolArray:
    """Return bool[steps], whether a part is much longer than its median; False for step 0, with its one-time work."""
    median_ns = float(np.median(part_ns))
    has_excess = part_ns - median_ns > _MIN_EXCESS_SHARE * rule_input.median_step_ns
    return np.asarray(
        has_excess & (part_ns > _MIN_OCCASION_RATIO * median_ns) & (rule_input.step_numbers > 0), np.bool_
    )


def find_slow_steps(rule_input: RuleInput, notes: NotedSteps, explained: Container[str | None]) -> Iterator[Finding]:
    """Yield a finding for the slow steps of each part and module or range, except `explained` parts."""
    if rule_input.steps < MIN_STEPS_FOR_MEDIANS:
        return
    by_cause: dict[tuple[str, str], list[tuple[int, SlowPart, str]]] = {}
    steps, delays = rule_input.summary.step_parts, dict(rule_input.step_notes.get("delays", ()))
    step_excess_ns = rule_input.duration_ns - rule_input.median_step_ns
    excess_by_step = dict(zip(rule_input.step_numbers.tolist(), step_excess_ns.tolist(), strict=True))
    overview = rule_input.summary.overview
    is_python = overview is not None and overview.engine == "python"
    wait_ns: int = rule_input.step_notes.get("waited_ns", 0)
    is_busy = bool(delays) or wait_ns > 0 or "delays" not in rule_input.step_notes
    max_sampling_ns = max(_MAX_SAMPLING_NS, _MAX_SAMPLING_RATIO * rule_input.median_step_ns)
    sampling_ns = dict(rule_input.step_notes.get("sampling_ns", ()))
    # Steps of the warm-up have no cause, so a periodic one may be missing there.
    warm = rule_input.step_numbers[warm_up_steps(rule_input.duration_ns) :]
    for index, (sentence, slow) in steps.causes.items():
        # A first step is slow by its one-time work.
        if slow.part not in explained and (number := int(steps.bounds.number[index])):
            by_cause.setdefault((slow.part, slow.module or slow.range), []).append((number, slow, sentence))
    longest_ns = {cause: max(slow.took_ns - slow.usual_ns for _, slow, _ in steps) for cause, steps in by_cause.items()}
    for (part, where), slow_steps in by_cause.items():
        period, numbers = 0, np.zeros(0, np.int64)
        # Without a period, sampling may have made them slow, or another program.
        is_sampled = [
            is_python and is_sampled_step(number) and slow.took_ns - sampling_ns.get(number, 0) < max_sampling_ns
            for number, slow, _ in slow_steps
        ]
        is_waiting = [
            _is_by_wait(excess_by_step.get(number, 0), delays.get(number, 0), wait_ns) for number, _, _ in slow_steps
        ]
        causes = np.stack([is_sampled, is_waiting])
        for is_explained in (causes[:0], causes[:1], causes):
            kept = np.flatnonzero(~is_explained.any(axis=0)).tolist()
            numbers = np.array([slow_steps[index][0] for index in kept], np.int64)
            if period := period_of(numbers, warm):
                break
        if not len(numbers):
            continue
        slow_steps = [slow_steps[index] for index in kept]
        other_ns = max((ns for cause, ns in longest_ns.items() if cause != (part, where)), default=0)
        ns_per_step = sum(slow.took_ns - slow.usual_ns for _, slow, _ in slow_steps) / max(rule_input.steps, 1)
        is_layer = bool(delays) and "*" in list_pattern(rule_input, where)
        min_ns = (_MIN_SLOW_LAYER_EXCESS if is_layer else _MIN_SLOW_EXCESS) * rule_input.median_step_ns
        if is_busy:  # steps that are slow for various causes are those in which the machine did other work
            min_ns = max(min_ns, _MIN_OUTLAST_RATIO * other_ns)
        is_noise = not period and longest_ns[part, where] < max(min_ns, _MIN_STALL_NS)
        if is_noise or ns_per_step < _MIN_SLOW_SHARE * rule_input.median_step_ns:
            continue
        title = f"makes {f'step {numbers[0]}' if len(numbers) == 1 else 'some steps'} slow"
        title = f"{title} ({part})" if where else f"{part} {title}"
        slowest, _, evidence = max(slow_steps, key=lambda step: step[1].took_ns)
        if len(numbers) > 1:
            is_slow = np.isin(rule_input.step_numbers, numbers)
            evidence = f"{when_text(rule_input.step_numbers, is_slow, warm)}; {evidence}"
        if part == "data loading":
            evidence += _workers_text(rule_input)
        evidence += _inputs_text(rule_input, slowest, part)
        evidence += notes.longest_gap_text(part, ns_per_step * rule_input.steps / len(slow_steps))
        # Steps that are ranges may be without modules.
        has_modules = rule_input.call_counts.calls.any() and part != OTHER
        show = f"--steps {slowest}:{slowest + 1}" if has_modules else "--by step"
        yield rule_input.finding(title, where or None, part, evidence=evidence, show=show, ns=ns_per_step)


def _is_by_wait(excess_ns: float, delay_ns: int, total_wait_ns: int) -> bool:
    """Return whether waiting for a CPU explains a step's excess; the total covers all calls if these are steps."""
    factor = _CPU_WAIT_SHARE if excess_ns < _LONG_EXCESS_NS else _MIN_WAITS_RATIO
    return delay_ns >= _CPU_WAIT_SHARE * excess_ns or total_wait_ns >= factor * excess_ns


def long_calls_text(rule_input: RuleInput) -> str:
    """Return a sentence if a few calls that are steps have much of the time of all; otherwise empty."""
    ns = rule_input.duration_ns
    is_long = ns > _MIN_LONG_CALL_RATIO * max(rule_input.median_step_ns, 1.0)
    share = float(ns[is_long].sum() / max(ns.sum(), 1))
    if rule_input.steps < MIN_STEPS_FOR_MEDIANS or share < _MIN_LONG_CALLS_SHARE:
        return ""
    count, period = int(np.count_nonzero(is_long)), period_of(rule_input.step_numbers[is_long], rule_input.step_numbers)
    calls = f"{count} of {counted(rule_input.steps, 'call')}" + (f", every {_ordinal(period)}," if period else "")
    duration = f"{short_ms(float(np.median(ns[is_long])))} each (usually {short_ms(rule_input.median_step_ns)})"
    return f"{calls} took {duration}, {share:.0%} of the time of all"


def _inputs_text(rule_input: RuleInput, number: int, part: str) -> str:
    """Return a clause if a step's forward and backward are both many times as long as usual; otherwise empty."""
    works = "forward", "backward"
    step_ns = [int(rule_input.part_ns(work)[rule_input.step_numbers == number].sum()) for work in works]
    median_ns = [float(np.median(rule_input.part_ns(work))) for work in works]
    is_larger = all(ns >= _LARGER_WORK_RATIO * max(usual, 1.0) for ns, usual in zip(step_ns, median_ns, strict=True))
    if part not in works or not is_larger:
        return ""
    other = 1 - works.index(part)
    return (
        f"; {works[other]} too: {short_ms(step_ns[other])}, usually {short_ms(median_ns[other])}, as of larger inputs"
    )


def _workers_text(rule_input: RuleInput) -> str:
    """Return a clause with the number of starts of a loader's workers, if more than one."""
    fetches = rule_input.ranges_of("data loading")
    starts = [fetch for fetch in fetches if fetch.range.endswith(LOADER_START) and fetch.calls > 1]
    if not starts or not rule_input.has_workers:
        return ""
    start_text = short_ms(starts[0].p50_ns)
    return f"; workers start {times_text(starts[0].calls)}, {start_text} each: persistent_workers=True would keep them"


def when_text(number: Int64Array, is_long: BoolArray, sampled: Int64Array | None = None) -> str:
    """Return a phrase with the number of the chosen steps, and their period in the sampled (otherwise all) steps."""
    long_numbers = number[is_long]
    if len(long_numbers) == 1:
        return f"in step {long_numbers[0]} of {len(number)}"
    period = period_of(long_numbers, number if sampled is None else sampled)
    return f"in {len(long_numbers)} of {len(number)} steps" + (f", every {_ordinal(period)} step" if period else "")


def period_of(event_steps: Int64Array, number: Int64Array) -> int:
    """Return the period of events among the steps `number`; 0 if they have none, or are few.

    No event may be missing at either end: three steps can be at one distance by chance.
    """
    distances = set(np.diff(event_steps).tolist())
    if len(event_steps) < _MIN_PERIOD_STEPS or len(distances) > 1 or 1 in distances:
        return 0
    period = distances.pop()
    return period if max(event_steps[0] - number[0], number[-1] - event_steps[-1]) <= period else 0


def collections_text(rule_input: RuleInput) -> str:
    """Return the garbage collections by generation, the oldest first, and by trigger."""
    count, freed = rule_input.collections
    return ", ".join(
        f"{count[trigger, generation]:,} of generation {generation}{_TRIGGER_TEXTS[trigger]}, "
        f"each freed {freed[trigger, generation] / count[trigger, generation]:,.0f} objects"
        for generation, trigger in np.argwhere(count.T)[::-1][:2].tolist()
    )


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number // 10 % 10 != 1 else 0, "th")
    return f"{number}{ending}"
