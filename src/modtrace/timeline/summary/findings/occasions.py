"""What differs from step to step: what comes now and then, slow steps, ever longer ones, and threads that wait."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

import numpy as np

from ...._arrays import AnyArray, BoolArray, Int64Array
from ...._tables import counted
from ...contents import WITHOUT_GRADIENTS
from ..parts import OTHER
from ..slow_steps import SlowPart, short_ms
from ..step_times import warm_up_steps
from .finding import MIN_SHARE, MIN_STEPS, Finding, RuleInput, times_text
from .noted import NotedSteps
from .siblings import place_of

_AT_ONCE = 1.5
"""How many calls run at a time on average: with fewer, most run alone."""
_UNHINDERED = 0.6
"""Share of a usual call that its modules take, each as usual: they take nearly all of it where nothing stops one, be
inputs short or long, as then all modules are. What stops a thread is in one module or another."""


def find_calls_at_once(measured: RuleInput) -> Iterator[Finding]:
    """Yield that calls on several threads take far longer than their modules do when nothing stops them."""
    at_once, usual_ns = measured.mean_concurrency, measured.median_step_ns
    if at_once < _AT_ONCE or measured.steps < MIN_STEPS or usual_ns < measured.min_ns:
        return
    each = zip(measured.rows, measured.calls.tolist(), strict=True)
    inner = [(row, calls) for row, calls in each if row.fqn not in measured.holders]
    mean_ns = sum(calls * row.self_ns / max(row.calls, 1) for row, calls in inner)
    # What is in no inner module is stopped as often, and has no median of its own.
    share = sum(min(calls, 1.0) * row.step_p50_ns for row, calls in inner) / max(mean_ns, 1.0)
    unhindered_ns = share * float(measured.duration_ns.mean())
    if unhindered_ns > _UNHINDERED * usual_ns:
        return
    evidence = (
        f"{at_once:.1f} calls run at a time; one takes {short_ms(usual_ns)}, and {short_ms(unhindered_ns)} where each "
        "module takes its median: now and then something stops the thread in one of them: Python, which runs one "
        "thread at a time (GIL), or too few processors"
    )
    what = f"calls of {measured.thread_count} threads wait for each other"
    yield measured.finding(what, evidence=evidence, show="--by step", ns=usual_ns - unhindered_ns)


_LEAST_RUN, _MOST_STEPS = 12, 0.75
"""Steps of a run that is long enough for quarters of three, and the share of all steps that such runs have."""
_FALLS_TO, _NEAR = 0.75, 8
"""A run ends where half of so many steps take at most this share of what three quarters of those before take at least,
as where a new request begins."""
_GROWS, _GROWS_ALONE, _FEW_RUNS, _EVEN = 1.5, 2.0, 2, 0.1
"""How many times as long as the first quarters of runs the last ones take, more if there are so few runs, as a machine
can get busier twice; and what share of that each quarter adds at least: a second length of inputs is one jump."""
_EXCEED = 0.9
"""Share of the pairs of a step in a last and one in a first quarter of which the later one takes longer: on a busy
machine levels alone rise by chance."""
_LARGER_INPUTS = 1.2
"""How many times as long steps with larger inputs take, their median and their shortest tenth."""
_MOSTLY = 0.7
"""What share of what is added a part or a module has for it to be named."""


def find_growing_steps(measured: RuleInput, notes: NotedSteps) -> Iterator[Finding]:
    """Yield that steps take longer and longer, from each time on that they are short again, and what does."""
    ns = measured.duration_ns
    runs = [run for run in _runs(ns) if len(run) >= _LEAST_RUN]
    if sum(map(len, runs)) < _MOST_STEPS * max(measured.steps, 1):
        return
    quarters = [np.concatenate(each) for each in zip(*(np.array_split(run[1:], 4) for run in runs), strict=True)]
    # A busy machine makes steps longer, and none shorter.
    levels = np.array([np.percentile(ns[quarter], 25) for quarter in quarters])
    more = levels[-1] - levels[0]
    least = _GROWS if len(runs) > _FEW_RUNS else _GROWS_ALONE
    if levels[-1] < least * levels[0] or np.diff(levels).min() < _EVEN * more:
        return
    first, last = quarters[0], quarters[-1]
    if np.searchsorted(np.sort(ns[first]), ns[last]).mean() < _EXCEED * len(first):
        return
    low, high = float(np.median(ns[first])), float(np.median(ns[last]))
    per_step = sum(float(np.maximum(ns[run] - low, 0).sum()) for run in runs) / measured.steps
    delays = dict(measured.step_notes.get("delays", ()))
    if sum(delays.values()) >= _OF_MACHINE * per_step * measured.steps:
        return
    added = measured.ns[last].mean(axis=0) - measured.ns[first].mean(axis=0)
    part = measured.parts[int(np.argmax(added))] if added.max() >= _MOSTLY * added.sum() else None
    evidence = f"from {short_ms(low)} to {short_ms(high)} in "
    evidence += f"{counted(len(runs), 'run')} of {max(map(len, runs))} steps" if len(runs) > 1 else f"{len(ns)} steps"
    place, where, inner = _place(measured, measured.module_ns(last) - measured.module_ns(first), float(added.sum()))
    if part == "backward":
        evidence += ", in backward alone: the graphs of earlier steps are kept, without detach()"
    elif where is not None:
        evidence += f", in {place}, {'in all modules inside' if inner >= _MOSTLY else 'in its own time'}"
        is_whole = inner >= _MOSTLY and not measured.trains
        evidence += ": inputs grow, as those of a model that gets all tokens again, without a cache" if is_whole else ""
    elif part == OTHER:
        evidence += f", outside of modules and ranges{notes.longest_gap_text(part, per_step)}"
        evidence += notes.outside_text(per_step, 0)
    if part is not None and where is None:
        ranges = measured.ranges_of(part)
        where = ranges[0].range if ranges else None
    what = "takes longer from step to step"
    yield measured.finding(what, where, part, evidence=evidence, show="--by step", ns=per_step)


def find_larger_inputs(measured: RuleInput) -> Iterator[Finding]:
    """Yield that steps take longer from where on the model gets more, if it does to the end."""
    number, ns = measured.number, measured.duration_ns
    for fqn, looks in measured.step_notes.get("inputs", {}).items():
        texts = [text for _, text in looks]
        same = texts.count(texts[0]) if texts else 0
        if texts[:same] != texts[:1] * same or len({*texts[same:]}) != 1:
            continue
        last, first = looks[same - 1][0], looks[same][0]
        before, after = ns[number <= last], ns[number >= first]
        if min(len(before), len(after)) < MIN_STEPS:
            continue
        (low_before, low), (low_after, high) = (np.percentile(side, (10, 50)).tolist() for side in (before, after))
        if min(low_after / max(low_before, 1), high / max(low, 1)) >= _LARGER_INPUTS:
            evidence = f"it gets {texts[-1]} from step {first} on, {texts[0]} until step {last}: a step takes "
            evidence += f"{short_ms(high)}, {short_ms(low)} before"
            per_step = (high - low) * len(after) / measured.steps
            yield measured.finding(
                "gets larger inputs after some steps", fqn, evidence=evidence, show="--by step", ns=per_step
            )


def _place(measured: RuleInput, added: AnyArray, most_of: float) -> tuple[str, str | None, float]:
    """Return the innermost place that most is added in, the module there or around, and the share of inner ones."""
    by_place: dict[str, list[int]] = {}
    for index, row in enumerate(measured.rows):
        by_place.setdefault(place_of(measured, row.fqn), []).append(index)
    more = {place: float(added[members].sum()) for place, members in by_place.items()}
    known = [place for place, ns in more.items() if ns >= _MOSTLY * most_of > 0]
    if not known:
        return "", None, 0.0
    place = max(known, key=lambda place: (place.count("."), more[place]))
    fqns = {measured.rows[index].fqn for index in by_place[place]}
    inner = [index for index, row in enumerate(measured.rows) if fqns.intersection(measured.outer[row.fqn][:1])]
    first = measured.rows[by_place[place][0]].fqn
    where = next(iter(measured.outer[first]), None) if len(fqns) > 1 else first
    return place, where, float(added[inner].sum()) / more[place]


def _runs(ns: Int64Array) -> list[Int64Array]:
    """Return the indices of steps in runs, each from where steps are short again on."""
    if len(ns) < 2 * _NEAR:
        return [np.arange(len(ns))]
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(ns, _NEAR), axis=1)
    falls = np.ones(len(ns))
    falls[_NEAR : 1 - _NEAR] = windows[_NEAR:, _NEAR // 2] / np.maximum(windows[:-_NEAR, _NEAR // 4], 1)
    low = np.flatnonzero(falls <= _FALLS_TO).tolist()
    cuts = [at for at in low if falls[at] == falls[at - _NEAR + 1 : at + _NEAR].min()]
    return np.split(np.arange(len(ns)), cuts)


_SEEN_SHARE, _LONGER = 0.05, 3
"""Share of the median step, and multiple of its own median: a part that takes less is no occasion."""
_COMPILED_AGAIN = re.compile(r"torch\.compile \d+/[1-9]")
_LAZY_BACKWARD = ": lazy backward"
"""How compilations end that come with the first backward of a graph, and say no reason."""
LARGE_EVALUATION = 0.10
"""Share of a step on average, or of most steps: who trains evaluates."""
_LEAST_PERIODS = 3
"""How often it has to come at the same distance for that to be a period."""
_ALWAYS = ("forward", "backward", "recompute", "loss", OTHER)
"""Parts of which only a much longer one counts: see `StepParts.cause`."""
LOADER_START = "DataLoader.__iter__"
"""How the name of the range ends in which a loader shuffles, and starts its workers."""
_USUALLY = ("data loading", "optimizer", "communication")
"""Parts of the same kind where most steps have them."""
_SLOW_STEPS, _BY_ONE = 3.0, 2.0
"""What a slow step has to take more, in median steps, but for one of a period: for less the system may be why; and less
if one module of a list takes it, and it is known how long the thread waited for a processor."""
_LEAST_STALL_NS = 15_000_000
"""The same in time, as threads of Python wait for each other, 5 ms for each, and a tiny step is shorter than that."""
_OUTLASTS = 3
"""How many times as long as slow steps by other causes one has to be slow."""
_OF_MACHINE = 0.5
"""What share of what slow steps take more their thread has waited for a processor, if the machine made them slow."""
_LARGER = 3.0
"""How many times as long as usual forward and backward both take if there is more to compute."""
_LONGEST_WAIT_NS, _WAITS = 50_000_000, 4.0
"""Where it is only known how long all calls waited together, what is longer is none of these waits, if they are less
than so many times as long."""
_LONG_CALL, _LONG_CALLS_SHARE = 4.0, 0.2
"""In usual calls, what a long one takes at least, and the share of all time that all of these have if it is said."""
_LONGEST_LOOK_NS = 50_000_000
"""What is shorter is the Python engine's look at the step after 1, 2, 4, 8 … others, in which it counts operators."""
_SLOW_SHARE = 0.04
"""Share of a usual step that slow steps by one cause have to take more, as a mean over all steps."""
_TRIGGERED = "", ", automatic", " by gc.collect()"
"""What is said of each of `TRIGGERS`."""


