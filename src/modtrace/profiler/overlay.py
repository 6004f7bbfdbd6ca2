"""The computation of a merge: align a recording with a trace, and attribute the trace's nodes and kernels to calls.

Without a recording, module tracks are made from the trace, such as from its `nn.Module` slices (`with_stack=True`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .._arrays import BoolArray, Int64Array, Numbering, count_in_run
from .._errors import TraceError
from ..formats.chrome_values import base_time_ns
from ..timeline import FORWARD, RECOMPUTE, Name, Process, Slices, Timeline, Track
from ..timeline.contents import LEFT_OUT, REGION_CLASS
from ..timeline.join import join, move_times
from ..timeline.nesting import InnermostLookup, clip_and_nest, nest_by_time
from ..timeline.select import modules_only, whole_spans
from ..timeline.slices import sort_by_start
from .alignment import Alignment, align_by_sync_marks, refine_by_operators
from .backward_nodes import Nodes, cut_to_nodes, find_calls_of_nodes
from .compiled_kernels import KernelCall, with_kernel_modules, with_kernel_times
from .device_work import (
    CudaGraphCapture,
    NoModuleReason,
    add_up_gpu_work,
    attribute_device_work,
    captured_graphs,
    find_cpu_collectives,
    find_launches,
    without_impossible_times,
)
from .event_collector import ProfilerEvents
from .recorded_part import (
    drop_unused,
    for_process,
    innermost_spans,
    pids_with_modules,
    profiled_window,
    recorded_pid,
    runs_module_code,
    with_pid,
    with_profiled_steps,
    without_annotated_ranges,
)
from .stream_spans import build_stream_spans, with_stream_spans

NO_EVENTS = "the trace has no events: nothing ran under the profiler, or it was exported within its with block"
NO_MODULES = (
    "the trace has neither nn.Module slices nor ranges of record_function other than torch's own, so that no module "
    "track could be made; profile with with_stack=True, or merge a recording with it"
)
REGIONS = (
    "the trace has no nn.Module slices: the tracks are its ranges of record_function; "
    "profile with with_stack=True, or give a recording, for modules"
)
CALLS = "its modules are those that modtrace wrote into it; links, ranges, marks and counters are not read"
NO_NAMES = (
    "the trace knows modules by class and number, not by attribute: Linear_1 is the second Linear that was called"
)


_TORCH_RANGE = re.compile(r"Optimizer\.\w+#|enumerate\(DataLoader\)#")
"""Names of ranges that torch itself creates in every training; such ranges are not modules."""


def reconstruct(events: ProfilerEvents, process: Process) -> tuple[Timeline, list[str]]:
    """Make a timeline in ns from the base of modtrace's slices, `nn.Module:` slices or ranges; return it and notes."""
    threads = events.threads
    if np.any(threads[events.calls.track] >= 0):
        return _timeline_from_call_args(events, process)
    modules, regions = (rows.take(threads[rows.track] >= 0) for rows in (events.modules, events.regions))
    has_modules = bool(len(modules))
    slices, note = (modules, NO_NAMES) if has_modules else (regions, REGIONS)
    used_names = [slices.names[name] for name in np.unique(slices.name).tolist()]
    if not has_modules and all(map(_TORCH_RANGE.match, used_names)):
        return Timeline(Slices.empty(), metadata={"reconstructed": True}), [
            NO_MODULES if events.event_count else NO_EVENTS
        ]
    nodes = Nodes(events.nodes)
    is_recompute = nodes.innermost.on_threads(slices.track, slices.start_ns) >= 0
    if not has_modules:
        # A range that runs only in backward does not repeat a forward one.
        is_recompute &= np.isin(slices.name, slices.name[~is_recompute])
    numbers = Numbering[tuple[int, bool]]()
    keys = zip(slices.track.tolist(), is_recompute.tolist(), strict=True)
    track = np.array([numbers[key] for key in keys], np.int64)
    tracks = []
    for number, recomputes in numbers:
        thread = events.thread_names.get(events.tracks[number], f"thread {threads[number]}")
        tracks.append(Track("backward" if recomputes else "forward", thread, int(threads[number]), process))
    end, parent, depth = clip_and_nest(track, slices.start_ns, slices.end_ns, np.zeros(len(slices), np.int64))
    make_name = _module_name if has_modules else _region_name
    order = np.lexsort((depth, is_recompute))
    names, name = _names(slices.names, slices.name, parent, order=order, is_recompute=is_recompute, make_name=make_name)
    phase = np.where(is_recompute, RECOMPUTE, FORWARD)
    columns = sort_by_start(
        Slices.of(start=slices.start_ns, end=end, name=name, phase=phase, track=track, depth=depth, parent=parent)
    )
    # Calls are numbered per name and phase.
    order = np.lexsort((columns.phase, columns.name))
    call = np.empty(len(columns), np.int64)
    call[order] = count_in_run(columns.name[order], columns.phase[order])
    columns = replace(columns, call=call)
    return Timeline(columns, names, tuple(tracks), metadata={"reconstructed": True}), [note]


