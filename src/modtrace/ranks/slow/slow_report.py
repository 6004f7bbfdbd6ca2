"""Who was late, as text, tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..._tables import Table
from ..._terminal import counted
from ...ring.collective_text import format_ranks
from .findings import LateRank, SlowRun
from .step_finding import OUTSIDE, StepFinding

__all__ = ["headline", "module_table", "rank_table", "step_finding_table", "to_json"]

_OUTSIDE_TEXT = "(outside modules)"
_HEADLINE_RANKS = 3


def headline(run: SlowRun) -> list[str]:
    """Say in some lines what came out."""
    told = [step for step in run.steps if step.verdict == "late"]
    unsure = sum(step.verdict == "cannot tell" for step in run.steps)
    lines = [f"{counted(run.ranks, 'rank')}, {counted(len(run.steps), 'step')}; {_bound_text(run.steps)}"]
    slow = [one for one in run.late if one.is_slow]
    lines += [_rank_line(one, run) for one in slow[:_HEADLINE_RANKS]]
    if len(slow) > _HEADLINE_RANKS:
        lines.append(f"so were ranks {format_ranks([one.rank for one in slow[_HEADLINE_RANKS:]])}")
    if not slow:
        lines.append("no rank is slower than the others again and again")
    once = len(told) - sum(one.steps for one in slow)
    if once:
        lines.append(f"in {counted(once, 'step')} one rank or another was late now and then")
    if unsure:
        steps = counted(unsure, "step")
        lines.append(f"in {steps} who was late cannot be told: by less than the times of ranks are off")
    return lines


def _rank_line(one: LateRank, run: SlowRun) -> str:
    each = one.cost_ns / max(one.steps, 1) / 1e6
    where = ", ".join(_module_text(fqn, phase) for fqn, phase, *_ in one.modules[:1])
    share = f", {100 * one.saved_ns / run.duration_ns:.1f} % of the run" if run.duration_ns else ""
    return (
        f"rank {one.rank} was late in {one.steps:,} of {counted(len(run.steps), 'step')}, by {each:,.3f} ms on average"
        + (f", mostly in {where}" if where else "")
        + f"; like the others it would have saved {one.saved_ns / 1e6:,.3f} ms{share}"
    )


def rank_table(run: SlowRun, limit: int | None = None) -> Table:
    """Return the late ranks by what they cost."""
    rows = [
        [
            str(one.rank),
            str(one.steps),
            f"{one.cost_ns / 1e6:,.3f}",
            f"{one.saved_ns / 1e6:,.3f}",
            "slow" if one.is_slow else "now and then",
            _module_text(*one.modules[0][:2]) if one.modules else "",
        ]
        for one in run.late[:limit]
    ]
    headings = ["rank", "late in steps", "cost ms", "saved ms", "verdict", "mostly in"]
    return Table(headings, rows, ["number", "number", "number", "number", "text", "name"], [0] * 6)


def module_table(run: SlowRun, limit: int | None = None) -> Table:
    """Return the modules in which ranks were late, by what that cost."""
    totals: dict[tuple[str, str], list[int]] = {}
    ranks: dict[tuple[str, str], list[int]] = {}
    for one in run.late:
        for fqn, phase, steps, cost in one.modules:
            total = totals.setdefault((fqn, phase), [0, 0])
            total[0] += steps
            total[1] += cost
            ranks.setdefault((fqn, phase), []).append(one.rank)
    in_order = sorted(totals.items(), key=lambda item: -item[1][1])[:limit]
    rows = [
        [fqn or _OUTSIDE_TEXT, phase, str(steps), f"{cost / 1e6:,.3f}", format_ranks(ranks[fqn, phase])]
        for (fqn, phase), (steps, cost) in in_order
    ]
    kinds: list[Any] = ["name", "text", "number", "number", "text"]
    return Table(["module", "phase", "late in steps", "cost ms", "ranks"], rows, kinds, [0] * 5)


def step_finding_table(run: SlowRun, limit: int | None = None) -> Table:
    """Return the steps, those that lost most first."""
    in_order = sorted(run.steps, key=lambda step: (step.verdict != "late", -step.cost_ns, step.step))
    rows = [_step_row(step) for step in in_order[:limit]]
    headings = ["step", "verdict", "rank", "module", "phase", "cost ms", "late by ms", "± µs", "step ms"]
    kinds: list[Any] = ["number", "text", "number", "name", "text", "number", "number", "number", "number"]
    return Table(headings, rows, kinds, [0] * len(headings))


def _step_row(step: StepFinding) -> list[str]:
    worst = step.modules[0] if step.modules else None
    told = step.verdict != "even"
    return [
        str(step.step),
        step.verdict,
        str(step.rank) if told else "",
        "" if worst is None else worst.fqn or _OUTSIDE_TEXT,
        "" if worst is None else worst.phase,
        f"{step.cost_ns / 1e6:,.3f}" if told else "",
        f"{step.lateness_ns / 1e6:,.3f}" if told else "",
        f"{step.bound_ns / 1e3:,.1f}",
        f"{step.duration_ns / 1e6:,.3f}" if step.duration_ns else "",
    ]


def to_json(run: SlowRun) -> dict[str, Any]:
    """Return all as JSON values; times are ns."""
    return {
        "ranks": run.ranks,
        "duration_ns": run.duration_ns,
        "saved_ns": run.saved_ns,
        "late_ranks": [
            {
                **one._asdict(),
                "modules": [
                    {"fqn": fqn, "phase": phase, "steps": steps, "cost_ns": cost}
                    for fqn, phase, steps, cost in one.modules
                ],
            }
            for one in run.late
        ],
        "steps": [{**step._asdict(), "modules": [module._asdict() for module in step.modules]} for step in run.steps],
    }


def _bound_text(steps: Sequence[StepFinding]) -> str:
    bound = max((step.bound_ns for step in steps), default=0)
    if not bound:
        return "ranks that wait for each other read one clock"
    return f"times of two ranks are off by at most {bound / 1e3:,.1f} µs"


def _module_text(fqn: str, phase: str) -> str:
    return f"{fqn} {phase}" if fqn != OUTSIDE else _OUTSIDE_TEXT
