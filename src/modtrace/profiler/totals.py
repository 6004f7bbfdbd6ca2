"""What each module took on the CPU and on the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..timeline import PHASES, Timeline
from ..timeline._summary import summarize
from .events import Events, Ints
from .gpu import KINDS

__all__ = ["NO_MODULE", "ModuleTotal", "ModuleTotals", "add_up"]

NO_MODULE = "(no module)"


class ModuleTotal(NamedTuple):
    """What one module took; times are integer nanoseconds.

    A total counts a call within a call of the same module once; a self time leaves out what inner modules took.
    GPU times are sums of the durations of kernels, memcpys and memsets, wherever they overlap.

    Attributes:
        fqn: the module's fully qualified name, or `NO_MODULE` for GPU work that no module asked for.
        module_class: the name of its class.
        calls: how often its forward ran; a recompute is not a call.
        forward_ns: total of forward on the CPU.
        forward_self_ns: of it, outside inner modules.
        backward_ns: total of backward on the CPU, recompute inside it included.
        backward_self_ns: of it, outside inner modules and recompute.
        recompute_ns: total of recompute on the CPU.
        recompute_self_ns: of it, outside inner modules.
        kernels: kernels that the module itself launched.
        gpu_forward_ns: GPU time launched in forward, by it or its inner modules.
        gpu_forward_self_ns: of it, launched by itself.
        gpu_backward_ns: the same of backward, recompute included.
        gpu_backward_self_ns: of it, launched by itself.
        gpu_recompute_ns: the same of recompute.
        gpu_recompute_self_ns: of it, launched by itself.
        kernel_ns: of the GPU self times together, kernels.
        memcpy_ns: memcpys.
        memset_ns: memsets.
    """

    fqn: str
    module_class: str
    calls: int = 0
    forward_ns: int = 0
    forward_self_ns: int = 0
    backward_ns: int = 0
    backward_self_ns: int = 0
    recompute_ns: int = 0
    recompute_self_ns: int = 0
    kernels: int = 0
    gpu_forward_ns: int = 0
    gpu_forward_self_ns: int = 0
    gpu_backward_ns: int = 0
    gpu_backward_self_ns: int = 0
    gpu_recompute_ns: int = 0
    gpu_recompute_self_ns: int = 0
    kernel_ns: int = 0
    memcpy_ns: int = 0
    memset_ns: int = 0

    @property
    def self_ns(self) -> int:
        """CPU self times of all phases together."""
        return self.forward_self_ns + self.backward_self_ns + self.recompute_self_ns

    @property
    def gpu_self_ns(self) -> int:
        """GPU self times of all phases together."""
        return self.kernel_ns + self.memcpy_ns + self.memset_ns


@dataclass(frozen=True, slots=True)
class ModuleTotals:
    """One row per module, in the order in which they were first called, `NO_MODULE` last.

    Attributes:
        rows: the modules'.
        kernel_ns: durations of all kernels of the trace; the rows' add up to it.
        memcpy_ns: of all memcpys.
        memset_ns: of all memsets.
    """

    rows: Sequence[ModuleTotal]
    kernel_ns: int
    memcpy_ns: int
    memset_ns: int

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values; what is 0 is left out of the rows."""
        return {
            "rows": [{key: value for key, value in row._asdict().items() if value != 0} for row in self.rows],
            "kernel_ns": self.kernel_ns,
            "memcpy_ns": self.memcpy_ns,
            "memset_ns": self.memset_ns,
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> ModuleTotals:
        """Read what `as_json` made.

        Raises:
            KeyError: it is something else.
            TypeError: it is something else.
        """
        return cls(
            [ModuleTotal(**row) for row in said["rows"]], said["kernel_ns"], said["memcpy_ns"], said["memset_ns"]
        )


def add_up(timeline: Timeline, events: Events, span: Ints) -> ModuleTotals:
    """Add up what each module took.

    Args:
        timeline: the recording, in the trace's time.
        events: the trace's.
        span: for each piece of GPU work the slice that launched it, or -1.
    """
    work, columns = events.work, timeline.columns
    rows = {
        row.fqn: ModuleTotal(**{key: value for key, value in row._asdict().items() if key in ModuleTotal._fields})
        for row in summarize(timeline).rows
    }
    codes = {fqn: code for code, fqn in enumerate(rows)}
    nobody = len(codes)
    module = np.array([codes.get(name.fqn, nobody) for name in timeline.names] or [nobody], np.int64)
    module_of = np.append(module[columns.name], nobody)
    phase_of = np.append(columns.phase.astype(np.int64), 0)
    own = np.zeros((len(KINDS), len(PHASES), nobody + 1), np.int64)
    np.add.at(own, (work.other, phase_of[span], module_of[span]), work.duration)
    kernels = np.bincount(module_of[span[work.other == 0]], minlength=nobody + 1)
    total = np.zeros((len(PHASES), nobody + 1), np.int64)
    by_span = np.zeros(len(columns) + 1, np.int64)
    np.add.at(by_span, span, work.duration)
    phases, modules, parents = phase_of.tolist(), module_of.tolist(), [*columns.parent.tolist(), -1]
    for at in np.flatnonzero(by_span[:-1]).tolist():
        counted: set[tuple[int, int]] = set()
        duration, around = int(by_span[at]), at
        while around >= 0:
            key = phases[around], modules[around]
            if key not in counted:
                counted.add(key)
                total[key] += duration
            around = parents[around]
    total[:, nobody] = own[:, :, nobody].sum(axis=0)
    if len(work) and (span < 0).any():
        rows[NO_MODULE] = ModuleTotal(NO_MODULE, "")
        codes[NO_MODULE] = nobody
    own_phase, own_kind = own.sum(axis=0), own.sum(axis=1)
    return ModuleTotals(
        [
            row._replace(
                kernels=int(kernels[code]),
                gpu_forward_ns=int(total[0, code]),
                gpu_forward_self_ns=int(own_phase[0, code]),
                gpu_backward_ns=int(total[1, code]),
                gpu_backward_self_ns=int(own_phase[1, code]),
                gpu_recompute_ns=int(total[2, code]),
                gpu_recompute_self_ns=int(own_phase[2, code]),
                kernel_ns=int(own_kind[0, code]),
                memcpy_ns=int(own_kind[1, code]),
                memset_ns=int(own_kind[2, code]),
            )
            for row, code in ((rows[fqn], code) for fqn, code in codes.items())
        ],
        *(int(work.duration[work.other == kind].sum()) for kind in range(len(KINDS))),
    )