def _timeline_from_call_args(events: ProfilerEvents, process: Process) -> tuple[Timeline, list[str]]:
    """Make a timeline from slices whose args identify calls; see `reconstruct`."""
    rows, threads = events.calls, events.threads
    names = [events.thread_names.get(key, "").partition(" · ") for key in events.tracks]
    has_modules = (threads >= 0) & np.array([kind in ("forward", "backward") for kind, _, _ in names], np.bool_)
    rows = rows.take(has_modules[rows.track])
    used_tracks, track = np.unique(rows.track, return_inverse=True)
    tracks = [Track(names[row][0], names[row][2], int(threads[row]), process) for row in used_tracks.tolist()]
    columns = Slices.of(
        start=rows.start_ns,
        end=rows.end_ns,
        name=rows.name,
        phase=rows.phase,
        track=track,
        call=rows.call,
        step=rows.step,
    ).take(np.lexsort((-rows.end_ns, rows.start_ns)))
    columns = sort_by_start(nest_by_time(columns))
    return Timeline(columns, rows.names, tuple(tracks), metadata={"reconstructed": True}), [CALLS]


def _module_name(text: str, outer: Name | None) -> Name:
    """Return the name of a module that the trace calls `Linear_0`, inside the module `outer`."""
    module_class = text.rpartition("_")[0] or text
    if outer is None:
        return Name(module_class, text, module_class)
    return Name(f"{text}: {module_class}", f"{outer.fqn}.{text}", module_class)


def _region_name(text: str, outer: Name | None) -> Name:
    return Name(text, text if outer is None else f"{outer.fqn}.{text}", REGION_CLASS)


def _names(
    texts: Sequence[str],
    value: Int64Array,
    parent: Int64Array,
    *,
    order: Int64Array,
    is_recompute: BoolArray,
    make_name: Callable[[str, Name | None], Name],
) -> tuple[list[Name], Int64Array]:
    """Return the names, one for each chain of modules, and the name of each span.

    An outermost recomputed call gets the name of the forward call that it repeats, which may be inside other calls.
    """
    numbers = Numbering[tuple[int, int]]()
    names: list[Name] = []
    name_of: list[int] = [-1] * len(value)
    outer_of_text: dict[int, int] = {}
    for row in order.tolist():
        outer = name_of[parent[row]] if parent[row] >= 0 else -1
        if not is_recompute[row]:
            outer_of_text.setdefault(int(value[row]), outer)
        elif parent[row] < 0:
            outer = outer_of_text.get(int(value[row]), -1)
        name_of[row] = numbers[outer, int(value[row])]
        if name_of[row] == len(names):
            names.append(make_name(texts[value[row]], names[outer] if outer >= 0 else None))
    return names, np.array(name_of, np.int64)


