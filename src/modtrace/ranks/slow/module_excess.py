"""Which module a late rank spent the time in: self times between two arrivals, against those of other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..._typing import Int64Array
from ...timeline import PHASES
from ..rank_tables import SpanTable, take
from .arrivals import Arrivals
from .late_steps import LateStep
from .own_time import OwnTime
from .segments import segments_of
from .step_finding import OUTSIDE, ModuleExcess

__all__ = ["module_excess", "peers_of"]

_MAX_PEERS = 32
"""Ranks that one is compared with: more do not change the median."""


class _Windows(NamedTuple):
    """From one arrival of a rank to the next one, on the axis of `OwnTime`."""

    begin: Int64Array
    end: Int64Array


def peers_of(found: Arrivals, late: LateStep) -> list[int]:
    """Return the ranks that a late one is compared with: of those that came to the same collectives, evenly chosen."""
    ranks = np.unique(found.rank[_rows_of(found, late)])
    ranks = ranks[ranks != late.finding.rank]
    if len(ranks) > _MAX_PEERS:
        # Those beside it first: they lie in the same part of a dataset.
        at = int(np.searchsorted(ranks, late.finding.rank))
        first = min(max(at - _MAX_PEERS // 2, 0), len(ranks) - _MAX_PEERS)
        ranks = ranks[first : first + _MAX_PEERS]
    return [int(rank) for rank in ranks]


def module_excess(
    found: Arrivals, late: LateStep, peers: Sequence[int], spans: SpanTable, own_time: OwnTime
) -> list[ModuleExcess]:
    """Return the modules in which the late rank of a step took more than others, the worst first.

    Args:
        found: all arrivals.
        late: the step.
        peers: the ranks to compare with.
        spans: at least those of the late rank and of `peers` from the step before to this one.
        own_time: the ranks' own time.
    """
    keys = [(name.fqn, phase) for name in spans.names for phase in range(len(PHASES))]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    number_of = np.array([numbers[key] for key in keys] or [0], np.int64)
    outside = len(numbers)
    times = np.zeros((1 + len(peers), outside + 1))
    rows = _rows_of(found, late)
    for row, rank in enumerate([late.finding.rank, *peers]):
        windows, own = _windows(found, rows[found.rank[rows] == rank])
        part = take(spans, spans.rank == rank)
        of_rank = own_time.of_rank(rank)
        segments = segments_of(part, of_rank, rank)
        for begin, end in zip(windows.begin.tolist(), windows.end.tolist(), strict=True):
            inside = np.clip(segments.end, begin, end), np.clip(segments.begin, begin, end)
            length = of_rank.until(inside[0]) - of_rank.until(inside[1])
            times[row] += np.bincount(number_of[segments.key], length, outside + 1)
        times[row, outside] = max(own - times[row, :outside].sum(), 0)
    usual = np.median(times[1:], axis=0) if peers else np.zeros(outside + 1)
    more = times[0] - usual
    names = [*numbers, (OUTSIDE, -1)]
    order = np.argsort(-more, kind="stable")
    return [
        ModuleExcess(
            names[number][0],
            PHASES[names[number][1]] if names[number][1] >= 0 else "",
            round(more[number]),
            round(times[0, number]),
        )
        for number in order.tolist()
        if more[number] > 0
    ]


def _rows_of(found: Arrivals, late: LateStep) -> Int64Array:
    """Return the arrivals of all ranks at the collectives that a late rank came to last."""
    wanted = np.unique(found.collective[late.arrivals])
    begins, ends = np.searchsorted(found.collective, wanted), np.searchsorted(found.collective, wanted + 1)
    parts = [np.arange(begin, end) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    return np.concatenate([np.empty(0, np.int64), *parts])


def _windows(found: Arrivals, rows: Int64Array) -> tuple[_Windows, int]:
    """Return what lies before a rank's arrivals, and its own time in it."""
    rows = rows[found.place_before[rows] >= 0]
    return _Windows(found.place_before[rows], found.place[rows]), int(found.own[rows].sum())
