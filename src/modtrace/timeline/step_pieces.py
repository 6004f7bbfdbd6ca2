"""A long timeline in pieces of whole steps, so that what is computed of it takes memory for one piece."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from .._typing import Int64Array
from .args import take_args
from .contents import COUNTED
from .join import put_modules_before
from .select import first_ended_step, keep_rows, samples_between
from .slices import BACKWARD, BACKWARD_PASS, DTYPES, FORWARD, MODULE, RANGE, Arg, Slices
from .step_begins import trained_modules

if TYPE_CHECKING:
    from .timeline import Timeline

_time = attrgetter("time_ns")

PIECE_SPANS = 1 << 17
"""Spans of modules in a piece, at least; a timeline with fewer than four times as many is one piece."""


def step_pieces(timeline: Timeline) -> Iterator[Timeline]:
    """Yield the timeline of one process in pieces that begin where a step ended, in order; perhaps a single one.

    Nothing but ranges is in two pieces, and a call is in that of its backward. The stats and the metadata of each piece
    are those of all.
    """
    cuts, columns = _find_cuts(timeline), timeline.columns
    trained = timeline.trained or frozenset()
    if not cuts:
        yield timeline
        return
    slices = timeline.slices
    others = keep_rows(timeline, np.flatnonzero(slices.kind != MODULE), cut_links=False)
    metadata, marks = dict(timeline.metadata), timeline.marks
    if Arg.FLOPS in columns.args:  # perhaps not in each piece
        metadata.setdefault(COUNTED, {})
    never = np.iinfo(np.int64)
    bounds = [(0, never.min), *cuts, (len(columns), never.max)]
    for (first, since), (last, until) in itertools.pairwise(bounds):
        rows = others.slices
        inside = (rows.start >= since) & (rows.start < until)
        inside |= (rows.kind == RANGE) & (rows.start < until) & (rows.end > since)
        piece = replace(
            keep_rows(others, np.flatnonzero(inside), cut_links=False),
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
    """Return the first span of each piece but the first one, and when the step before it ended."""
    columns, slices = timeline.columns, timeline.slices
    if len(columns) < 4 * PIECE_SPANS or len({track.process for track in timeline.tracks}) > 1:
        return []
    moments = timeline.step_ends
    number = first_ended_step(timeline) + np.arange(1, len(moments) + 1)
    row = np.searchsorted(columns.start, moments)
    others = slices.take(np.flatnonzero((slices.kind != MODULE) & (slices.kind != RANGE)))
    is_cut = row < len(columns)
    for start, end in ((columns.start, columns.end), (others.start, others.end), _calls_with_backward(columns)):
        is_cut &= np.searchsorted(np.sort(start), moments) == np.searchsorted(np.sort(end), moments)
    row, moments, number = row[is_cut], moments[is_cut], number[is_cut]
    # The first span says which step it is; the loss before a backward pass is after what ran before.
    is_first = columns.complete[row] & (columns.step[row] == number) & (columns.phase[row] == FORWARD)
    passes = np.sort(others.start[others.kind == BACKWARD_PASS])
    is_first &= np.searchsorted(passes, moments) == np.searchsorted(passes, columns.start[row])
    cuts, first = list[tuple[int, int]](), 0
    for cut in zip(row[is_first].tolist(), moments[is_first].tolist(), strict=True):
        if cut[0] - first >= PIECE_SPANS:
            cuts.append(cut)
            first = cut[0]
    return cuts


def _calls_with_backward(columns: Slices) -> tuple[Int64Array, Int64Array]:
    """Return when outermost calls begin and the last spans of their backward do."""
    calls = np.flatnonzero((columns.parent < 0) & (columns.phase != BACKWARD) & (columns.link >= 0))
    link, first = np.unique(columns.link[calls], return_index=True)
    start = columns.start[calls[first]]
    backward = np.flatnonzero((columns.phase == BACKWARD) & (columns.link >= 0))
    at = np.minimum(np.searchsorted(link, columns.link[backward]), max(len(link) - 1, 0))
    until = start.copy()
    if len(link):
        found = link[at] == columns.link[backward]
        np.maximum.at(until, at[found], columns.start[backward[found]])
    return start, until