def find_occasions(measured: RuleInput) -> Iterator[Finding]:
    """Yield the parts that are long in some steps only, and compilations that come again."""
    if measured.steps < MIN_STEPS:
        return
    compiles = _is_long(measured, measured.part_ns("compile", gaps=True))
    for part in measured.parts:
        took = measured.part_ns(part, gaps=True)
        has = _is_long(measured, took)
        if part == "gc":  # what compiling allocates is collected
            has &= ~compiles
        count, more = int(np.count_nonzero(has)), took[has] - np.median(took)
        per_step = float(more.sum()) / measured.steps
        ranges = measured.ranges_of(part)
        again = [each for each in ranges if _COMPILED_AGAIN.match(each.range)]
        if (
            part in _ALWAYS
            or (part in _USUALLY and np.median(took))
            or (
                part != "gc" and np.median(took) > _SEEN_SHARE * measured.median_step_ns
            )  # short ones come in each step
            or not count
            or count > measured.steps / 2
            or per_step
            < (LARGE_EVALUATION * measured.median_step_ns if part == "evaluation" else measured.min_share_ns)
            or measured.share(per_step, gaps=True) < MIN_SHARE
            or (part == "evaluation" and _plays(measured))
        ):
            continue
        if (count == 1 and part not in ("evaluation", "compile")) or (part == "compile" and not again):
            continue  # a single one is a slow step; what is compiled once is not compiled again
        usual, longest = float(np.median(took[has])), int(took[has].max())
        evidence = f"{when_text(measured.number, has)}, {short_ms(usual)} each"
        evidence += f" (median, {short_ms(longest)} the longest)" if longest > _LONGER * usual else ""
        evidence += f", {short_ms(per_step)} a step on average"
        where = ranges[0].range if ranges and part != "gc" else None
        evidence += measured.graph_of_evaluations if part == "evaluation" else ""
        what = f"{part} comes now and then"
        if part == "gc":
            what, evidence = "garbage collection comes now and then", f"{evidence}; {collections_text(measured)}"
        elif part == "compile":
            reasons = [each for each in again if not each.range.endswith(_LAZY_BACKWARD)] or again
            where, what = reasons[0].range, "is compiled again"
            count = sum(each.calls for each in reasons)
            evidence += f"; compiled again {times_text(count)}, {short_ms(sum(each.total_ns for each in again))} in all"
        elif part == where:
            what = "comes now and then"
        show = "--by step" if where is None else "--ranges"
        yield measured.finding(what, where, part, evidence=evidence, show=show, ns=per_step, gaps=True)


