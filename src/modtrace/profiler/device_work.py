"""Attributes GPU work to calls: a kernel's launch is known, and so is the call in which it was launched.

A correlation id identifies the launch. Ids are counted per process, so they are ambiguous in a trace of several
processes, such as ranks in one file. There devices and processes are paired in order, if their numbers are equal. If
several launches remain, the last one that started before the work counts.

While a graph is captured nothing runs: the launches of the capture have no work. A replay is a single launch with all
of that work. A replay is matched to a capture with the same kinds of operations in the same order.

Collectives that threads of the CPU run, such as gloo's, are attributed in the same way as kernels. Both are added up
for the GPU columns of summaries.
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
"""The name of work without a module."""


class NoModuleReason(IntEnum):
    """The reason for GPU work without a module."""

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

    span: Int64Array  # the innermost span in which the work was launched, or -1
    reason: Int8Array  # a `NoModuleReason`, for work without a span
    collective: Int64Array  # index into `ProfilerEvents.collective_names`; -1 for work that does not communicate
    replay: Int64Array  # row of the launch that replayed the work as part of a graph, or -1
    step: Int64Array  # the step in which the work was launched


def without_impossible_times(events: ProfilerEvents) -> tuple[ProfilerEvents, list[str]]:
    """Return the trace's events with impossible times of devices cut, and a note on the cut time.

    A stream does one piece of work after another. If a piece goes on while the next one starts and ends, or after the
    profiler stopped, its end overflowed or was guessed: it is cut at that moment.
    """
    work, old_end = events.work, events.work.end_ns
    end = possible_ends(work.track, work.start_ns, old_end, None if events.window is None else events.window[1])
    cut_count = int(np.count_nonzero(end != old_end))
    if not cut_count:
        return events, []
    cut_ms = float((old_end - end).sum()) / 1e6
    note = (
        f"{cut_count:,} kernels, memcpys and memsets overlap the next one of their stream or last until after the "
        f"profiler stopped, which no device does: their ends are wrong, and {cut_ms:,.3f} ms were cut off; profile "
        "again, if need be with a newer driver, to get the true ends"
    )
    # The last end of a slice that is not work of a device, and of the cut work.
    kinds = (events.ops, events.plain_ops, events.nodes, events.launches, events.modules, events.regions, events.steps)
    last = max(events.first, int(end.max()), *(int(slices.end_ns.max(initial=0)) for slices in kinds))
    work = EventColumns(**{**vars(work), "duration_ns": end - work.start_ns})
    return replace(events, work=work, last=min(events.last, last)), [note]


def possible_ends(track: Int64Array, start: Int64Array, end: Int64Array, stop: int | None) -> Int64Array:
    """Return the latest possible end of each piece of device work; the profiler stopped at `stop`, if known."""
    order = np.lexsort((-end, start, track))
    order = order[end[order] > start[order]]
    piece, next_piece = order[:-1], order[1:]
    is_around = (track[piece] == track[next_piece]) & (end[piece] > end[next_piece])
    possible_end: Int64Array = end.copy()
    possible_end[piece[is_around]] = start[next_piece[is_around]]
    return possible_end if stop is None else np.minimum(possible_end, np.maximum(stop, start))


def count_overlapping(work: EventColumns) -> int:
    """Return the number of pieces of work that start during another piece of their stream and end after it."""
    count, last_track, open_ends = 0, -1, list[int]()
    order = np.lexsort((-work.end_ns, work.start_ns, work.track))
    columns = (column[order].tolist() for column in (work.track, work.start_ns, work.end_ns))
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
    """Return the row of the launch of each piece of work, or -1."""
    work, launches = events.work, events.launches
    launch = np.full(len(work), -1, np.int64)
    if not len(launches) or not len(work):
        return launch
    process_of = _processes_of(events)
    process = process_of[launches.track]
    order = np.lexsort((np.arange(len(launches)), process, launches.correlation))
    rows = order[begins_run(launches.correlation[order], process[order])]  # the first with each id in each process
    ids = launches.correlation[rows]
    first, end = (np.searchsorted(ids, work.correlation, side=side) for side in ("left", "right"))
    end = np.where(work.correlation >= 0, end, first)
    if np.all(process == process[0]):
        has_launch = first < end
        launch[has_launch] = rows[first[has_launch]]
        return launch
    row_index, pieces = expand_ranges(first, end)
    candidates = rows[row_index]
    work_id, launch_id = work.external[pieces], launches.external[candidates]
    is_possible = (work_id < 0) | (launch_id < 0) | (work_id == launch_id)
    is_possible &= launches.start_ns[candidates] <= work.start_ns[pieces]
    devices, device = np.unique(process_of[work.track], return_inverse=True)
    processes, process = np.unique(process, return_inverse=True)
    if len(devices) == len(processes):
        is_possible &= device[pieces] == process[candidates]
    pieces, candidates = pieces[is_possible], candidates[is_possible]
    # If several launches share an id, the one that started last overwrites the others.
    order = np.argsort(launches.start_ns[candidates], kind="stable")
    launch[pieces[order]] = candidates[order]
    return launch


class CudaGraphCapture(NamedTuple):
    """The launches while a graph was captured, in order."""

    kinds: tuple[int, ...]  # kind of each launched operation: 0 kernel, 1 memcpy, 2 memset
    spans: Int64Array  # innermost span around each launch, or -1


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
    candidates = candidates[np.argsort(launches.start_ns[candidates], kind="stable")]
    capture_starts: dict[int, int] = {}
    for row in np.argsort(captures.start_ns, kind="stable").tolist():
        track = int(captures.track[row])
        if captures.api[row] == ApiCall.CAPTURE_BEGIN:
            capture_starts[track] = int(captures.start_ns[row])
        elif (start := capture_starts.pop(track, None)) is not None:
            # Launches of other threads, such as autograd's, are captured too.
            first, last = np.searchsorted(launches.start_ns[candidates], (start, captures.end_ns[row]))
            rows = candidates[first:last]
            rows = rows[process_of[launches.track[rows]] == process_of[track]]
            kinds = tuple(_KIND_OF_CALL[ApiCall(call)] for call in launches.api[rows].tolist())
            spans = running.on_threads(events.threads[launches.track[rows]], launches.start_ns[rows])
            graphs.append(CudaGraphCapture(kinds, spans))
    return [graph for graph in graphs if graph.kinds]


def attribute_device_work(
    timeline: Timeline,
    events: ProfilerEvents,
    launch: Int64Array,
    running: InnermostLookup,
    graphs: Sequence[CudaGraphCapture] = (),
) -> WorkOwners:
    """Find for each piece of GPU work the innermost span in which it was launched, or the reason for its absence.

    Work that `graphs` replay belongs to the spans in which it was captured.
    """
    work, launches, threads = events.work, events.launches, events.threads
    span = np.full(len(work), -1, np.int64)
    launched = np.flatnonzero(launch >= 0)
    rows = launch[launched]
    span[launched] = running.on_threads(threads[launches.track[rows]], launches.start_ns[rows])
    is_replay = np.zeros(len(work), np.bool_)
    is_replay[launched] = launches.api[rows] == ApiCall.GRAPH
    captured = _map_replays(events, launch, graphs)
    span = np.where(captured >= 0, captured, span)
    time = work.start_ns.copy()
    time[launched] = launches.start_ns[rows]
    reason = np.full(len(work), NoModuleReason.OUTSIDE, np.int8)
    process_of = _processes_of(events)
    recorded_processes = np.unique(process_of[threads >= 0])
    reason[launched[~np.isin(process_of[launches.track[rows]], recorded_processes)]] = NoModuleReason.OTHER_PROCESS
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
    """Return the step of each moment, by the marks of the timeline, or by the profiler's steps without such marks.

    Moments after the last step with a module belong to this step.
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
    """Return the span in which each piece of GPU work was captured; -1 if it is not a known replay."""
    span = np.full(len(launch), -1, np.int64)
    work = events.work
    replays = _replays(events, launch)
    kinds_of = {row: tuple(work.work[pieces].tolist()) for row, pieces in replays.items()}
    for kinds in set(kinds_of.values()):
        matches = [graph for graph in graphs if graph.kinds == kinds]
        rows = [row for row in replays if kinds_of[row] == kinds]
        ids = sorted({int(work.graph[replays[row][0]]) for row in rows})
        for row in rows:
            graph_id = int(work.graph[replays[row][0]])
            if len({graph.spans.tobytes() for graph in matches}) == 1:
                span[replays[row]] = matches[0].spans
            elif graph_id >= 0 and len(ids) == len(matches):
                # Ids and graphs are both in the order of the captures.
                span[replays[row]] = matches[ids.index(graph_id)].spans
    return span


