"""What several processes did in the last seconds, together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..timeline.summary.module_rows import fold_below
from .rank_rates import RankRates

__all__ = ["SORT_KEYS", "ModuleRate", "merge_ranks", "sort_modules"]

SORT_KEYS = ("self", "total", "forward", "backward", "calls", "name")


class ModuleRate(NamedTuple):
    """What one module takes, as the mean over ranks; shares are of the time that passes, 1 is all of it.

    Attributes:
        fqn: the module's fully qualified name.
        calls_per_s: how often its forward runs in a second.
        self_share: in it and outside of modules inside it.
        total_share: in it, in all phases.
        forward_share: in forward.
        backward_share: in backward and recompute.
        busiest_share: the largest self share of a rank.
        busiest_rank: that rank; None where there is one rank only, or it is not known.
    """

    fqn: str
    calls_per_s: float
    self_share: float
    total_share: float
    forward_share: float
    backward_share: float
    busiest_share: float
    busiest_rank: int | None


def merge_ranks(ranks: Sequence[RankRates], max_depth: int | None) -> list[ModuleRate]:
    """Return what each module takes, in the order in which modules were first called.

    Args:
        ranks: those without any module do not count.
        max_depth: how many levels of modules; the self time of those below counts to the last.
    """
    measured = [rank for rank in ranks if rank.rows and rank.window_ns]
    found: dict[str, list[float]] = {}
    busiest: dict[str, tuple[float, int | None]] = {}
    for rank in measured:
        rows = rank.rows if max_depth is None else fold_below(rank.rows, max_depth)
        for row in rows:
            backward_ns = row.backward_ns + row.recompute_ns
            values = [1e9 * row.calls, row.self_ns, row.total_ns, row.forward_ns, backward_ns]
            shares = [value / rank.window_ns for value in values]
            found[row.fqn] = [a + b for a, b in zip(found.get(row.fqn, [0.0] * 5), shares, strict=True)]
            if shares[1] >= busiest.get(row.fqn, (0.0, None))[0]:
                busiest[row.fqn] = (shares[1], rank.state.rank)
    several = len(measured) > 1
    modules = []
    for fqn, totals in found.items():
        calls, own, total, forward, backward = (value / len(measured) for value in totals)
        share, number = busiest[fqn]
        modules.append(ModuleRate(fqn, calls, own, total, forward, backward, share, number if several else None))
    return modules


def sort_modules(modules: Sequence[ModuleRate], key: str) -> list[ModuleRate]:
    """Return modules by one of `SORT_KEYS`, the largest first; by name as names are sorted."""
    if key == "name":
        return sorted(modules)
    field = "calls_per_s" if key == "calls" else f"{key}_share"
    return sorted(modules, key=lambda module: -float(getattr(module, field)))
