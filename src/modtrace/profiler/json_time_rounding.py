"""Choose the times of spans so that they nest for every reader of a merged JSON trace.

A reader turns the text of a time into a double of µs. The trace processor makes nanoseconds of that double times 1000,
rounded once more, so that a slice may begin a nanosecond later (in traces of before torch 2.4: 130 ns earlier or later)
than its text says, while its duration stays. Slices that nest by their texts alone would partly overlap there and be
dropped. So ends are chosen such that slices nest in both readings.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .._typing import Int64Array, SignedIntArray
from ..formats.chrome_values import read_microseconds_array
from ..timeline import Timeline

# 2**43 µs (101 days) from the base doubles of µs begin to be 2 ns apart.
_EXACT_UNTIL_NS = 1000 << 43
_UNIX_QUANTUM_NS = 250
"""How far doubles of µs since 1970 are apart."""


def time_quantum_ns(latest: int) -> int:
    """Return the steps in ns in which a double of µs can tell times up to `latest` ns apart."""
    return 1 if latest < _EXACT_UNTIL_NS else _UNIX_QUANTUM_NS


def perfetto_rounding(nanoseconds: Int64Array) -> Int64Array:
    """Return what the trace processor makes of the text of times."""
    whole = nanoseconds // 1000
    micros = whole + (nanoseconds - whole * 1000) / 1000.0
    return read_microseconds_array(micros)


def nested_timeline(timeline: Timeline, quantum: int) -> Timeline:
    """Return a timeline, in ns from the trace's base, with times that nest in every reading, see `time_quantum_ns`."""
    slices = timeline.slices
    start, duration = nest_after_rounding(
        slices.track.astype(np.int64), slices.start, slices.end, slices.parent, slices.depth, quantum
    )
    return replace(timeline, slices=replace(slices, start=start, end=start + duration))


def nest_after_rounding(
    track: Int64Array, start: Int64Array, end: Int64Array, parent: Int64Array, depth: SignedIntArray, quantum: int
) -> tuple[Int64Array, Int64Array]:
    """Move starts onto the reader's steps, and choose durations with which slices nest in every reading.

    Args:
        track: int64[n]; slices of one track nest.
        start: int64[n], ns from the base; in order within each track.
        end: int64[n], ns from the base.
        parent: int64[n], the slice around each, or -1.
        depth: int[n], how many slices are around each.
        quantum: the steps in ns, see `time_quantum_ns`.

    Returns:
        int64[n] start and int64[n] duration of each slice, in ns.
    """
    if not len(start):
        return start, start
    levels = [np.flatnonzero(depth == level) for level in range(int(depth.max()) + 1)]
    sibling = _next_siblings(track, start, parent)
    begin = _starts_with_room(track, start, parent, levels, sibling, quantum)
    readings = (begin, perfetto_rounding(begin))
    # Each is at least as long as its children …
    duration = _enclosing_durations(np.maximum(end - begin, 0), readings, parent, levels)
    # … but ends before its next sibling begins, and with the slice around it.
    for rows in levels:
        outer, after = parent[rows], sibling[rows]
        for reading in readings:
            most = np.where(outer >= 0, reading[outer] + duration[outer] - reading[rows], duration[rows])
            most = np.minimum(most, np.where(after >= 0, reading[after] - reading[rows], duration[rows]))
            duration[rows] = np.maximum(np.minimum(duration[rows], most), 0)
    return begin, duration


def _starts_with_room(
    track: Int64Array,
    start: Int64Array,
    parent: Int64Array,
    levels: Sequence[Int64Array],
    sibling: Int64Array,
    quantum: int,
) -> Int64Array:
    """Move starts onto the reader's steps so that each slice can end after its children and before its next sibling.

    Steps are rounded down. Where the start of an inner slice and that of the outer's next sibling fall on one step,
    and readers disagree how far that is from the outer's start, no duration suits both: the sibling and what follows
    it then begin a step later. That happens once per level of slices that end there at most.
    """
    begin = start // quantum * quantum
    order = np.argsort(track, kind="stable")
    first_of_track = np.flatnonzero(np.diff(track[order], prepend=track[order[0]] - 1))
    followed = np.flatnonzero(sibling >= 0)
    after = sibling[followed]
    while True:
        readings = (begin, perfetto_rounding(begin))
        least = _enclosing_durations(np.zeros(len(begin), np.int64), readings, parent, levels)
        room = np.minimum(*(reading[after] - reading[followed] for reading in readings))
        late = after[least[followed] > room]
        if not len(late):
            return begin
        begin[late] += quantum
        for rows in np.split(order, first_of_track[1:]):
            begin[rows] = np.maximum.accumulate(begin[rows])


def _enclosing_durations(
    duration: Int64Array, readings: Sequence[Int64Array], parent: Int64Array, levels: Sequence[Int64Array]
) -> Int64Array:
    """Lengthen durations until each slice holds those in it, in every reading of their starts."""
    for rows in reversed(levels[1:]):
        outer = parent[rows]
        for reading in readings:
            np.maximum.at(duration, outer, reading[rows] + duration[rows] - reading[outer])
    return duration


def _next_siblings(track: Int64Array, begin: Int64Array, parent: Int64Array) -> Int64Array:
    """Return for each slice the next one beside it, or -1."""
    order = np.lexsort((np.arange(len(begin)), begin, parent, track))
    sibling = np.full(len(begin), -1, np.int64)
    this, following = order[:-1], order[1:]
    beside = (track[this] == track[following]) & (parent[this] == parent[following])
    sibling[this[beside]] = following[beside]
    return sibling
