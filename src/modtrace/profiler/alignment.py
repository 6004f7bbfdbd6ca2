"""The alignment of a recording with a trace: offset and drift between their clocks.

Sync marks, which are in both, give a first measure. The operators of the trace refine it: no call begins or ends while
an operator runs, so the offset is where the fewest operators lie partly outside a call.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from .._arrays import Float64Array, Int64Array
from .._interrupts import cached_property
from ..ring.clocks import MAX_RATE, ClockMap, Reading
from ..timeline import Mark, Timeline
from ..timeline.nesting import TimeIntervals, union_of
from .event_collector import ProfilerEvents
from .recorded_part import runs_module_code, threads_of

REACH_NS = 40_000
"""The largest error of the first guess, ns."""
SHIFT_STEP_NS = 250
SHIFTS = np.arange(-REACH_NS, REACH_NS + 1, SHIFT_STEP_NS, dtype=np.int64)
"""The corrections of the guess that are tried, ns."""
_WINDOW_EDGES, _MIN_WINDOW_EDGES = 64, 8
_WINDOW_NS = 20_000_000
"""The length of a window, ns, within the bounds on its number of edges."""
_WINDOWS_AT_ONCE = 256
"""The number of windows whose cuts are counted together: it bounds the memory."""


class OffsetBounds(NamedTuple):
    """Bounds on an offset, each at one moment; columns of equal length."""

    time: Int64Array  # ns, of the recording's clock
    low: Float64Array  # ns, the least offset; -inf where unknown
    high: Float64Array  # ns, the greatest; inf where unknown; less than `low` where bounds contradict each other

    @classmethod
    def joined(cls, parts: Sequence["OffsetBounds"]) -> "OffsetBounds":
        """Put bounds one after the other."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    @property
    def middle(self) -> Float64Array:
        """The offsets between `low` and `high`; those of bounds from `intersect` drift no faster than is allowed."""
        return (self.low + self.high) / 2

    @property
    def clock(self) -> ClockMap:
        """The trace's clock by the middle; its error is bounded at the moments of the bounds."""
        return ClockMap.of_columns(self.time, self.middle, np.abs(self.high - self.low) / 2, "no rate")


class CallEdges(NamedTuple):
    """Moments at which calls of one thread begin or end; columns of equal length, in time order."""

    time: Int64Array  # ns, of the recording's clock
    guess: Int64Array  # ns from the trace's base, their supposed places in the trace


def busy_intervals(start: Int64Array, end: Int64Array, edges: Int64Array, margin: int) -> TimeIntervals:
    """Return when a thread ran operators that call no module.

    An operator that calls modules, such as a checkpoint's, has edges of calls deep inside it: the operators in it count
    instead. Operators are in order, an outer one first, and edges are off by at most `margin` ns.
    """
    has_inner = np.append(start[1:] < end[:-1], False)
    calls = np.searchsorted(edges, start + margin) < np.searchsorted(edges, end - margin)
    kept = (end > start) & ~(has_inner & calls)
    return union_of(start[kept], end[kept])


def cut_depth(busy: TimeIntervals, time: Int64Array) -> Int64Array:
    """Return how far each moment is from the nearer edge of the operator it is in, ns; 0 if it is in none."""
    if not len(busy.start):
        return np.zeros(len(time), np.int64)
    operator = np.searchsorted(busy.start, time, side="right") - 1
    depth: Int64Array = np.maximum(np.minimum(time - busy.start[operator], busy.end[operator] - time), 0)
    return depth


