"""Who launched the GPU work of a trace, and its communication: what the GPU columns of summaries are added up from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._typing import Int8Array, Int64Array
from ..timeline import GpuWork, Timeline
from ..timeline.gpu_work import COMMUNICATION_KIND, NO_PHASE, Place
from ..timeline.time_intervals import union_of
from .device_work import CpuCollectives, WorkOwners, no_module_name
from .event_columns import ProfilerEvents

_MAX_ROWS = 100_000
"""Of a table with more the steps are not told apart: it is a part of the trace's metadata."""


class _Pieces(NamedTuple):
    """Work of GPUs and of the CPU; int64 columns of equal length.

    Attributes:
        launched_in: the span in which it was launched; for work without one its reason, behind all spans.
        step: the step in which it was launched.
        kind: as `GpuWork.kind`.
        duration: ns.
        overlap: ns of it while the device computed.
    """

    launched_in: Int64Array
    step: Int64Array
    kind: Int64Array
    duration: Int64Array
    overlap: Int64Array


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
    pieces = _joined(
        [
            _Pieces(
                launched_in=of_work[computing],
                step=owners.step[computing],
                kind=work.kind[computing],
                duration=work.duration[computing],
                overlap=np.zeros(len(computing), np.int64),
            ),
            _communication(events, owners, of_work),
            _Pieces(
                launched_in=_launched_in(recorded, on_cpu.span, on_cpu.reason),
                step=on_cpu.step,
                kind=np.full(len(on_cpu.span), COMMUNICATION_KIND),
                duration=on_cpu.end - on_cpu.start,
                overlap=on_cpu.overlap,
            ),
        ]
    )
    modules, places, place = _places(recorded, pieces.launched_in)
    keys, row = np.unique(np.stack([place, pieces.step, pieces.kind]), axis=1, return_inverse=True)
    if keys.shape[1] > _MAX_ROWS:
        keys[1] = -1
        keys, again = np.unique(keys, axis=1, return_inverse=True)
        row = again.ravel()[row]
    row = row.ravel()
    duration, overlap = np.zeros((2, keys.shape[1]), np.int64)
    np.add.at(duration, row, pieces.duration)
    np.add.at(overlap, row, pieces.overlap)
    place, step, kind = keys
    return GpuWork(modules, places, place, step, kind, np.bincount(row, minlength=keys.shape[1]), duration, overlap)


def _launched_in(recorded: Timeline, span: Int64Array, reason: Int8Array) -> Int64Array:
    return np.where(span >= 0, span, len(recorded.columns) + reason.astype(np.int64))


def _places(recorded: Timeline, launched_in: Int64Array) -> tuple[list[tuple[str, str]], list[Place], Int64Array]:
    """Return the modules, the places in which work was launched, and the place of each piece."""
    columns, names = recorded.columns, recorded.names
    name, phase, parent = columns.name.tolist(), columns.phase.tolist(), columns.parent.tolist()
    modules: dict[tuple[str, str], int] = {}
    places: dict[Place, int] = {}
    keys, of_piece = np.unique(launched_in, return_inverse=True)
    place_of = []
    for key in keys.tolist():
        path: list[tuple[int, int]] = []
        if key >= len(columns):
            reason = (no_module_name(key - len(columns)), "")
            path = [(modules.setdefault(reason, len(modules)), NO_PHASE)]
        while 0 <= key < len(columns):
            own = (names[name[key]].fqn, names[name[key]].module_class)
            path.append((modules.setdefault(own, len(modules)), phase[key]))
            key = parent[key]
        place_of.append(places.setdefault(tuple(reversed(path)), len(places)))
    return list(modules), list(places), np.array(place_of, np.int64)[of_piece]


def _joined(parts: list[_Pieces]) -> _Pieces:
    return _Pieces(*(np.concatenate(columns).astype(np.int64) for columns in zip(*parts, strict=True)))


def _communication(events: ProfilerEvents, owners: WorkOwners, of_work: Int64Array) -> _Pieces:
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
    return _Pieces(
        launched_in=of_work[pieces],
        step=owners.step[pieces],
        kind=np.full(len(pieces), COMMUNICATION_KIND),
        duration=work.duration[pieces],
        overlap=overlap,
    )