@dataclass(frozen=True)
class Aligned:
    """A recording in the time of one trace."""

    timeline: Timeline  # recording in ns from the trace's base, clipped to the trace and cut to its nodes
    running: InnermostLookup  # finds the innermost span of any phase on a thread at a moment
    pid: int | str  # pid of the recording's first process in the trace
    events: ProfilerEvents  # events of the trace, with `threads` set
    alignment: Alignment | None  # None if the timeline was made from the trace itself
    node_count: int  # number of autograd nodes of the trace
    attributed_count: int  # number of nodes that belong to a call
    # Number of forward operations partly in and partly outside a call, which a wrong alignment would cause.
    straddling_count: int
    max_straddle_ns: int  # maximum time of such an operation on the wrong side of a call's edge
    notes: list[str]  # notes for the user
    pids: Mapping[Process, int | str]  # pids of the processes, if there are several
    kernels: list[KernelCall]  # kernels that ran inside compiled regions

    def pid_of(self, process: Process) -> int | str:
        """Return the pid under which the trace lists a process of the timeline."""
        return self.pids.get(process, self.pid)


@dataclass(frozen=True)
class Overlay(Aligned):
    """A recording in the time of a trace, and the modules of the trace's kernels."""

    shown_timeline: Timeline  # the timeline without ranges that the profiler's annotations show already
    stream_spans: Slices  # spans above the streams, see `build_stream_spans`
    stream_names: list[Name]  # their names
    unique_thread_timeline: Timeline  # the timeline with unique thread ids, even across processes
    work: int  # number of kernels, memcpys and memsets
    attributed_work: int  # number of these that were launched in a call
    unattributed: dict[str, int]  # number of other work by the text of its reason

    def recording(self, events: ProfilerEvents, base: int, left_out: int) -> Timeline:
        """Return the timeline that `modtrace.load` of the merged trace returns: a track per stream, in Unix ns."""
        metadata = {**self.timeline.metadata, **({LEFT_OUT: left_out} if left_out else {})}
        timeline = replace(self.timeline, metadata=metadata)
        timeline = with_stream_spans(timeline, self.stream_spans, self.stream_names, events.tracks)
        return move_times(timeline, lambda time: time + base)


class Trace(NamedTuple):
    """A trace that was read."""

    events: ProfilerEvents
    keys: Mapping[str, Any]  # top-level keys
    path: str  # path of the file, for errors


def overlay(
    timeline: Timeline | None, events: ProfilerEvents, keys: Mapping[str, Any], path: str, capture: Trace | None = None
) -> Overlay:
    """Align a recording, or a trace's own modules, with the trace; cut it to the profile, and attribute the GPU work.

    `capture` is another trace, with the captures of the graphs that this one replays. Raises TraceError if recording
    and trace have no moment in common, or the trace has no usable event, or an invalid base of its times.
    """
    events, time_notes = without_impossible_times(events)
    aligned = _align(timeline, events, keys, path)
    timeline_with_captures, events = aligned.timeline, aligned.events
    launch = find_launches(events)
    graphs = captured_graphs(events, launch, aligned.running)
    if capture is not None:
        timeline_with_captures, captures = _join_captures(aligned.timeline, timeline, capture)
        graphs += captures
    owners = attribute_device_work(aligned.timeline, events, launch, aligned.running, graphs)
    on_cpu = find_cpu_collectives(aligned.timeline, events, aligned.running)
    reasons = np.bincount(owners.reason, minlength=len(NoModuleReason)).tolist()
    timeline = with_kernel_times(aligned.timeline, aligned.kernels, events, launch)
    timeline = replace(timeline, gpu_work=add_up_gpu_work(timeline_with_captures, events, owners, on_cpu))
    shown_timeline = unique_thread_timeline = timeline
    if aligned.alignment is not None:
        shown_timeline = drop_unused(without_annotated_ranges(timeline, events))
    if aligned.pids:
        tids = {number: tid for number, (_, tid) in enumerate(events.tracks, 1) if isinstance(tid, int)}
        timeline = shown_timeline = _set_tids(timeline, tids)
    stream_spans, stream_names = build_stream_spans(timeline_with_captures, events, owners)
    return Overlay(
        **{**vars(aligned), "timeline": timeline, "notes": [*aligned.notes, *time_notes]},
        shown_timeline=shown_timeline,
        stream_spans=stream_spans,
        stream_names=stream_names,
        unique_thread_timeline=unique_thread_timeline,
        work=len(owners.span),
        attributed_work=int(np.count_nonzero(owners.span >= 0)),
        unattributed={reason.text: reasons[reason] for reason in NoModuleReason if reason and reasons[reason]},
    )


