"""Nest slices as every reader of the JSON will see them.

A reader turns the text of a time into a double of µs. The trace processor makes nanoseconds of that double times 1000,
rounded once more, so that a slice may begin a nanosecond later (in traces of before torch 2.4: 130 ns earlier or later)
than its text says, while its duration stays. Slices that nest by their texts alone would partly overlap there and be
dropped. So ends are chosen such that slices nest in both readings.
"""

from __future__ import annotations

import numpy as np

from ..._typing import Int64Array, SignedIntArray

__all__ = ["seat", "step_of", "viewed"]


def step_of(latest: int) -> int:
    """Return the steps in ns in which a double of µs can tell times up to `latest` ns apart; 1 where it is enough."""
    # 2**43 µs is where doubles lie 2 ns apart: 101 days from the base.
    return 1 if latest < 1000 << 43 else 250


def viewed(nanoseconds: Int64Array) -> Int64Array:
    """Return what the trace processor makes of the text of times.

    Whole microseconds stay what they are; of others it takes the nearest nanosecond of the product, halves up.
    """
    whole = nanoseconds // 1000
    micros = whole + (nanoseconds - whole * 1000) / 1000.0
    scaled = micros * 1000.0
    floor = np.floor(scaled)
    nearest = floor.astype(np.int64) + (scaled - floor >= 0.5)
    return np.where(micros == np.floor(micros), np.floor(micros).astype(np.int64) * 1000, nearest)


def seat(
    track: Int64Array, start: Int64Array, end: Int64Array, parent: Int64Array, depth: SignedIntArray, step: int
) -> tuple[Int64Array, Int64Array]:
    """Move starts onto the reader's steps, and choose durations with which slices nest in every reading.

    Args:
        track: int64[n]; slices of one track nest.
        start: int64[n], ns from the base; in order within each track.
        end: int64[n].
        parent: int64[n], the slice around each, or -1.
        depth: slices around each.
        step: as of `step_of`.

    Returns:
        Start and duration of each slice.
    """
    if not len(start):
        return start, start
    begin = start // step * step
    readings = (begin, viewed(begin))
    length = end - begin
    levels = [np.flatnonzero(depth == level) for level in range(int(depth.max()) + 1)]
    # Each is at least as long as what lies in it …
    for rows in reversed(levels[1:]):
        around = parent[rows]
        for reading in readings:
            np.maximum.at(length, around, reading[rows] + length[rows] - reading[around])
    # … but ends before its follower begins, and with the slice around it.
    follower = _followers(track, begin, parent)
    for rows in levels:
        around, after = parent[rows], follower[rows]
        for reading in readings:
            inside = around >= 0
            least = np.where(inside, reading[around] + length[around] - reading[rows], length[rows])
            has = after >= 0
            least = np.minimum(least, np.where(has, reading[after] - reading[rows], length[rows]))
            length[rows] = np.maximum(np.minimum(length[rows], least), 0)
    return begin, length


def _followers(track: Int64Array, begin: Int64Array, parent: Int64Array) -> Int64Array:
    """Return for each slice the next one beside it, or -1."""
    order = np.lexsort((np.arange(len(begin)), begin, parent, track))
    follower = np.full(len(begin), -1, np.int64)
    here, following = order[:-1], order[1:]
    beside = (track[here] == track[following]) & (parent[here] == parent[following])
    follower[here[beside]] = following[beside]
    return follower
