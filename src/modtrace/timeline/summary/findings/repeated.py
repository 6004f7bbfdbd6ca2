"""Modules that compute again in a step from the inputs of an earlier call."""

from __future__ import annotations

from collections.abc import Container, Iterator

from ..slow_steps import short_ms
from .finding import Finding, RuleInput, only_option, times_text
from .noted import MIN_SAME_INPUTS, NotedSteps

_MIN_SAME_SHARE = 0.05
"""Minimum share of the median step for such calls, as for loops outside of modules: the cause is known."""


def find_repeated(measured: RuleInput, notes: NotedSteps, named: Container[str | None]) -> Iterator[Finding]:
    """Yield the outermost modules that are called again with the same inputs, but for those that are named."""
    seen: set[str] = set()
    for index, row in sorted(enumerate(measured.rows), key=lambda item: item[1].fqn.count(".")):
        again, around = notes.same_inputs.get(row.fqn, 0.0), measured.outer[row.fqn]
        if again < MIN_SAME_INPUTS or not seen.isdisjoint(around):
            continue
        seen.add(row.fqn)
        calls = float(measured.calls[index])
        per_step = float(measured.module_median_ns[index]) * min(again / max(calls, 1e-9), 1.0)
        if row.fqn not in named and per_step >= max(_MIN_SAME_SHARE * measured.median_step_ns, measured.min_ns):
            evidence = (
                f"called {times_text(calls)} a step, {times_text(again)} of these with the tensors of an earlier "
            )
            evidence += f"call, which gives the same result: {short_ms(per_step)} a step"
            evidence += f", inside {around[0]}" if around else ""
            title, show = "is called again with the same inputs", only_option(row.fqn)
            yield measured.finding(title, row.fqn, "forward", evidence=evidence, show=show, ns=per_step)
