"""The part of a recording that a trace covers, and the lookup of the call that ran on a thread at a moment."""

import re
from dataclasses import replace

import numpy as np

from .._arrays import BoolArray, Int64Array
from ..timeline import FORWARD, RECOMPUTE, Mark, Process, Slices, Timeline
from ..timeline.join import replace_processes
from ..timeline.nesting import InnermostLookup
from ..timeline.select import DEVICE_METADATA, keep_rows, keep_tracks, without_gpu
from ..timeline.slices import RANGE
from .event_collector import ProfilerEvents


class CallIndex:
    """Finds the call of any span; the forward span of a call identifies it."""

    def __init__(self, timeline: Timeline) -> None:
        columns = timeline.columns
        self._columns = columns
        forward = np.flatnonzero(columns.phase == FORWARD)
        calls = zip(columns.name[forward].tolist(), columns.call[forward].tolist(), strict=True)
        self._forward = dict(zip(calls, forward.tolist(), strict=True))
        self._paths: dict[int, tuple[int, ...]] = {}

    def forward_span_of(self, span: int) -> int:
        """Return the forward span of a span's call, or the span itself if the call has no forward span."""
        columns = self._columns
        if columns.phase[span] == FORWARD:
            return span
        forward: int = self._forward.get((int(columns.name[span]), int(columns.call[span])), span)
        return forward

    def path(self, span: int) -> tuple[int, ...]:
        """Return the call stack of a span, outermost first, as indices of forward spans."""
        path = self._paths.get(span)
        if path is None:
            call = self.forward_span_of(span)
            outer = int(self._columns.parent[call])
            in_same_phase = outer >= 0 and self._columns.phase[outer] == self._columns.phase[call]
            path = self._paths[span] = (*(self.path(outer) if in_same_phase else ()), call)
        return path


def threads_of(timeline: Timeline) -> Int64Array:
    """Return the thread of each span, from the thread of its track."""
    return np.array([track.tid for track in timeline.tracks] or [0], np.int64)[timeline.columns.track]


def runs_module_code(columns: Slices) -> BoolArray:
    """Return a mask of the forward and recompute spans, which run a module's own code."""
    is_module_code: BoolArray = (columns.phase == FORWARD) | (columns.phase == RECOMPUTE)
    return is_module_code


def innermost_spans(timeline: Timeline, is_candidate: BoolArray | None = None) -> InnermostLookup:
    """Return the lookup of the innermost span on a thread at a moment, among all spans or the candidates."""
    return InnermostLookup(threads_of(timeline), timeline.columns, is_candidate)


_SPECIAL_ANNOTATION = re.compile(r"ProfilerStep#|(?:nccl|rccl|gloo|mpi|ucc|xccl):")
"""Annotations that are not regions of a trace: the profiler's steps, and collectives."""


def profiled_window(events: ProfilerEvents) -> tuple[int, int] | None:
    """Return start and end of the profiled time in ns from the trace's base; None if they are not known.

    The time contains the profiler's start and stop, if the trace has them, and all slices.
    """
    windows = [events.window] if events.window is not None else []
    windows += [(events.first, events.last)] if events.first <= events.last else []
    return (min(start for start, _ in windows), max(end for _, end in windows)) if windows else None


def without_annotated_ranges(timeline: Timeline, events: ProfilerEvents) -> Timeline:
    """Return the timeline without the ranges that the profiler shows as annotations of the same names."""
    labels = set(events.regions.names)
    is_dropped = [name.label in labels or _SPECIAL_ANNOTATION.match(name.label) is not None for name in timeline.names]
    if not is_dropped:
        return timeline
    slices = timeline.slices
    stays = (slices.kind != RANGE) | ~np.array(is_dropped, np.bool_)[slices.name]
    return keep_rows(timeline, np.flatnonzero(stays), cut_links=False)


def drop_unused(timeline: Timeline) -> Timeline:
    """Return the timeline without unused names, tracks and counters.

    A long recording contains threads and modules that did not run while the profiler did.
    """
    is_used = np.zeros(len(timeline.tracks), np.bool_)
    is_used[timeline.slices.track] = True
    if not is_used.any():
        return timeline
    timeline = keep_tracks(timeline, is_used)
    slices = timeline.slices
    has_name = slices.name >= 0
    used_names, name = np.unique(slices.name[has_name], return_inverse=True)
    new_name = np.full(len(slices), -1, np.int32)
    new_name[has_name] = name
    return replace(
        timeline,
        slices=replace(slices, name=new_name),
        names=[timeline.names[index] for index in used_names.tolist()],
        counters=[counter for counter in timeline.counters if len(counter.time)],
    )


