"""The alignment of a recording with a trace: offset and drift between their clocks.

Sync marks, which both contain, give a first guess. The operators of the trace refine it: no call starts or ends while
an operator runs, so the best offset leaves the fewest operators partly outside a call.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from .._arrays import Float64Array, Int64Array
from .._interrupts import cached_property
from ..ring.clocks import MAX_RATE, MAX_SLEW, ClockMap, Reading
from ..timeline import Mark, Timeline
from ..timeline.nesting import TimeIntervals, union_of
from .event_collector import ProfilerEvents
from .recorded_part import runs_module_code, threads_of

MAX_GUESS_ERROR_NS = 40_000
"""Maximum error of the first guess in ns."""
SHIFT_STEP_NS = 250
SHIFTS = np.arange(-MAX_GUESS_ERROR_NS, MAX_GUESS_ERROR_NS + 1, SHIFT_STEP_NS, dtype=np.int64)
"""Corrections of the guess in ns that are tried."""
_MAX_WINDOW_EDGES, _MIN_WINDOW_EDGES = 64, 8
_WINDOW_NS = 20_000_000
"""Duration of a window in ns, if the number of its edges allows it."""
_WINDOWS_PER_BLOCK = 256
"""Number of windows whose cuts are counted together: it bounds the memory."""


class OffsetBounds(NamedTuple):
    """Bounds on an offset, each at one moment; columns of equal length."""

    time_ns: Int64Array  # time of the recording's clock
    low_ns: Float64Array  # minimum offset; -inf if unknown
    high_ns: Float64Array  # maximum offset; inf if unknown; below `low_ns` if bounds contradict each other

    @classmethod
    def joined(cls, parts: Sequence["OffsetBounds"]) -> "OffsetBounds":
        """Return the concatenated bounds."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    @property
    def middle_ns(self) -> Float64Array:
        """The offsets halfway between the bounds; bounds from `intersect` keep their drift within its limit."""
        return (self.low_ns + self.high_ns) / 2

    @property
    def clock(self) -> ClockMap:
        """The trace's clock by `middle_ns`, with bounds on its error at the moments of the bounds."""
        return ClockMap.of_columns(self.time_ns, self.middle_ns, np.abs(self.high_ns - self.low_ns) / 2, "no rate")


class CallEdges(NamedTuple):
    """Moments at which calls of one thread start or end; columns of equal length, in time order."""

    time_ns: Int64Array  # time of the recording's clock
    guess_ns: Int64Array  # supposed time in the trace, from its base


def busy_intervals(start: Int64Array, end: Int64Array, edges: Int64Array, margin: int) -> TimeIntervals:
    """Return the time in which a thread ran operators that call no module.

    An operator that calls modules, such as a checkpoint's, has edges of calls deep inside: it is replaced by the
    operators inside it. Operators are sorted, outer before inner; edges are accurate to `margin` ns.
    """
    has_inner = np.append(start[1:] < end[:-1], False)
    has_calls = np.searchsorted(edges, start + margin) < np.searchsorted(edges, end - margin)
    is_busy = (end > start) & ~(has_inner & has_calls)
    return union_of(start[is_busy], end[is_busy])


def cut_depth(busy: TimeIntervals, time: Int64Array) -> Int64Array:
    """Return the distance in ns of each moment from the nearer edge of its operator; 0 outside operators."""
    if not len(busy.start_ns):
        return np.zeros(len(time), np.int64)
    operator = np.searchsorted(busy.start_ns, time, side="right") - 1
    depth: Int64Array = np.maximum(np.minimum(time - busy.start_ns[operator], busy.end_ns[operator] - time), 0)
    return depth


