"""In which module a slow step was slow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..._typing import Int64Array
from .module_rows import Groups
from .parts import StepParts, short_ms

_OF_MODULES = ("forward", "backward", "recompute", "loss")
"""Parts in which modules run."""
_EXPLAINS = 0.5
"""What share of the time that a part takes too much a module has to take for it to be named."""
_AS_GOOD = 0.8
"""What share of it an inner module has to take to be named instead of the one around it."""


def name_places(
    steps: Sequence[StepParts],
    in_steps: Sequence[tuple[Int64Array, Int64Array, Int64Array]],
    usual_ns: Int64Array,
    groups: Groups,
) -> list[StepParts]:
    """Return the steps, with the innermost module that explains a slow one in its sentence.

    Args:
        steps: in parts.
        in_steps: of each piece: group, step and ns, what each group took in each step.
        usual_ns: int64[groups], the median of that.
        groups: of modules; for classes nothing is named.
    """
    slow = {step.step for step in steps if step.slow_by is not None and step.slow_by.part in _OF_MODULES}
    if not slow or not any(groups.fqns):
        return list(steps)
    chosen = [np.isin(step, [*slow]) for _, step, _ in in_steps]
    group, number, took_ns = (
        np.concatenate([piece[at][rows] for piece, rows in zip(in_steps, chosen, strict=True)]) for at in range(3)
    )
    order = np.argsort(number, kind="stable")
    group, number, took_ns = group[order], number[order], took_ns[order]
    named = []
    for step in steps:
        if step.step in slow:
            own = slice(*np.searchsorted(number, (step.step, step.step + 1)))
            step = _with_place(step, group[own], took_ns[own], usual_ns, groups)
        named.append(step)
    return named


def _with_place(
    step: StepParts, group: Int64Array, took_ns: Int64Array, usual_ns: Int64Array, groups: Groups
) -> StepParts:
    more, slow = took_ns - usual_ns[group], step.slow_by
    if slow is None or not len(more) or more.max() < _EXPLAINS * (slow.took_ns - slow.usual_ns):
        return step
    rows = np.flatnonzero(more >= _AS_GOOD * more.max()).tolist()
    row = max(rows, key=lambda row: (groups.fqns[group[row]].count("."), more[row]))
    fqn = groups.fqns[group[row]]
    sentence = f"{step.cause}; {fqn} {short_ms(took_ns[row])}, usually {short_ms(usual_ns[group[row]])}"
    return step._replace(cause=sentence, slow_by=slow._replace(module=fqn))