def _plays(measured: RuleInput) -> bool:
    """Whether evaluations are in training mode and come before the first step: a policy plays to learn from it."""
    ranges, before = measured.ranges_of("evaluation"), measured.summary.around.before
    return "evaluation" in before and any(each.range == WITHOUT_GRADIENTS for each in ranges[:1])


def _is_long(measured: RuleInput, took: Int64Array) -> BoolArray:
    """Return bool[steps], whether a part is much longer than usual; a first step is long by what it sets up."""
    usual = float(np.median(took))
    is_long = (took - usual > _SEEN_SHARE * measured.median_step_ns) & (took > _LONGER * usual) & (measured.number > 0)
    return np.asarray(is_long, np.bool_)


def find_slow_steps(measured: RuleInput, notes: NotedSteps, explained: Container[str | None]) -> Iterator[Finding]:
    """Yield the slow steps, those with one cause and place together, but for parts that are explained."""
    if measured.steps < MIN_STEPS:
        return
    by_cause: dict[tuple[str, str], list[tuple[int, SlowPart, str]]] = {}
    steps, delays = measured.summary.step_parts, dict(measured.step_notes.get("delays", ()))
    more_ns = dict(
        zip(measured.number.tolist(), (measured.duration_ns - measured.median_step_ns).tolist(), strict=True)
    )
    overview = measured.summary.overview
    is_python = overview is not None and overview.engine == "python"
    waited_ns: int = measured.step_notes.get("waited_ns", 0)
    is_busy = bool(delays) or waited_ns > 0 or "delays" not in measured.step_notes
    # No cause is told of those that warm up, so that one of a period may be missing there.
    warm = measured.number[warm_up_steps(measured.duration_ns) :]
    for index, (cause, slow) in steps.causes.items():
        # A first step is slow by what it sets up.
        if slow.part not in explained and (number := int(steps.bounds.number[index])):
            by_cause.setdefault((slow.part, slow.module or slow.range), []).append((number, slow, cause))
    longest = {cause: max(slow.took_ns - slow.usual_ns for _, slow, _ in steps) for cause, steps in by_cause.items()}
    for (part, where), slow_steps in by_cause.items():
        most, numbers = longest[part, where], np.array([number for number, _, _ in slow_steps])
        if not period_of(numbers, warm):  # the machine may run something else meanwhile
            slow_steps = [
                (number, slow, cause)
                for number, slow, cause in slow_steps
                if not (is_python and number & (number - 1) == 0 and slow.took_ns < _LONGEST_LOOK_NS)
                and delays.get(number, 0) < _OF_MACHINE * (more := more_ns.get(number, 0))
                and waited_ns < (_OF_MACHINE if more < _LONGEST_WAIT_NS else _WAITS) * more
            ]
            numbers = np.array([number for number, _, _ in slow_steps])
        if not slow_steps:
            continue
        others = max((ns for cause, ns in longest.items() if cause != (part, where)), default=0)
        per_step = sum(slow.took_ns - slow.usual_ns for _, slow, _ in slow_steps) / max(measured.steps, 1)
        # Steps that are slow here and there are those in which the machine did other things too, if it did any.
        is_by_one = bool(delays) and "*" in place_of(measured, where)
        least = (_BY_ONE if is_by_one else _SLOW_STEPS) * measured.median_step_ns
        is_noise = not period_of(numbers, warm) and most < max(least, _OUTLASTS * others * is_busy, _LEAST_STALL_NS)
        if is_noise or per_step < _SLOW_SHARE * measured.median_step_ns:
            continue
        what = f"makes {f'step {numbers[0]}' if len(numbers) == 1 else 'some steps'} slow"
        what = f"{what} ({part})" if where else f"{part} {what}"
        slowest, _, evidence = max(slow_steps, key=lambda step: step[1].took_ns)
        if len(numbers) > 1:
            evidence = f"{when_text(measured.number, np.isin(measured.number, numbers), warm)}; {evidence}"
        if part == "data loading":
            evidence += _workers_text(measured)
        evidence += _inputs_text(measured, slowest, part)
        evidence += notes.longest_gap_text(part, per_step * measured.steps / len(slow_steps))
        # Steps that are ranges may be without modules.
        has_modules = measured.runs.calls.any() and part != OTHER
        show = f"--steps {slowest}:{slowest + 1}" if has_modules else "--by step"
        yield measured.finding(what, where or None, part, evidence=evidence, show=show, ns=per_step)


