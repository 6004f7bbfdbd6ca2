"""A recording laid over a trace's events: everything that is computed between reading one and writing the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..._errors import TraceError
from ..._typing import Int64Array
from ...timeline import CounterSeries, Process, Timeline
from ..trace.event_columns import Events
from ..trace.trace_file import base_of
from .alignment import Alignment, by_marks
from .backward_from_nodes import attribute_nodes, cut_to_nodes
from .call_lookup import Innermost, repeats, threads_of
from .gpu_work import DeviceSlices, attribute_work, cover_streams
from .module_times import ModuleTotals, add_up
from .reconstruct import reconstruct

__all__ = ["Laid", "lay_over", "moved", "of_process", "pid_of", "threads_of_trace"]


@dataclass(frozen=True)
class Laid:
    """A recording in the time of a trace, and what became of the trace's nodes and kernels.

    Attributes:
        timeline: in ns from the trace's base.
        pid: the process it belongs to, as it stands in the trace.
        alignment: None where the timeline was made from the trace itself.
        devices: slices above the streams.
        totals: what each module took.
        nodes: autograd nodes of the trace.
        nodes_placed: of these, how many belong to a call.
        work: kernels, memcpys and memsets.
        work_placed: of these, how many were launched in a call.
        cut_ops: forward operations through which an edge of a forward slice goes: what misalignment would cause.
        worst_cut_ns: by how much at most.
        notes: what the user should know.
    """

    timeline: Timeline
    pid: int | str
    alignment: Alignment | None
    devices: DeviceSlices
    totals: ModuleTotals
    nodes: int
    nodes_placed: int
    work: int
    work_placed: int
    cut_ops: int
    worst_cut_ns: int
    notes: list[str]


def lay_over(timeline: Timeline | None, events: Events, keys: Mapping[str, Any], path: str) -> Laid:
    """Align, attribute and cut.

    Args:
        timeline: the recording; None reconstructs one from the trace.
        events: the trace's.
        keys: the trace's top-level keys.
        path: the trace, for errors.

    Raises:
        TraceError: recording and trace have no moment in common, or the trace does not say from when its times count.
    """
    notes: list[str] = []
    alignment = None
    base = base_of(keys, path)
    if timeline is None:
        pid = pid_of(events, None)
        threads = threads_of_trace(events, pid)
        process = Process(pid if isinstance(pid, int) else 0, _rank(keys), events.process_names.get(pid, "python"))
        timeline, notes = reconstruct(events, threads, process)
    else:
        pid = pid_of(events, timeline)
        timeline, other = of_process(timeline, pid)
        notes += other
        threads = threads_of_trace(events, pid)
        process = timeline.tracks[0].process if timeline.tracks else Process(pid if isinstance(pid, int) else 0)
        if isinstance(pid, int) and process.pid != pid:
            # The trace was made where the process had another pid: in a container, or by hand.
            process = process._replace(pid=pid)
            timeline = replace(timeline, tracks=[track._replace(process=process) for track in timeline.tracks])
        alignment = by_marks(timeline.marks, events.syncs, base)
        timeline = moved(timeline, alignment)
        _check_common(timeline, events, path, alignment)
    if events.zero_times:
        notes.append(f"{events.zero_times} of the profiler's slices lie at time 0 and were left as they are")
    cuts, worst = _cut_ops(timeline, events, threads)
    nodes = attribute_nodes(timeline, events, threads)
    names = {tid: events.thread_names.get(events.tracks[at], "") for at, tid in enumerate(threads.tolist()) if tid >= 0}
    timeline = cut_to_nodes(timeline, nodes, threads, {tid: name for tid, name in names.items() if name}, process)
    span = attribute_work(timeline, events, threads)
    return Laid(
        timeline=timeline,
        pid=pid,
        alignment=alignment,
        devices=cover_streams(timeline, events, span),
        totals=add_up(timeline, events, span),
        nodes=len(nodes),
        nodes_placed=int(np.count_nonzero(nodes.call >= 0)),
        work=len(span),
        work_placed=int(np.count_nonzero(span >= 0)),
        cut_ops=cuts,
        worst_cut_ns=worst,
        notes=notes,
    )


def moved(timeline: Timeline, alignment: Alignment) -> Timeline:
    """Return the timeline in ns from the trace's base."""
    columns = timeline.columns
    times = np.array([mark.time_ns for mark in timeline.marks], np.int64)
    return replace(
        timeline,
        columns=replace(columns, start=alignment.to_trace(columns.start), end=alignment.to_trace(columns.end)),
        marks=[
            mark._replace(time_ns=time)
            for mark, time in zip(timeline.marks, alignment.to_trace(times).tolist(), strict=True)
        ],
        counters=[replace(counter, time=alignment.to_trace(counter.time)) for counter in timeline.counters],
    )