def most_likely_shift(edges: CallEdges, busy: TimeIntervals, low: Float64Array, high: Float64Array) -> Float64Array:
    """Return the shift of each edge's guess in ns, from `low` to `high`, that cuts the fewest operators nearby.

    The shift is the middle of the best run of shifts; among equal runs, the run nearest to the previous shift counts.
    """
    elapsed = (edges.time_ns - edges.time_ns[0]).astype(np.float64)
    starts = _window_starts(edges.time_ns)
    center = np.add.reduceat(elapsed, starts) / np.diff(np.append(starts, len(elapsed)))
    shift = np.zeros(len(starts))
    min_shift = np.minimum.reduceat(low, starts) - SHIFT_STEP_NS
    max_shift = np.maximum.reduceat(high, starts) + SHIFT_STEP_NS
    last_shift = 0.0
    for block in range(0, len(starts), _WINDOWS_PER_BLOCK):
        bounds = np.append(starts, len(elapsed))[block : block + _WINDOWS_PER_BLOCK + 1]
        window = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        cuts = _count_cuts(edges.guess_ns[bounds[0] : bounds[-1]], window, busy)
        for index, count in enumerate(cuts):
            is_possible = (min_shift[block + index] <= SHIFTS) & (max_shift[block + index] >= SHIFTS)
            if is_possible.any():
                count = np.where(is_possible, count, len(edges.time_ns) + 1)
            best = np.flatnonzero(count == count.min())
            if len(best) < len(SHIFTS):
                run = best - np.arange(len(best))
                best_run = best[run == run[np.argmin(np.abs(SHIFTS[best] - last_shift))]]
                last_shift = float(SHIFTS[best_run[0]] + SHIFTS[best_run[-1]]) / 2
            shift[block + index] = last_shift
    edge_shift: Float64Array = np.interp(elapsed, center, shift)
    return edge_shift


def bounds_from_gaps(edges: CallEdges, shift: Float64Array, busy: TimeIntervals, tolerance: float) -> OffsetBounds:
    """Return the bounds from the gap around each edge, as corrections of the guess, in order.

    An edge deeper than `tolerance` ns in an operator has no bounds; a shallower edge counts as beyond the nearer end.
    """
    time = edges.guess_ns + np.rint(shift).astype(np.int64)
    next_op = np.searchsorted(busy.start_ns, time, side="right")
    # An operator around the edge counts as before or after it, whichever is nearer.
    last_op = np.maximum(next_op - 1, 0)
    is_inside = (next_op > 0) & (time < busy.end_ns[last_op])
    is_near_start = time - busy.start_ns[last_op] < busy.end_ns[last_op] - time
    next_op = np.where(is_inside & is_near_start, last_op, next_op)
    low, high = np.full(len(time), -np.inf), np.full(len(time), np.inf)
    follows, precedes = np.flatnonzero(next_op > 0), np.flatnonzero(next_op < len(busy.start_ns))
    low[follows] = busy.end_ns[next_op[follows] - 1] - edges.guess_ns[follows]
    high[precedes] = busy.start_ns[next_op[precedes]] - edges.guess_ns[precedes]
    is_deep = cut_depth(busy, time) > tolerance
    low[is_deep], high[is_deep] = -np.inf, np.inf
    return OffsetBounds(edges.time_ns, low, high)


def _window_starts(time: Int64Array) -> Int64Array:
    """Return the first edge of each window; a window is short, but has enough edges to count."""
    starts = [0]
    while True:
        start = starts[-1]
        window_end = int(np.searchsorted(time, time[start] + _WINDOW_NS))
        start = min(start + _MAX_WINDOW_EDGES, max(start + _MIN_WINDOW_EDGES, window_end))
        if start + _MIN_WINDOW_EDGES > len(time):
            return np.array(starts, np.int64)
        starts.append(start)