def long_calls_text(measured: RuleInput) -> str:
    """Say that few calls, if these are steps, take much of the time of all; nothing if they do not."""
    ns = measured.duration_ns
    is_long = ns > _LONG_CALL * max(measured.median_step_ns, 1.0)
    share = float(ns[is_long].sum() / max(ns.sum(), 1))
    if measured.steps < MIN_STEPS or share < _LONG_CALLS_SHARE:
        return ""
    count, period = int(np.count_nonzero(is_long)), period_of(measured.number[is_long], measured.number)
    often = f"{count} of {counted(measured.steps, 'call')}" + (f", every {_ordinal(period)}" if period else "")
    each = f"{short_ms(float(np.median(ns[is_long])))} each (usually {short_ms(measured.median_step_ns)})"
    return f"{often}, took {each}, {share:.0%} of the time of all"


def _inputs_text(measured: RuleInput, number: int, part: str) -> str:
    """Say that a step's forward and backward are both many times as long as usual, if they are."""
    works = "forward", "backward"
    took = [int(measured.part_ns(work)[measured.number == number].sum()) for work in works]
    usual = [float(np.median(measured.part_ns(work))) for work in works]
    if part not in works or any(ns < _LARGER * max(own, 1.0) for ns, own in zip(took, usual, strict=True)):
        return ""
    other = 1 - works.index(part)
    return f"; {works[other]} too: {short_ms(took[other])}, usually {short_ms(usual[other])}, as of larger inputs"


