"""From the recording's clock to the trace's: offset and drift, measured where both saw the same moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from .._typing import Float64Array, Int64Array
from ..timeline import Mark
from .offset_band import DRIFT_LIMIT, OffsetBand, OffsetBounds, find_clock_steps

__all__ = ["Alignment", "ClockSegment", "OperatorFit", "align_by_sync_marks", "align_by_wall_clock", "sync_bounds"]

_CLOCK_NOISE_NS = 50.0
_SAME_RUN_NS = 10_000_000_000
"""Marks of another run have the same names: a clock is not set by more than this while it is profiled."""


@dataclass(frozen=True, slots=True)
class ClockSegment:
    """A section of time in which the trace's clock runs evenly against the recording's.

    Attributes:
        begin_ns: Unix nanoseconds of the recording from which on it holds.
        center_ns: where the offset is meant.
        offset_ns: how much the trace's clock is ahead.
        drift: by how much that grows, nanoseconds per nanosecond.
    """

    begin_ns: int
    center_ns: int
    offset_ns: float
    drift: float


@dataclass(frozen=True, slots=True, eq=False)
class OperatorFit:
    """The offset as the operators of a trace prove it.

    Attributes:
        bands: of each segment the offsets that are possible; None where no operator is near it.
        operators: whose begin and end the proof rests on.
        left_out: edges of calls that lie inside an operator whatever the offset; they prove nothing.
        contradicted: edges at which no offset suits all operators around.
        typical_ns: how far off the offset can be, by median over the edges of calls.
        bound_ns: how far off it can be where that is most.
        is_certain: whether `bound_ns` holds whichever of the possible gaps each edge lies in.
    """

    bands: Sequence[OffsetBand | None]
    operators: int
    left_out: int
    contradicted: int
    typical_ns: float
    bound_ns: float
    is_certain: bool = False

    def metadata(self) -> dict[str, Any]:
        """What a trace's metadata says of it; JSON values."""
        return {
            "operators": self.operators,
            "left_out": self.left_out,
            "contradicted": self.contradicted,
            "typical_ns": round(self.typical_ns, 1),
            "bound_ns": round(self.bound_ns, 1),
            "is_certain": self.is_certain,
            "drift_limits": [None if band is None else band.drift_limit for band in self.bands],
        }

    def __str__(self) -> str:
        bound, typical = f"±{self.bound_ns / 1000:.1f} µs", f"±{self.typical_ns / 1000:.1f} µs"
        if self.is_certain:
            return f"aligned within {bound}, typically {typical} (proven by {self.operators} operators)"
        # Where bounds contradict each other, one of them at least was taken from the wrong gap: nothing is proven.
        about = f"aligned to about {bound}, typically {typical}, by {self.operators} operators; this is not proven"
        return f"{about}, as {self.contradicted} edges of calls suit no offset" if self.contradicted else about


@dataclass(frozen=True)
class Alignment:
    """How the recording lies over the trace.

    Attributes:
        method: "sync marks" or "wall clock".
        base_ns: Unix nanoseconds of the trace's time 0.
        segments: in time order; more than one where a clock was set meanwhile.
        marks: sync marks that both files hold.
        residual_ns: median distance of the marks from the fit; None without marks.
        worst_ns: the greatest distance; None without marks.
        bound_ns: half the time that a mark took, by median: what the marks cannot tell apart; None without marks.
        note: what the user should know.
        brackets: the two marks, Unix nanoseconds, between which each segment after the first begins.
        operators: the offset as operators prove it, instead of the segments' lines; None where none were asked.
    """

    method: str
    base_ns: int
    segments: Sequence[ClockSegment]
    marks: int
    residual_ns: float | None
    worst_ns: float | None
    bound_ns: float | None
    note: str
    brackets: Sequence[tuple[int, int]] = ()
    operators: OperatorFit | None = None

    def to_trace(self, unix_ns: Int64Array) -> Int64Array:
        """Convert times of the recording to nanoseconds from the trace's base; never reverses two of them."""
        moved = self.to_trace_clock(unix_ns)
        segment_of = self._segments_of(unix_ns)
        floor = np.iinfo(np.int64).min
        for index in range(1, len(self.segments)):
            # Where the clock was set back, time stands still until it has caught up.
            end = np.array([self.segments[index].begin_ns], np.int64)
            floor = max(floor, int(self._through(index - 1, end)[0]))
            here = segment_of == index
            moved[here] = np.maximum(moved[here], floor)
        return moved

    def to_trace_clock(self, unix_ns: Int64Array) -> Int64Array:
        """Convert the same to what the trace's clock showed, which goes back where it was set back."""
        segment_of = self._segments_of(unix_ns)
        moved = np.empty(len(unix_ns), np.int64)
        for index in range(len(self.segments)):
            here = segment_of == index
            moved[here] = self._through(index, unix_ns[here])
        return moved

    def _segments_of(self, unix_ns: Int64Array) -> Int64Array:
        begins = np.array([segment.begin_ns for segment in self.segments[1:]], np.int64)
        return np.searchsorted(begins, unix_ns, side="right").astype(np.int64)

    def of_segment(self, index: int) -> Alignment:
        """Return the alignment as it would be if one segment held always."""
        operators = self.operators and replace(self.operators, bands=[self.operators.bands[index]])
        return replace(self, segments=[self.segments[index]], brackets=(), operators=operators)

    def _through(self, index: int, unix_ns: Int64Array) -> Int64Array:
        segment = self.segments[index]
        band = None if self.operators is None else self.operators.bands[index]
        if band is None:
            shift = segment.offset_ns + segment.drift * (unix_ns - segment.center_ns)
        else:
            origin = band.time[0]
            shift = np.interp(unix_ns - origin, band.time - origin, band.middle)
        moved: Int64Array = unix_ns - self.base_ns + np.rint(shift).astype(np.int64)
        return moved

    def metadata(self) -> dict[str, Any]:
        """What a trace's metadata says of it; JSON values."""
        metadata: dict[str, Any] = {
            "method": self.method,
            "base_ns": self.base_ns,
            "segments": [asdict(segment) for segment in self.segments],
            "marks": self.marks,
            "residual_ns": self.residual_ns,
            "worst_ns": self.worst_ns,
            "bound_ns": self.bound_ns,
            "note": self.note,
            "operators": None if self.operators is None else self.operators.metadata(),
        }
        return {key: round(value, 1) if isinstance(value, float) else value for key, value in metadata.items()}

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


