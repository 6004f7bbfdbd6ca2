"""The GPU columns of a summary, of all of a merged trace or of some steps."""

from dataclasses import replace

import numpy as np

from ..._typing import BoolArray
from ..contents import COMMUNICATION_KIND, NO_PHASE, GpuWork
from ..slices import PHASES
from .module_rows import GpuStepTimes, GpuTotals, ModuleTimes, outer_modules
from .module_summary import Summary


def with_gpu_times(summary: Summary, work: GpuWork) -> Summary:
    """Return a summary with GPU columns, and with rows for the modules that only launched work.

    Args:
        summary: of the same part of the recording.
        work: what was launched in it.
    """
    by_module = summary.by == "module"
    used = {module for place in np.unique(work.place).tolist() for module, _ in work.places[place]}
    rows = {row.fqn if by_module else row.module_class: row for row in summary.rows}
    keys = [fqn if by_module or not module_class else module_class for fqn, module_class in work.modules]
    for module in sorted(used):
        fqn, module_class = work.modules[module]
        own = ModuleTimes(fqn, module_class) if by_module else ModuleTimes("", keys[module])
        rows.setdefault(keys[module], own)
    index = {key: number for number, key in enumerate(rows)}
    paths = [[(phase, index.get(keys[module], -1)) for module, phase in place] for place in work.places]
    phase, row = np.array([path[-1] if path else (0, 0) for path in paths] or [(0, 0)], np.int64).T
    phase, row = phase[work.place], row[work.place]
    computes = work.kind < COMMUNICATION_KIND
    launched = np.zeros(len(paths), np.int64)
    np.add.at(launched, work.place[computes], work.duration[computes])
    # A call within a call of the same module counts once.
    total_ns, self_ns = np.zeros((2, len(PHASES), len(rows)), np.int64)
    for number in np.flatnonzero(launched).tolist():
        for of_phase, outer in set(paths[number]):
            if of_phase != NO_PHASE:
                total_ns[of_phase, outer] += launched[number]
    own_phase = computes & (phase != NO_PHASE)
    np.add.at(self_ns, (phase[own_phase], row[own_phase]), work.duration[own_phase])
    # By kind, and last what of communication overlaps.
    counts, times = np.zeros((2, COMMUNICATION_KIND + 2, len(rows)), np.int64)
    np.add.at(counts, (work.kind, row), work.count)
    np.add.at(times, (work.kind, row), work.duration)
    np.add.at(times[-1], row, work.overlap)
    columns = {
        "kernels": counts[0],
        **{f"gpu_{name}_ns": total_ns[code] for code, name in enumerate(PHASES)},
        **{f"gpu_{name}_self_ns": self_ns[code] for code, name in enumerate(PHASES)},
        **dict(zip(GpuTotals._fields, times, strict=True)),
        "collectives": counts[COMMUNICATION_KIND],
    }
    flops = summary.flops
    if flops is not None and by_module and not flops.on_cpu:
        outer, with_inner = outer_modules(list(rows)), self_ns.copy()
        for fqn, number in index.items():
            # As FLOPs, recompute counts to the modules that contain its module by name.
            for around in outer[fqn]:
                with_inner[:, index[around]] += self_ns[:, number]
        named = [(row.fqn, row.module_class) for row in rows.values()]
        flops = flops.timed(dict(zip(named, with_inner.T.tolist(), strict=True)))
    return replace(
        summary,
        flops=flops,
        rows=[
            ModuleTimes(**{**own._asdict(), **{name: int(column[number]) for name, column in columns.items()}})
            for number, own in enumerate(rows.values())
        ],
        modules=len(rows),
        gpu=GpuTotals(*times.sum(axis=1).tolist()),
        gpu_steps=tuple(_step_times(work, computes, step) for step in np.unique(work.step).tolist() if step >= 0),
    )


def _step_times(work: GpuWork, computes: BoolArray, step: int) -> GpuStepTimes:
    here = work.step == step
    sums = (
        int(column[here & chosen].sum())
        for column, chosen in ((work.duration, computes), (work.duration, ~computes), (work.overlap, ~computes))
    )
    return GpuStepTimes(step, *sums)
