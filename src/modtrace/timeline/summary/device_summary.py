"""What the streams of devices did, in a recording with device times: per module and as a whole, and their table."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._tables import CellKind, Table, first_lines
from ..._terminal import counted, wrapped
from ..._typing import BoolArray, Int64Array
from ..select import on_gpu
from ..slices import FORWARD, PHASES, Columns
from ..time_intervals import union_of
from .module_rows import GroupBy, group_modules
from .percentiles import median
from .self_times import is_outermost, self_times, times_in_phase

if TYPE_CHECKING:
    from ..timeline import Timeline


class DeviceModule(NamedTuple):
    """What streams of devices did for one module; times are integer nanoseconds.

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
    """What the streams did as a whole; times are integer nanoseconds.

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
    if not isinstance(bound, int) or not chosen.any():
        return None
    columns = timeline.columns
    rows = _rows(timeline, chosen, by)
    length = in_modules = gaps = 0
    tracks = np.unique(columns.track[chosen])
    for track in tracks.tolist():
        own = columns.track == track
        busy = union_of(columns.start[own], columns.end[own])
        length += int(busy.end[-1] - busy.start[0])
        in_modules += int((busy.end - busy.start).sum())
        gaps += len(busy.start) - 1
    lost = [timeline.metadata.get(f"device_events_{how}") for how in ("dropped", "unread")]
    dropped, unread = (count if isinstance(count, int) else 0 for count in lost)
    return DeviceSummary(rows, len(tracks), length, in_modules, gaps, bound, dropped, unread)


def _rows(timeline: "Timeline", chosen: BoolArray, by: GroupBy) -> tuple[DeviceModule, ...]:
    columns, groups = timeline.columns, group_modules(timeline.names, by)
    count = len(groups)
    group = groups.of_name[columns.name]
    outermost = chosen & is_outermost(columns, group)
    duration = times_in_phase(columns)
    totals = np.zeros((len(PHASES), count), np.int64)
    np.add.at(totals, (columns.phase[outermost], group[outermost]), duration[outermost])
    own_ns = np.zeros(count, np.int64)
    np.add.at(own_ns, group[chosen], self_times(columns)[chosen])
    calls = np.bincount(group[chosen & (columns.phase == FORWARD)], minlength=count)
    latencies = _latencies(columns, chosen, groups.of_name, count)
    modules = [
        DeviceModule(
            *(groups.fqns[row], groups.classes[row], int(calls[row]), int(totals[:, row].sum()), int(own_ns[row])),
            *(*totals[:, row].tolist(), median(latencies[row])),
        )
        for row in np.unique(group[chosen]).tolist()
    ]
    return tuple(sorted(modules, key=lambda module: module.total_ns, reverse=True))


def _latencies(columns: Columns, chosen: BoolArray, group_of_name: Int64Array, count: int) -> list[list[int]]:
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


_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("module", "fqn", 0),
    ("class", "module_class", 6),
    ("calls", "calls", 4),
    ("total ms", "total_ns", 0),
    ("self", "self_ns", 2),
    ("forward", "forward_ns", 3),
    ("backward", "backward_ns", 3),
    ("recompute", "recompute_ns", 5),
    ("latency p50", "latency_p50_ns", 1),
)
"""Heading, field, and rank: the column with the highest is hidden first if the table is too wide; 0: never."""
_NOTE = (
    "times from event to event, with waits of the stream for the host; latency: from the begin on a thread until the "
    "stream reached the event, which an idle stream does at once"
)


def render_device(device: DeviceSummary | None, limit: int | None = None, width: int | None = None) -> str:
    """Return a line about all streams, and the table of modules; nothing if there is no device."""
    if device is None:
        return ""
    table = first_lines(device_table(device), limit, width, "module")
    return "\n".join([*wrapped(device_totals(device), width), *table, *wrapped(_NOTE, width)])


def device_table(device: DeviceSummary) -> Table:
    """Return the table of modules or classes, the one with the longest total first; times in ms."""
    return times_table(_COLUMNS, device.rows, ["fqn", "recompute_ns"])


def times_table(columns: Sequence[tuple[str, str, int]], rows: Sequence[Any], optional: Sequence[str]) -> Table:
    """Return a table of records, times in ms, without those of the optional fields that are 0 in all of them."""
    shown = [column for column in columns if column[1] not in optional or any(getattr(row, column[1]) for row in rows)]
    cells = [[_cell(getattr(row, field), field) for _, field, _ in shown] for row in rows]
    kinds: list[CellKind] = ["name" if field in {"fqn", "module_class"} else "number" for _, field, _ in shown]
    return Table([heading for heading, _, _ in shown], cells, kinds, [rank for _, _, rank in shown])


def _cell(value: str | int, field: str) -> str:
    return f"{int(value) / 1e6:.3f}" if field.endswith("_ns") else str(value)


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
