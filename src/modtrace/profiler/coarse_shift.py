"""How far two clocks are apart, by calls and operators alone: to a microsecond, within milliseconds.

At the right shift the innermost calls begin and end between operators, and hold one. At a wrong one they begin or end
inside of operators, or hold none. So the shift is looked for at which fewest calls are wrong, and the drift with it,
and it counts only where the calls are wrong clearly more often at all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .._typing import Float64Array, Int64Array
from ..timeline.time_intervals import TimeIntervals
from .operator_gaps import cut_depth

__all__ = ["COARSE_REACH_NS", "CoarseShift", "find_coarse_shift"]

COARSE_REACH_NS = 5_000_000
"""How far apart the clocks may be."""
_STEP_NS = 1_000
_DRIFT_LIMIT = 500e-6
_MAX_DRIFTS = 250
"""How many are tried to each side of 0: over a long time only small ones are, as clocks drift that are not set."""
_SPAN_NS = 20_000_000_000
"""How long a part of the trace is looked at at most."""
_STRETCHES, _STRETCH_CALLS, _STRETCH_NS = 48, 64, 20_000_000
_MAX_CALL_NS = 100_000_000
_WANDER = 4
"""By so many steps the profiler's clock may wander from one stretch to the next."""
_MIN_CALLS = 24
_BASIN_NS = 50_000
"""Shifts as near as that to the best one are no others."""
_LEAST_MORE = 3.5
"""By so many calls there have to be more at any other, as one or two can be wrong by chance."""
_CLEAR = 0.25
"""At the best shift at most so many times as many calls may be wrong as at any other. Of 28 live profiles at most 0.12
times as many are, where the right one is within reach, and 0.9 and more of them where it is not."""


class CoarseShift(NamedTuple):
    """By how much calls have to be shifted.

    Attributes:
        center_ns: the moment, ns from the trace's base, at which `shift_ns` holds.
        shift_ns: at that moment.
        drift: by how much it grows, nanoseconds per nanosecond.
        wrong: share of the calls that do not suit the operators nonetheless.
        next_wrong: the least share at any other shift.
        calls: how many there are.
    """

    center_ns: int
    shift_ns: int
    drift: float
    wrong: float
    next_wrong: float
    calls: int

    @property
    def is_clear(self) -> bool:
        """Whether calls are wrong clearly more often at every other shift."""
        more = (self.next_wrong - self.wrong) * self.calls
        return self.wrong <= _CLEAR * self.next_wrong and more >= _LEAST_MORE


class _Stretch(NamedTuple):
    """What some calls in a row say of the shift.

    Attributes:
        time: the middle of them, ns from the base.
        wrong: int64, for each shift how many calls do not suit the operators, at it or a few steps beside it.
        judged: int64, for each shift how many calls lie within the thread's operators.
    """

    time: int
    wrong: Int64Array
    judged: Int64Array


