"""GPU work and the calls that asked for it: a kernel's launch is known, and so the call in which it was launched.

A correlation id says which launch it was. Ids are counted per process, so they are not enough in a trace of several
processes, such as ranks in one file. There devices and processes are paired in order, if there are as many of both. Of
the launches that are still possible the last one that began before the work counts.

While a graph is captured nothing runs: the launches of the capture have no work. A replay is one launch with all that
work. Both have the same kinds of operations in the same order, which shows that they belong together.

Collectives that threads of the CPU run, as gloo's, are found in the same way as kernels. Both are added up for the
GPU columns of summaries.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from .._arrays import Int8Array, Int64Array, Numbering, begins_run, expand_ranges, split_by
from ..timeline import GpuWork, Timeline
from ..timeline.contents import COMMUNICATION_KIND, NO_PHASE, Place
from ..timeline.nesting import InnermostLookup, union_of
from ..timeline.select import steps_at
from .event_collector import ApiCall, EventColumns, ProfilerEvents
from .recorded_part import steps_of_profile

_KIND_OF_CALL = {ApiCall.KERNEL: 0, ApiCall.MEMCPY: 1, ApiCall.MEMSET: 2}
"""The kind of work that a call launches, as in `EventColumns.work`."""

NO_MODULE = "(no module)"
"""The name of work that belongs to no module."""


class NoModuleReason(IntEnum):
    """Why a piece of GPU work has no module."""

    KNOWN, OUTSIDE, NO_LAUNCH, GRAPH, NO_CORRELATION, OTHER_PROCESS = range(6)

    @property
    def text(self) -> str:
        """The reason in words."""
        return _REASON_TEXTS[self]


_REASON_TEXTS = (
    "",
    "launched outside modules",
    "launch not in the trace",
    "graph launch, capture not known",
    "no correlation id",
    "launched by another process",
)


def no_module_name(reason: int) -> str:
    """Return the name of the summary row for work without a module, by reason."""
    return f"{NO_MODULE[:-1]}: {NoModuleReason(reason).text})"


@dataclass(frozen=True)
class WorkOwners:
    """The owner of each piece of GPU work; columns as long as `ProfilerEvents.work`."""

    span: Int64Array  # the innermost span in which it was launched, or -1
    reason: Int8Array  # a `NoModuleReason`: why there is none
    collective: Int64Array  # index into `ProfilerEvents.collective_names`; -1 where it computes
    replay: Int64Array  # the row of the launch that replayed it as part of a graph, or -1
    step: Int64Array  # the step in which it was launched


def without_impossible_times(events: ProfilerEvents) -> tuple[ProfilerEvents, list[str]]:
    """Return the trace's events with the impossible device times cut, and notes of what was cut.

    A stream does one piece of work after another. A piece may go on while the next one begins and ends, or after the
    profiler stopped. Its end overflowed or was guessed: it counts until then.
    """
    work, end = events.work, events.work.end
    until = possible_ends(work.track, work.start, end, None if events.window is None else events.window[1])
    cut = int(np.count_nonzero(until != end))
    if not cut:
        return events, []
    lost_ms = float((end - until).sum()) / 1e6
    note = (
        f"{cut:,} kernels, memcpys and memsets go on while the next one of their stream begins and ends, or after the "
        f"profiler stopped: {lost_ms:,.3f} ms of them are left out, as no device works so; profile again, or with a "
        "newer driver, for their true ends"
    )
    # The last end of a slice that is no work of a device, and of the work as it is now.
    kinds = (events.ops, events.plain_ops, events.nodes, events.launches, events.modules, events.regions, events.steps)
    last = max(events.first, int(until.max()), *(int(slices.end.max(initial=0)) for slices in kinds))
    work = EventColumns(**{**vars(work), "duration": until - work.start})
    return replace(events, work=work, last=min(events.last, last)), [note]


def possible_ends(track: Int64Array, start: Int64Array, end: Int64Array, stop: int | None) -> Int64Array:
    """Return the latest possible end of each piece of device work; `stop` is when the profiler stopped, if known."""
    order = np.lexsort((-end, start, track))
    order = order[end[order] > start[order]]
    piece, following = order[:-1], order[1:]
    holds = (track[piece] == track[following]) & (end[piece] > end[following])
    until: Int64Array = end.copy()
    until[piece[holds]] = start[following[holds]]
    return until if stop is None else np.minimum(until, np.maximum(stop, start))


def count_overlapping(work: EventColumns) -> int:
    """Return how many pieces of work begin before one of their stream ends, and end after it."""
    count, last_track, open_ends = 0, -1, list[int]()
    order = np.lexsort((-work.end, work.start, work.track))
    columns = (column[order].tolist() for column in (work.track, work.start, work.end))
    for track, start, end in zip(*columns, strict=True):
        while open_ends and (track != last_track or open_ends[-1] <= start):
            open_ends.pop()
        last_track = track
        if open_ends and open_ends[-1] < end:
            count += 1
        else:
            open_ends.append(end)
    return count


def find_launches(events: ProfilerEvents) -> Int64Array:
    """Return for each piece of work the row of its launch among the trace's, or -1."""
    work, launches = events.work, events.launches
    launch = np.full(len(work), -1, np.int64)
    if not len(launches) or not len(work):
        return launch
    process_of = _processes_of(events)
    process = process_of[launches.track]
    order = np.lexsort((np.arange(len(launches)), process, launches.correlation))
    rows = order[begins_run(launches.correlation[order], process[order])]  # of each process the first with each id
    ids = launches.correlation[rows]
    first, end = (np.searchsorted(ids, work.correlation, side=side) for side in ("left", "right"))
    end = np.where(work.correlation >= 0, end, first)
    if np.all(process == process[0]):
        has_launch = first < end
        launch[has_launch] = rows[first[has_launch]]
        return launch
    place, pieces = expand_ranges(first, end)
    chosen = rows[place]
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
    launch[pieces[order]] = chosen[order]
    return launch


