"""Calls of several threads at the same time, which wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

from ..slow_steps import short_ms
from .finding import LEAST_STEPS, Finding, Measured

_AT_ONCE = 1.5
"""How many calls run at a time on average: with fewer, most run alone."""
_UNHINDERED = 0.6
"""Share of a usual call that its modules take, each as usual: they take nearly all of it where nothing stops one, be
inputs short or long, as then all modules are. What stops a thread is in one module or another."""


def find_calls_at_once(measured: Measured) -> Iterator[Finding]:
    """Yield that calls on several threads take far longer than their modules do when nothing stops them."""
    at_once, usual_ns = measured.at_once, measured.usual_ns
    if at_once < _AT_ONCE or measured.steps < LEAST_STEPS or usual_ns < measured.brief_ns:
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
    what = f"calls of {measured.threads} threads wait for each other"
    yield measured.finding(what, evidence=evidence, show="--by step", ns=usual_ns - unhindered_ns)
