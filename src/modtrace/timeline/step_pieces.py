"""Starts of training steps, and long timelines in pieces of whole steps, of which memory holds one at a time."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from .._arrays import INT64_MAX, INT64_MIN, Int64Array, number_values
from .contents import COUNTED
from .join import put_modules_before
from .nesting import union_of
from .select import first_ended_step, first_process_tracks, keep_rows, outermost_calls, samples_between
from .slices import BACKWARD, BACKWARD_PASS, DTYPES, FORWARD, MODULE, RANGE, Arg, Slices, take_args

if TYPE_CHECKING:
    from .timeline import Timeline


_OTHER, _USER, _EVALUATION, _OPTIMIZER, _LOADING, _COMPILE = range(6)
_CATEGORIES = {
    "user": _USER,
    "evaluation": _EVALUATION,
    "optimizer": _OPTIMIZER,
    "data loading": _LOADING,
    "compile": _COMPILE,
}


def find_step_starts(timeline: Timeline, start: Int64Array, end: Int64Array) -> Int64Array:
    """Return the start of each step: the end of the previous one, except for the first step of a training.

    A training starts with a step whose modules had not trained before. That step starts with its first call that has a
    backward, or with the work that leads to it: data loading, compiling, and slices no longer than the rest of the
    step. It starts after a pause that is as long as everything that follows.
    """
    starts: Int64Array = start.copy()
    if timeline.begin_ns is None or timeline.trained is not None:
        items = _Items(timeline)
        for step in items.first_steps(end):
            starts[step] = items.first_start(int(start[step]), int(end[step]))
    return starts


def trained_modules(timeline: Timeline, end_step: int | None = None) -> frozenset[str]:
    """Return the names of modules whose outermost calls (before `end_step`) have a backward."""
    slices, roots = timeline.slices, outermost_calls(timeline)
    trained = roots[backward_starts(timeline, roots) < INT64_MAX]
    if end_step is not None:
        trained = trained[slices.step[trained] < end_step]
    names = frozenset(timeline.names[name].fqn for name in np.unique(slices.name[trained]).tolist())
    return names | (timeline.trained or frozenset())


class _Items:
    """Slices of the first process, outside evaluations, with which a step can start."""

    def __init__(self, timeline: Timeline) -> None:
        slices, names = timeline.slices, timeline.names
        self._timeline, in_process = timeline, first_process_tracks(timeline)[slices.track]
        name_categories = [_CATEGORIES.get(name.category or "", _OTHER) for name in names]
        category = np.array([*name_categories, _OTHER], np.int8)[slices.name]
        evaluations = np.flatnonzero(category == _EVALUATION)
        evaluated = union_of(slices.start[evaluations], slices.end[evaluations])
        is_item = (category > _OTHER) | (slices.kind == BACKWARD_PASS)
        is_item[outermost_calls(timeline)] = True
        rows = np.flatnonzero(is_item & in_process)
        rows = rows[~evaluated.contains(slices.start[rows])]
        self._rows = rows[np.argsort(slices.start[rows], kind="stable")]
        self._start, self._end = slices.start[self._rows], slices.end[self._rows]
        self._category = category[self._rows]
        self._backward = np.full(len(self._rows), INT64_MAX)
        calls = slices.kind[self._rows] == MODULE
        self._backward[calls] = backward_starts(timeline, self._rows[calls])
        fqns = np.unique([name.fqn for name in names] or [""], return_inverse=True)
        self._fqns, self._fqn = fqns[0], np.where(calls, fqns[1][slices.name[self._rows]], -1)

    def first_steps(self, end: Int64Array) -> list[int]:
        """Return the indexes of the steps that start a training, such as the first one of a recording."""
        trained = np.flatnonzero(self._backward < INT64_MAX)
        step, fqn = np.searchsorted(end, self._backward[trained], side="right"), self._fqn[trained]
        first = np.full(len(self._fqns), len(end))
        np.minimum.at(first, fqn, step)
        trained_before = [
            number for number, name in enumerate(self._fqns.tolist()) if name in (self._timeline.trained or ())
        ]
        first[trained_before] = -1
        trains = np.bincount(step, minlength=len(end))[: len(end)] > 0
        trains[step[(first[fqn] < step) & (step < len(end))]] = False
        trains[:1] |= self._timeline.begin_ns is None
        first_steps: list[int] = np.flatnonzero(trains).tolist()
        return first_steps

    def first_start(self, low: int, high: int) -> int:
        """Return the start of a training's first step, which ends at `high`; `low` is the end of the step before."""
        rows = slice(*np.searchsorted(self._start, (low, high)))
        start, end, fqn = self._start[rows], self._end[rows], self._fqn[rows]
        category, backward = self._category[rows], self._backward[rows]
        trains = backward < high
        if not trains.any():
            trains = fqn >= 0
            backward = np.where(trains, start, INT64_MAX)
        if not trains.any():
            return low
        trained_start, backward = start[trains], backward[trains]
        busy = union_of(start[category != _USER], end[category != _USER])
        first_call, moment = INT64_MAX, int(trained_start[-1])
        while moment < first_call:
            index = int(np.searchsorted(busy.start_ns, moment, side="right")) - 1
            while index > 0 and busy.start_ns[index] - busy.end_ns[index - 1] <= high - busy.start_ns[index]:
                index -= 1
            # A call whose backward is in the step belongs to it, however long its loss takes.
            first_call = int(trained_start[trained_start >= busy.start_ns[index]].min())
            moment = int(trained_start[backward >= first_call].min(initial=first_call))
        since = 2 * first_call - high
        is_long = (category >= _LOADING) & (end >= since)
        leads = (start < first_call) & ((start >= since) | is_long) & ~np.isin(fqn, fqn[trains])
        leads &= (end <= high) | (category == _OPTIMIZER)
        return int(start[leads].min(initial=first_call))