class CudaGraphCapture(NamedTuple):
    """The launches while a graph was captured, in order."""

    kinds: tuple[int, ...]  # what each launched: 0 a kernel, 1 a memcpy, 2 a memset
    spans: Int64Array  # int64, the innermost span around each, or -1


def captured_graphs(events: ProfilerEvents, launch: Int64Array, running: InnermostLookup) -> list[CudaGraphCapture]:
    """Return the graphs that were captured in a trace, in the order in which their captures ended."""
    captures, launches = events.captures, events.launches
    graphs: list[CudaGraphCapture] = []
    process_of = _processes_of(events)
    _, number = np.unique(launches.correlation, return_inverse=True)
    id_in_process = number * (int(process_of.max()) + 1) + process_of[launches.track]
    is_captured = np.isin(launches.api, list(_KIND_OF_CALL))
    is_captured &= ~np.isin(id_in_process, id_in_process[launch[launch >= 0]])
    candidates = np.flatnonzero(is_captured)
    candidates = candidates[np.argsort(launches.start[candidates], kind="stable")]
    open_since: dict[int, int] = {}
    for row in np.argsort(captures.start, kind="stable").tolist():
        track = int(captures.track[row])
        if captures.api[row] == ApiCall.CAPTURE_BEGIN:
            open_since[track] = int(captures.start[row])
        elif (begin := open_since.pop(track, None)) is not None:
            # What other threads launch meanwhile, as autograd's, is captured too.
            first, last = np.searchsorted(launches.start[candidates], (begin, captures.end[row]))
            rows = candidates[first:last]
            rows = rows[process_of[launches.track[rows]] == process_of[track]]
            kinds = tuple(_KIND_OF_CALL[ApiCall(call)] for call in launches.api[rows].tolist())
            spans = running.on_threads(events.threads[launches.track[rows]], launches.start[rows])
            graphs.append(CudaGraphCapture(kinds, spans))
    return [graph for graph in graphs if graph.kinds]


