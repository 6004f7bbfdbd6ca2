"""What each module took on the CPU and on the GPU."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..._typing import Int64Array
from ...timeline import PHASES, Timeline
from ...timeline.summary import markdown, printable, summarize
from ..trace.event_columns import ProfilerEvents
from .gpu_work import KINDS

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["NO_MODULE", "SORT_KEYS", "ModuleTotal", "ModuleTotals", "add_up"]

NO_MODULE = "(no module)"

SORT_KEYS = ("gpu", "self", "forward", "backward", "recompute", "calls", "name")
"""What the rows can be sorted by; `gpu` is GPU self time, `self` CPU self time."""

HEADINGS = (
    *("module", "class", "calls", "forward ms", "backward ms", "recompute ms", "self ms", "kernels"),
    *("GPU forward ms", "GPU backward ms", "GPU recompute ms", "GPU self ms"),
)


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


def _by_key(row: ModuleTotal, key: str) -> int:
    fields = {"gpu": "gpu_self_ns", "self": "self_ns", "calls": "calls"}
    value: int = getattr(row, fields.get(key, f"{key}_ns"))
    return -value


@dataclass(frozen=True, slots=True)
class ModuleTotals:
    """One row per module, in the order in which they were first called, `NO_MODULE` last.

    Attributes:
        rows: the modules'.
        kernel_ns: durations of all kernels of the trace; the rows' add up to it.
        memcpy_ns: of all memcpys.
        memset_ns: of all memsets.
        modules: how many rows there were before any limit; -1 where all are there.
    """

    rows: Sequence[ModuleTotal]
    kernel_ns: int
    memcpy_ns: int
    memset_ns: int
    modules: int = -1

    def top(self, key: str = "gpu", limit: int | None = None) -> ModuleTotals:
        """Sort by one of `SORT_KEYS`, times and calls descending, and keep the first `limit` rows.

        Raises:
            ValueError: the key is not one of them.
        """
        if key not in SORT_KEYS:
            raise ValueError(f"module totals sort by {', '.join(SORT_KEYS)}, not by {key!r}")
        rows = sorted(self.rows, key=lambda row: row.fqn if key == "name" else _by_key(row, key))
        return replace(self, rows=rows[:limit], modules=len(self.rows) if self.modules < 0 else self.modules)

    @property
    def note(self) -> str:
        """What the rows together come to, and how many are not shown."""
        times = f"kernels {self.kernel_ns / 1e6:.3f} ms, memcpys {self.memcpy_ns / 1e6:.3f} ms, "
        hidden = self.modules - len(self.rows)
        return f"GPU: {times}memsets {self.memset_ns / 1e6:.3f} ms" + (f"; {hidden} more rows" if hidden > 0 else "")

    def to_markdown(self) -> str:
        """Return a GitHub table, times in ms."""
        lines = ["| " + " | ".join(HEADINGS) + " |", "| --- | --- |" + " ---: |" * (len(HEADINGS) - 2)]
        lines += ["| " + " | ".join(_cells(row, markdown)) + " |" for row in self.rows]
        return "\n".join([*lines, "", self.note]) + "\n"

    def to_csv(self) -> str:
        """Return CSV with a header line; times in ns."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(ModuleTotal._fields)
        writer.writerows([printable(row.fqn), printable(row.module_class), *row[2:]] for row in self.rows)
        return out.getvalue()

    def to_json(self) -> str:
        """Return a JSON object: `rows`, and the trace's own `kernel_ns`, `memcpy_ns` and `memset_ns`."""
        said = {"rows": [row._asdict() for row in self.rows]}
        times = {"kernel_ns": self.kernel_ns, "memcpy_ns": self.memcpy_ns, "memset_ns": self.memset_ns}
        return json.dumps(said | times, indent=2) + "\n"

    def __rich__(self) -> Table:
        from rich.table import Table  # totals can be made and written without rich
        from rich.text import Text

        table = Table(caption=self.note, caption_justify="left", header_style="bold", box=None, pad_edge=False)
        rows = [_cells(row, printable) for row in self.rows]
        # Terminals are narrow: what is 0 for every module is not shown.
        shown = [n for n in range(len(HEADINGS)) if n < 3 or any(float(cells[n]) for cells in rows)]
        for index in shown:
            heading = HEADINGS[index].replace(" ", "\n")
            table.add_column(heading, justify="left" if index < 2 else "right", overflow="fold", no_wrap=index >= 2)
        for cells in rows:
            table.add_row(*(Text(cells[index]) for index in shown))
        return table

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


def _cells(row: ModuleTotal, text: Callable[[str], str]) -> list[str]:
    cpu = (row.forward_ns, row.backward_ns, row.recompute_ns, row.self_ns)
    gpu = (row.gpu_forward_ns, row.gpu_backward_ns, row.gpu_recompute_ns, row.gpu_self_ns)
    names = [text(row.fqn), text(row.module_class), str(row.calls)]
    return [*names, *(f"{t / 1e6:.3f}" for t in cpu), str(row.kernels), *(f"{t / 1e6:.3f}" for t in gpu)]


def add_up(timeline: Timeline, events: ProfilerEvents, span: Int64Array) -> ModuleTotals:
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
    if len(work) and (span < 0).any():
        rows[NO_MODULE] = ModuleTotal(NO_MODULE, "")
        codes[NO_MODULE] = nobody
    own_phase, own_kind = own.sum(axis=0), own.sum(axis=1)
    own_phase[:, nobody] = 0  # of what no module launched nobody knows the phase
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
