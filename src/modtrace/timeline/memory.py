"""Memory that calls allocated and kept, in a recording that counted the memory of tensors."""

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
"""Holders other than calls of modules: nodes of backward passes, optimizer steps, parameters of called modules."""
KINDS = "backward", "optimizer", "parameters"
"""The names of `OUTSIDE_CALLS` in a ring, in the same order."""
NO_MODULE = "no module"
"""The holder of all other memory."""


class CallMemory(NamedTuple):
    """The memory of each span of modules, in bytes; arrays with one entry per span."""

    is_known: BoolArray  # bool, whether memory was counted from start to end
    retained_bytes: Int64Array  # int64, of tensors at the end minus bytes at the start
    peak_bytes: Int64Array  # int64, maximum of tensors inside the span minus bytes at the start


class Holders(NamedTuple):
    """The holders of memory at one moment, in bytes."""

    process: str  # name of the process; empty if only one process counted
    time_ns: int  # the moment, Unix nanoseconds
    held_bytes: int  # of all tensors
    start_ns: int  # first sample of the process, Unix nanoseconds
    # Bytes held by calls of that step, by fully qualified name, largest first: bytes kept outside inner calls, minus
    # bytes freed in the backward, in a call around it, or between calls (oldest first). `OUTSIDE_CALLS` too, if known.
    by_fqn: dict[str, int]

    @property
    def other(self) -> int:
        """Bytes that no holder in `by_fqn` holds."""
        return self.held_bytes - sum(self.by_fqn.values())


def measure_calls(timeline: "Timeline") -> CallMemory | None:
    """Return the memory of each span of `timeline.columns`; None if memory was not counted."""
    columns, memory = timeline.columns, None
    for series, in_process in _counted(timeline):
        memory = memory or CallMemory(
            np.zeros(len(columns), np.bool_), np.zeros(len(columns), np.int64), np.zeros(len(columns), np.int64)
        )
        first = _sample_at(series, columns.start)
        rows = np.flatnonzero(in_process & columns.complete & (first >= 0))
        first, last = first[rows], _sample_at(series, columns.end[rows])
        bounds = np.column_stack([first, last + 1]).ravel()
        max_bytes = np.maximum.reduceat(np.append(series.value, 0), bounds)[::2] if len(rows) else first
        memory.is_known[rows] = True
        memory.retained_bytes[rows] = series.value[last] - series.value[first]
        memory.peak_bytes[rows] = max_bytes - series.value[first]
    return memory


def find_holders(timeline: "Timeline") -> Holders | None:
    """Return the holders of memory at the highest peak of any process; None if memory was not counted."""
    columns, counted = timeline.columns, list(_counted(timeline))
    if not counted:
        return None
    series, in_process = max(counted, key=lambda pair: int(pair[0].value.max()))
    peak = int(series.value.argmax())
    peak_ns = int(series.time[peak])
    earlier_ends = timeline.step_ends[timeline.step_ends <= peak_ns]
    selected_from = [] if timeline.begin_ns is None else [timeline.begin_ns]
    start_ns = max([int(series.time[0]), *selected_from, *earlier_ends.tolist()])
    rows = np.flatnonzero(in_process & (columns.end > start_ns) & (columns.start <= peak_ns))
    last = np.minimum(_sample_at(series, columns.end[rows]), peak)
    change = np.zeros(len(columns), np.int64)
    change[rows] = series.value[last] - series.value[_sample_at(series, np.maximum(columns.start[rows], start_ns))]
    self_bytes = without_inner(change, columns.parent)
    _subtract_from_inner_calls(columns, self_bytes, rows)
    _subtract_freed_between_calls(series, columns, self_bytes, rows)
    by_fqn: Counter[str] = Counter()
    by_name = np.bincount(columns.name[rows], self_bytes[rows], len(timeline.names)).astype(np.int64)
    for name in np.flatnonzero(by_name > 0).tolist():
        by_fqn[timeline.names[name].fqn] += int(by_name[name])
    if len(counted) == 1:
        # The memory that backward spans keep is counted for their modules.
        kinds = OUTSIDE_CALLS[bool((columns.phase[rows] == BACKWARD).any()) :]
        facts, held = timeline.metadata.get(MEMORY, {}), int(series.value[peak])
        at_peak, by, grows_by = (facts.get(key, {}) for key in ("at_peak", "by", "grows_by"))
        if at_peak.get("time_ns") == peak_ns:
            by_fqn.update(_up_to(held - by_fqn.total(), {kind: at_peak.get(kind, 0) for kind in reversed(kinds)}))
        # Growing holders: their bytes at the end, minus their growth in the steps since the peak.
        growing, steps = grows_by.keys() & by.keys() - {*KINDS}, len(timeline.step_ends) - len(earlier_ends)
        by_fqn.update(_up_to(held - by_fqn.total(), {name: by[name] - grows_by[name] * steps for name in growing}))
    process = series.process.name if len(counted) > 1 else ""
    return Holders(process, peak_ns, int(series.value[peak]), int(series.time[0]), dict(by_fqn.most_common()))


def _up_to(max_bytes: int, counts: Mapping[str, int]) -> dict[str, int]:
    """Return the byte counts, in their order, cut where their sum exceeds `max_bytes`."""
    bounded = {}
    for name, count in counts.items():
        if (bounded_count := min(count, max_bytes)) > 0:
            bounded[name], max_bytes = bounded_count, max_bytes - bounded_count
    return bounded


