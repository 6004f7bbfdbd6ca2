"""Self times of modules per rank and step against the slowest of their like elsewhere: for ranks of a pipeline."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..._typing import Float64Array, Int64Array
from ...timeline import PHASES
from ..rank_tables import SpanTable, take
from .late_steps import MAD_TO_SIGMA
from .own_time import OwnTime
from .runs import median_of_runs, run_lengths, run_starts, slowest_of_others
from .segments import segments_of

__all__ = ["ModuleTimes", "module_times"]

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class ModuleTimes(NamedTuple):
    """What modules took in each step; arrays of equal length.

    Attributes:
        fqns: what `fqn` points into.
        rank: int64.
        step: int64.
        fqn: int64.
        phase: int64, index into `timeline.PHASES`.
        own: int64, self time, ns.
        excess: int64, by how much that is more than the slowest of its like took on other ranks, ns; 0 where there is
            none. Alike are modules of one class whose names differ by numbers (`layers.3.up` and `layers.7.up`).
        noise: float64, how much the self times of its like vary from step to step, as a deviation, ns.
    """

    fqns: list[str]
    rank: Int64Array
    step: Int64Array
    fqn: Int64Array
    phase: Int64Array
    own: Int64Array
    excess: Int64Array
    noise: Float64Array


def module_times(parts: Iterable[SpanTable], own_time: OwnTime) -> ModuleTimes:
    """Return what the modules of some ranks took.

    Args:
        parts: their spans, each rank's in one of the tables.
        own_time: the ranks' own time.
    """
    fqns: dict[str, int] = {}
    likes: dict[tuple[str, str], int] = {}
    rows = [np.empty((6, 0), np.int64)]
    for spans in parts:
        fqn = np.array([fqns.setdefault(name.fqn, len(fqns)) for name in spans.names] or [0])
        names = [(_NUMBER.sub("*", name.fqn), name.module_class) for name in spans.names]
        like = np.array([likes.setdefault(name, len(likes)) for name in names] or [0])
        by_rank = np.argsort(spans.rank, kind="stable")
        ranks, begins = np.unique(spans.rank[by_rank], return_index=True)
        for rank, chosen in zip(ranks.tolist(), np.split(by_rank, begins[1:]) if len(ranks) else [], strict=True):
            rows.append(_rank_rows(take(spans, chosen), own_time, rank, fqn, like))
    rank, step, name, phase, kind, own = np.concatenate(rows, axis=1)
    excess = _excess(rank, step, kind * len(PHASES) + phase, own)
    noise = _noise(rank, name * len(PHASES) + phase, kind * len(PHASES) + phase, own)
    return ModuleTimes(list(fqns), rank, step, name, phase, own, excess, noise)


def _rank_rows(spans: SpanTable, own_time: OwnTime, rank: int, fqn: Int64Array, like: Int64Array) -> Int64Array:
    of_rank = own_time.of_rank(rank)
    segments = segments_of(spans, of_rank, rank)
    own = of_rank.until(segments.end) - of_rank.until(segments.begin)
    name, phase = np.divmod(segments.key, len(PHASES))
    step = spans.step[segments.owner].astype(np.int64)
    key, index = np.unique(np.stack([step, fqn[name], phase, like[name]]), axis=1, return_inverse=True)
    total = np.bincount(index.ravel(), own, key.shape[1]).astype(np.int64)
    step, number, phase, kind = key
    return np.stack([np.full(len(total), rank), step, number, phase, kind, total])


def _excess(rank: Int64Array, step: Int64Array, kind: Int64Array, own: Int64Array) -> Int64Array:
    order = np.lexsort((own, rank, step, kind))
    begins = run_starts(kind[order], step[order], rank[order])
    sizes = run_lengths(begins, len(order))
    # The slowest of each rank: the last of each run.
    slowest = order[begins + sizes - 1]
    by_size = np.lexsort((own[slowest], step[slowest], kind[slowest]))
    ordered = slowest[by_size]
    groups = run_starts(kind[ordered], step[ordered])
    count = run_lengths(groups, len(ordered))
    compared = np.repeat(count, count) > 1
    usual = np.full(len(slowest), -1)
    if np.any(compared):
        values = own[ordered[compared]]
        again = run_starts(kind[ordered[compared]], step[ordered[compared]])
        usual[by_size[compared]] = slowest_of_others(values, again)
    of_row = np.empty(len(own), np.int64)
    of_row[order] = np.repeat(usual, sizes)
    return np.where(of_row >= 0, own - of_row, 0)


def _noise(rank: Int64Array, module: Int64Array, kind: Int64Array, own: Int64Array) -> Float64Array:
    """Return the deviations of the modules of a kind from what each takes at the median of its steps."""
    order = np.lexsort((own, module, rank))
    begins = run_starts(module[order], rank[order])
    rest = np.empty(len(own))
    usual = np.repeat(median_of_runs(own[order], begins), run_lengths(begins, len(order)))
    rest[order] = np.abs(own[order] - usual)
    order = np.lexsort((rest, kind))
    begins = run_starts(kind[order])
    noise = np.empty(len(own))
    noise[order] = np.repeat(median_of_runs(rest[order], begins), run_lengths(begins, len(order)))
    return MAD_TO_SIGMA * noise
