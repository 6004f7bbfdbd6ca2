"""A ring's events of ranges → slices on tracks of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..._typing import BoolArray, Int64Array
from ...ring import Kind
from ...ring.range_text import parse_range
from ...ring.slot_format import RANGE_KINDS
from ..contents import RANGES, Process, Track, range_name
from ..slices import RANGE, Slices
from ..timeline import Timeline
from .analysis import RingAnalysis
from .pairing import pair_by_key, without_repeated_ends
from .path_spans import clip_and_nest

__all__ = ["add_ranges"]

_MAX_ROWS = 8
"""Per thread; ranges that overlap without one being in the other take a row each."""


def add_ranges(
    timeline: Timeline, analysis: RingAnalysis, tracks: Sequence[Track], process: Process
) -> tuple[Timeline, Slices]:
    """Return the timeline with the names and the tracks of ranges, and the ranges.

    Args:
        timeline: what the ring holds of modules.
        analysis: of the ring.
        tracks: all other tracks.
        process: that was recorded.
    """
    timeline = replace(timeline, tracks=[*tracks])
    events, clock, lookup = analysis.all_events, analysis.clock, analysis.lookup
    index = np.flatnonzero(np.isin(events.kind, RANGE_KINDS))
    if not len(index):
        return timeline, Slices.empty()
    index = without_repeated_ends(index, events.kind[index] == Kind.RANGE_BEGIN, events.value[index])
    begin, end = pair_by_key(index, events.kind[index] == Kind.RANGE_BEGIN, events.value[index])
    complete = (begin >= 0) & (end >= 0)
    known = np.where(begin >= 0, begin, end)
    start_ns = np.where(begin >= 0, events.time[begin], events.time.min())
    end_ns = np.maximum(np.where(end >= 0, events.time[end], events.time.max()), start_ns)
    thread = events.thread[known].astype(np.int64)
    row, end_ns = _rows(thread, start_ns, end_ns, complete)
    places, place = np.unique(np.stack([thread, row], axis=1), axis=0, return_inverse=True)
    added = []
    for number, nth in places.tolist():
        name, tid = lookup.threads[number]
        added.append(Track(RANGES, name if nth == 0 else f"{name} ({nth + 1})", tid, process))
    texts, text = np.unique(events.name[known], return_inverse=True)
    slices = Slices.of_kind(
        RANGE,
        clock.to_other(start_ns),
        end=clock.to_other(end_ns),
        name=len(timeline.names) + text,
        track=len(timeline.tracks) + place.reshape(-1),
        step=analysis.steps_before(2 * np.searchsorted(analysis.events.serial, events.serial[known]) - 1),
        complete=complete,
    )
    names = [range_name(*parse_range(lookup.texts[number])) for number in texts.tolist()]
    return replace(timeline, names=[*timeline.names, *names], tracks=[*timeline.tracks, *added]), slices


def _rows(thread: Int64Array, start: Int64Array, end: Int64Array, complete: BoolArray) -> tuple[Int64Array, Int64Array]:
    """Return the row of each range among those of its thread, and its end.

    A range that outlasts the one around it takes another row: another thread may end it, as for a collective. A range
    whose end is lost ends with the one around it.
    """
    row, end = np.zeros(len(thread), np.int64), end.copy()
    left = np.arange(len(thread))
    for number in range(_MAX_ROWS):
        until, _, _ = clip_and_nest(thread[left], start[left], end[left], left)
        moves = (until < end[left]) & complete[left] & (number + 1 < _MAX_ROWS)
        row[left], end[left[~moves]] = number, until[~moves]
        left = left[moves]
        if not len(left):
            break
    return row, end
