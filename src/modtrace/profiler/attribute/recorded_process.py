"""The process that a recording and a trace are both of, and the recording as the trace knows that process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..._typing import Int64Array
from ...timeline import Process, Timeline
from ...timeline.gpu_tracks import DEVICE_METADATA, without_gpu
from ...timeline.rewrite import replace_processes
from ...timeline.select import keep_tracks
from ..trace.event_columns import ProfilerEvents

__all__ = ["for_process", "recorded_pid", "threads_of_trace", "with_pid"]

_NO_DEVICE_TIMES = (
    "the recording's device times were left out: of streams the trace has the profiler's kernels, and two rows of one "
    "stream would count twice; 'modtrace view' of the recording shows them"
)


def recorded_pid(events: ProfilerEvents, timeline: Timeline | None) -> int | str:
    """Return the process of a recording: its own if the trace has it, else the one with most CPU slices."""
    pids = events.cpu_pids
    if timeline is not None:
        for track in timeline.tracks:
            if track.process.pid in pids or not pids:
                return track.process.pid
    return max(pids, key=lambda pid: pids[pid]) if pids else 0


def threads_of_trace(events: ProfilerEvents, pid: int | str) -> Int64Array:
    """Return the OS thread of each of the trace's tracks, -1 for other processes and for devices."""
    return np.array(
        [tid if key_pid == pid and isinstance(tid, int) else -1 for key_pid, tid in events.tracks] or [-1], np.int64
    )


def for_process(timeline: Timeline, pid: int | str) -> tuple[Timeline, list[str]]:
    """Return what a timeline has of the threads of one process, and what was left out.

    Of a timeline of a single process these are all its threads, whatever the process' pid.
    """
    notes = [_NO_DEVICE_TIMES] if any(key in timeline.metadata for key in DEVICE_METADATA) else []
    metadata = {key: value for key, value in timeline.metadata.items() if key not in DEVICE_METADATA}
    timeline = replace(without_gpu(timeline), metadata=metadata)
    processes = {track.process for track in timeline.tracks}
    if len(processes) <= 1:
        return timeline, notes
    process = next((process for process in processes if process.pid == pid), timeline.tracks[0].process)
    kept = keep_tracks(timeline, np.array([track.process == process for track in timeline.tracks], np.bool_))
    return (
        replace(
            kept,
            counters=[counter for counter in timeline.counters if counter.process == process],
            backward_passes=[run for run in timeline.backward_passes if run.process == process],
        ),
        [*notes, f"{len(processes) - 1} other processes of the recording were left out: the trace is of pid {pid}"],
    )


def with_pid(timeline: Timeline, pid: int | str) -> tuple[Timeline, Process]:
    """Return a timeline of one process under the pid that the trace has of it, and that process.

    The trace was made where the process had another pid: in a container, or by hand.
    """
    process = timeline.tracks[0].process if timeline.tracks else Process(pid if isinstance(pid, int) else 0)
    if not isinstance(pid, int) or process.pid == pid:
        return timeline, process
    in_trace = process._replace(pid=pid)
    return replace_processes(timeline, lambda _: in_trace), in_trace
