"""The usual methods to compare two sets of recordings, in a few lines; `modtrace.diff` is compared with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from modtrace import Timeline
from modtrace.timeline import PHASES

LIMIT = 0.05
"""Minimum relative difference of a change."""


def mean_per_name(timeline: Timeline) -> dict[str, float]:
    """Return the mean time per step of each module and phase, including inner modules, as a script would print it."""
    columns, names = timeline.columns, timeline.names
    keys = columns.name.astype(np.int64) * len(PHASES) + columns.phase
    total = np.bincount(keys, columns.end - columns.start)
    steps = len(np.unique(columns.step))
    return {
        f"{names[key // len(PHASES)].fqn} {PHASES[key % len(PHASES)]}": float(total[key]) / steps
        for key in np.unique(keys).tolist()
    }


def totals_per_slice(timeline: Timeline) -> dict[str, float]:
    """Return the total duration of the slices of each name, as computed by HTA's TraceDiff and a query in Perfetto."""
    columns, names = timeline.columns, timeline.names
    labels = np.array([name.label for name in names])[columns.name]
    distinct, index = np.unique(labels, return_inverse=True)
    return dict(zip(distinct.tolist(), np.bincount(index, columns.end - columns.start).tolist(), strict=True))


def changed(base: Sequence[Mapping[str, float]], new: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the names whose mean times differ by more than 5 %, the largest difference in ns first."""
    keys = {key for run in (*base, *new) for key in run}
    before, after = ({key: float(np.mean([run.get(key, 0.0) for run in side])) for key in keys} for side in (base, new))
    differing = [key for key in keys if abs(after[key] - before[key]) > LIMIT * before[key]]
    return sorted(differing, key=lambda key: -abs(after[key] - before[key]))
