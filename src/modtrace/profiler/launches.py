"""The launch of each piece of GPU work, also that of work which the replay of a CUDA graph launched.

A correlation id says which launch it was. Ids are counted per process, so they are not enough in a trace of several
processes (ranks that were put into one file). There devices and processes are paired in order, if there are as many of
both, and of the launches that are left the last one that began before the work counts.

While a graph is captured nothing runs: the launches of the capture have no work. A replay is one launch with all that
work. Both have the same kinds of operations in the same order, which shows that they belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .._typing import Int64Array
from ..timeline.nesting import InnermostLookup
from .event_columns import ApiCall, ProfilerEvents


def processes_of(events: ProfilerEvents) -> Int64Array:
    """Return a number for the process or device of each of the trace's tracks, in the order of their pids."""
    pids = sorted({pid for pid, _ in events.tracks}, key=lambda pid: (isinstance(pid, str), pid))
    number = {pid: index for index, pid in enumerate(pids)}
    return np.array([number[pid] for pid, _ in events.tracks] or [0], np.int64)


def find_launches(events: ProfilerEvents) -> Int64Array:
    """Return for each piece of work the row of its launch among the trace's, or -1."""
    work, launches = events.work, events.launches
    found = np.full(len(work), -1, np.int64)
    if not len(launches) or not len(work):
        return found
    process_of = processes_of(events)
    process = process_of[launches.track]
    order = np.lexsort((np.arange(len(launches)), process, launches.correlation))
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (np.diff(launches.correlation[order]) != 0) | (np.diff(process[order]) != 0)
    rows = order[is_first]  # of each process the first with each id
    ids = launches.correlation[rows]
    first, end = (np.searchsorted(ids, work.correlation, side=side) for side in ("left", "right"))
    end = np.where(work.correlation >= 0, end, first)
    if np.all(process == process[0]):
        known = first < end
        found[known] = rows[first[known]]
        return found
    pieces = np.repeat(np.arange(len(work)), end - first)
    place = np.arange(len(pieces)) - np.repeat(np.cumsum(end - first) - (end - first), end - first)
    chosen = rows[first[pieces] + place]
    of_work, of_launch = work.external[pieces], launches.external[chosen]
    possible = (of_work < 0) | (of_launch < 0) | (of_work == of_launch)
    possible &= launches.start[chosen] <= work.start[pieces]
    devices, device = np.unique(process_of[work.track], return_inverse=True)
    processes, process = np.unique(process, return_inverse=True)
    if len(devices) == len(processes):
        possible &= device[pieces] == process[chosen]
    pieces, chosen = pieces[possible], chosen[possible]
    # Of several with one id the last one that began stays.
    order = np.argsort(launches.start[chosen], kind="stable")
    found[pieces[order]] = chosen[order]
    return found


_KIND_OF_CALL = {ApiCall.KERNEL: 0, ApiCall.MEMCPY: 1, ApiCall.MEMSET: 2}


class CudaGraphCapture(NamedTuple):
    """What was launched while a graph was captured.

    Attributes:
        kinds: of each launch, in order, what it launched: 0 a kernel, 1 a memcpy, 2 a memset.
        spans: int64, of each the innermost span that it was launched in, or -1.
    """

    kinds: tuple[int, ...]
    spans: Int64Array


def captured_graphs(
    events: ProfilerEvents, launch: Int64Array, running: InnermostLookup, threads: Int64Array
) -> list[CudaGraphCapture]:
    """Return the graphs that were captured in a trace, in the order in which their captures ended.

    Args:
        events: the trace's.
        launch: for each piece of GPU work the row of its launch, or -1.
        running: the spans of the threads.
        threads: the thread of each of the trace's tracks, as `running` knows it, or -1.
    """
    captures, launches = events.captures, events.launches
    found: list[CudaGraphCapture] = []
    process_of = processes_of(events)
    _, number = np.unique(launches.correlation, return_inverse=True)
    id_in_process = number * (int(process_of.max()) + 1) + process_of[launches.track]
    is_captured = np.isin(launches.call, list(_KIND_OF_CALL))
    is_captured &= ~np.isin(id_in_process, id_in_process[launch[launch >= 0]])
    candidates = np.flatnonzero(is_captured)
    candidates = candidates[np.argsort(launches.start[candidates], kind="stable")]
    open_since: dict[int, int] = {}
    order = np.argsort(captures.start, kind="stable").tolist()
    for row in order:
        track = int(captures.track[row])
        if captures.call[row] == ApiCall.CAPTURE_BEGIN:
            open_since[track] = int(captures.start[row])
        elif (begin := open_since.pop(track, None)) is not None:
            # What other threads launch meanwhile, as autograd's, is captured too.
            first, last = np.searchsorted(launches.start[candidates], (begin, captures.end[row]))
            rows = candidates[first:last]
            rows = rows[process_of[launches.track[rows]] == process_of[track]]
            kinds = tuple(_KIND_OF_CALL[ApiCall(call)] for call in launches.call[rows].tolist())
            found.append(
                CudaGraphCapture(kinds, running.on_threads(threads[launches.track[rows]], launches.start[rows]))
            )
    return [graph for graph in found if graph.kinds]


def map_replays(events: ProfilerEvents, launch: Int64Array, graphs: Sequence[CudaGraphCapture]) -> Int64Array:
    """Return for each piece of GPU work the span in which it was captured; -1 if it is no replay that is known.

    Args:
        events: the trace's.
        launch: for each piece of work the row of its launch, or -1.
        graphs: those that are known.
    """
    span = np.full(len(launch), -1, np.int64)
    work = events.work
    replays = _replays(events, launch)
    kinds_of = {row: tuple(work.kind[pieces].tolist()) for row, pieces in replays.items()}
    for kinds in set(kinds_of.values()):
        fitting = [graph for graph in graphs if graph.kinds == kinds]
        rows = [row for row in replays if kinds_of[row] == kinds]
        ids = sorted({int(work.graph[replays[row][0]]) for row in rows})
        for row in rows:
            graph = _choose_graph(fitting, ids, int(work.graph[replays[row][0]]))
            if graph is not None:
                span[replays[row]] = graph.spans
    return span


def _replays(events: ProfilerEvents, launch: Int64Array) -> dict[int, Int64Array]:
    """Return the pieces of work of each launch of a graph, in the order of its nodes."""
    pieces = np.flatnonzero(launch >= 0)
    pieces = pieces[events.launches.call[launch[pieces]] == ApiCall.GRAPH]
    # Nodes are numbered as they are captured; without their numbers the time gives the order.
    node = events.work.node[pieces]
    order = np.lexsort((events.work.start[pieces], np.where(node >= 0, node, 0), launch[pieces]))
    pieces = pieces[order]
    if not len(pieces):
        return {}
    rows, first = np.unique(launch[pieces], return_index=True)
    return dict(zip(rows.tolist(), np.split(pieces, first[1:]), strict=True))


def _choose_graph(fitting: Sequence[CudaGraphCapture], ids: Sequence[int], graph_id: int) -> CudaGraphCapture | None:
    """Return the graph that a replay runs; None if that is not known.

    Args:
        fitting: those with its operations, in order of their captures.
        ids: of all graphs replayed that have these operations, in order, which is that of their captures too.
        graph_id: the replay's; -1 if the trace does not say.
    """
    if not fitting:
        return None
    if len({graph.spans.tobytes() for graph in fitting}) == 1:
        return fitting[0]
    return fitting[ids.index(graph_id)] if graph_id >= 0 and len(ids) == len(fitting) else None