def most_likely_shift(edges: CallEdges, busy: TimeIntervals, least: Float64Array, most: Float64Array) -> Float64Array:
    """Return for each edge the shift of its guess, in ns, with which the fewest operators around it are cut.

    It is the middle of the best possible shifts; among equally good ones, of those nearest to the shift before.
    """
    since = (edges.time - edges.time[0]).astype(np.float64)
    starts = _windows(edges.time)
    center = np.add.reduceat(since, starts) / np.diff(np.append(starts, len(since)))
    shift = np.zeros(len(starts))
    low = np.minimum.reduceat(least, starts) - SHIFT_STEP_NS
    high = np.maximum.reduceat(most, starts) + SHIFT_STEP_NS
    before = 0.0
    for block in range(0, len(starts), _WINDOWS_AT_ONCE):
        bounds = np.append(starts, len(since))[block : block + _WINDOWS_AT_ONCE + 1]
        window = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        cuts = _count_cuts(edges.guess[bounds[0] : bounds[-1]], window, busy)
        for index, count in enumerate(cuts):
            possible = (low[block + index] <= SHIFTS) & (high[block + index] >= SHIFTS)
            if possible.any():
                count = np.where(possible, count, len(edges.time) + 1)
            fewest = np.flatnonzero(count == count.min())
            if len(fewest) < len(SHIFTS):
                run = fewest - np.arange(len(fewest))
                same = fewest[run == run[np.argmin(np.abs(SHIFTS[fewest] - before))]]
                before = float(SHIFTS[same[0]] + SHIFTS[same[-1]]) / 2
            shift[block + index] = before
    edge_shift: Float64Array = np.interp(since, center, shift)
    return edge_shift


def bounds_from_gaps(edges: CallEdges, shift: Float64Array, busy: TimeIntervals, tolerance: float) -> OffsetBounds:
    """Return the bounds that the gap around each edge gives, as corrections of the guess, in order.

    An edge deeper than `tolerance` ns in an operator bounds nothing; another one counts as beyond the nearer end.
    """
    place = edges.guess + np.rint(shift).astype(np.int64)
    after = np.searchsorted(busy.start, place, side="right")
    # An operator with the edge inside is before it or after it, whichever is nearer.
    last = np.maximum(after - 1, 0)
    inside = (after > 0) & (place < busy.end[last])
    nearer_start = place - busy.start[last] < busy.end[last] - place
    after = np.where(inside & nearer_start, last, after)
    low, high = np.full(len(place), -np.inf), np.full(len(place), np.inf)
    follows, precedes = np.flatnonzero(after > 0), np.flatnonzero(after < len(busy.start))
    low[follows] = busy.end[after[follows] - 1] - edges.guess[follows]
    high[precedes] = busy.start[after[precedes]] - edges.guess[precedes]
    deep = cut_depth(busy, place) > tolerance
    low[deep], high[deep] = -np.inf, np.inf
    return OffsetBounds(edges.time, low, high)


def _windows(time: Int64Array) -> Int64Array:
    """Return where the windows begin: each has enough edges to count, and is short."""
    starts = [0]
    while True:
        begin = starts[-1]
        soon = int(np.searchsorted(time, time[begin] + _WINDOW_NS))
        begin = min(begin + _WINDOW_EDGES, max(begin + _MIN_WINDOW_EDGES, soon))
        if begin + _MIN_WINDOW_EDGES > len(time):
            return np.array(starts, np.int64)
        starts.append(begin)


