"""Modules that compute again in a step from the inputs of an earlier call."""

from __future__ import annotations

from collections.abc import Container, Iterator

from ..slow_steps import short_ms
from .finding import Finding, RuleInput, only_option, times_text
from .noted import MIN_SAME_INPUTS, NotedSteps

_MIN_SAME_SHARE = 0.05
"""Minimum share of the median step for such calls, as for loops outside modules: the cause is known."""


def find_repeated(measured: RuleInput, notes: NotedSteps, reported: Container[str | None]) -> Iterator[Finding]:
    """Yield the outermost modules that are called again with the same inputs, except `reported` ones."""
    seen: set[str] = set()
    for index, row in sorted(enumerate(measured.rows), key=lambda item: item[1].fqn.count(".")):
        repeats, outer = notes.same_inputs.get(row.fqn, 0.0), measured.outer[row.fqn]
        if repeats < MIN_SAME_INPUTS or not seen.isdisjoint(outer):
            continue
        seen.add(row.fqn)
        calls = float(measured.calls[index])
        per_step = float(measured.module_median_ns[index]) * min(repeats / max(calls, 1e-9), 1.0)
        if row.fqn not in reported and per_step >= max(_MIN_SAME_SHARE * measured.median_step_ns, measured.min_ns):
            evidence = f"called {times_text(calls)} a step, {times_text(repeats)} of these with the tensors of an "
            evidence += f"earlier call, which gives the same result unless it is random: {short_ms(per_step)} a step"
            evidence += f", inside {outer[0]}" if outer else ""
            title, show = "is called again with the same inputs", only_option(row.fqn)
            yield measured.finding(title, row.fqn, "forward", evidence=evidence, show=show, ns=per_step)
