"""What comes now and then: in some steps only, or in a single slow one."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

import numpy as np

from ...._arrays import BoolArray, Int64Array
from ...contents import WITHOUT_GRADIENTS
from ..parts import OTHER
from ..slow_steps import SlowPart, short_ms
from .finding import LEAST_STEPS, Finding, Measured, times_text
from .noted import NotedSteps
from .siblings import place_of

_SEEN_SHARE, _LONGER = 0.05, 3
"""Share of the median step, and multiple of its own median: a part that takes less is no occasion."""
_COMPILED_AGAIN = re.compile(r"torch\.compile \d+/[1-9]")
LARGE_EVALUATION = 0.10
"""Share of a step on average, or of most steps: who trains evaluates."""
_LEAST_PERIODS = 3
"""How often it has to come at the same distance for that to be a period."""
_ALWAYS = ("forward", "backward", "recompute", "loss", OTHER)
"""Parts of which only a much longer one counts: see `StepParts.cause`."""
LOADER_BEGINS = "DataLoader.__iter__"
"""How the name of the range ends in which a loader shuffles, and starts its workers."""
_USUALLY = ("data loading", "optimizer", "communication")
"""Parts of the same kind where most steps have them."""
_SLOW_STEPS, _BY_ONE = 3.0, 2.0
"""What a slow step has to take more, in median steps, but for one of a period: for less the system may be why; and less
if one module of a list takes it, and it is known how long the thread waited for a processor."""
_OUTLASTS = 3
"""How many times as long as slow steps by other causes one has to be slow."""
_OF_MACHINE = 0.5
"""What share of what a slow step takes more its thread has waited for a processor, if the machine made it slow."""
_LARGER = 3.0
"""How many times as long as usual forward and backward both take if there is more to compute."""
_LONGEST_WAIT_NS, _WAITS = 50_000_000, 4.0
"""Where it is only known how long all calls waited together, what is longer is none of these waits, if they are less
than so many times as long."""
_LONGEST_LOOK_NS = 50_000_000
"""What is shorter is the Python engine's look at the step after 1, 2, 4, 8 … others, in which it counts operators."""
_SLOW_SHARE = 0.04
"""Share of a usual step that slow steps by one cause have to take more, as a mean over all steps."""
_TRIGGERED = "", ", automatic", " by gc.collect()"
"""What is said of each of `TRIGGERS`."""


def find_occasions(measured: Measured) -> Iterator[Finding]:
    """Yield the parts that are long in some steps only, and compilations that come again."""
    if measured.steps < LEAST_STEPS:
        return
    compiles = _is_long(measured, measured.of_part("compile", gaps=True))
    for part in measured.parts:
        took = measured.of_part(part, gaps=True)
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
            or np.median(took) > _SEEN_SHARE * measured.usual_ns
            or not count
            or count > measured.steps / 2
            or per_step < (LARGE_EVALUATION * measured.usual_ns if part == "evaluation" else measured.least_ns)
            or (part == "evaluation" and _plays(measured))
        ):
            continue
        if (count == 1 and part not in ("evaluation", "compile")) or (part == "compile" and not again):
            continue  # a single one is a slow step; what is compiled once is not compiled again
        evidence = f"{when_text(measured.number, has)}, {short_ms(float(np.median(took[has])))} each"
        evidence += f", {short_ms(per_step)} a step on average"
        where = ranges[0].range if ranges and part != "gc" else None
        evidence += measured.graph_of_evaluations if part == "evaluation" else ""
        what = f"{part} comes now and then"
        if part == "gc":
            what, evidence = "garbage collection comes now and then", f"{evidence}; {collections_text(measured)}"
        elif part == "compile":
            where, what = again[0].range, "is compiled again"
            count = sum(each.calls for each in again)
            evidence += f"; compiled again {times_text(count)}, {short_ms(sum(each.total_ns for each in again))} in all"
        elif part == where:
            what = "comes now and then"
        show = "--by step" if where is None else "--ranges"
        yield measured.finding(what, where, part, evidence=evidence, show=show, ns=per_step, gaps=True)


def _plays(measured: Measured) -> bool:
    """Whether evaluations are in training mode and come before the first step: a policy plays to learn from it."""
    ranges, before = measured.ranges_of("evaluation"), measured.summary.around.before
    return "evaluation" in before and any(each.range == WITHOUT_GRADIENTS for each in ranges[:1])


def _is_long(measured: Measured, took: Int64Array) -> BoolArray:
    """Return bool[steps], whether a part is much longer than usual; a first step is long by what it sets up."""
    usual = float(np.median(took))
    is_long = (took - usual > _SEEN_SHARE * measured.usual_ns) & (took > _LONGER * usual) & (measured.number > 0)
    return np.asarray(is_long, np.bool_)