def find_coarse_shift(threads: Sequence[tuple[TimeIntervals, TimeIntervals]]) -> CoarseShift | None:
    """Return the shift at which the calls suit the operators best; None if there are too few calls.

    Args:
        threads: of each thread the calls, and when it ran operators that hold no others.
    """
    threads = [
        (short, busy) for calls, busy in threads if len((short := _short_calls(calls)).start) and len(busy.start)
    ]
    if not threads:
        return None
    begin, end = _common_part(threads)
    if end <= begin:
        return None
    drifts = _drifts(end - begin)
    pad = (int(drifts[-1] * (end - begin) / 2) // _STEP_NS + 2) * _STEP_NS
    stretches = [
        stretch for calls, busy in threads for stretch in _stretches(calls, busy, begin, end, COARSE_REACH_NS + pad)
    ]
    if not stretches:
        return None
    center = (begin + end) // 2
    count = 2 * (COARSE_REACH_NS // _STEP_NS) + 1
    first = (len(stretches[0].wrong) - count) // 2
    best: tuple[float, int, float, Float64Array, int] | None = None
    for drift in drifts:
        wrong, judged = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for stretch in stretches:
            at = first + round(drift * (stretch.time - center) / _STEP_NS)
            wrong += stretch.wrong[at : at + count]
            judged += stretch.judged[at : at + count]
        enough = judged >= max(_MIN_CALLS, judged.max() // 2)
        if not enough.any():
            continue
        share = np.where(enough, wrong / np.maximum(judged, 1), 1.0)
        least = int(np.argmin(share))
        # A drift counts only where it makes more than one call right.
        if best is None or share[least] < best[0] - 1.5 / judged[least]:
            best = float(share[least]), least, drift, share, int(judged[least])
    if best is None:
        return None
    least_share, least, drift, share, calls = best
    run = np.flatnonzero(share == least_share)
    run = run[np.abs(run - least) * _STEP_NS < _BASIN_NS]
    shift = round((float(run.mean()) - count // 2) * _STEP_NS)
    others = np.abs(np.arange(count) - least) * _STEP_NS > _BASIN_NS
    return CoarseShift(center, shift, drift, least_share, float(share[others].min()), calls)


def _short_calls(calls: TimeIntervals) -> TimeIntervals:
    """Return the calls without those that last so long that looking at them would take much memory."""
    return TimeIntervals(*(column[calls.end - calls.start <= _MAX_CALL_NS] for column in calls))


def _common_part(threads: Sequence[tuple[TimeIntervals, TimeIntervals]]) -> tuple[int, int]:
    """Return begin and end of the part that is looked at, ns from the base: the middle of what both files hold."""
    begin = max(min(int(calls.start[0]) for calls, _ in threads), min(int(busy.start[0]) for _, busy in threads))
    end = min(max(int(calls.end[-1]) for calls, _ in threads), max(int(busy.end[-1]) for _, busy in threads))
    begin, end = begin - COARSE_REACH_NS, end + COARSE_REACH_NS
    center, half = (begin + end) // 2, min((end - begin) // 2, _SPAN_NS // 2)
    return center - half, center + half


def _drifts(length: int) -> list[float]:
    """Return the drifts that are to be tried, the least first: apart by 2 µs at both ends."""
    step = 2 * _STEP_NS / (length / 2)
    count = min(int(_DRIFT_LIMIT / step), _MAX_DRIFTS)
    return sorted((number * step for number in range(-count, count + 1)), key=lambda drift: (abs(drift), drift))


def _stretches(calls: TimeIntervals, busy: TimeIntervals, begin: int, end: int, reach: int) -> Iterator[_Stretch]:
    """Yield what stretches of calls say, which are spread over a part of the trace."""
    first, last = np.searchsorted(calls.start, (begin, end))
    starts = []
    while first < last:
        starts.append(int(first))
        soon = int(np.searchsorted(calls.start, calls.start[first] + _STRETCH_NS))
        first = min(first + _STRETCH_CALLS, soon)
    bounds = [*starts, int(last)]
    chosen = np.unique(np.linspace(0, len(starts) - 1, min(_STRETCHES, len(starts))).astype(int)).tolist()
    for number in chosen:
        part = slice(bounds[number], bounds[number + 1])
        yield _judge(calls.start[part], calls.end[part], busy, reach)


def _judge(start: Int64Array, end: Int64Array, busy: TimeIntervals, reach: int) -> _Stretch:
    """Return at which shifts calls suit the operators, by looking at a moment every `_STEP_NS`."""
    origin = int(start.min()) - reach
    moments = np.arange(origin, int(end.max()) + reach + 2 * _STEP_NS, _STEP_NS)
    inside = cut_depth(busy, moments) > 0
    begun = np.searchsorted(busy.start, moments).astype(np.int32)
    known = (moments >= busy.start[0]) & (moments <= busy.end[-1])
    count = 2 * (reach // _STEP_NS) + 1
    at_start, at_end = ((time - reach - origin + _STEP_NS // 2) // _STEP_NS for time in (start, end))
    cut, before, within = (sliding_window_view(column, count) for column in (inside, begun, known))
    judged = within[at_start] & within[at_end]
    suits = ~cut[at_start] & ~cut[at_end] & (before[at_end] > before[at_start])
    wrong = np.count_nonzero(judged & ~suits, axis=0)
    return _Stretch(
        int(start[len(start) // 2]),
        sliding_window_view(np.pad(wrong, _WANDER, "edge"), 2 * _WANDER + 1).min(axis=1),
        np.count_nonzero(judged, axis=0),
    )
