"""Which ranks are late more often than chance has it: those that are slow, and not late now and then."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

__all__ = ["NO_RANK", "at_least", "often_late"]

NO_RANK = -1
"""Stands for the rank of a step in which none was late."""
_SIGNIFICANT = 1e-3
_LATE_BY_CHANCE = 0.02
"""In what part of the steps a rank is taken to be late by chance where most never are; less where there are many."""


def often_late(late: Sequence[int], ranks: int) -> set[int]:
    """Return the ranks that are late more often than chance has it.

    Chance has a rank late as often as the median rank is. What makes ranks late by chance lasts for a while, as when
    something else has their processors, so steps in a row are not as many chances: they count as parts of the runs that
    the ranks have which are late by chance.

    Args:
        late: of each step, in order, which rank was late, or `NO_RANK`.
        ranks: how many ranks there are.
    """
    counts = Counter(rank for rank in late if rank != NO_RANK)
    usual = sorted([*counts.values(), *[0] * (ranks - len(counts))])[(ranks - 1) // 2] if ranks else 0

    def often(among: set[int], length: float) -> set[int]:
        return {rank for rank in among if ranks * _chance(counts[rank], usual, len(late), ranks, length) < _SIGNIFICANT}

    found = often(set(counts), 1.0)
    runs = [len(list(steps)) for rank, steps in groupby(late) if rank != NO_RANK and rank not in found]
    return often(found, sum(runs) / len(runs)) if runs else found


def _chance(count: int, usual: int, steps: int, ranks: int, length: float) -> float:
    """Return how probable it is that a rank is late `count` times by chance, of runs of `length` steps."""
    own, others = int(count / length), int(usual * (ranks - 1) / length)
    # How often the others were late is a count too: of few ranks it does not tell the rate well.
    as_others = at_least(own, own + others, 1 / ranks)
    return max(as_others, at_least(own, int(steps / length), min(_LATE_BY_CHANCE, 1 / ranks)))


def at_least(count: int, of: int, probability: float) -> float:
    """Return how probable it is that something happens `count` times of `of` or more often."""
    if count <= 0 or probability >= 1:
        return 1.0
    logs = [
        math.lgamma(of + 1) - math.lgamma(n + 1) - math.lgamma(of - n + 1)
        + n * math.log(probability) + (of - n) * math.log1p(-probability)
        for n in range(count, of + 1)
    ]  # fmt: skip
    return math.fsum(math.exp(value) for value in logs)
