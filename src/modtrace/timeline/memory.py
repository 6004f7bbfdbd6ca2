"""Memory that calls took and kept, in a recording that counted what tensors hold."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .._arrays import BoolArray, Int64Array
from ..ring.slot_format import ALLOCATED, CUDA_ALLOCATED
from .contents import MEMORY, CounterSeries
from .nesting import union_of, without_inner
from .slices import BACKWARD, BACKWARD_PASS, MODULE, PHASES, RANGE, Slices

if TYPE_CHECKING:
    from .timeline import Timeline


OUTSIDE_CALLS = "gradients", "optimizer state", "parameters"
"""Memory that no call of a module holds: allocated by nodes of backward passes and by optimizers' steps, and the
parameters of modules that were called."""
KINDS = "backward", "optimizer", "parameters"
"""The names of these in a ring, in the same order."""
OUTSIDE = "no module"
"""The holder of what was allocated in none of these, nor in a call of a module."""


class CallMemory(NamedTuple):
    """The memory of each span of modules, in bytes; arrays with one entry per span."""

    known: BoolArray  # bool, whether it was counted from the begin to the end
    retained: Int64Array  # int64, what tensors held at its end less what they held at its begin
    peak: Int64Array  # int64, the most that they held inside it less what they held at its begin


class Holders(NamedTuple):
    """The holders of memory at one moment, in bytes."""

    process: str  # which process; empty if only one counted
    time_ns: int  # the moment, Unix nanoseconds
    held: int  # what tensors held together
    begin_ns: int  # when the process began to count, Unix nanoseconds
    # What the calls of that step hold by then, largest first, by fully qualified name: what each kept outside of inner
    # calls, less what was freed in its backward, in a call around it, or between calls (the oldest first). Among them
    # are `OUTSIDE_CALLS`, as far as known. Together with what else is held they sum to `held`.
    by_fqn: dict[str, int]

    @property
    def other(self) -> int:
        """Bytes that none of these calls holds."""
        return self.held - sum(self.by_fqn.values())


def measure_calls(timeline: "Timeline") -> CallMemory | None:
    """Return what each span of `timeline.columns` took; None if nothing was counted."""
    columns, measured = timeline.columns, None
    for series, is_own in _counted(timeline):
        measured = measured or CallMemory(
            np.zeros(len(columns), np.bool_), np.zeros(len(columns), np.int64), np.zeros(len(columns), np.int64)
        )
        first = _sample_at(series, columns.start)
        rows = np.flatnonzero(is_own & columns.complete & (first >= 0))
        first, last = first[rows], _sample_at(series, columns.end[rows])
        bounds = np.column_stack([first, last + 1]).ravel()
        most = np.maximum.reduceat(np.append(series.value, 0), bounds)[::2] if len(rows) else first
        measured.known[rows] = True
        measured.retained[rows] = series.value[last] - series.value[first]
        measured.peak[rows] = most - series.value[first]
    return measured


def find_holders(timeline: "Timeline") -> Holders | None:
    """Return who held memory when the process that held most did so; None if none counted it."""
    columns, counted = timeline.columns, list(_counted(timeline))
    if not counted:
        return None
    series, is_own = max(counted, key=lambda pair: int(pair[0].value.max()))
    moment = int(series.value.argmax())
    until = int(series.time[moment])
    ended = timeline.step_ends[timeline.step_ends <= until]
    begun = [] if timeline.begin_ns is None else [timeline.begin_ns]
    begin = max([int(series.time[0]), *begun, *ended.tolist()])
    rows = np.flatnonzero(is_own & (columns.end > begin) & (columns.start <= until))
    last = np.minimum(_sample_at(series, columns.end[rows]), moment)
    kept = np.zeros(len(columns), np.int64)
    kept[rows] = series.value[last] - series.value[_sample_at(series, np.maximum(columns.start[rows], begin))]
    itself = without_inner(kept, columns.parent)
    _take_from_inner_calls(columns, itself, rows)
    _take_freed_between_calls(series, columns, itself, rows)
    by_fqn: Counter[str] = Counter()
    by_name = np.bincount(columns.name[rows], itself[rows], len(timeline.names)).astype(np.int64)
    for name in np.flatnonzero(by_name > 0).tolist():
        by_fqn[timeline.names[name].fqn] += int(by_name[name])
    if len(counted) == 1:
        # What backward spans keep is with their modules.
        kinds = OUTSIDE_CALLS[bool((columns.phase[rows] == BACKWARD).any()) :]
        facts, held = timeline.metadata.get(MEMORY, {}), int(series.value[moment])
        at_peak, by, grows_by = (facts.get(key, {}) for key in ("at_peak", "by", "grows_by"))
        if at_peak.get("time_ns") == until:
            by_fqn.update(_up_to(held - by_fqn.total(), {kind: at_peak.get(kind, 0) for kind in reversed(kinds)}))
        # What others hold at the end, less what they grew by in the steps since.
        growing, steps = grows_by.keys() & by.keys() - {*KINDS}, len(timeline.step_ends) - len(ended)
        by_fqn.update(_up_to(held - by_fqn.total(), {name: by[name] - grows_by[name] * steps for name in growing}))
    process = series.process.name if len(counted) > 1 else ""
    return Holders(process, until, int(series.value[moment]), int(series.time[0]), dict(by_fqn.most_common()))


def _up_to(most: int, counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of bytes, in their order, of which together at most so many are there."""
    held = {}
    for name, count in counts.items():
        if (left := min(count, most)) > 0:
            held[name], most = left, most - left
    return held