def backward_starts(timeline: Timeline, calls: Int64Array) -> Int64Array:
    """Return the start of the backward of each call; INT64_MAX if it has none."""
    slices = timeline.slices
    rows = slices.block_of(MODULE)
    backward = np.flatnonzero((slices.phase[rows] == BACKWARD) & (slices.link[rows] >= 0))
    link, link_index = number_values(slices.link[backward])
    starts, call_link = np.full(len(link) + 1, INT64_MAX), slices.link[calls]
    np.minimum.at(starts, link_index, slices.start[backward])
    return np.where(np.isin(call_link, link), starts[np.searchsorted(link, call_link)], INT64_MAX)


_time = attrgetter("time_ns")

PIECE_SPANS = 1 << 17
"""Minimum number of module spans in a piece; a timeline with fewer than four times as many is one piece."""


def step_pieces(timeline: Timeline) -> Iterator[Timeline]:
    """Yield the timeline of one process in pieces, one or more, that start at ends of steps.

    Only ranges can be in two pieces, and a call is in the piece of its backward. Each piece has the stats and metadata
    of the whole timeline.
    """
    cuts, columns = _find_cuts(timeline), timeline.columns
    trained = timeline.trained or frozenset()
    if not cuts:
        yield timeline
        return
    slices = timeline.slices
    without_modules = keep_rows(timeline, np.flatnonzero(slices.kind != MODULE), cut_links=False)
    metadata, marks = dict(timeline.metadata), timeline.marks
    if Arg.FLOPS in columns.args:  # a piece may have none
        metadata.setdefault(COUNTED, {})
    bounds = [(0, INT64_MIN), *cuts, (len(columns), INT64_MAX)]
    for (first, since), (last, until) in itertools.pairwise(bounds):
        rows = without_modules.slices
        inside = (rows.start >= since) & (rows.start < until)
        inside |= (rows.kind == RANGE) & (rows.start < until) & (rows.end > since)
        piece = replace(
            keep_rows(without_modules, np.flatnonzero(inside), cut_links=False),
            metadata=metadata,
            marks=marks[bisect_right(marks, since, key=_time) : bisect_right(marks, until, key=_time)],
            counters=[samples_between(counter, since, until) for counter in timeline.counters],
            begin_ns=timeline.begin_ns if first == 0 else since,
        )
        modules = {field: getattr(columns, field)[first:last].copy() for field in DTYPES}
        modules["parent"][modules["parent"] >= 0] -= first
        args = take_args(columns.args, slice(first, last), len(columns))
        piece = replace(put_modules_before(piece, modules, args), trained=trained)
        yield piece
        trained = trained_modules(piece)


def _find_cuts(timeline: Timeline) -> list[tuple[int, int]]:
    """Return (first span, end of the previous step) of each piece after the first."""
    columns, slices = timeline.columns, timeline.slices
    if len(columns) < 4 * PIECE_SPANS or len({track.process for track in timeline.tracks}) > 1:
        return []
    moments = timeline.step_ends
    number = first_ended_step(timeline) + np.arange(1, len(moments) + 1)
    row = np.searchsorted(columns.start, moments)
    uncut = slices.take(np.flatnonzero((slices.kind != MODULE) & (slices.kind != RANGE)))
    is_cut = row < len(columns)
    for start, end in ((columns.start, columns.end), (uncut.start, uncut.end), _calls_with_backward(columns)):
        is_cut &= np.searchsorted(np.sort(start), moments) == np.searchsorted(np.sort(end), moments)
    row, moments, number = row[is_cut], moments[is_cut], number[is_cut]
    # The first span must have the step's number, and no backward pass may start between the cut and this span.
    is_first = columns.complete[row] & (columns.step[row] == number) & (columns.phase[row] == FORWARD)
    passes = np.sort(uncut.start[uncut.kind == BACKWARD_PASS])
    is_first &= np.searchsorted(passes, moments) == np.searchsorted(passes, columns.start[row])
    cuts, first = list[tuple[int, int]](), 0
    for cut in zip(row[is_first].tolist(), moments[is_first].tolist(), strict=True):
        if cut[0] - first >= PIECE_SPANS:
            cuts.append(cut)
            first = cut[0]
    return cuts


def _calls_with_backward(columns: Slices) -> tuple[Int64Array, Int64Array]:
    """Return the starts of outermost calls, and the starts of the last spans of their backward."""
    calls = np.flatnonzero((columns.parent < 0) & (columns.phase != BACKWARD) & (columns.link >= 0))
    link, first = np.unique(columns.link[calls], return_index=True)
    start = columns.start[calls[first]]
    backward = np.flatnonzero((columns.phase == BACKWARD) & (columns.link >= 0))
    index = np.minimum(np.searchsorted(link, columns.link[backward]), max(len(link) - 1, 0))
    last_start = start.copy()
    if len(link):
        has_call = link[index] == columns.link[backward]
        np.maximum.at(last_start, index[has_call], columns.start[backward[has_call]])
    return start, last_start
