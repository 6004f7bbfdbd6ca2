"""The GPU columns of a summary: what the work that each module launched took, communication apart from the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from .._typing import Int64Array
from ..timeline import PHASES, Timeline
from ..timeline.summary import GpuStepTimes, GpuTotals, ModuleTimes, Summary, summarize
from ..timeline.time_intervals import union_of
from .device_work import KINDS, CpuCollectives, NoModuleReason, WorkOwners, no_module_name
from .event_columns import ProfilerEvents

__all__ = ["compute_module_times"]


class _Pieces(NamedTuple):
    """Work of a kind, of the GPU and of the CPU; columns of equal length.

    Attributes:
        duration: int64[n], ns.
        overlap: int64[n], ns of it while the device computed.
        row: int64[n], the row of the summary that it belongs to.
        step: int64[n].
    """

    duration: Int64Array
    overlap: Int64Array
    row: Int64Array
    step: Int64Array


def compute_module_times(
    timeline: Timeline, known: Timeline, events: ProfilerEvents, owners: WorkOwners, on_cpu: CpuCollectives
) -> Summary:
    """Return the summary of a recording, with GPU columns where the trace has GPU work or communication.

    Args:
        timeline: the recording, in the trace's time.
        known: the same, and behind its spans those of captured graphs: whose spans the owners are.
        events: the trace's.
        owners: whose each piece of GPU work is.
        on_cpu: the collectives that the CPU ran.
    """
    work, columns = events.work, known.columns
    summary = summarize(timeline)
    if not len(work) and not len(on_cpu.start):
        return summary
    rows = {row.fqn: row for row in summary.rows}
    for span in np.unique(np.concatenate([owners.span, on_cpu.span])).tolist():
        outer = span
        while outer >= 0:  # of a captured graph no span needs to be in the recording
            name = known.names[columns.name[outer]]
            rows.setdefault(name.fqn, ModuleTimes(name.fqn, name.module_class))
            outer = int(columns.parent[outer])
    modules = len(rows)
    for reason in NoModuleReason:
        if reason and ((owners.reason == reason).any() or (on_cpu.reason == reason).any()):
            rows[no_module_name(reason)] = ModuleTimes(no_module_name(reason), "")
    index_of = {fqn: index for index, fqn in enumerate(rows)}
    of_name = np.array([index_of.get(name.fqn, -1) for name in known.names] or [-1], np.int64)
    of_reason = np.array([index_of.get(no_module_name(reason), -1) for reason in NoModuleReason], np.int64)
    # The last entry of each is for work without a span, whose index is -1.
    row_of_span, phase_of = np.append(of_name[columns.name], -1), np.append(columns.phase.astype(np.int64), 0)
    row = np.where(owners.span >= 0, row_of_span[owners.span], of_reason[owners.reason])
    computes = owners.collective < 0
    own = np.zeros((len(KINDS), len(PHASES), len(rows)), np.int64)
    np.add.at(own, (work.other[computes], phase_of[owners.span[computes]], row[computes]), work.duration[computes])
    launched_ns = np.zeros(len(columns) + 1, np.int64)
    np.add.at(launched_ns, owners.span[computes], work.duration[computes])
    total_ns = _with_outer_modules(launched_ns, columns.parent, phase_of, row_of_span, len(rows))
    self_ns, kind_ns = own.sum(axis=0), own.sum(axis=1)
    self_ns[:, modules:] = 0  # the phase of work that no module launched is not known
    kernels = np.bincount(row[computes & (work.other == 0)], minlength=len(rows))
    communication = _communication(events, owners, row, on_cpu, row_of_span, of_reason)
    collectives = np.bincount(communication.row, minlength=len(rows))
    communication_ns, overlap_ns = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    np.add.at(communication_ns, communication.row, communication.duration)
    np.add.at(overlap_ns, communication.row, communication.overlap)
    computed_in, computed_ns = owners.step[computes], work.duration[computes]
    return replace(
        summary,
        rows=[
            times._replace(
                kernels=int(kernels[index]),
                gpu_forward_ns=int(total_ns[0, index]),
                gpu_forward_self_ns=int(self_ns[0, index]),
                gpu_backward_ns=int(total_ns[1, index]),
                gpu_backward_self_ns=int(self_ns[1, index]),
                gpu_recompute_ns=int(total_ns[2, index]),
                gpu_recompute_self_ns=int(self_ns[2, index]),
                kernel_ns=int(kind_ns[0, index]),
                memcpy_ns=int(kind_ns[1, index]),
                memset_ns=int(kind_ns[2, index]),
                collectives=int(collectives[index]),
                communication_ns=int(communication_ns[index]),
                communication_overlap_ns=int(overlap_ns[index]),
            )
            for index, times in enumerate(rows.values())
        ],
        modules=len(rows),
        gpu=GpuTotals(
            kernel_ns=int(kind_ns[0].sum()),
            memcpy_ns=int(kind_ns[1].sum()),
            memset_ns=int(kind_ns[2].sum()),
            communication_ns=int(communication.duration.sum()),
            communication_overlap_ns=int(communication.overlap.sum()),
        ),
        gpu_steps=tuple(
            GpuStepTimes(
                step,
                int(computed_ns[computed_in == step].sum()),
                int(communication.duration[communication.step == step].sum()),
                int(communication.overlap[communication.step == step].sum()),
            )
            for step in np.union1d(computed_in, communication.step).tolist()
        ),
    )


def _communication(
    events: ProfilerEvents,
    owners: WorkOwners,
    row: Int64Array,
    on_cpu: CpuCollectives,
    row_of_span: Int64Array,
    of_reason: Int64Array,
) -> _Pieces:
    """Return all pieces of communication, and how much of each overlaps with what its device computed."""
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
        duration=np.concatenate([work.duration[pieces], on_cpu.end - on_cpu.start]),
        overlap=np.concatenate([overlap, on_cpu.overlap]),
        row=np.concatenate(
            [row[pieces], np.where(on_cpu.span >= 0, row_of_span[on_cpu.span], of_reason[on_cpu.reason])]
        ),
        step=np.concatenate([owners.step[pieces], on_cpu.step]),
    )


def _with_outer_modules(
    launched_ns: Int64Array, parent: Int64Array, phase_of: Int64Array, row_of: Int64Array, rows: int
) -> Int64Array:
    """Return int64[phase, rows]: GPU time in ns, counted once for each module and phase that it was launched in.

    Args:
        launched_ns: for each span the GPU time that it launched itself, and one entry more, which is left out.
        parent: for each span the index of the span around it, or -1.
        phase_of: for each span its phase.
        row_of: for each span the row of its module.
        rows: how many there are.
    """
    total_ns = np.zeros((len(PHASES), rows), np.int64)
    phases, owners, parents = phase_of.tolist(), row_of.tolist(), parent.tolist()
    for span in np.flatnonzero(launched_ns[:-1]).tolist():
        counted: set[tuple[int, int]] = set()
        outer = span
        while outer >= 0:
            key = phases[outer], owners[outer]
            if key not in counted and key[1] >= 0:
                counted.add(key)
                total_ns[key] += int(launched_ns[span])
            outer = parents[outer]
    return total_ns