def _workers_text(measured: RuleInput) -> str:
    """Say how often workers of a loader start anew, if they do."""
    fetches = measured.ranges_of("data loading")
    begins = [each for each in fetches if each.range.endswith(LOADER_START) and each.calls > 1]
    if not begins or not any("MultiProcessing" in each.range for each in fetches):
        return ""
    took = short_ms(begins[0].p50_ns)
    return f"; workers start {times_text(begins[0].calls)}, {took} each: persistent_workers=True would keep them"


def when_text(number: Int64Array, has: BoolArray, looked_at: Int64Array | None = None) -> str:
    """Say in how many steps something is, and at which distance if that is the same in all that were looked at."""
    chosen = number[has]
    if len(chosen) == 1:
        return f"in step {chosen[0]} of {len(number)}"
    period = period_of(chosen, number if looked_at is None else looked_at)
    return f"in {len(chosen)} of {len(number)} steps" + (f", every {_ordinal(period)} step" if period else "")


def period_of(chosen: Int64Array, number: Int64Array) -> int:
    """Return the distance of some of all steps if it is the same between all, from begin to end; 0 if not, or of few.

    Three steps by chance are at one distance now and then, but most often others would have been due.
    """
    distances = set(np.diff(chosen).tolist())
    if len(chosen) < _LEAST_PERIODS or len(distances) > 1 or 1 in distances:
        return 0
    period = distances.pop()
    return period if max(chosen[0] - number[0], number[-1] - chosen[-1]) <= period else 0


def collections_text(measured: RuleInput) -> str:
    """Say which garbage collections there were, the oldest generations first, and who began them."""
    count, freed = measured.collections
    return ", ".join(
        f"{count[trigger, generation]:,} of generation {generation}{_TRIGGERED[trigger]}, "
        f"each freed {freed[trigger, generation] / count[trigger, generation]:,.0f} objects"
        for generation, trigger in np.argwhere(count.T)[::-1][:2].tolist()
    )


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number // 10 % 10 != 1 else 0, "th")
    return f"{number}{ending}"