def grown_in(timeline: "Timeline") -> dict[str, int]:
    """Return the growth in bytes of the memory of tensors, by place outside modules, on the thread with most calls.

    A place is a range, or a gap between two slices: `between Net forward and backward`.
    """
    counted, slices = list(_counted(timeline)), timeline.slices
    outer = np.flatnonzero((slices.kind == MODULE) & (slices.depth == 0))
    tids = np.array([track.tid if track.device is None else -1 for track in timeline.tracks], np.int64)[slices.track]
    if len(counted) != 1 or not len(outer):
        return {}
    caller_tids, calls = np.unique(tids[outer], return_counts=True)
    rows = np.append(outer, np.flatnonzero(np.isin(slices.kind, (BACKWARD_PASS, RANGE))))
    rows = rows[tids[rows] == caller_tids[np.argmax(calls)]]
    time = np.concatenate([slices.start[rows], slices.end[rows]])
    is_end, length = np.repeat([False, True], len(rows)), np.tile(slices.end[rows] - slices.start[rows], 2)
    # At one moment ends come first, inner ones before outer ones.
    order = np.lexsort((np.where(is_end, length, -length), ~is_end, time))
    change = np.diff(counted[0][0].value[np.maximum(_sample_at(counted[0][0], time[order]), 0)])
    grown: Counter[str] = Counter()
    inside: list[int] = []
    for index, (edge, next_edge) in enumerate(pairwise(order.tolist())):
        row = int(rows[edge % len(rows)])
        if is_end[edge] and row in inside:
            inside.remove(row)
        elif not is_end[edge]:
            inside.append(row)
        if change[index] and all(slices.kind[outer_row] == RANGE for outer_row in inside):
            before, after = (_edge_text(timeline, int(rows[number % len(rows)])) for number in (edge, next_edge))
            is_leaf = inside and edge % len(rows) == next_edge % len(rows)
            grown[f"in {before}" if is_leaf else f"between {before} and {after}"] += int(change[index])
    return dict(grown)


def _edge_text(timeline: "Timeline", row: int) -> str:
    slices = timeline.slices
    if slices.kind[row] == BACKWARD_PASS:
        return PHASES[BACKWARD]
    name = timeline.names[slices.name[row]]
    return f"{name.fqn} {PHASES[slices.phase[row]]}" if slices.kind[row] == MODULE else name.label


def _subtract_from_inner_calls(columns: Slices, self_bytes: Int64Array, rows: Int64Array) -> None:
    """If a forward call freed more than it allocated itself, subtract the excess from its inner calls, oldest first."""
    starts, forward = columns.start[rows], columns.phase[rows] != BACKWARD
    # Inner calls before outer calls.
    for index in np.flatnonzero(forward & (self_bytes[rows] < 0))[::-1].tolist():
        row = rows[index]
        inner = rows[index + 1 : np.searchsorted(starts, columns.end[row])]
        inner = inner[(columns.track[inner] == columns.track[row]) & (self_bytes[inner] > 0)]
        freed = np.minimum(np.cumsum(self_bytes[inner]), -self_bytes[row])
        self_bytes[inner] -= np.diff(freed, prepend=0)
        self_bytes[row] = 0


def _subtract_freed_between_calls(
    series: CounterSeries, columns: Slices, self_bytes: Int64Array, rows: Int64Array
) -> None:
    """Subtract memory freed between outermost calls, such as a dropped result, from the calls before, oldest first."""
    busy = union_of(columns.start[rows], columns.end[rows])
    if len(busy.start_ns) < 2:
        return
    edges = series.value[[_sample_at(series, busy.end_ns[:-1]), _sample_at(series, busy.start_ns[1:])]]
    freed = np.maximum(edges[0] - edges[1], 0)
    order = rows[np.argsort(columns.end[rows], kind="stable")]
    allocated_bytes = np.maximum(self_bytes[order], 0)
    end = np.append(columns.end[order], busy.start_ns[1:])
    # Bytes held after each call and each gap; no more is freed than was held.
    held_bytes = np.cumsum(np.append(allocated_bytes, -freed)[np.argsort(end, kind="stable")])
    freed_bytes = int(allocated_bytes.sum() - (held_bytes[-1] - min(0, int(held_bytes.min()))))
    self_bytes[order] -= np.diff(np.minimum(np.cumsum(allocated_bytes), freed_bytes), prepend=0)


def peaks_of(counters: Sequence[CounterSeries]) -> list[tuple[int, str]]:
    """Return the time in Unix nanoseconds and a text for the peak of each process's tensor memory."""
    peaks = [(c, int(c.value.argmax())) for c in allocated(counters) if len(c.time)]
    return [(int(c.time[index]), f"most allocated: {format_bytes(int(c.value[index]))}") for c, index in peaks]


def allocated(counters: Sequence[CounterSeries]) -> list[CounterSeries]:
    """Return the tensor memory of each process: on its GPU, or on the CPU if it allocated on no GPU."""
    on_gpu = {series.process for series in counters if series.name == CUDA_ALLOCATED}
    return [s for s in counters if s.name == (CUDA_ALLOCATED if s.process in on_gpu else ALLOCATED)]


def format_bytes(count: int) -> str:
    """Return a number of bytes for people: `1.21 GiB`."""
    if abs(count) < 1 << 10:
        return f"{count} B"
    power = min((abs(count).bit_length() - 1) // 10, 4)
    return f"{count / (1 << 10 * power):.2f} {'KMGT'[power - 1]}iB"


def _counted(timeline: "Timeline") -> Iterator[tuple[CounterSeries, BoolArray]]:
    """Yield the samples of each process that counted memory, and a mask of the spans on its threads."""
    for series in allocated(timeline.counters):
        if len(series.time):
            in_process = [track.process == series.process and track.device is None for track in timeline.tracks]
            yield series, np.array(in_process, np.bool_)[timeline.columns.track]


def _sample_at(series: CounterSeries, time: Int64Array) -> Int64Array:
    """Return the index of the last sample up to each time, since samples precede events; -1 if there is none."""
    return np.searchsorted(series.time, time, side="right") - 1
