"""Calls and times per module, added up from the columns of a timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..._typing import BoolArray, Int64Array
from ..columns import BACKWARD, FORWARD, PHASES, RECOMPUTE, Columns
from ..gpu_tracks import without_gpu
from .module_summary import Summary
from .module_times import ModuleTimes

if TYPE_CHECKING:
    from ..timeline import Timeline

__all__ = ["summarize"]


def summarize(timeline: Timeline) -> Summary:
    """Add up calls and CPU times per module; what ran on a GPU counts for neither."""
    timeline = without_gpu(timeline)
    columns = timeline.columns
    index_of: dict[str, int] = {}
    for name in timeline.names:
        index_of.setdefault(name.fqn, len(index_of))
    classes = {name.fqn: name.module_class for name in reversed(timeline.names)}
    module = np.array([index_of[name.fqn] for name in timeline.names], np.int64)[columns.name]
    total_ns, self_ns, calls = _add_up(columns, module, len(index_of))
    called, first = np.unique(module, return_index=True)
    fqns = list(index_of)
    rows = [
        ModuleTimes(
            fqns[index],
            classes[fqns[index]],
            int(calls[index]),
            *(int(times[phase, index]) for phase in (FORWARD, BACKWARD, RECOMPUTE) for times in (total_ns, self_ns)),
        )
        for index in called[np.argsort(first)].tolist()
    ]
    return Summary(rows, len(rows), int(np.count_nonzero(~columns.complete)), timeline.stats.overwritten)


def _add_up(columns: Columns, module: Int64Array, modules: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return total and self time as int64[phase, module] in ns, and forward calls as int64[module]."""
    phase = columns.phase.astype(np.int64)
    duration = columns.end - columns.start
    in_children = np.zeros(len(columns), np.int64)
    has_parent = columns.parent >= 0
    np.add.at(in_children, columns.parent[has_parent], duration[has_parent])
    total_ns = np.zeros((len(PHASES), modules), np.int64)
    self_ns = np.zeros_like(total_ns)
    outermost = ~_within_itself(columns, module)
    np.add.at(total_ns, (phase[outermost], module[outermost]), duration[outermost])
    np.add.at(self_ns, (phase, module), duration - in_children)
    calls = np.bincount(module[phase == FORWARD], minlength=modules)
    return total_ns, self_ns, calls


def _within_itself(columns: Columns, module: Int64Array) -> BoolArray:
    """Return which spans lie inside a span of the same module and phase, at any distance."""
    within = np.zeros(len(columns), np.bool_)
    span = np.flatnonzero(columns.parent >= 0)
    outer = columns.parent[span]
    while len(span):
        same = (module[outer] == module[span]) & (columns.phase[outer] == columns.phase[span])
        within[span[same]] = True
        outer = columns.parent[outer]
        climbs = ~same & (outer >= 0)
        span, outer = span[climbs], outer[climbs]
    return within