def align_by_wall_clock(base_ns: int) -> Alignment:
    """Trust that the profiler and the recording read the same wall clock."""
    note = (
        "no sync mark is in both files; the clocks usually agree within 10 µs, and calls and operators do not tell "
        "whether these do: where they are more than 40 µs apart, as on another machine, the times are wrong"
    )
    return Alignment("wall clock", base_ns, [ClockSegment(0, 0, 0.0, 0.0)], 0, None, None, None, note)


def align_by_sync_marks(
    marks: Sequence[Mark], syncs: Mapping[str, Sequence[tuple[int, int]]], base_ns: int
) -> Alignment:
    """Fit offset and drift from the sync marks; by the wall clock where none is in both.

    Args:
        marks: those of the recording; a sync mark lies within the profiler's slice of the same name.
        syncs: the profiler's slices, start and end in ns from its base.
        base_ns: Unix nanoseconds of the trace's time 0.
    """
    pairs = _pairs(marks, syncs, base_ns)
    if not len(pairs):
        return align_by_wall_clock(base_ns)
    time, low, high = pairs.T
    middle, half = (low + high) / 2, (high - low) / 2
    segments: list[ClockSegment] = []
    distance: list[Float64Array] = []
    steps = find_clock_steps(OffsetBounds(time, low.astype(np.float64), high.astype(np.float64)))
    brackets = [(int(time[before]), int(time[after])) for before, after in steps]
    begins = [0, *((before + after) // 2 for before, after in brackets)]
    firsts, lasts = [0, *(after for _, after in steps)], [*(before + 1 for before, _ in steps), len(time)]
    for begin, first, last in zip(begins, firsts, lasts, strict=True):
        segment = _fit(begin, time[first:last], middle[first:last], half[first:last])
        segments.append(segment)
        shift = segment.offset_ns + segment.drift * (time[first:last] - segment.center_ns)
        distance.append(np.abs(middle[first:last] - shift))
    distances = np.concatenate(distance)
    note = ""
    if steps:
        note = f"a clock was set {len(steps)} times meanwhile: where exactly is known to the nearest operator"
    return Alignment(
        "sync marks",
        base_ns,
        segments,
        len(time),
        float(np.median(distances)),
        float(distances.max()),
        float(np.median(half)),
        note,
        brackets,
    )


def sync_bounds(marks: Sequence[Mark], syncs: Mapping[str, Sequence[tuple[int, int]]], base_ns: int) -> OffsetBounds:
    """Return what the sync marks say of the offset: each was written while the profiler's slice of its name ran.

    Args:
        marks: those of the recording.
        syncs: the profiler's slices, start and end in ns from its base.
        base_ns: Unix nanoseconds of the trace's time 0.
    """
    time, low, high = _pairs(marks, syncs, base_ns).T
    return OffsetBounds(time, low.astype(np.float64), high.astype(np.float64))


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


def _fit(begin: int, time: Int64Array, middle: Float64Array, half: Float64Array) -> ClockSegment:
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
        if abs(slope) > 2 * error and abs(slope) < DRIFT_LIMIT:
            drift = slope
    return ClockSegment(begin, origin + round(center), offset, drift)