def of_process(timeline: Timeline, pid: int | str) -> tuple[Timeline, list[str]]:
    """Return what a timeline has of one process, and what was left out; of a single process all, whatever its pid."""
    processes = {track.process for track in timeline.tracks}
    if len(processes) <= 1:
        return timeline, []
    ours = next((process for process in processes if process.pid == pid), timeline.tracks[0].process)
    here = np.array([track.process == ours for track in timeline.tracks])
    chosen = np.flatnonzero(here[timeline.columns.track])
    place = np.full(len(timeline.columns) + 1, -1, np.int64)
    place[chosen] = np.arange(len(chosen))
    columns = timeline.columns.take(chosen)
    left = len(processes) - 1
    counters: list[CounterSeries] = [counter for counter in timeline.counters if counter.process == ours]
    number = np.cumsum(here) - 1
    kept = replace(columns, parent=place[columns.parent], track=number[columns.track].astype(np.int32))
    return (
        replace(
            timeline,
            columns=kept,
            tracks=[track for track in timeline.tracks if track.process == ours],
            counters=counters,
            span_args={int(place[at]): said for at, said in timeline.span_args.items() if place[at] >= 0},
        ),
        [f"{left} other processes of the recording were left out: the trace is of pid {pid}"],
    )


def threads_of_trace(events: Events, pid: int | str) -> Int64Array:
    """Return the OS thread of each of the trace's tracks, -1 for other processes and for devices."""
    return np.array(
        [tid if key_pid == pid and isinstance(tid, int) else -1 for key_pid, tid in events.tracks] or [-1], np.int64
    )


def pid_of(events: Events, timeline: Timeline | None) -> int | str:
    """Return the process of a recording: its own if the trace has it, else the one with most CPU slices."""
    pids = events.cpu_pids
    if timeline is not None:
        for track in timeline.tracks:
            if track.process.pid in pids or not pids:
                return track.process.pid
    return max(pids, key=lambda pid: pids[pid]) if pids else 0


def _rank(keys: Mapping[str, Any]) -> int | None:
    said = keys.get("distributedInfo")
    rank = said.get("rank") if isinstance(said, dict) else None
    return rank if isinstance(rank, int) else None


def _check_common(timeline: Timeline, events: Events, path: str, alignment: Alignment) -> None:
    columns = timeline.columns
    if not len(columns) or events.first > events.last:
        return
    begin, end = int(columns.start.min()), int(columns.end.max())
    if begin > events.last or end < events.first:
        distance = max(begin - events.last, events.first - end) / 1e9
        raise TraceError(
            path,
            f"recording and trace have no moment in common: they lie {distance:.3f} s apart by {alignment.method}; "
            "record while the profiler runs, with modtrace.on_trace_ready or with modtrace.record around it",
        )


def _cut_ops(timeline: Timeline, events: Events, threads: Int64Array) -> tuple[int, int]:
    """Count forward operations that lie partly in and partly outside a call, and say by how much at most."""
    columns, ops = timeline.columns, events.ops
    if not len(columns) or not len(ops):
        return 0, 0
    thread = threads_of(columns, (track.tid for track in timeline.tracks))
    running = Innermost(
        thread, columns.track.astype(np.int64), columns.start, columns.end, columns.parent, repeats(columns)
    )
    on = threads[ops.track]
    last = np.maximum(ops.end - 1, ops.start)
    first_in, last_in = running.at_each(on, ops.start), running.at_each(on, last)
    cut = np.flatnonzero(first_in != last_in)
    if not len(cut):
        return 0, 0
    before, after = first_in[cut], last_in[cut]
    left = (before >= 0) & (columns.end[before] < ops.end[cut])
    edge = np.where(left, columns.end[before], columns.start[after])
    amount = np.minimum(np.abs(edge - ops.start[cut]), np.abs(ops.end[cut] - edge))
    return len(cut), int(amount.max())