def attribute_device_work(
    timeline: Timeline,
    events: ProfilerEvents,
    launch: Int64Array,
    running: InnermostLookup,
    graphs: Sequence[CudaGraphCapture] = (),
) -> WorkOwners:
    """Find for each piece of GPU work the innermost span in which it was launched, or why there is none.

    What `graphs` replay belongs to the spans that they were captured in.
    """
    work, launches, threads = events.work, events.launches, events.threads
    span = np.full(len(work), -1, np.int64)
    launched = np.flatnonzero(launch >= 0)
    rows = launch[launched]
    span[launched] = running.on_threads(threads[launches.track[rows]], launches.start[rows])
    is_replay = np.zeros(len(work), np.bool_)
    is_replay[launched] = launches.api[rows] == ApiCall.GRAPH
    captured = _map_replays(events, launch, graphs)
    span = np.where(captured >= 0, captured, span)
    time = work.start.copy()
    time[launched] = launches.start[rows]
    reason = np.full(len(work), NoModuleReason.OUTSIDE, np.int8)
    process_of = _processes_of(events)
    recorded = np.unique(process_of[threads >= 0])
    reason[launched[~np.isin(process_of[launches.track[rows]], recorded)]] = NoModuleReason.OTHER_PROCESS
    reason[is_replay & (reason == NoModuleReason.OUTSIDE)] = NoModuleReason.GRAPH
    reason[launch < 0] = NoModuleReason.NO_LAUNCH
    reason[work.correlation < 0] = NoModuleReason.NO_CORRELATION
    reason[span >= 0] = NoModuleReason.KNOWN
    return WorkOwners(
        span=span,
        reason=reason,
        collective=_collectives(events, launch),
        replay=np.where(captured >= 0, launch, -1),
        step=steps_of_work(timeline, events, time),
    )


def steps_of_work(timeline: Timeline, events: ProfilerEvents, time: Int64Array) -> Int64Array:
    """Return the step that each moment is in, by the marks of the timeline, else by the profiler's own.

    What comes after the last step in which a module ran counts to that one.
    """
    ends = timeline.step_ends
    if not len(ends) or not len(timeline.columns):
        return steps_of_profile(events, time)
    last = max(int(timeline.columns.step.max()), int(steps_at(timeline, ends[-1:])[0]), 0)
    return np.clip(steps_at(timeline, time, starts=True), 0, last)


def _processes_of(events: ProfilerEvents) -> Int64Array:
    """Return a number for the process or device of each of the trace's tracks, in the order of their pids."""
    pids = sorted({pid for pid, _ in events.tracks}, key=lambda pid: (isinstance(pid, str), pid))
    number = {pid: index for index, pid in enumerate(pids)}
    return np.array([number[pid] for pid, _ in events.tracks] or [0], np.int64)


def _map_replays(events: ProfilerEvents, launch: Int64Array, graphs: Sequence[CudaGraphCapture]) -> Int64Array:
    """Return for each piece of GPU work the span in which it was captured; -1 if it is not a replay that is known."""
    span = np.full(len(launch), -1, np.int64)
    work = events.work
    replays = _replays(events, launch)
    kinds_of = {row: tuple(work.work[pieces].tolist()) for row, pieces in replays.items()}
    for kinds in set(kinds_of.values()):
        fitting = [graph for graph in graphs if graph.kinds == kinds]
        rows = [row for row in replays if kinds_of[row] == kinds]
        ids = sorted({int(work.graph[replays[row][0]]) for row in rows})
        for row in rows:
            graph_id = int(work.graph[replays[row][0]])
            if len({graph.spans.tobytes() for graph in fitting}) == 1:
                span[replays[row]] = fitting[0].spans
            elif graph_id >= 0 and len(ids) == len(fitting):
                # Ids and graphs are both in the order of the captures.
                span[replays[row]] = fitting[ids.index(graph_id)].spans
    return span


