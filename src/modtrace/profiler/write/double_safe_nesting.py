"""Choose the times of spans so that they nest for every reader of a merged JSON trace.

A reader turns the text of a time into a double of µs. The trace processor makes nanoseconds of that double times 1000,
rounded once more, so that a slice may begin a nanosecond later (in traces of before torch 2.4: 130 ns earlier or later)
than its text says, while its duration stays. Slices that nest by their texts alone would partly overlap there and be
dropped. So ends are chosen such that slices nest in both readings.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..._typing import Int64Array, SignedIntArray
from ...timeline import Timeline

__all__ = ["nest_after_rounding", "nested_timeline", "perfetto_rounding", "time_quantum_ns"]

# 2**43 µs (101 days) from the base doubles of µs begin to lie 2 ns apart.
_EXACT_UNTIL_NS = 1000 << 43
_UNIX_QUANTUM_NS = 250
"""How far doubles of µs since 1970 lie apart."""


def time_quantum_ns(latest: int) -> int:
    """Return the steps in ns in which a double of µs can tell times up to `latest` ns apart."""
    return 1 if latest < _EXACT_UNTIL_NS else _UNIX_QUANTUM_NS


def perfetto_rounding(nanoseconds: Int64Array) -> Int64Array:
    """Return what the trace processor makes of the text of times.

    Whole microseconds stay what they are; of others it takes the nearest nanosecond of the product, halves up.
    """
    whole = nanoseconds // 1000
    micros = whole + (nanoseconds - whole * 1000) / 1000.0
    scaled = micros * 1000.0
    floor = np.floor(scaled)
    nearest = floor.astype(np.int64) + (scaled - floor >= 0.5)
    return np.where(micros == np.floor(micros), np.floor(micros).astype(np.int64) * 1000, nearest)


def nested_timeline(timeline: Timeline, quantum: int) -> Timeline:
    """Return a timeline, in ns from the trace's base, with times that nest in every reading, see `time_quantum_ns`."""
    columns = timeline.columns
    start, duration = nest_after_rounding(
        columns.track.astype(np.int64), columns.start, columns.end, columns.parent, columns.depth, quantum
    )
    return replace(timeline, columns=replace(columns, start=start, end=start + duration))


def nest_after_rounding(
    track: Int64Array, start: Int64Array, end: Int64Array, parent: Int64Array, depth: SignedIntArray, quantum: int
) -> tuple[Int64Array, Int64Array]:
    """Move starts onto the reader's steps, and choose durations with which slices nest in every reading.

    Args:
        track: int64[n]; slices of one track nest.
        start: int64[n], ns from the base; in order within each track.
        end: int64[n], ns from the base.
        parent: int64[n], the slice around each, or -1.
        depth: int[n], how many slices lie around each.
        quantum: the steps in ns, see `time_quantum_ns`.

    Returns:
        int64[n] start and int64[n] duration of each slice, in ns.
    """
    if not len(start):
        return start, start
    begin = start // quantum * quantum
    readings = (begin, perfetto_rounding(begin))
    duration = end - begin
    levels = [np.flatnonzero(depth == level) for level in range(int(depth.max()) + 1)]
    # Each is at least as long as what lies in it …
    for rows in reversed(levels[1:]):
        outer = parent[rows]
        for reading in readings:
            np.maximum.at(duration, outer, reading[rows] + duration[rows] - reading[outer])
    # … but ends before its next sibling begins, and with the slice around it.
    sibling = _next_siblings(track, begin, parent)
    for rows in levels:
        outer, after = parent[rows], sibling[rows]
        for reading in readings:
            most = np.where(outer >= 0, reading[outer] + duration[outer] - reading[rows], duration[rows])
            most = np.minimum(most, np.where(after >= 0, reading[after] - reading[rows], duration[rows]))
            duration[rows] = np.maximum(np.minimum(duration[rows], most), 0)
    return begin, duration


def _next_siblings(track: Int64Array, begin: Int64Array, parent: Int64Array) -> Int64Array:
    """Return for each slice the next one beside it, or -1."""
    order = np.lexsort((np.arange(len(begin)), begin, parent, track))
    sibling = np.full(len(begin), -1, np.int64)
    this, following = order[:-1], order[1:]
    beside = (track[this] == track[following]) & (parent[this] == parent[following])
    sibling[this[beside]] = following[beside]
    return sibling
