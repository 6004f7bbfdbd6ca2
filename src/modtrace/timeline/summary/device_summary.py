"""What the streams of devices did, where a recording has device times: per module, and as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..._typing import BoolArray, Int64Array
from ..columns import BACKWARD, FORWARD, PHASES, RECOMPUTE, Columns
from ..gpu_tracks import on_gpu
from ..ranges import union_of
from .percentiles import median
from .self_times import is_outermost, self_times, times_in_phase

if TYPE_CHECKING:
    from ..timeline import Timeline

__all__ = ["DeviceModule", "DeviceSummary", "summarize_device"]


class DeviceModule(NamedTuple):
    """What streams of devices did for one module; times are integer nanoseconds.

    Times are from event to event, so they hold what a stream waited for the host meanwhile.

    Attributes:
        fqn: the module's fully qualified name.
        module_class: the name of its class.
        calls: how many of its forwards were seen on a stream.
        total_ns: of all phases together.
        self_ns: of it, outside of inner modules that were chosen too.
        forward_ns: of it, in forward.
        backward_ns: of it, in backward.
        recompute_ns: of it, in recompute.
        latency_p50_ns: median over calls and phases: from the begin on a thread until a stream came by. A device that
            has nothing else to do comes by at once.
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
        rows: a row per module, the one with the longest total first.
        streams: how many there are.
        length_ns: from the first begin to the last end of each stream's spans, together.
        in_modules_ns: of it, in any module.
        gaps: how often a stream left all modules, and came back into one.
        bound_ns: how far the times are off from the host's clock at most.
        dropped: events that were not recorded, as too many had not been read.
        unread: events that nobody read.
    """

    rows: tuple[DeviceModule, ...]
    streams: int
    length_ns: int
    in_modules_ns: int
    gaps: int
    bound_ns: int
    dropped: int
    unread: int


def summarize_device(timeline: Timeline) -> DeviceSummary | None:
    """Return what streams did; None where the timeline has no device times. Those of a merged profile are none."""
    bound = timeline.metadata.get("device_clock_bound_ns")
    chosen = on_gpu(timeline)
    if not isinstance(bound, int) or not chosen.any():
        return None
    columns = timeline.columns
    rows = _rows(timeline, chosen)
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


def _rows(timeline: Timeline, chosen: BoolArray) -> tuple[DeviceModule, ...]:
    columns, names = timeline.columns, timeline.names
    fqns = list(dict.fromkeys(names[name].fqn for name in np.unique(columns.name[chosen]).tolist()))
    row_of = {fqn: row for row, fqn in enumerate(fqns)}
    class_of = {name.fqn: name.module_class for name in reversed(names)}
    row_of_name = np.array([row_of.get(name.fqn, -1) for name in names], np.int64)
    row = row_of_name[columns.name]
    outermost = chosen & is_outermost(columns, row)
    duration = times_in_phase(columns)
    totals = np.zeros((len(PHASES), len(fqns)), np.int64)
    np.add.at(totals, (columns.phase[outermost], row[outermost]), duration[outermost])
    own_ns = np.zeros(len(fqns), np.int64)
    np.add.at(own_ns, row[chosen], self_times(columns)[chosen])
    calls = np.bincount(row[chosen & (columns.phase == FORWARD)], minlength=len(fqns))
    latencies = _latencies(columns, chosen, row_of_name, len(fqns))
    found = [
        DeviceModule(
            fqn,
            class_of[fqn],
            int(calls[index]),
            int(totals[:, index].sum()),
            int(own_ns[index]),
            int(totals[FORWARD, index]),
            int(totals[BACKWARD, index]),
            int(totals[RECOMPUTE, index]),
            median(latencies[index]),
        )
        for index, fqn in enumerate(fqns)
    ]
    return tuple(sorted(found, key=lambda module: module.total_ns, reverse=True))


def _latencies(columns: Columns, chosen: BoolArray, row_of_name: Int64Array, count: int) -> list[list[int]]:
    """Return of each row how long after its begin on a thread each call, in each phase, began on a stream."""
    found: list[list[int]] = [[] for _ in range(count)]
    begun: list[dict[tuple[int, int, int], int]] = []
    for side in (~chosen, chosen):
        # Spans are in start order: of each call and phase the first counts.
        rows = np.flatnonzero(side & (row_of_name[columns.name] >= 0))[::-1]
        keys = zip(*(column[rows].tolist() for column in (columns.name, columns.call, columns.phase)), strict=True)
        begun.append(dict(zip(keys, columns.start[rows].tolist(), strict=True)))
    on_threads, on_streams = begun
    for key, start in on_streams.items():
        if key in on_threads:
            # At the moment itself, the bound of the clock can put the device before the host.
            found[row_of_name[key[0]]].append(max(start - on_threads[key], 0))
    return found
