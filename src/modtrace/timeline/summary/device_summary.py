"""Device times of modules and of streams as a whole, in a recording that has them, and their table."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._arrays import BoolArray, Int64Array, sums_at
from ..._tables import MODULE, MS, NAME, NUMBER, Column, Table, counted, fields_of
from ..nesting import is_outermost, self_times, times_in_phase, union_of
from ..select import on_gpu
from ..slices import FORWARD, PHASES, Slices
from .module_rows import GroupBy, group_modules
from .units import median

if TYPE_CHECKING:
    from ..timeline import Timeline


class DeviceModule(NamedTuple):
    """The device times of one module; times are integer nanoseconds.

    Times are from event to event, so they include waits of the stream for the host.

    Attributes:
        fqn: the module's fully qualified name; empty in a summary by class.
        module_class: the name of its class.
        calls: how many of its forwards were seen on a stream.
        total_ns: of all phases together.
        self_ns: of it, outside inner modules that have device times too.
        forward_ns: of it, in forward.
        backward_ns: of it, in backward.
        recompute_ns: of it, in recompute.
        latency_p50_ns: median over calls and phases: from the begin on a thread until a stream reached the
            event; a device with nothing else to do reaches it at once.
    """

    fqn: str
    module_class: str
    calls: int
    total_ns: int
    self_ns: int
    forward_ns: int
    backward_ns: int
    recompute_ns: int
    latency_p50_ns: int


class DeviceSummary(NamedTuple):
    """The times of all streams of devices; times are integer nanoseconds.

    Attributes:
        rows: a row per module, or class, the one with the longest total first.
        streams: how many there are.
        length_ns: from the first begin to the last end of each stream's spans, together.
        in_modules_ns: of it, in any module.
        gaps: how often a stream left all modules and entered one again.
        bound_ns: how far the times are off from the host's clock at most.
        dropped: events that were not recorded, as too many had not been read.
        unread: events that were never read.
    """

    rows: tuple[DeviceModule, ...]
    streams: int
    length_ns: int
    in_modules_ns: int
    gaps: int
    bound_ns: int
    dropped: int
    unread: int


def summarize_device(timeline: "Timeline", by: GroupBy = "module") -> DeviceSummary | None:
    """Return what streams did; None if the timeline has no device times. A merged profile has none."""
    bound = timeline.metadata.get("device_clock_bound_ns")
    chosen = on_gpu(timeline)
    if bound is None or not chosen.any():
        return None
    columns = timeline.columns
    rows = _rows(timeline, chosen, by)
    length = in_modules = gaps = 0
    tracks = np.unique(columns.track[chosen])
    for track in tracks.tolist():
        on_stream = columns.track == track
        busy = union_of(columns.start[on_stream], columns.end[on_stream])
        length += int(busy.end[-1] - busy.start[0])
        in_modules += int((busy.end - busy.start).sum())
        gaps += len(busy.start) - 1
    dropped, unread = (timeline.metadata.get(f"device_events_{state}", 0) for state in ("dropped", "unread"))
    return DeviceSummary(rows, len(tracks), length, in_modules, gaps, bound, dropped, unread)


def _rows(timeline: "Timeline", chosen: BoolArray, by: GroupBy) -> tuple[DeviceModule, ...]:
    columns, groups = timeline.columns, group_modules(tuple(timeline.names), by)
    count = len(groups)
    group = groups.of_name[columns.name]
    outermost = chosen & is_outermost(columns, group)
    duration = times_in_phase(columns)
    totals = sums_at((len(PHASES), count), (columns.phase[outermost], group[outermost]), duration[outermost])
    self_ns = sums_at(count, group[chosen], self_times(columns)[chosen])
    calls = np.bincount(group[chosen & (columns.phase == FORWARD)], minlength=count)
    latencies = _latencies(columns, chosen, groups.of_name, count)
    modules = [
        DeviceModule(
            *(groups.fqns[row], groups.classes[row], int(calls[row]), int(totals[:, row].sum()), int(self_ns[row])),
            *(*totals[:, row].tolist(), median(latencies[row])),
        )
        for row in np.unique(group[chosen]).tolist()
    ]
    return tuple(sorted(modules, key=lambda module: module.total_ns, reverse=True))


def _latencies(columns: Slices, chosen: BoolArray, group_of_name: Int64Array, count: int) -> list[list[int]]:
    """Return the latencies of the calls of each group, in each phase: from a thread's begin to that of a stream."""
    latencies: list[list[int]] = [[] for _ in range(count)]
    begun: list[dict[tuple[int, int, int], int]] = []
    for side in (~chosen, chosen):
        # Spans are in start order; the first of each call and phase counts.
        rows = np.flatnonzero(side)[::-1]
        keys = zip(*(column[rows].tolist() for column in (columns.name, columns.call, columns.phase)), strict=True)
        begun.append(dict(zip(keys, columns.start[rows].tolist(), strict=True)))
    on_threads, on_streams = begun
    for key, start in on_streams.items():
        if key in on_threads:
            # At the moment itself, the bound of the clock can put the device before the host.
            latencies[group_of_name[key[0]]].append(max(start - on_threads[key], 0))
    return latencies


_COLUMNS = (
    Column("module", "fqn", MODULE),
    Column("class", "module_class", NAME, 6),
    Column("calls", "calls", NUMBER, 4),
    Column("total ms", "total_ns", MS),
    Column("self", "self_ns", MS, 2, repeats=("total_ns",)),
    Column("forward", "forward_ns", MS, 3),
    Column("backward", "backward_ns", MS, 3),
    Column("recompute", "recompute_ns", MS, 5, hidden_if="zero"),
    Column("latency p50", "latency_p50_ns", MS, 1),
)
_NOTE = (
    "times from event to event, with waits of the stream for the host; latency: from the begin on a thread until the "
    "stream reached the event, which an idle stream does at once"
)


def device_table(device: DeviceSummary) -> Table:
    """Return the table of modules or classes, the one with the longest total first, and a line about all streams."""
    return Table(_COLUMNS, device.rows, fields_of(DeviceModule), (device_totals(device),), (_NOTE,), "module")


def device_totals(device: DeviceSummary) -> str:
    """Return how long the streams were in modules, their gaps, the bound of the clock, and what was lost."""
    share = 100 * device.in_modules_ns / device.length_ns if device.length_ns else 0.0
    text = (
        f"{counted(device.streams, 'stream')} of devices: in modules {share:.1f} % of {device.length_ns / 1e6:,.3f} ms"
    )
    if device.gaps:
        mean_ns = (device.length_ns - device.in_modules_ns) / device.gaps
        text += f", {counted(device.gaps, 'gap')} of {mean_ns / 1e6:.3f} ms on average"
    text += f"; ±{device.bound_ns / 1e3:.1f} µs on the host's clock"
    if device.dropped:
        text += f"; {counted(device.dropped, 'event')} dropped, as too many were not read yet"
    if device.unread:
        text += f"; {counted(device.unread, 'event')} never read"
    return text