def _count_cuts(guess: Int64Array, window: Int64Array, busy: TimeIntervals) -> Int64Array:
    """Return int64[windows, shifts]: how many edges are inside an operator at each of `SHIFTS`."""
    width = len(SHIFTS) + 1
    count = int(window[-1]) + 1
    change = np.zeros(count * width, np.int64)
    # The operators within reach of each edge, one after another.
    near = np.searchsorted(busy.end, guess - REACH_NS, side="right")
    rows = np.flatnonzero(near < len(busy.start))
    near = near[rows]
    while len(rows):
        distance = busy.start[near] - guess[rows]
        within = distance < REACH_NS
        rows, near, distance = rows[within], near[within], distance[within]
        if not len(rows):
            break
        # A moment at which an operator begins or ends is not inside.
        first = np.maximum((distance + REACH_NS) // SHIFT_STEP_NS + 1, 0)
        end = -(-(busy.end[near] - guess[rows] + REACH_NS) // SHIFT_STEP_NS)
        end = np.maximum(first, np.minimum(end, len(SHIFTS)))
        np.add.at(change, window[rows] * width + first, 1)
        np.subtract.at(change, window[rows] * width + end, 1)
        near = near + 1
        more = near < len(busy.start)
        rows, near = rows[more], near[more]
    cuts: Int64Array = np.cumsum(change.reshape(count, width), axis=1)[:, :-1]
    return cuts


_DRIFT_LIMIT = 500e-6
"""The fastest change of the offset, ns per ns: a kernel slews its wall clock by no more."""
_CLOCK_NOISE_NS = 50.0
_LINE_NS = 1 << 40
"""The distance of the two moments that define a line, ns."""
_SAME_RUN_NS = 10_000_000_000
"""The largest distance of a mark and its slice, ns: marks of other runs have the same names."""
_PASSES = ((REACH_NS, 2_000.0), (10_000, 1_000.0), (5_000, 500.0))
"""For each pass the largest error of the guess, and the largest depth of an edge in an operator that counts, ns."""
_AROUND_NS = 1_000_000


def intersect(bounds: OffsetBounds) -> OffsetBounds | None:
    """Return the offsets that all bounds allow a clock of limited drift; None without bounds on both sides.

    A bound at one moment holds at every other, widened by what the clock may drift until then. So the greatest of all
    such lower bounds and the least of all such upper bounds are exactly the edges of what is possible.

    Returns:
        The band at the moments of the bounds, each once and in order; for a drift of 500 ppm at most.

    Example:
        >>> band = intersect(OffsetBounds(np.array([0, 1000]), np.array([2.0, -np.inf]), np.array([np.inf, 4.0])))
        >>> [round(offset, 2) for offset in band.middle.tolist()]
        [3.25, 2.75]
    """
    if not np.isfinite(bounds.low).any() or not np.isfinite(bounds.high).any():
        return None
    time, place = np.unique(bounds.time, return_inverse=True)
    low, high = np.full(len(time), -np.inf), np.full(len(time), np.inf)
    np.maximum.at(low, place, bounds.low)
    np.minimum.at(high, place, bounds.high)
    drift = _DRIFT_LIMIT * (time - time[0])
    return OffsetBounds(time, _greatest(low, drift), -_greatest(-high, drift))


class ClockLine(NamedTuple):
    """A trace's clock that runs evenly against the recording's."""

    center_ns: int = 0  # Unix nanoseconds of the recording at which the offset is meant
    offset_ns: float = 0.0  # how much the trace's clock is ahead
    drift: float = 0.0  # by how much that grows, nanoseconds per nanosecond

    @property
    def clock(self) -> ClockMap:
        """The trace's clock."""
        further = Reading(self.center_ns + _LINE_NS, self.offset_ns + self.drift * _LINE_NS)
        return ClockMap([Reading(self.center_ns, self.offset_ns), further], "mean rate")


@dataclass(frozen=True, slots=True, eq=False)
class OperatorFit:
    """The offset as the operators of a trace show it."""

    band: OffsetBounds  # the offsets that are possible
    operators: int  # whose begin and end it rests on
    left_out: int  # edges of calls that lie inside an operator whatever the offset; they do not count
    contradicted: int  # edges at which no offset suits all operators around
    typical_ns: float  # half of what the band is wide, by median
    bound_ns: float  # half of what it is wide where that is most

    def metadata(self) -> dict[str, Any]:
        """Return the JSON values in a trace's metadata."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "band"}
        return _rounded(values) | {"drift_limit": _DRIFT_LIMIT}

    def __str__(self) -> str:
        bound, typical = f"±{self.bound_ns / 1000:.1f} µs", f"±{self.typical_ns / 1000:.1f} µs"
        about = f"aligned to about {bound}, typically {typical}, by {self.operators} operators"
        # Where bounds contradict each other, one of them at least was taken from the wrong gap.
        return f"{about}; {self.contradicted} edges of calls suit no offset" if self.contradicted else about


@dataclass(frozen=True)
class Alignment:
    """The offset between the clocks of recording and trace, and how exact it is."""

    method: str  # "sync marks" or "wall clock"
    base_ns: int  # Unix nanoseconds of the trace's time 0
    line: ClockLine  # the trace's clock against the recording's, but for what operators show
    marks: int = 0  # sync marks that both files hold
    residual_ns: float | None = None  # median distance of the marks from the fit; None without marks
    worst_ns: float | None = None  # the greatest distance; None without marks
    # Half the time that a mark took, by median: what the marks cannot tell apart; None without marks.
    bound_ns: float | None = None
    note: str = ""  # what the user should know
    # The offset as operators show it, instead of the line; None if none were asked.
    operators: OperatorFit | None = None

    def to_trace(self, unix_ns: Int64Array) -> Int64Array:
        """Convert times of the recording to nanoseconds from the trace's base; never reverses two of them."""
        return self._clock.to_other(unix_ns) - self.base_ns

    @cached_property
    def _clock(self) -> ClockMap:
        return self.line.clock if self.operators is None else self.operators.band.clock

    def metadata(self) -> dict[str, Any]:
        """Return the JSON values in a trace's metadata."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        operators = None if self.operators is None else self.operators.metadata()
        return _rounded(values) | {"line": self.line._asdict(), "operators": operators}

    def __str__(self) -> str:
        if self.operators is not None:
            return f"{self.operators}; {self.note}" if self.note else str(self.operators)
        if self.residual_ns is None:
            return f"aligned by {self.method}: {self.note}"
        text = (
            f"aligned by {self.marks} sync marks: residual {self.residual_ns:.0f} ns (median), "
            f"{self.worst_ns:.0f} ns (worst)"
        )
        return f"{text}; {self.note}" if self.note else text


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: round(value, 1) if isinstance(value, float) else value for key, value in values.items()}


def align_by_wall_clock(base_ns: int) -> Alignment:
    """Return the alignment of a profiler and a recording that read the same wall clock."""
    note = (
        "no sync mark is in both files; the clocks usually agree within 10 µs: if they are more than 40 µs apart, as "
        "on another machine, the times are wrong"
    )
    return Alignment("wall clock", base_ns, ClockLine(), note=note)


def align_by_sync_marks(
    marks: Sequence[Mark], syncs: Mapping[str, Sequence[tuple[int, int]]], base_ns: int
) -> Alignment:
    """Fit offset and drift from the sync marks, each in a slice of its name; by the wall clock where both have none."""
    pairs = _pairs(marks, syncs, base_ns)
    if not len(pairs):
        return align_by_wall_clock(base_ns)
    time, low, high = pairs.T
    middle, half = (low + high) / 2, (high - low) / 2
    line = _fit(time, middle, half)
    distance = np.abs(middle - line.offset_ns - line.drift * (time - line.center_ns))
    bounds = float(np.median(distance)), float(distance.max()), float(np.median(half))
    return Alignment("sync marks", base_ns, line, len(time), *bounds)


def refine_by_operators(alignment: Alignment, timeline: Timeline, events: ProfilerEvents) -> Alignment:
    """Refine an alignment, off by at most `REACH_NS`, by the trace's operators; if none runs in a call it stays."""
    shared = list(_shared_threads(timeline, events))
    if not shared:
        return alignment
    pairs = _pairs(timeline.marks, events.syncs, alignment.base_ns)
    marks = OffsetBounds(pairs[:, 0], *pairs[:, 1:].T.astype(np.float64))
    refined = alignment
    for margin, tolerance in _PASSES:
        parts = [marks]
        operators = cut = 0
        for all_edges, start, end in shared:
            guess = refined.to_trace(all_edges)
            near = (guess > int(start.min()) - _AROUND_NS) & (guess < int(end.max()) + _AROUND_NS)
            edges = CallEdges(all_edges[near], guess[near])
            busy = busy_intervals(start, end, np.sort(edges.guess), margin)
            if not len(edges.time) or not len(busy.start):
                continue
            # Shifts and bounds are corrections of this guess of the offset.
            guessed = (edges.guess + alignment.base_ns - edges.time).astype(np.float64)
            least, most = _within_marks(marks, edges.time)
            shift = most_likely_shift(edges, busy, least - guessed, most - guessed)
            bounds = bounds_from_gaps(edges, shift, busy, tolerance)
            low, high = bounds.low + guessed, bounds.high + guessed
            # The slice of a mark is certain, the gap of an edge only likely.
            agrees = (low <= most) & (high >= least) & (np.isfinite(low) | np.isfinite(high))
            parts.append(OffsetBounds(bounds.time[agrees], low[agrees], high[agrees]))
            operators += len(start)
            cut += int(np.count_nonzero(~agrees))
        if not operators:
            return alignment
        band = intersect(OffsetBounds.joined(parts))
        if band is None:
            return alignment
        half = (band.high - band.low) / 2
        contradicted = int(np.count_nonzero(half < 0))
        widths = float(np.median(np.abs(half))), float(np.abs(half).max())
        refined = replace(alignment, operators=OperatorFit(band, operators, cut, contradicted, *widths))
    return refined


def _pairs(marks: Sequence[Mark], syncs: Mapping[str, Sequence[tuple[int, int]]], base_ns: int) -> Int64Array:
    """Return int64[n, 3]: the mark's time, and the least and the greatest offset that it allows; in time order."""
    rows: list[tuple[int, int, int]] = []
    for mark in marks:
        if mark.kind != "sync" or not syncs.get(mark.text):
            continue
        expected = mark.time_ns - base_ns
        # Numbers start again with each recording; then the nearest is meant.
        begin, end = min(syncs[mark.text], key=lambda interval: abs(interval[0] - expected))
        if abs(begin - expected) > _SAME_RUN_NS:
            continue
        rows.append((mark.time_ns, begin - expected, end - expected))
    return np.array(sorted(rows), np.int64).reshape(-1, 3)


def _fit(time: Int64Array, middle: Float64Array, half: Float64Array) -> ClockLine:
    """Fit a line; a mark counts by how sharp it is, and a slope only where it stands out of the noise."""
    weight = 1.0 / (half + _CLOCK_NOISE_NS) ** 2
    origin = int(time[0])
    x = (time - origin).astype(np.float64)
    center = float(np.average(x, weights=weight))
    offset = float(np.average(middle, weights=weight))
    drift = 0.0
    spread = float(np.sum(weight * (x - center) ** 2))
    if len(time) >= 3 and spread > 0:
        slope = float(np.sum(weight * (x - center) * (middle - offset))) / spread
        rest = middle - offset - slope * (x - center)
        error = float(np.sqrt(np.sum(weight * rest**2) / (len(time) - 2) / spread))
        if abs(slope) > 2 * error and abs(slope) < MAX_RATE:
            drift = slope
    return ClockLine(origin + round(center), offset, drift)


def _greatest(low: Float64Array, drift: Float64Array) -> Float64Array:
    """Return the greatest of all bounds at each moment; each falls to both sides as fast as `drift` grows."""
    before: Float64Array = np.maximum.accumulate(low + drift) - drift
    after: Float64Array = np.maximum.accumulate((low - drift)[::-1])[::-1] + drift
    return np.maximum(before, after)


def _within_marks(marks: OffsetBounds, time: Int64Array) -> tuple[Float64Array, Float64Array]:
    """Return the least and the greatest offset at each moment that the sync marks allow."""
    nothing = np.full(len(time), np.inf)
    asked = OffsetBounds(time, -nothing, nothing)
    band = intersect(OffsetBounds.joined([marks, asked]))
    if band is None:
        return -nothing, nothing
    moment = np.searchsorted(band.time, time)
    low, high = band.low[moment], band.high[moment]
    return np.where(low <= high, low, -np.inf), np.where(low <= high, high, np.inf)


def _shared_threads(timeline: Timeline, events: ProfilerEvents) -> Iterator[tuple[Int64Array, Int64Array, Int64Array]]:
    """Yield calls and operators of each thread that has both.

    The edges of its calls, ns of the recording's clock, ascending; start and end of its operators, ns from the trace's
    base, ascending and an outer one first.
    """
    columns = timeline.columns
    thread_of_span = threads_of(timeline)
    chosen = runs_module_code(columns) & columns.complete
    tables = events.ops, events.plain_ops
    track, start, end = (np.concatenate([getattr(ops, name) for ops in tables]) for name in ("track", "start", "end"))
    thread_of_op = events.threads[track]
    for thread in np.unique(thread_of_span[chosen]).tolist():
        running = thread_of_op == thread
        if running.any():
            spans = chosen & (thread_of_span == thread)
            edges = np.sort(np.concatenate([columns.start[spans], columns.end[spans]]))
            begins, ends = start[running], end[running]
            order = np.lexsort((-ends, begins))
            yield edges, begins[order], ends[order]