def _align(timeline: Timeline | None, events: ProfilerEvents, keys: Mapping[str, Any], path: str) -> Aligned:
    _check_usable(events, path)
    base_time_ns(keys, path)  # raises if it is not a time
    pids = pids_with_modules(events) if timeline is None else []
    if len(pids) <= 1:
        return _align_process(timeline, events, keys, path, pids[0] if pids else recorded_pid(events, timeline))
    return _join_processes({pid: _align_process(None, events.of_process(pid), {}, path, pid) for pid in pids}, events)


def _join_processes(parts: Mapping[int | str, Aligned], events: ProfilerEvents) -> Aligned:
    """Return the modules of several processes of one trace, each with its pid.

    Two processes can have threads of the same id, so the new id of a thread is the number of its track plus one.
    """
    number_of = {key: track + 1 for track, key in enumerate(events.tracks)}
    timelines = [
        _set_tids(part.timeline, {tid: number_of[pid, tid] for tid in part.events.threads.tolist() if tid >= 0})
        for pid, part in parts.items()
    ]
    timeline = join(timelines)
    is_thread = np.max([part.events.threads for part in parts.values()], axis=0) >= 0
    threads = np.where(is_thread, np.arange(len(is_thread)) + 1, -1)
    return Aligned(
        timeline=timeline,
        running=innermost_spans(timeline),
        pid=next(iter(parts)),
        events=replace(events, threads=threads),
        alignment=None,
        node_count=sum(part.node_count for part in parts.values()),
        attributed_count=sum(part.attributed_count for part in parts.values()),
        straddling_count=sum(part.straddling_count for part in parts.values()),
        max_straddle_ns=max(part.max_straddle_ns for part in parts.values()),
        notes=[*dict.fromkeys(note for part in parts.values() for note in part.notes)],
        pids={part.timeline.tracks[0].process: pid for pid, part in parts.items() if part.timeline.tracks},
        kernels=[],
    )


def _set_tids(timeline: Timeline, tids: Mapping[int, int]) -> Timeline:
    """Return the timeline with the new thread ids `tids`, by old id."""
    return replace(timeline, tracks=[track._replace(tid=tids[track.tid]) for track in timeline.tracks])


def _align_process(
    timeline: Timeline | None, events: ProfilerEvents, keys: Mapping[str, Any], path: str, pid: int | str
) -> Aligned:
    """Align the recording of one process with a trace; if it is None, make one from the trace."""
    alignment = None
    base, events = base_time_ns(keys, path), events.with_threads_of(pid)
    if timeline is None:
        number, name = (pid, events.process_names.get(pid, "python")) if isinstance(pid, int) else (0, pid)
        process = Process(number, _rank(keys), name)
        timeline, notes = reconstruct(events, process)
    else:
        timeline, notes = for_process(timeline, pid)
        timeline, process = with_pid(timeline, pid)
        alignment = align_by_sync_marks(timeline.marks, events.syncs, base)
        alignment = refine_by_operators(alignment, timeline, events)
        # The profiler already has a slice for each sync mark.
        timeline = replace(timeline, marks=[mark for mark in timeline.marks if mark.kind != "sync"])
        timeline = move_times(timeline, alignment.to_trace)
        _check_common(timeline, events, path, alignment)
        window = profiled_window(events)
        # Calls that only partly ran in the window stay, with their full times.
        timeline = timeline if window is None else whole_spans(timeline, *window)
    timeline = with_profiled_steps(timeline, events)
    straddling_count, max_straddle_ns = _straddling_ops(timeline, events)
    nodes = find_calls_of_nodes(timeline, events)
    timeline = drop_unused(cut_to_nodes(timeline, nodes, events, process))
    timeline, kernels, kernel_notes = with_kernel_modules(timeline, events)
    return Aligned(
        timeline=timeline,
        running=innermost_spans(timeline),
        pid=pid,
        events=events,
        alignment=alignment,
        node_count=len(nodes),
        attributed_count=int(np.count_nonzero(nodes.call >= 0)),
        straddling_count=straddling_count,
        max_straddle_ns=max_straddle_ns,
        notes=[*notes, *kernel_notes],
        pids={},
        kernels=kernels,
    )