def grown_in(timeline: "Timeline") -> dict[str, int]:
    """Return by how many bytes what tensors hold grew in each place outside of modules, on the thread that calls most.

    A place is a range, or what is between two things: `between Net forward and backward`.
    """
    counted, slices = list(_counted(timeline)), timeline.slices
    outer = np.flatnonzero((slices.kind == MODULE) & (slices.depth == 0))
    tids = np.array([track.tid if track.device is None else -1 for track in timeline.tracks], np.int64)[slices.track]
    if len(counted) != 1 or not len(outer):
        return {}
    called, calls = np.unique(tids[outer], return_counts=True)
    rows = np.append(outer, np.flatnonzero(np.isin(slices.kind, (BACKWARD_PASS, RANGE))))
    rows = rows[tids[rows] == called[np.argmax(calls)]]
    time = np.concatenate([slices.start[rows], slices.end[rows]])
    is_end, length = np.repeat([False, True], len(rows)), np.tile(slices.end[rows] - slices.start[rows], 2)
    # At one moment ends come first, the inner ones before those around them.
    order = np.lexsort((np.where(is_end, length, -length), ~is_end, time))
    change = np.diff(counted[0][0].value[np.maximum(_sample_at(counted[0][0], time[order]), 0)])
    grown: Counter[str] = Counter()
    inside: list[int] = []
    for place, (edge, following) in enumerate(pairwise(order.tolist())):
        row = int(rows[edge % len(rows)])
        if is_end[edge] and row in inside:
            inside.remove(row)
        elif not is_end[edge]:
            inside.append(row)
        if change[place] and all(slices.kind[index] == RANGE for index in inside):
            before, after = (_edge_text(timeline, int(rows[index % len(rows)])) for index in (edge, following))
            is_leaf = inside and edge % len(rows) == following % len(rows)
            grown[f"in {before}" if is_leaf else f"between {before} and {after}"] += int(change[place])
    return dict(grown)


def _edge_text(timeline: "Timeline", row: int) -> str:
    slices = timeline.slices
    if slices.kind[row] == BACKWARD_PASS:
        return PHASES[BACKWARD]
    name = timeline.names[slices.name[row]]
    return f"{name.fqn} {PHASES[slices.phase[row]]}" if slices.kind[row] == MODULE else name.label


def _take_from_inner_calls(columns: Slices, itself: Int64Array, rows: Int64Array) -> None:
    """Take from calls inside of a forward call, the oldest first, what it freed beyond what it holds itself."""
    starts, forward = columns.start[rows], columns.phase[rows] != BACKWARD
    # Inner calls before those around them.
    for place in np.flatnonzero(forward & (itself[rows] < 0))[::-1].tolist():
        row = rows[place]
        inner = rows[place + 1 : np.searchsorted(starts, columns.end[row])]
        inner = inner[(columns.track[inner] == columns.track[row]) & (itself[inner] > 0)]
        freed = np.minimum(np.cumsum(itself[inner]), -itself[row])
        itself[inner] -= np.diff(freed, prepend=0)
        itself[row] = 0


def _take_freed_between_calls(series: CounterSeries, columns: Slices, itself: Int64Array, rows: Int64Array) -> None:
    """Take from the calls before, the oldest first, what was freed between outermost calls: a result that is gone."""
    busy = union_of(columns.start[rows], columns.end[rows])
    if len(busy.start) < 2:
        return
    edges = series.value[[_sample_at(series, busy.end[:-1]), _sample_at(series, busy.start[1:])]]
    freed = np.maximum(edges[0] - edges[1], 0)
    order = rows[np.argsort(columns.end[rows], kind="stable")]
    kept = np.maximum(itself[order], 0)
    # How much is held after each call and each gap; no more is freed than was held.
    change = np.append(kept, -freed)[np.argsort(np.append(columns.end[order], busy.start[1:]), kind="stable")]
    held = np.cumsum(change)
    gone = int(kept.sum() - (held[-1] - min(0, int(held.min()))))
    itself[order] -= np.diff(np.minimum(np.cumsum(kept), gone), prepend=0)


def peaks_of(counters: Sequence[CounterSeries]) -> list[tuple[int, str]]:
    """Return when the tensors of each process held most, Unix nanoseconds, and a text that says how much."""
    peaks = [(c, int(c.value.argmax())) for c in allocated(counters) if len(c.time)]
    return [(int(c.time[place]), f"most allocated: {format_bytes(int(c.value[place]))}") for c, place in peaks]


def allocated(counters: Sequence[CounterSeries]) -> list[CounterSeries]:
    """Return what tensors of each process held: on its GPU, or on the CPU if it allocated on no GPU."""
    on_gpu = {series.process for series in counters if series.name == CUDA_ALLOCATED}
    return [s for s in counters if s.name == (CUDA_ALLOCATED if s.process in on_gpu else ALLOCATED)]


def format_bytes(count: int) -> str:
    """Return a number of bytes for people: `1.21 GiB`."""
    if abs(count) < 1 << 10:
        return f"{count} B"
    power = min((abs(count).bit_length() - 1) // 10, 4)
    return f"{count / (1 << 10 * power):.2f} {'KMGT'[power - 1]}iB"


def _counted(timeline: "Timeline") -> Iterator[tuple[CounterSeries, BoolArray]]:
    """Yield the samples of each process that counted, and which spans are on its threads."""
    for series in allocated(timeline.counters):
        if len(series.time):
            of_process = [track.process == series.process and track.device is None for track in timeline.tracks]
            yield series, np.array(of_process, np.bool_)[timeline.columns.track]


def _sample_at(series: CounterSeries, time: Int64Array) -> Int64Array:
    """Return the index of the last sample up to each time: an event follows its sample. -1 if there is none."""
    return np.searchsorted(series.time, time, side="right") - 1
