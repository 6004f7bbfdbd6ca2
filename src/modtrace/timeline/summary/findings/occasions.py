"""What comes now and then: in some steps only, or in a single slow one."""

from __future__ import annotations

from collections.abc import Container, Iterator

import numpy as np

from ...._typing import BoolArray, Int64Array
from ..parts import OTHER, SlowPart, short_ms
from .finding import TRACE, Finding, times_text
from .measured import Measured

_LEAST_STEPS = 4
"""With fewer steps nothing is known to come now and then."""
_LEAST_SHARE = 0.02
"""Of the median step, on average: less is not worth a change."""
_SEEN_SHARE = 0.01
"""Of the median step: a shorter part does not count as one that a step has; collections of 0.1 ms are in any step."""
_LEAST_PERIODS = 3
"""How often it has to come at the same distance for that to be a period."""
_ALWAYS = ("forward", "backward", "recompute", "loss", OTHER)
"""Parts of which only a much longer one counts: see `StepParts.cause`."""
_SLOW_STEPS = 3.0
"""What a slow step has to take more, in median steps: for less the system may have stopped the process."""
_SLOW_SHARE = 0.04
"""Of all steps: what slow steps by one cause have to take more."""


def find_occasions(measured: Measured) -> Iterator[Finding]:
    """Yield the parts that only some steps have, and compilations that come again."""
    if measured.steps < _LEAST_STEPS:
        return
    for part in measured.parts:
        took = measured.of_part(part)
        has = took > _SEEN_SHARE * measured.usual_ns
        per_step, count = float(took[has].sum()) / measured.steps, int(np.count_nonzero(has))
        again = [each for each in measured.ranges_of(part) if ": " in each.range] if part == "compile" else []
        if part in _ALWAYS or not 0 < count <= measured.steps / 2 or per_step < _LEAST_SHARE * measured.usual_ns:
            continue
        if part == "compile" and not again:  # what is compiled once is not compiled again
            continue
        when = when_text(measured.number, has)
        evidence = f"{when}, {short_ms(float(np.median(took[has])))} each, {short_ms(per_step)} a step on average"
        ranges = measured.ranges_of(part)
        where = ranges[0].range if ranges and part != "gc" else None
        what = f"{part} comes now and then"
        if part == "gc":
            what, evidence = "garbage collection comes now and then", f"{evidence}; {_collections(measured, has)}"
        elif part == "compile":
            where, what = again[0].range, "is compiled again"
            count = sum(each.calls for each in again)
            evidence += f"; compiled again {times_text(count)}, {short_ms(sum(each.total_ns for each in again))} in all"
        elif part == where:
            what = "comes now and then"
        share, command = measured.share(per_step), "--by step" if where is None else "--ranges"
        yield Finding(what, where, part, round(per_step), share, evidence, f"modtrace summary {TRACE} {command}")


def find_slow_steps(measured: Measured, explained: Container[str | None]) -> Iterator[Finding]:
    """Yield the slow steps, those with one cause and place together, but for parts that are explained."""
    by_cause: dict[tuple[str, str], list[tuple[int, SlowPart, str]]] = {}
    for step in measured.summary.step_parts:
        # A first step is slow by what it sets up.
        if (slow := step.slow_by) is not None and slow.part not in explained and step.step:
            where = slow.module or slow.range
            by_cause.setdefault((slow.part, where), []).append((step.step, slow, step.cause or ""))
    for (part, where), slow_steps in by_cause.items():
        more = [slow.took_ns - slow.usual_ns for _, slow, _ in slow_steps]
        per_step = sum(more) / max(measured.steps, 1)
        is_noise = max(more) < _SLOW_STEPS * measured.usual_ns and len(more) < _LEAST_PERIODS
        if is_noise or per_step < _SLOW_SHARE * measured.usual_ns:
            continue
        numbers = np.array([number for number, _, _ in slow_steps])
        what = f"makes step {numbers[0]} slow ({part})" if len(numbers) == 1 else f"makes some steps slow ({part})"
        evidence = slow_steps[int(np.argmax(more))][2]
        if len(numbers) > 1:
            evidence = f"{when_text(measured.number, np.isin(measured.number, numbers))}; {evidence}"
        if not where:
            what = f"{part} {what}"
        command = f"modtrace summary {TRACE} --steps {numbers[0]}"
        share = measured.share(per_step)
        yield Finding(what, where or None, part, round(per_step), share, evidence, command)


def when_text(number: Int64Array, has: BoolArray) -> str:
    """Say in how many steps something is, and at which distance if that is always the same."""
    chosen = number[has]
    if len(chosen) == 1:
        return f"in step {chosen[0]} of {len(number)}"
    text, distance = f"in {len(chosen)} of {len(number)} steps", np.diff(chosen)
    if len(chosen) >= _LEAST_PERIODS and (distance == distance[0]).all() and distance[0] > 1:
        return f"{text}, every {_ordinal(int(distance[0]))} step"
    return text


def _collections(measured: Measured, has: BoolArray) -> str:
    """Say which garbage collections there were, and whether they come as often as a program's own calls would."""
    count, freed = measured.collections
    text = ", ".join(
        f"{number:,} of generation {generation}, each freed {total / number:,.0f} objects"
        for generation, number, total in reversed(
            [*zip(range(len(count)), count.tolist(), freed.tolist(), strict=True)]
        )
        if number
    )
    chosen = measured.number[has]
    regular = len(chosen) >= _LEAST_PERIODS and len(set(np.diff(chosen).tolist())) == 1
    if count[:2].sum() == 0 and regular:
        return f"{text}; at a fixed distance and never a younger one: as gc.collect() of the program does"
    return text


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number // 10 % 10 != 1 else 0, "th")
    return f"{number}{ending}"