def _replays(events: ProfilerEvents, launch: Int64Array) -> dict[int, Int64Array]:
    """Return the pieces of work of each launch of a graph, in the order of its nodes."""
    pieces = np.flatnonzero(launch >= 0)
    pieces = pieces[events.launches.api[launch[pieces]] == ApiCall.GRAPH]
    # Nodes are numbered as they are captured; without their numbers the time gives the order.
    node = events.work.node[pieces]
    pieces = pieces[np.lexsort((events.work.start[pieces], np.where(node >= 0, node, 0)))]
    return {int(launch[nodes[0]]): nodes for nodes in split_by(launch[pieces], pieces)}


def _collectives(events: ProfilerEvents, launch: Int64Array) -> Int64Array:
    """Return for each piece of work the collective that it is part of, or -1.

    By the name of a kernel; else by the range of a collective in which it was launched, as copies of NCCL are.
    """
    launched = np.flatnonzero(launch >= 0)
    rows = launch[launched]
    around = np.full(len(launch), -1, np.int64)
    ranges = events.collectives.take(events.collectives.is_operator == 0)
    ranges = ranges.take(np.lexsort((-ranges.duration, ranges.start, ranges.track)))
    for track in np.unique(ranges.track).tolist():
        of_track = np.flatnonzero(ranges.track == track)
        pieces = launched[events.launches.track[rows] == track]
        time = events.launches.start[launch[pieces]]
        # Ranges inside others are of the same collective: the last one begun is the one, or all have ended.
        index = np.searchsorted(ranges.start[of_track], time, side="right") - 1
        reached = np.maximum.accumulate(ranges.end[of_track])
        inside = (index >= 0) & (reached[np.maximum(index, 0)] > time)
        around[pieces[inside]] = ranges.name[of_track[index[inside]]]
    return np.where(events.work.name >= 0, events.work.name, around)


@dataclass(frozen=True)
class CpuCollectives:
    """Collectives that the CPU ran; columns as long as `ProfilerEvents.cpu_collectives`."""

    span: Int64Array  # the innermost span in which each was launched, or -1
    reason: Int8Array  # a `NoModuleReason`: why there is none
    step: Int64Array  # the step in which it was launched
    overlap: Int64Array  # ns of it while any module ran on another thread


def find_cpu_collectives(timeline: Timeline, events: ProfilerEvents, running: InnermostLookup) -> CpuCollectives:
    """Find the collectives, and for each the call that launched it.

    Nothing in a trace joins the two. Those of one name run in the order of their launches: the first belongs to the
    first, if there are as many of both.
    """
    ran = events.cpu_collectives
    launches = events.collectives.take(events.collectives.is_operator == 1)
    span = np.full(len(ran), -1, np.int64)
    reason = np.full(len(ran), NoModuleReason.NO_LAUNCH, np.int8)
    time = ran.start.copy()
    for name in np.unique(ran.name).tolist():
        rows, launched = np.flatnonzero(ran.name == name), np.flatnonzero(launches.name == name)
        if len(rows) != len(launched):
            continue
        rows = rows[np.argsort(ran.start[rows], kind="stable")]
        launched = launched[np.argsort(launches.start[launched], kind="stable")]
        time[rows] = launches.start[launched]
        reason[rows] = NoModuleReason.OUTSIDE
        span[rows] = running.on_threads(events.threads[launches.track[launched]], time[rows])
    reason[span >= 0] = NoModuleReason.KNOWN
    columns = timeline.columns
    outermost = columns.parent < 0
    busy = union_of(columns.start[outermost], columns.end[outermost])
    step, overlap = steps_of_work(timeline, events, time), busy.time_within(ran.start, ran.end)
    return CpuCollectives(span, reason, step, overlap)


_MAX_ROWS = 100_000
"""A larger table has no steps: it is stored in the trace's metadata."""


_Columns = tuple[Int64Array, ...]
"""Columns of pieces of work: launching span, step, kind as in `GpuWork.kind`, duration in ns, ns of it that overlap
with computation. Work without a span has its reason, counted from the number of spans."""