def _count_cuts(guess: Int64Array, window: Int64Array, busy: TimeIntervals) -> Int64Array:
    """Return int64[windows, shifts]: the number of edges inside an operator at each of `SHIFTS`."""
    width = len(SHIFTS) + 1
    count = int(window[-1]) + 1
    change = np.zeros(count * width, np.int64)
    # Each pass of the loop handles the next operator within reach of each edge.
    op = np.searchsorted(busy.end_ns, guess - MAX_GUESS_ERROR_NS, side="right")
    rows = np.flatnonzero(op < len(busy.start_ns))
    op = op[rows]
    while len(rows):
        distance = busy.start_ns[op] - guess[rows]
        is_near = distance < MAX_GUESS_ERROR_NS
        rows, op, distance = rows[is_near], op[is_near], distance[is_near]
        if not len(rows):
            break
        # The start and the end of an operator are not inside it.
        first = np.maximum((distance + MAX_GUESS_ERROR_NS) // SHIFT_STEP_NS + 1, 0)
        end = -(-(busy.end_ns[op] - guess[rows] + MAX_GUESS_ERROR_NS) // SHIFT_STEP_NS)
        end = np.maximum(first, np.minimum(end, len(SHIFTS)))
        np.add.at(change, window[rows] * width + first, 1)
        np.subtract.at(change, window[rows] * width + end, 1)
        op = op + 1
        has_next = op < len(busy.start_ns)
        rows, op = rows[has_next], op[has_next]
    cuts: Int64Array = np.cumsum(change.reshape(count, width), axis=1)[:, :-1]
    return cuts


_CLOCK_NOISE_NS = 50.0
_LINE_NS = 1 << 40
"""Distance in ns of the two moments that define a line."""
_SAME_RUN_NS = 10_000_000_000
"""Maximum distance of a mark and its slice in ns: marks of other runs have the same names."""
_PASSES = ((MAX_GUESS_ERROR_NS, 2_000.0), (10_000, 1_000.0), (5_000, 500.0))
"""For each pass, the maximum error of the guess and the maximum depth of a usable edge in an operator, both in ns."""
_OP_MARGIN_NS = 1_000_000


def intersect(bounds: OffsetBounds) -> OffsetBounds | None:
    """Return the offsets that satisfy all bounds, for a clock of limited drift; None without bounds on both sides.

    A bound at one moment holds at every other moment, widened by the maximum drift between them. So the maximum of the
    lower bounds and the minimum of the upper bounds, all widened, are exactly the limits of the possible offsets.

    Returns:
        The band at the distinct moments of the bounds, in order, for a drift of up to 500 ppm.

    Example:
        >>> band = intersect(OffsetBounds(np.array([0, 1000]), np.array([2.0, -np.inf]), np.array([np.inf, 4.0])))
        >>> [round(offset, 2) for offset in band.middle.tolist()]
        [3.25, 2.75]
    """
    if not np.isfinite(bounds.low_ns).any() or not np.isfinite(bounds.high_ns).any():
        return None
    time, index = np.unique(bounds.time_ns, return_inverse=True)
    low, high = np.full(len(time), -np.inf), np.full(len(time), np.inf)
    np.maximum.at(low, index, bounds.low_ns)
    np.minimum.at(high, index, bounds.high_ns)
    drift = MAX_SLEW * (time - time[0])
    return OffsetBounds(time, _max_lower_bound(low, drift), -_max_lower_bound(-high, drift))


class ClockLine(NamedTuple):
    """A trace's clock that runs evenly against the recording's."""

    center_ns: int = 0  # time of the recording in Unix ns at which `offset_ns` applies
    offset_ns: float = 0.0  # trace's clock minus the recording's clock, in ns
    drift: float = 0.0  # growth of the offset in ns per ns

    @property
    def clock(self) -> ClockMap:
        """The trace's clock."""
        end = Reading(self.center_ns + _LINE_NS, self.offset_ns + self.drift * _LINE_NS)
        return ClockMap([Reading(self.center_ns, self.offset_ns), end], "mean rate")


@dataclass(frozen=True, slots=True, eq=False)
class OperatorFit:
    """The offset determined from the operators of a trace."""

    band: OffsetBounds  # the possible offsets
    operators: int  # number of operators used
    left_out: int  # number of call edges not used: deep inside an operator, or against the marks
    contradicted: int  # number of edges at which no offset fits all operators nearby
    typical_ns: float  # median of half the band's width
    bound_ns: float  # maximum of half the band's width

    def metadata(self) -> dict[str, Any]:
        """Return the JSON values in a trace's metadata."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "band"}
        return _rounded(values) | {"drift_limit": MAX_SLEW}

    def __str__(self) -> str:
        bound, typical = f"±{self.bound_ns / 1000:.1f} µs", f"±{self.typical_ns / 1000:.1f} µs"
        text = f"aligned to about {bound}, typically {typical}, by {self.operators} operators"
        # If bounds contradict each other, at least one of them comes from the wrong gap.
        return f"{text}; {self.contradicted} edges of calls suit no offset" if self.contradicted else text


@dataclass(frozen=True)
class Alignment:
    """The offset between the clocks of recording and trace, and its accuracy."""

    method: Literal["sync marks", "wall clock"]
    base_ns: int  # Unix nanoseconds of the trace's time 0
    line: ClockLine  # the trace's clock against the recording's, without the refinement by operators
    marks: int = 0  # number of sync marks that both files contain
    residual_ns: float | None = None  # median distance of the marks from the fit; None without marks
    worst_ns: float | None = None  # maximum distance; None without marks
    # Half the median duration of a mark, which limits the accuracy; None without marks.
    bound_ns: float | None = None
    note: str = ""  # note for the user
    # The offset determined from operators, which replaces the line; None if operators were not used.
    operators: OperatorFit | None = None

    def to_trace(self, unix_ns: Int64Array) -> Int64Array:
        """Convert times of the recording to nanoseconds from the trace's base, without changing their order."""
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
        "no sync mark is in both files; the clocks usually agree within 10 µs: if they are more than 40 µs apart, "
        "such as on another machine, the times are wrong"
    )
    return Alignment("wall clock", base_ns, ClockLine(), note=note)


def align_by_sync_marks(
    marks: Sequence[Mark], syncs: Mapping[str, Sequence[tuple[int, int]]], base_ns: int
) -> Alignment:
    """Fit offset and drift to the sync marks, each in a slice of its name; without common marks use the wall clock."""
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
    """Refine an alignment that is correct within `MAX_GUESS_ERROR_NS`; without an operator in a call it stays."""
    shared = list(_shared_threads(timeline, events))
    if not shared:
        return alignment
    pairs = _pairs(timeline.marks, events.syncs, alignment.base_ns)
    marks = OffsetBounds(pairs[:, 0], *pairs[:, 1:].T.astype(np.float64))
    refined = alignment
    for margin, tolerance in _PASSES:
        parts = [marks]
        operators = unused_edges = 0
        for all_edges, start, end in shared:
            guess = refined.to_trace(all_edges)
            is_near = (guess > int(start.min()) - _OP_MARGIN_NS) & (guess < int(end.max()) + _OP_MARGIN_NS)
            edges = CallEdges(all_edges[is_near], guess[is_near])
            busy = busy_intervals(start, end, np.sort(edges.guess_ns), margin)
            if not len(edges.time_ns) or not len(busy.start_ns):
                continue
            # Shifts and bounds are corrections of this guess of the offset.
            offset = (edges.guess_ns + alignment.base_ns - edges.time_ns).astype(np.float64)
            mark_low, mark_high = _mark_bounds(marks, edges.time_ns)
            shift = most_likely_shift(edges, busy, mark_low - offset, mark_high - offset)
            bounds = bounds_from_gaps(edges, shift, busy, tolerance)
            low, high = bounds.low_ns + offset, bounds.high_ns + offset
            # The slice of a mark is certain, the gap of an edge only likely.
            agrees = (low <= mark_high) & (high >= mark_low) & (np.isfinite(low) | np.isfinite(high))
            parts.append(OffsetBounds(bounds.time_ns[agrees], low[agrees], high[agrees]))
            operators += len(start)
            unused_edges += int(np.count_nonzero(~agrees))
        if not operators:
            return alignment
        band = intersect(OffsetBounds.joined(parts))
        if band is None:
            return alignment
        half_width = (band.high_ns - band.low_ns) / 2
        contradicted = int(np.count_nonzero(half_width < 0))
        errors = float(np.median(np.abs(half_width))), float(np.abs(half_width).max())
        refined = replace(alignment, operators=OperatorFit(band, operators, unused_edges, contradicted, *errors))
    return refined


def _pairs(marks: Sequence[Mark], syncs: Mapping[str, Sequence[tuple[int, int]]], base_ns: int) -> Int64Array:
    """Return int64[n, 3]: time of the mark, and minimum and maximum offset that it allows; in time order."""
    rows: list[tuple[int, int, int]] = []
    for mark in marks:
        if mark.kind != "sync" or not syncs.get(mark.text):
            continue
        expected = mark.time_ns - base_ns
        # Each recording numbers its marks from the start, so a name may have several slices: the nearest counts.
        start, end = min(syncs[mark.text], key=lambda interval: abs(interval[0] - expected))
        if abs(start - expected) > _SAME_RUN_NS:
            continue
        rows.append((mark.time_ns, start - expected, end - expected))
    return np.array(sorted(rows), np.int64).reshape(-1, 3)


def _fit(time: Int64Array, middle: Float64Array, half: Float64Array) -> ClockLine:
    """Fit a line; the weight of a mark is its accuracy, and a slope counts only if it exceeds the noise."""
    weight = 1.0 / (half + _CLOCK_NOISE_NS) ** 2
    origin = int(time[0])
    x = (time - origin).astype(np.float64)
    center = float(np.average(x, weights=weight))
    offset = float(np.average(middle, weights=weight))
    drift = 0.0
    spread = float(np.sum(weight * (x - center) ** 2))
    if len(time) >= 3 and spread > 0:
        slope = float(np.sum(weight * (x - center) * (middle - offset))) / spread
        residuals = middle - offset - slope * (x - center)
        error = float(np.sqrt(np.sum(weight * residuals**2) / (len(time) - 2) / spread))
        if abs(slope) > 2 * error and abs(slope) < MAX_RATE:
            drift = slope
    return ClockLine(origin + round(center), offset, drift)


def _max_lower_bound(low: Float64Array, drift: Float64Array) -> Float64Array:
    """Return the maximum of all lower bounds at each moment; each bound decreases on both sides as `drift` grows."""
    from_left: Float64Array = np.maximum.accumulate(low + drift) - drift
    from_right: Float64Array = np.maximum.accumulate((low - drift)[::-1])[::-1] + drift
    return np.maximum(from_left, from_right)


def _mark_bounds(marks: OffsetBounds, time: Int64Array) -> tuple[Float64Array, Float64Array]:
    """Return the minimum and the maximum offset that the sync marks allow at each moment."""
    infinity = np.full(len(time), np.inf)
    unbounded = OffsetBounds(time, -infinity, infinity)
    band = intersect(OffsetBounds.joined([marks, unbounded]))
    if band is None:
        return -infinity, infinity
    index = np.searchsorted(band.time_ns, time)
    low, high = band.low_ns[index], band.high_ns[index]
    return np.where(low <= high, low, -np.inf), np.where(low <= high, high, np.inf)


def _shared_threads(timeline: Timeline, events: ProfilerEvents) -> Iterator[tuple[Int64Array, Int64Array, Int64Array]]:
    """Yield calls and operators of each thread that has both.

    The edges of its calls are in ns of the recording's clock, ascending. Start and end of its operators are in ns from
    the trace's base, ascending, outer before inner.
    """
    columns = timeline.columns
    thread_of_span = threads_of(timeline)
    is_call = runs_module_code(columns) & columns.complete
    tables = events.ops, events.plain_ops
    track, start, end = (
        np.concatenate([getattr(ops, name) for ops in tables]) for name in ("track", "start_ns", "end_ns")
    )
    thread_of_op = events.threads[track]
    for thread in np.unique(thread_of_span[is_call]).tolist():
        ops = thread_of_op == thread
        if ops.any():
            spans = is_call & (thread_of_span == thread)
            edges = np.sort(np.concatenate([columns.start[spans], columns.end[spans]]))
            starts, ends = start[ops], end[ops]
            order = np.lexsort((-ends, starts))
            yield edges, starts[order], ends[order]