def _replays(events: ProfilerEvents, launch: Int64Array) -> dict[int, Int64Array]:
    """Return the pieces of work of each graph launch, by its row, in the order of the nodes."""
    pieces = np.flatnonzero(launch >= 0)
    pieces = pieces[events.launches.api[launch[pieces]] == ApiCall.GRAPH]
    # Nodes are numbered in the order of capture; without numbers the order of time is used.
    node = events.work.node[pieces]
    pieces = pieces[np.lexsort((events.work.start_ns[pieces], np.where(node >= 0, node, 0)))]
    return {int(launch[nodes[0]]): nodes for nodes in split_by(launch[pieces], pieces)}


def _collectives(events: ProfilerEvents, launch: Int64Array) -> Int64Array:
    """Return the collective of each piece of work, or -1.

    The name of a kernel determines it; otherwise a collective's range around the launch, such as for NCCL's copies.
    """
    launched = np.flatnonzero(launch >= 0)
    rows = launch[launched]
    range_name = np.full(len(launch), -1, np.int64)
    ranges = events.collectives.take(events.collectives.is_operator == 0)
    ranges = ranges.take(np.lexsort((-ranges.duration_ns, ranges.start_ns, ranges.track)))
    for track in np.unique(ranges.track).tolist():
        track_ranges = np.flatnonzero(ranges.track == track)
        pieces = launched[events.launches.track[rows] == track]
        time = events.launches.start_ns[launch[pieces]]
        # A nested range is of the same collective as its outer one, so the last range to start counts.
        index = np.searchsorted(ranges.start_ns[track_ranges], time, side="right") - 1
        last_end = np.maximum.accumulate(ranges.end_ns[track_ranges])
        is_inside = (index >= 0) & (last_end[np.maximum(index, 0)] > time)
        range_name[pieces[is_inside]] = ranges.name[track_ranges[index[is_inside]]]
    return np.where(events.work.name >= 0, events.work.name, range_name)