def find_slow_steps(measured: Measured, notes: NotedSteps, explained: Container[str | None]) -> Iterator[Finding]:
    """Yield the slow steps, those with one cause and place together, but for parts that are explained."""
    if measured.steps < LEAST_STEPS:
        return
    by_cause: dict[tuple[str, str], list[tuple[int, SlowPart, str]]] = {}
    steps, delays = measured.summary.step_parts, dict(measured.step_notes.get("delays", ()))
    more_ns = dict(zip(measured.number.tolist(), (measured.duration_ns - measured.usual_ns).tolist(), strict=True))
    overview = measured.summary.overview
    is_python = overview is not None and overview.engine == "python"
    waited_ns: int = measured.step_notes.get("waited_ns", 0)
    for index, (cause, slow) in steps.causes.items():
        # A first step is slow by what it sets up.
        if slow.part not in explained and (number := int(steps.bounds.number[index])):
            by_cause.setdefault((slow.part, slow.module or slow.range), []).append((number, slow, cause))
    longest = {cause: max(slow.took_ns - slow.usual_ns for _, slow, _ in steps) for cause, steps in by_cause.items()}
    for (part, where), slow_steps in by_cause.items():
        most, numbers = longest[part, where], np.array([number for number, _, _ in slow_steps])
        if not _period(numbers):  # the machine may run something else meanwhile
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
        # Steps that are slow here and there are those in which the machine did other things too.
        is_by_one = bool(delays) and "*" in place_of(measured, where)
        least = (_BY_ONE if is_by_one else _SLOW_STEPS) * measured.usual_ns
        is_noise = not _period(numbers) and most < max(least, _OUTLASTS * others)
        if is_noise or per_step < _SLOW_SHARE * measured.usual_ns:
            continue
        what = f"makes {f'step {numbers[0]}' if len(numbers) == 1 else 'some steps'} slow"
        what = f"{what} ({part})" if where else f"{part} {what}"
        slowest, _, evidence = max(slow_steps, key=lambda step: step[1].took_ns)
        if len(numbers) > 1:
            evidence = f"{when_text(measured.number, np.isin(measured.number, numbers))}; {evidence}"
        if part == "data loading":
            evidence += _workers_text(measured)
        evidence += _inputs_text(measured, slowest, part)
        evidence += notes.longest_gap_text(part, per_step * measured.steps / len(slow_steps))
        # Steps that are ranges may be without modules.
        show = f"--steps {slowest}:{slowest + 1}" if measured.runs[0].any() else "--by step"
        yield measured.finding(what, where or None, part, evidence=evidence, show=show, ns=per_step)


def _inputs_text(measured: Measured, number: int, part: str) -> str:
    """Say that a step's forward and backward are both many times as long as usual, if they are."""
    works = "forward", "backward"
    took = [int(measured.of_part(work)[measured.number == number].sum()) for work in works]
    usual = [float(np.median(measured.of_part(work))) for work in works]
    if part not in works or any(ns < _LARGER * max(own, 1.0) for ns, own in zip(took, usual, strict=True)):
        return ""
    other = 1 - works.index(part)
    return f"; {works[other]} too: {short_ms(took[other])}, usually {short_ms(usual[other])}, as of larger inputs"


def _workers_text(measured: Measured) -> str:
    """Say how often workers of a loader start anew, if they do."""
    fetches = measured.ranges_of("data loading")
    begins = [each for each in fetches if each.range.endswith(LOADER_BEGINS) and each.calls > 1]
    if not begins or not any("MultiProcessing" in each.range for each in fetches):
        return ""
    took = short_ms(begins[0].p50_ns)
    return f"; workers start {times_text(begins[0].calls)}, {took} each: persistent_workers=True would keep them"


def when_text(number: Int64Array, has: BoolArray) -> str:
    """Say in how many steps something is, and at which distance if that is always the same."""
    chosen = number[has]
    if len(chosen) == 1:
        return f"in step {chosen[0]} of {len(number)}"
    period = _period(chosen)
    return f"in {len(chosen)} of {len(number)} steps" + (f", every {_ordinal(period)} step" if period else "")


def _period(number: Int64Array) -> int:
    """Return the distance of some steps if it is the same between all; 0 if not, or if there are few."""
    distances = set(np.diff(number).tolist())
    return distances.pop() if len(number) >= _LEAST_PERIODS and len(distances) == 1 and 1 not in distances else 0


def collections_text(measured: Measured) -> str:
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
