"""The GPU columns of a summary: what the work that each module launched took."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..._typing import Int64Array
from ...timeline import PHASES, Timeline
from ...timeline.summary import GpuTotals, ModuleTimes, Summary, summarize
from ..trace.event_columns import ProfilerEvents
from .gpu_work import KINDS

__all__ = ["NO_MODULE", "compute_module_times"]

NO_MODULE = "(no module)"
"""The `fqn` of the row for GPU work that no module launched; it is the last one."""


def compute_module_times(timeline: Timeline, events: ProfilerEvents, span: Int64Array) -> Summary:
    """Return the summary of a recording, with GPU columns where the trace has GPU work.

    Args:
        timeline: the recording, in the trace's time.
        events: the trace's.
        span: int64, for each piece of GPU work the index of the span that launched it, or -1.
    """
    work, columns = events.work, timeline.columns
    summary = summarize(timeline)
    if not len(work):
        return summary
    rows = {row.fqn: row for row in summary.rows}
    no_module = len(rows)
    if (span < 0).any():
        rows[NO_MODULE] = ModuleTimes(NO_MODULE, "")
    index_of = {fqn: index for index, fqn in enumerate(rows)}
    module = np.array([index_of.get(name.fqn, no_module) for name in timeline.names] or [no_module], np.int64)
    # The last entry of each stands for no span, whose index is -1.
    module_of = np.append(module[columns.name], no_module)
    phase_of = np.append(columns.phase.astype(np.int64), 0)
    own = np.zeros((len(KINDS), len(PHASES), no_module + 1), np.int64)
    np.add.at(own, (work.other, phase_of[span], module_of[span]), work.duration)
    kernels = np.bincount(module_of[span[work.other == 0]], minlength=no_module + 1)
    launched_ns = np.zeros(len(columns) + 1, np.int64)
    np.add.at(launched_ns, span, work.duration)
    total_ns = _with_outer_modules(launched_ns, columns.parent, phase_of, module_of, no_module)
    self_ns, kind_ns = own.sum(axis=0), own.sum(axis=1)
    self_ns[:, no_module] = 0  # of what no module launched nobody knows the phase
    return replace(
        summary,
        rows=[
            row._replace(
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
            )
            for index, row in enumerate(rows.values())
        ],
        modules=len(rows),
        gpu=GpuTotals(*(int(work.duration[work.other == kind].sum()) for kind in range(len(KINDS)))),
    )


def _with_outer_modules(
    launched_ns: Int64Array, parent: Int64Array, phase_of: Int64Array, module_of: Int64Array, modules: int
) -> Int64Array:
    """Return int64[phase, modules + 1]: GPU time in ns, counted once for each module and phase that it was launched in.

    Args:
        launched_ns: for each span the GPU time that it launched itself, and one entry more, which is left out.
        parent: for each span the index of the span around it, or -1.
        phase_of: for each span its phase.
        module_of: for each span its module.
        modules: how many there are.
    """
    total_ns = np.zeros((len(PHASES), modules + 1), np.int64)
    phases, owners, parents = phase_of.tolist(), module_of.tolist(), parent.tolist()
    for span in np.flatnonzero(launched_ns[:-1]).tolist():
        counted: set[tuple[int, int]] = set()
        outer = span
        while outer >= 0:
            key = phases[outer], owners[outer]
            if key not in counted:
                counted.add(key)
                total_ns[key] += int(launched_ns[span])
            outer = parents[outer]
    return total_ns
