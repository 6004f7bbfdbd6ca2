"""What runs more often than it must: forwards without a backward, evaluations in each step, recompute."""

from __future__ import annotations

from collections.abc import Iterator

from ...memory import format_bytes
from ..slow_steps import short_ms
from .finding import TRACE, Finding, times_text
from .measured import Measured
from .siblings import place_of

_LEAST_SHARE = 0.02
"""Of the median step: less is not worth a change."""


def find_reruns(measured: Measured) -> Iterator[Finding]:
    """Yield the outermost modules whose forward runs more often than their backward, and what checkpointing costs."""
    named: set[str] = set()
    for index, row in enumerate(measured.rows) if measured.trains else ():
        calls, backed, alone_ns = (int(count) for count in measured.runs[:, index])
        per_step = alone_ns / measured.steps
        if not 0 < backed < calls or per_step < _LEAST_SHARE * measured.usual_ns:
            continue
        if named.isdisjoint(measured.outer[row.fqn]):
            yield Finding(
                "runs forward more often than backward",
                row.fqn,
                "forward",
                round(per_step),
                measured.share(per_step),
                f"forward {times_text(calls / measured.steps)} a step, backward {times_text(backed / measured.steps)}; "
                f"forwards without a backward take {short_ms(alone_ns / (calls - backed))} each",
                f"modtrace summary {TRACE} --tree",
            )
        named.add(row.fqn)
    yield from _recompute(measured)


def _recompute(measured: Measured) -> Iterator[Finding]:
    total_ns = int(measured.of_part("recompute").sum())
    per_step = total_ns / max(measured.steps, 1)
    if not total_ns or per_step < _LEAST_SHARE * measured.usual_ns:
        return
    overview = measured.summary.overview
    whole = overview.recomputed if overview is not None else {}
    again = {row.fqn: row for row in measured.rows if row.recompute_ns and row.module_class in whole}
    outermost = [row for fqn, row in again.items() if again.keys().isdisjoint(measured.outer.get(fqn, ()))]
    places = dict.fromkeys(place_of(measured, row.fqn) for row in outermost)
    evidence = f"checkpointing runs {', '.join(list(places)[:3])} again: {short_ms(per_step)} a step"
    rows = measured.summary.memory.rows if measured.summary.memory is not None else ()
    saves = sum(
        max(0, (row.retained_recompute_bytes or 0) - (row.retained_bytes or 0))
        for row in rows
        if row.fqn in again and again.keys().isdisjoint(measured.outer.get(row.fqn, ()))
    )
    evidence += f", and saves about {format_bytes(saves)}" if saves else ""
    where = outermost[0].fqn if outermost else None
    share = total_ns / measured.whole_ns
    command = f"modtrace summary {TRACE} --sort recompute"
    yield Finding("runs again in backward (recompute)", where, "recompute", round(per_step), share, evidence, command)
