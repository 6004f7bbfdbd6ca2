"""Who launched the GPU work of a trace, and its communication: what the GPU columns of summaries are added up from."""

import numpy as np

from .._numbering import Numbering
from .._typing import Int8Array, Int64Array
from ..timeline import GpuWork, Timeline
from ..timeline.gpu_work import COMMUNICATION_KIND, NO_PHASE, Place
from ..timeline.time_intervals import union_of
from .device_work import CpuCollectives, WorkOwners, no_module_name
from .event_columns import ProfilerEvents

_MAX_ROWS = 100_000
"""Of a table with more the steps are not told apart: it is a part of the trace's metadata."""


_Columns = tuple[Int64Array, ...]
"""Five of pieces of work: the span in which each was launched (without one its reason, behind all spans), the step, the
kind as `GpuWork.kind`, the duration in ns, and how much of it overlaps with what the device computed."""


def add_up_gpu_work(
    recorded: Timeline, events: ProfilerEvents, owners: WorkOwners, on_cpu: CpuCollectives
) -> GpuWork | None:
    """Return what modules launched; None if the trace has neither GPU work nor communication.

    Args:
        recorded: the recording, in the trace's time, and spans of captured graphs after it; `owners` points to them.
        events: the trace's.
        owners: the owner of each piece of GPU work.
        on_cpu: the collectives that the CPU ran.
    """
    work = events.work
    if not len(work) and not len(on_cpu.start):
        return None
    computing = np.flatnonzero(owners.collective < 0)
    of_work = _launched_in(recorded, owners.span, owners.reason)
    kinds, durations = work.kind[computing], work.duration[computing]
    on_gpu = of_work[computing], owners.step[computing], kinds, durations, np.zeros_like(durations)
    of_cpu = _launched_in(recorded, on_cpu.span, on_cpu.reason)
    kinds = np.full_like(of_cpu, COMMUNICATION_KIND)
    on_host = of_cpu, on_cpu.step, kinds, on_cpu.end - on_cpu.start, on_cpu.overlap
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
    pids = {pid: index for index, pid in enumerate(dict.fromkeys(pid for pid, _ in events.tracks))}
    device = np.array([pids[pid] for pid, _ in events.tracks] or [0], np.int64)[work.track]
    overlap = np.zeros(len(pieces), np.int64)
    for number in np.unique(device[pieces]).tolist():
        computing = (owners.collective < 0) & (device == number)
        here = device[pieces] == number
        busy = union_of(work.start[computing], work.end[computing])
        overlap[here] = busy.time_within(work.start[pieces[here]], work.end[pieces[here]])
    kinds = np.full_like(overlap, COMMUNICATION_KIND)
    return of_work[pieces], owners.step[pieces], kinds, work.duration[pieces], overlap