@dataclass(frozen=True)
class CpuCollectives:
    """Collectives that the CPU ran; columns as long as `ProfilerEvents.cpu_collectives`."""

    span: Int64Array  # innermost span in which the collective was launched, or -1
    reason: Int8Array  # a `NoModuleReason`, for collectives without a span
    step: Int64Array  # the step in which the collective was launched
    overlap: Int64Array  # ns of the collective during which modules ran


def find_cpu_collectives(timeline: Timeline, events: ProfilerEvents, running: InnermostLookup) -> CpuCollectives:
    """Find the collectives, and for each the call that launched it.

    A trace has no link between the two. Collectives of one name run in the order of their launches, so they are paired
    in order if their numbers are equal.
    """
    collectives = events.cpu_collectives
    launches = events.collectives.take(events.collectives.is_operator == 1)
    span = np.full(len(collectives), -1, np.int64)
    reason = np.full(len(collectives), NoModuleReason.NO_LAUNCH, np.int8)
    time = collectives.start_ns.copy()
    for name in np.unique(collectives.name).tolist():
        rows, launch_rows = np.flatnonzero(collectives.name == name), np.flatnonzero(launches.name == name)
        if len(rows) != len(launch_rows):
            continue
        rows = rows[np.argsort(collectives.start_ns[rows], kind="stable")]
        launch_rows = launch_rows[np.argsort(launches.start_ns[launch_rows], kind="stable")]
        time[rows] = launches.start_ns[launch_rows]
        reason[rows] = NoModuleReason.OUTSIDE
        span[rows] = running.on_threads(events.threads[launches.track[launch_rows]], time[rows])
    reason[span >= 0] = NoModuleReason.KNOWN
    columns = timeline.columns
    outermost = columns.parent < 0
    busy = union_of(columns.start[outermost], columns.end[outermost])
    step, overlap = steps_of_work(timeline, events, time), busy.time_within(collectives.start_ns, collectives.end_ns)
    return CpuCollectives(span, reason, step, overlap)


_MAX_ROWS = 100_000
"""Maximum size of the table of GPU work with steps, which is stored in the trace's metadata."""