def steps_of_profile(events: ProfilerEvents, time: Int64Array) -> Int64Array:
    """Return the step of each moment (ns from the base), by the `ProfilerStep#` ranges; 0 without such ranges."""
    steps = events.steps
    if not len(steps):
        return np.zeros(len(time), np.int64)
    index = np.searchsorted(steps.start_ns, time, side="right") - 1
    return np.where(index >= 0, steps.step[index], np.maximum(steps.step[0] - 1, 0))


def with_profiled_steps(timeline: Timeline, events: ProfilerEvents) -> Timeline:
    """Return a timeline in the trace's time, with the profiler's steps if it has no steps of its own."""
    columns, steps = timeline.columns, events.steps
    has_steps = len(timeline.step_ends) or bool(columns.step.any())
    if has_steps or not len(steps) or not len(columns):
        return timeline
    # A step ends at the start of the next step, and the last step at the end of its range.
    ends = [*zip([*steps.start_ns[1:].tolist(), int(steps.end_ns.max())], steps.step.tolist(), strict=True)]
    if steps.step[0] > 0 and columns.start[0] < steps.start_ns[0]:
        ends.insert(0, (int(steps.start_ns[0]), int(steps.step[0]) - 1))
    marks = [Mark.of_step(time, step) for time, step in ends]
    return replace(
        timeline,
        slices=replace(timeline.slices, step=steps_of_profile(events, timeline.slices.start)),
        marks=sorted([*timeline.marks, *marks], key=lambda mark: mark.time_ns),
    )


_NO_DEVICE_TIMES = (
    "the recording's device times were left out: the trace has the profiler's kernels of each stream, and a second row "
    "of a stream would count twice; 'modtrace view' of the recording shows them"
)


def recorded_pid(events: ProfilerEvents, timeline: Timeline | None) -> int | str:
    """Return the pid of a recording's process if the trace has it, or the pid with the most CPU slices."""
    pids = events.cpu_pids
    if timeline is not None:
        for track in timeline.tracks:
            if track.process.pid in pids or not pids:
                return track.process.pid
    return max(pids, key=lambda pid: pids[pid]) if pids else 0


def pids_with_modules(events: ProfilerEvents) -> list[int | str]:
    """Return the processes with modules in a trace, or with ranges if none has modules; most CPU slices first."""
    kinds = [events.thread_names.get(key, "").partition(" · ")[0] for key in events.tracks]
    has_calls = np.array([kind in ("forward", "backward") for kind in kinds] or [False])
    calls = events.calls.take(has_calls[events.calls.track])
    for slices in (calls, events.modules, events.regions):
        keys = [events.tracks[track] for track in np.unique(slices.track).tolist()]
        if pids := {pid for pid, tid in keys if isinstance(tid, int)}:
            return sorted(pids, key=lambda pid: (-events.cpu_pids.get(pid, 0), str(pid)))
    return []


def for_process(timeline: Timeline, pid: int | str) -> tuple[Timeline, list[str]]:
    """Return the part of a timeline on the threads of one process, and notes on the parts left out.

    A timeline of a single process keeps all its threads, even if the process has another pid.
    """
    notes = [_NO_DEVICE_TIMES] if any(key in timeline.metadata for key in DEVICE_METADATA) else []
    metadata = {key: value for key, value in timeline.metadata.items() if key not in DEVICE_METADATA}
    timeline = replace(without_gpu(timeline), metadata=metadata)
    processes = {track.process for track in timeline.tracks}
    if len(processes) <= 1:
        return timeline, notes
    process = next((process for process in processes if process.pid == pid), timeline.tracks[0].process)
    counters = [counter for counter in timeline.counters if counter.process == process]
    timeline = keep_tracks(timeline, np.array([track.process == process for track in timeline.tracks], np.bool_))
    notes.append(f"{len(processes) - 1} other processes of the recording were left out: the trace is of pid {pid}")
    return replace(timeline, counters=counters), notes


def with_pid(timeline: Timeline, pid: int | str) -> tuple[Timeline, Process]:
    """Return a timeline of one process under its pid in the trace, and the process with this pid.

    The pids differ if the trace was made in a container or by hand.
    """
    process = timeline.tracks[0].process if timeline.tracks else Process(pid if isinstance(pid, int) else 0)
    if not isinstance(pid, int) or process.pid == pid:
        return timeline, process
    in_trace = process._replace(pid=pid)
    return replace_processes(timeline, lambda _: in_trace), in_trace
