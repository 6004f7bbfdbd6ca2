"""Device times of modules and of streams as a whole, in a recording that has them, and their table."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._arrays import BoolArray, Int64Array, sums_at
from ..._tables import MODULE, MS, NAME, NUMBER, Column, Table, counted, fields_of, ms_text
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
        calls: number of forward calls with device times.
        total_ns: time of all phases together.
        self_ns: the part of `total_ns` outside inner modules that have device times too.
        forward_ns: the part of `total_ns` in forward.
        backward_ns: the part of `total_ns` in backward.
        recompute_ns: the part of `total_ns` in recompute.
        latency_p50_ns: median latency of calls and phases: time from the start on a thread until a stream reached the
            event; an idle stream reaches it at once.
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
        rows: one per module or class, the longest total first.
        streams: number of streams.
        length_ns: total over streams of the time from the first start to the last end of their spans.
        in_modules_ns: the part of `length_ns` in modules.
        gaps: number of times between two modules of a stream in which it was in no module.
        bound_ns: maximum difference of the times from the host's clock.
        dropped: number of events that were not recorded because too many were still unread.
        unread: number of events that were never read.
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
    """Return the times of streams; None if the timeline has no device times, such as a merged profile."""
    bound = timeline.metadata.get("device_clock_bound_ns")
    is_device = on_gpu(timeline)
    if bound is None or not is_device.any():
        return None
    columns = timeline.columns
    rows = _rows(timeline, is_device, by)
    length = in_modules = gaps = 0
    tracks = np.unique(columns.track[is_device])
    for track in tracks.tolist():
        on_stream = columns.track == track
        busy = union_of(columns.start[on_stream], columns.end[on_stream])
        length += int(busy.end_ns[-1] - busy.start_ns[0])
        in_modules += int((busy.end_ns - busy.start_ns).sum())
        gaps += len(busy.start_ns) - 1
    dropped, unread = (timeline.metadata.get(f"device_events_{state}", 0) for state in ("dropped", "unread"))
    return DeviceSummary(rows, len(tracks), length, in_modules, gaps, bound, dropped, unread)


def _rows(timeline: "Timeline", is_device: BoolArray, by: GroupBy) -> tuple[DeviceModule, ...]:
    columns, groups = timeline.columns, group_modules(tuple(timeline.names), by)
    count = len(groups)
    group = groups.of_name[columns.name]
    outermost = is_device & is_outermost(columns, group)
    duration = times_in_phase(columns)
    totals = sums_at((len(PHASES), count), (columns.phase[outermost], group[outermost]), duration[outermost])
    self_ns = sums_at(count, group[is_device], self_times(columns)[is_device])
    calls = np.bincount(group[is_device & (columns.phase == FORWARD)], minlength=count)
    latencies = _latencies(columns, is_device, groups.of_name, count)
    modules = [
        DeviceModule(
            *(groups.fqns[row], groups.classes[row], int(calls[row]), int(totals[:, row].sum()), int(self_ns[row])),
            *(*totals[:, row].tolist(), median(latencies[row])),
        )
        for row in np.unique(group[is_device]).tolist()
    ]
    return tuple(sorted(modules, key=lambda module: module.total_ns, reverse=True))


def _latencies(columns: Slices, is_device: BoolArray, group_of_name: Int64Array, count: int) -> list[list[int]]:
    """Return the latencies of each group's calls in each phase: from the start on a thread to that on a stream."""
    latencies: list[list[int]] = [[] for _ in range(count)]
    start_of: list[dict[tuple[int, int, int], int]] = []
    for side in (~is_device, is_device):
        # Spans are in start order; only the first of each call and phase counts.
        rows = np.flatnonzero(side)[::-1]
        keys = zip(*(column[rows].tolist() for column in (columns.name, columns.call, columns.phase)), strict=True)
        start_of.append(dict(zip(keys, columns.start[rows].tolist(), strict=True)))
    on_threads, on_streams = start_of
    for key, start in on_streams.items():
        if key in on_threads:
            # The clock's error can put the device's start before the host's.
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
    "times from event to event, with waits of the stream for the host; latency: from the start on a thread until the "
    "stream reached the event, which an idle stream does at once"
)


def device_table(device: DeviceSummary) -> Table:
    """Return the table of modules or classes, the longest total first, and a line about all streams."""
    return Table(_COLUMNS, device.rows, fields_of(DeviceModule), (device_totals(device),), (_NOTE,), "module")


def device_totals(device: DeviceSummary) -> str:
    """Return a line about all streams: their time in modules, gaps, the clock's error bound, and lost events."""
    share = 100 * device.in_modules_ns / device.length_ns if device.length_ns else 0.0
    text = f"{counted(device.streams, 'stream')} of devices: in modules {share:.1f} % of {ms_text(device.length_ns)}"
    if device.gaps:
        mean_ns = (device.length_ns - device.in_modules_ns) / device.gaps
        text += f", {counted(device.gaps, 'gap')} of {mean_ns / 1e6:.3f} ms on average"
    text += f"; ±{device.bound_ns / 1e3:.1f} µs on the host's clock"
    if device.dropped:
        text += f"; {counted(device.dropped, 'event')} dropped, because too many were still unread"
    if device.unread:
        text += f"; {counted(device.unread, 'event')} never read"
    return text