def add_up_gpu_work(
    recorded: Timeline, events: ProfilerEvents, owners: WorkOwners, on_cpu: CpuCollectives
) -> GpuWork | None:
    """Return what modules launched; None if the trace has neither GPU work nor communication.

    `owners` points to the spans of `recorded`, which has those of captured graphs after its own.
    """
    work = events.work
    if not len(work) and not len(on_cpu.span):
        return None
    computing = np.flatnonzero(owners.collective < 0)
    of_work = _launched_in(recorded, owners.span, owners.reason)
    kinds, durations = work.work[computing], work.duration[computing]
    on_gpu = of_work[computing], owners.step[computing], kinds, durations, np.zeros_like(durations)
    of_cpu = _launched_in(recorded, on_cpu.span, on_cpu.reason)
    kinds = np.full_like(of_cpu, COMMUNICATION_KIND)
    on_host = of_cpu, on_cpu.step, kinds, events.cpu_collectives.duration, on_cpu.overlap
    parts = [np.stack(columns) for columns in (on_gpu, _communication(events, owners, of_work), on_host)]
    launched_in, step, kind, lasts, overlaps = np.concatenate(parts, axis=1).astype(np.int64)
    modules, places, place = _places(recorded, launched_in)
    keys, row = np.unique(np.stack([place, step, kind]), axis=1, return_inverse=True)
    if keys.shape[1] > _MAX_ROWS:
        keys[1] = -1
        keys, again = np.unique(keys, axis=1, return_inverse=True)
        row = again.ravel()[row]
    row = row.ravel()
    duration, overlap = np.zeros((2, keys.shape[1]), np.int64)
    np.add.at(duration, row, lasts)
    np.add.at(overlap, row, overlaps)
    place, step, kind = keys
    return GpuWork(modules, places, place, step, kind, np.bincount(row, minlength=keys.shape[1]), duration, overlap)


def _launched_in(recorded: Timeline, span: Int64Array, reason: Int8Array) -> Int64Array:
    return np.where(span >= 0, span, len(recorded.columns) + reason.astype(np.int64))


def _places(recorded: Timeline, launched_in: Int64Array) -> tuple[list[tuple[str, str]], list[Place], Int64Array]:
    """Return the modules, the places in which work was launched, and the place of each piece."""
    columns, names = recorded.columns, recorded.names
    name, phase, parent = columns.name.tolist(), columns.phase.tolist(), columns.parent.tolist()
    modules, places = Numbering[tuple[str, str]](), Numbering[Place]()
    keys, of_piece = np.unique(launched_in, return_inverse=True)
    place_of = []
    for key in keys.tolist():
        path: list[tuple[int, int]] = []
        if key >= len(columns):
            path = [(modules[no_module_name(key - len(columns)), ""], NO_PHASE)]
        while 0 <= key < len(columns):
            path.append((modules[names[name[key]].fqn, names[name[key]].module_class], phase[key]))
            key = parent[key]
        place_of.append(places[tuple(reversed(path))])
    return list(modules), list(places), np.array(place_of, np.int64)[of_piece]


def _communication(events: ProfilerEvents, owners: WorkOwners, of_work: Int64Array) -> _Columns:
    """Return the communication of GPUs, and how much of each piece overlaps with what its device computed."""
    work = events.work
    pieces = np.flatnonzero(owners.collective >= 0)
    device = _processes_of(events)[work.track]
    overlap = np.zeros(len(pieces), np.int64)
    for number in np.unique(device[pieces]).tolist():
        computing = (owners.collective < 0) & (device == number)
        of_device = device[pieces] == number
        busy = union_of(work.start[computing], work.end[computing])
        overlap[of_device] = busy.time_within(work.start[pieces[of_device]], work.end[pieces[of_device]])
    kinds = np.full_like(overlap, COMMUNICATION_KIND)
    return of_work[pieces], owners.step[pieces], kinds, work.duration[pieces], overlap
