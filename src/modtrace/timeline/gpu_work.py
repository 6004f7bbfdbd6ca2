"""What modules launched on GPUs, as a merged trace knows it: the GPU columns of its summaries, also of some steps."""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .._typing import BoolArray, Int64Array
from .slices import PHASES
from .summary import GpuStepTimes, GpuTotals, ModuleTimes, Summary, outer_modules

Place = tuple[tuple[int, int], ...]
"""A module and phase, and those around it: (index into `GpuWork.modules`, index into `PHASES`), the outermost first."""

NO_PHASE = -1
"""The phase of work that no module launched."""
COMMUNICATION_KIND = 3
_FIELDS = 6


@dataclass(frozen=True)
class GpuWork:
    """The kernels, memcpys and memsets of a trace, and its communication, added up by launcher and step.

    Attributes:
        modules: fully qualified name and class of each module; the reason and an empty text for work without a module.
        places: who launched work.
        place: int64[n], index into `places`.
        step: int64[n], in which step it was launched; -1 if the steps are not told apart.
        kind: int64[n], 0 for kernels, 1 for memcpys, 2 for memsets, 3 for communication of any kind.
        count: int64[n], how many there were.
        duration: int64[n], ns, of all together.
        overlap: int64[n], ns of it while the device computed; of communication alone.
    """

    modules: Sequence[tuple[str, str]]
    places: Sequence[Place]
    place: Int64Array
    step: Int64Array
    kind: Int64Array
    count: Int64Array
    duration: Int64Array
    overlap: Int64Array

    @property
    def rows(self) -> Int64Array:
        """int64[n, 6]: the columns beside each other."""
        return np.stack([self.place, self.step, self.kind, self.count, self.duration, self.overlap], axis=1)

    def take(self, chosen: BoolArray) -> "GpuWork":
        """Return some of the rows."""
        return GpuWork(self.modules, self.places, *self.rows[chosen].T)

    def only(self, pattern: str | None, max_depth: int | None) -> "GpuWork":
        """Return what the modules that match launched, see `Timeline.only`."""
        chosen = [fnmatch.fnmatchcase(fqn, "*" if pattern is None else pattern) for fqn, _ in self.modules]
        places = [tuple(one for one in place if chosen[one[0]])[:max_depth] for place in self.places]
        has_module = np.array([bool(place) for place in places], np.bool_)
        return replace(self.take(has_module[self.place]), places=places)

    def to_json_values(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"modules": self.modules, "places": self.places, "rows": self.rows.tolist()}

    @classmethod
    def from_json_values(cls, values: Mapping[str, Any]) -> "GpuWork":
        """Read what `to_json_values` returned.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        modules = [(str(fqn), str(module_class)) for fqn, module_class in values["modules"]]
        places = [tuple((int(module), int(phase)) for module, phase in place) for place in values["places"]]
        rows = np.array(values["rows"], np.int64).reshape(-1, _FIELDS)
        known = [
            0 <= module < len(modules) and NO_PHASE <= phase < len(PHASES)
            for place in places
            for module, phase in place
        ]
        of_places, kinds = rows[:, 0], rows[:, 2]
        in_range = (of_places >= 0) & (of_places < len(places)) & (kinds >= 0) & (kinds <= COMMUNICATION_KIND)
        if not (all(places) and all(known) and in_range.all()):
            raise ValueError("a place, a kind or a module in it does not exist")
        return cls(modules, places, *rows.T)


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