_Columns = tuple[Int64Array, ...]
"""Columns of pieces of work: launching span, step, kind as in `GpuWork.kind`, duration in ns, and the part of it in ns
that overlaps with computation. Work without a span has its reason plus the number of spans."""


def add_up_gpu_work(
    recorded: Timeline, events: ProfilerEvents, owners: WorkOwners, on_cpu: CpuCollectives
) -> GpuWork | None:
    """Return the GPU work that modules launched; None if the trace has neither GPU work nor communication.

    `owners` refers to the spans of `recorded`: the timeline's own, followed by the spans of captured graphs.
    """
    work = events.work
    if not len(work) and not len(on_cpu.span):
        return None
    computing = np.flatnonzero(owners.collective < 0)
    gpu_owner = _owner_codes(recorded, owners.span, owners.reason)
    kinds, durations = work.work[computing], work.duration_ns[computing]
    computation = gpu_owner[computing], owners.step[computing], kinds, durations, np.zeros_like(durations)
    cpu_owner = _owner_codes(recorded, on_cpu.span, on_cpu.reason)
    kinds = np.full_like(cpu_owner, COMMUNICATION_KIND)
    cpu_communication = cpu_owner, on_cpu.step, kinds, events.cpu_collectives.duration_ns, on_cpu.overlap
    parts = computation, _communication(events, owners, gpu_owner), cpu_communication
    columns = np.concatenate([np.stack(part) for part in parts], axis=1)
    owner, step, kind, work_duration, work_overlap = columns.astype(np.int64)
    modules, places, place = _places(recorded, owner)
    keys, row = np.unique(np.stack([place, step, kind]), axis=1, return_inverse=True)
    if keys.shape[1] > _MAX_ROWS:
        keys[1] = -1
        keys, new_row = np.unique(keys, axis=1, return_inverse=True)
        row = new_row.ravel()[row]
    row = row.ravel()
    duration, overlap = np.zeros((2, keys.shape[1]), np.int64)
    np.add.at(duration, row, work_duration)
    np.add.at(overlap, row, work_overlap)
    place, step, kind = keys
    return GpuWork(modules, places, place, step, kind, np.bincount(row, minlength=keys.shape[1]), duration, overlap)


def _owner_codes(recorded: Timeline, span: Int64Array, reason: Int8Array) -> Int64Array:
    return np.where(span >= 0, span, len(recorded.columns) + reason.astype(np.int64))


def _places(recorded: Timeline, owner: Int64Array) -> tuple[list[tuple[str, str]], list[Place], Int64Array]:
    """Return the modules, the places in which work was launched, and the place of each piece."""
    columns, names = recorded.columns, recorded.names
    name, phase, parent = columns.name.tolist(), columns.phase.tolist(), columns.parent.tolist()
    modules, places = Numbering[tuple[str, str]](), Numbering[Place]()
    keys, key_index = np.unique(owner, return_inverse=True)
    place_of = []
    for key in keys.tolist():
        path: list[tuple[int, int]] = []
        if key >= len(columns):
            path = [(modules[no_module_name(key - len(columns)), ""], NO_PHASE)]
        while 0 <= key < len(columns):
            path.append((modules[names[name[key]].fqn, names[name[key]].module_class], phase[key]))
            key = parent[key]
        place_of.append(places[tuple(reversed(path))])
    return list(modules), list(places), np.array(place_of, np.int64)[key_index]


def _communication(events: ProfilerEvents, owners: WorkOwners, owner: Int64Array) -> _Columns:
    """Return the communication of GPUs; the overlap is with computation on the same device."""
    work = events.work
    pieces = np.flatnonzero(owners.collective >= 0)
    device = _processes_of(events)[work.track]
    overlap = np.zeros(len(pieces), np.int64)
    for number in np.unique(device[pieces]).tolist():
        computing = (owners.collective < 0) & (device == number)
        on_device = device[pieces] == number
        busy = union_of(work.start_ns[computing], work.end_ns[computing])
        overlap[on_device] = busy.time_within(work.start_ns[pieces[on_device]], work.end_ns[pieces[on_device]])
    kinds = np.full_like(overlap, COMMUNICATION_KIND)
    return owner[pieces], owners.step[pieces], kinds, work.duration_ns[pieces], overlap
