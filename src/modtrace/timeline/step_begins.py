"""When the first step of a training begins: what prepares the training comes before it, and is no part of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .._numbering import number_values
from .._typing import Int64Array
from .select import first_process_tracks, outermost_calls
from .slices import BACKWARD, BACKWARD_PASS, MODULE
from .time_intervals import union_of

if TYPE_CHECKING:
    from .timeline import Timeline

NEVER = int(np.iinfo(np.int64).max)
"""When the backward of a call without one begins."""
_OTHER, _USER, _EVALUATION, _OPTIMIZER, _LOADING, _COMPILE = range(6)
_CATEGORIES = {
    "user": _USER,
    "evaluation": _EVALUATION,
    "optimizer": _OPTIMIZER,
    "data loading": _LOADING,
    "compile": _COMPILE,
}


def find_step_begins(timeline: Timeline, start: Int64Array, end: Int64Array) -> Int64Array:
    """Return when each step begins: where the one before it ended, but for the first step of a training.

    A training begins with a step whose modules had not trained before. That step begins with its first call that has a
    backward, or with what leads to it: loading data, compiling, and what takes no longer than the rest of the step.
    What is before a pause as long as all that follows it is before the step.
    """
    begins: Int64Array = start.copy()
    if timeline.begin_ns is None or timeline.trained is not None:
        items = _Items(timeline)
        for step in items.first_steps(end):
            begins[step] = items.begin(int(start[step]), int(end[step]))
    return begins


def trained_modules(timeline: Timeline, before: int | None = None) -> frozenset[str]:
    """Return the names of the modules that trained, perhaps before a step: their outermost calls have a backward."""
    slices, roots = timeline.slices, outermost_calls(timeline)
    trained = roots[backward_starts(timeline, roots) < NEVER]
    if before is not None:
        trained = trained[slices.step[trained] < before]
    names = frozenset(timeline.names[name].fqn for name in np.unique(slices.name[trained]).tolist())
    return names | (timeline.trained or frozenset())


class _Items:
    """What threads of the first process did outside of evaluations: the things with which a step can begin."""

    def __init__(self, timeline: Timeline) -> None:
        slices, names = timeline.slices, timeline.names
        self._timeline, own = timeline, first_process_tracks(timeline)[slices.track]
        of_name = [_CATEGORIES.get(name.category or "", _OTHER) for name in names]
        category = np.array([*of_name, _OTHER], np.int8)[slices.name]
        evaluations = np.flatnonzero(category == _EVALUATION)
        evaluated = union_of(slices.start[evaluations], slices.end[evaluations])
        is_item = (category > _OTHER) | (slices.kind == BACKWARD_PASS)
        is_item[outermost_calls(timeline)] = True
        rows = np.flatnonzero(is_item & own)
        rows = rows[~evaluated.hold(slices.start[rows])]
        self._rows = rows[np.argsort(slices.start[rows], kind="stable")]
        self._start, self._end = slices.start[self._rows], slices.end[self._rows]
        self._category = category[self._rows]
        self._backward = np.full(len(self._rows), NEVER)
        calls = slices.kind[self._rows] == MODULE
        self._backward[calls] = backward_starts(timeline, self._rows[calls])
        fqns = np.unique([name.fqn for name in names] or [""], return_inverse=True)
        self._fqns, self._fqn = fqns[0], np.where(calls, fqns[1][slices.name[self._rows]], -1)

    def first_steps(self, end: Int64Array) -> list[int]:
        """Return the indices of steps that begin a training, as the first of a whole recording does."""
        trained = np.flatnonzero(self._backward < NEVER)
        step, fqn = np.searchsorted(end, self._backward[trained], side="right"), self._fqn[trained]
        first = np.full(len(self._fqns), len(end))
        np.minimum.at(first, fqn, step)
        known = [number for number, name in enumerate(self._fqns.tolist()) if name in (self._timeline.trained or ())]
        first[known] = -1
        trains = np.bincount(step, minlength=len(end))[: len(end)] > 0
        trains[step[(first[fqn] < step) & (step < len(end))]] = False
        trains[:1] |= self._timeline.begin_ns is None
        first_steps: list[int] = np.flatnonzero(trains).tolist()
        return first_steps

    def begin(self, low: int, high: int) -> int:
        """Return when a first step begins that ends at `high`, where the one before it ended at `low`."""
        within = slice(*np.searchsorted(self._start, (low, high)))
        start, end, fqn = self._start[within], self._end[within], self._fqn[within]
        category, backward = self._category[within], self._backward[within]
        trains = backward < high
        if not trains.any():
            trains = fqn >= 0
            backward = np.where(trains, start, NEVER)
        if not trains.any():
            return low
        trained_start, backward = start[trains], backward[trains]
        busy = union_of(start[category != _USER], end[category != _USER])
        begin, at = NEVER, int(trained_start[-1])
        while at < begin:
            index = int(np.searchsorted(busy.start, at, side="right")) - 1
            while index > 0 and busy.start[index] - busy.end[index - 1] <= high - busy.start[index]:
                index -= 1
            # A call whose backward is in the step is too, however long its loss takes.
            begin = int(trained_start[trained_start >= busy.start[index]].min())
            at = int(trained_start[backward >= begin].min(initial=begin))
        since = 2 * begin - high
        takes_long = (category >= _LOADING) & (end >= since)
        leads = (start < begin) & ((start >= since) | takes_long) & ~np.isin(fqn, fqn[trains])
        leads &= (end <= high) | (category == _OPTIMIZER)
        return int(start[leads].min(initial=begin))


def backward_starts(timeline: Timeline, calls: Int64Array) -> Int64Array:
    """Return when the backward of each call begins; the largest number if it has none."""
    slices = timeline.slices
    rows = slices.block_of(MODULE)
    backward = np.flatnonzero((slices.phase[rows] == BACKWARD) & (slices.link[rows] >= 0))
    link, at = number_values(slices.link[backward])
    starts, of_call = np.full(len(link) + 1, NEVER), slices.link[calls]
    np.minimum.at(starts, at, slices.start[backward])
    return np.where(np.isin(of_call, link), starts[np.searchsorted(link, of_call)], NEVER)