def _join_captures(
    merged: Timeline, timeline: Timeline | None, capture: Trace
) -> tuple[Timeline, list[CudaGraphCapture]]:
    """Return the modules of a merged trace and of `capture`, and the graphs that were captured in `capture`.

    The spans of `merged` keep their rows. If `timeline` does not overlap with `capture`, its own modules are used.
    """
    try:
        aligned = _align(timeline, *capture)
    except TraceError:
        if timeline is None:
            raise
        aligned = _align(None, *capture)
    launch = find_launches(capture.events)
    graphs = captured_graphs(aligned.events, launch, aligned.running)
    first = len(merged.columns)
    return (
        join([modules_only(merged), modules_only(aligned.timeline)], sort=False),
        [graph._replace(spans=np.where(graph.spans >= 0, graph.spans + first, -1)) for graph in graphs],
    )


def _check_usable(events: ProfilerEvents, path: str) -> None:
    """Raise TraceError if all events of the trace are malformed."""
    if events.event_count and events.malformed == events.event_count:
        raise TraceError(
            path,
            f"none of its {events.event_count} events can be used: an event of torch.profiler is an object with ph, "
            "pid, tid, name and a ts above 0",
        )


def _rank(keys: Mapping[str, Any]) -> int | None:
    distributed = keys.get("distributedInfo")
    rank = distributed.get("rank") if isinstance(distributed, dict) else None
    return rank if isinstance(rank, int) else None


def _check_common(timeline: Timeline, events: ProfilerEvents, path: str, alignment: Alignment) -> None:
    columns = timeline.columns
    if not len(columns) or events.first > events.last:
        return
    start, end = int(columns.start.min()), int(columns.end.max())
    if start > events.last or end < events.first:
        distance = max(start - events.last, events.first - end) / 1e9
        raise TraceError(
            path,
            f"recording and trace have no moment in common: they are {distance:.3f} s apart by {alignment.method}; "
            "record while the profiler runs, with modtrace.on_trace_ready or with modtrace.record around it",
        )


def _straddling_ops(timeline: Timeline, events: ProfilerEvents) -> tuple[int, int]:
    """Return the number of forward operations partly in and partly outside a call, and their maximum excess in ns."""
    columns, ops = timeline.columns, events.ops
    running = innermost_spans(timeline, runs_module_code(columns))
    thread, last = events.threads[ops.track], np.maximum(ops.end_ns - 1, ops.start_ns)
    first_in, last_in = running.on_threads(thread, ops.start_ns), running.on_threads(thread, last)
    cut_ops = np.flatnonzero(first_in != last_in)
    first_span, last_span = first_in[cut_ops], last_in[cut_ops]
    ends_inside = (first_span >= 0) & (columns.end[first_span] < ops.end_ns[cut_ops])
    edge = np.where(ends_inside, columns.end[first_span], columns.start[last_span])
    excess_ns = np.minimum(np.abs(edge - ops.start_ns[cut_ops]), np.abs(ops.end_ns[cut_ops] - edge))
    return len(cut_ops), int(excess_ns.max(initial=0))
