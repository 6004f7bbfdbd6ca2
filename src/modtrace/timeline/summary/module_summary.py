"""Summary: one row per module or class, sorted, limited, and written in many forms."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..._typing import AnyArray
from .column_arrays import module_columns, step_columns
from .device_summary import DeviceSummary
from .module_times import GpuStepTimes, GpuTotals, ModuleTimes
from .module_tree import fold_below
from .overview import Overview
from .render.as_csv import render_csv, render_steps_csv
from .render.as_html import render_html
from .render.as_json import from_json_values, render_json, to_json_values
from .render.as_markdown import render_markdown, render_steps_markdown
from .render.as_text import render_steps, render_text, render_tree
from .render.device_table import render_device
from .step_times import StepTimes

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

__all__ = ["SORT_KEYS", "Summary"]

SORT_KEYS = ("gpu", "self", "total", "forward", "backward", "recompute", "mean", "p50", "p95", "calls", "name")

_SORT_FIELDS = {"gpu": "gpu_self_ns", "calls": "calls", "p50": "step_p50_ns", "p95": "step_p95_ns"}


@dataclass(frozen=True, slots=True)
class Summary:
    """One row per module or class, in the order in which they were first called.

    Attributes:
        rows: the rows shown.
        modules: how many rows there were before a limit.
        incomplete: spans whose enter or exit is missing; they count with the time that is known of them.
        overwritten: events that the ring had to drop, which no row can count.
        gpu: the GPU time of the whole trace; None where no GPU was profiled, and then there are no GPU columns.
        overview: what was recorded; None where that is not known.
        steps: what each step took; all of the timeline is one step where none was marked.
        by: what the rows stand for, "module" or "class".
        gpu_steps: what was launched on GPUs in each step; empty where that is not known.
        others_ns: what the processes but the first took, whose steps are not marked: each from the start of its first
            span to the end of its last, in nanoseconds together.
        device: what the streams of devices did; None where the recording has no device times.

    Examples:
        >>> print(timeline.summary().sort_by("backward", 10))
        >>> slow = timeline.summary().columns()["step_p95_ns"]
        >>> Path("summary.md").write_text(timeline.summary().to_markdown())
    """

    rows: Sequence[ModuleTimes]
    modules: int
    incomplete: int = 0
    overwritten: int = 0
    gpu: GpuTotals | None = None
    overview: Overview | None = None
    steps: Sequence[StepTimes] = ()
    by: str = "module"
    gpu_steps: Sequence[GpuStepTimes] = ()
    others_ns: int = 0
    device: DeviceSummary | None = None

    def sort_by(self, key: str | None = None, limit: int | None = None) -> Summary:
        """Sort the rows, times and calls descending, names ascending, and keep the first `limit` of them.

        Args:
            key: "gpu" (GPU self time), "self", "total", a phase (CPU total), "mean" of calls, "p50", "p95" of steps,
                "calls" or "name"; None: GPU self time where there are GPU columns, else CPU self time.
            limit: how many rows to keep; None: all.

        Raises:
            ValueError: the key is not one of them, or is "gpu" where there are no GPU columns.
        """
        key = key or ("gpu" if self.gpu else "self")
        known = SORT_KEYS if self.gpu else SORT_KEYS[1:]
        if key not in known:
            raise ValueError(f"this summary sorts by {', '.join(known)}, not by {key!r}")
        if key == "name":
            rows = sorted(self.rows, key=lambda row: (row.fqn, row.module_class))
        else:
            field = _SORT_FIELDS.get(key, f"{key}_ns")
            rows = sorted(self.rows, key=lambda row: getattr(row, field), reverse=True)
        return replace(self, rows=rows[:limit])

    def matching(self, pattern: str) -> Summary:
        """Keep the rows whose module, or class in a summary by class, matches; their times stay as they are.

        Args:
            pattern: as of a shell, over the whole name, case matters: `GPT.h.*`; `*` also matches dots.
        """
        matches = re.compile(fnmatch.translate(pattern)).match
        rows = [row for row in self.rows if matches(row.fqn or row.module_class)]
        device = self.device
        if device is not None:
            device = device._replace(
                rows=tuple(row for row in device.rows if matches(row.fqn if self.by == "module" else row.module_class))
            )
        return replace(self, rows=rows, modules=len(rows), device=device)

    def to_depth(self, depth: int) -> Summary:
        """Keep the first `depth` levels of names; the self time of what lies below counts to the module around it."""
        rows = fold_below(self.rows, depth)
        return replace(self, rows=rows, modules=len(rows))

    @property
    def steps_ns(self) -> int:
        """What the steps took together in all processes, in nanoseconds: the 100 % of the table."""
        return sum(step.duration_ns for step in self.steps) + self.others_ns

    @property
    def note(self) -> str:
        """The GPU time of the whole trace and how many rows are not shown; without an overview, the losses too."""
        return self._note(with_losses=self.overview is None)

    @property
    def footer(self) -> str:
        """The GPU time of the whole trace, and which rows and time are missing; empty where there is nothing to say."""
        return self._note(with_losses=True)

    def _note(self, *, with_losses: bool) -> str:
        hidden = self.modules - len(self.rows)
        nouns = ("module", "modules") if self.by == "module" else ("class", "classes")
        counts = [(hidden, f"{hidden:,} more {nouns[hidden != 1]}")]
        if with_losses:
            counts.append((self.incomplete, f"{self.incomplete} spans incomplete"))
            counts.append((self.overwritten, f"{self.overwritten} events overwritten"))
        missing = ", ".join(text for count, text in counts if count)
        if self.gpu is None:
            return missing
        times = zip(("kernels", "memcpys", "memsets"), self.gpu[:3], strict=True)
        gpu = "GPU: " + ", ".join(f"{name} {ns / 1e6:.3f} ms" for name, ns in times)
        if self.gpu.communication_ns:
            share = 100 * self.gpu.communication_overlap_ns / self.gpu.communication_ns
            gpu += f"; communication {self.gpu.communication_ns / 1e6:.3f} ms, {share:.1f} % of it while computing"
        return f"{gpu}; {missing}" if missing else gpu

    def with_gpu_of(self, merged: Summary) -> Summary:
        """Return this summary with the rows and GPU times of another one of the same recording."""
        return replace(self, rows=merged.rows, modules=merged.modules, gpu=merged.gpu, gpu_steps=merged.gpu_steps)

    def columns(self) -> dict[str, AnyArray]:
        """Return a NumPy array per column, times in int64 ns: what `pandas.DataFrame` or `polars.DataFrame` take."""
        return module_columns(self)

    def step_columns(self) -> dict[str, AnyArray]:
        """Return a NumPy array per field of `StepTimes`, one entry per step."""
        return step_columns(self)

    def to_text(self, width: int | None = None) -> str:
        """Return header and table, times in ms.

        Args:
            width: characters in a line: the columns that matter least are left out, and names shortened from the left,
                until it fits. None: nothing is.
        """
        return render_text(self, width)

    def to_tree(self, width: int | None = None) -> str:
        """Return header and the tree of the modules, times in ms; siblings are in the order of the rows."""
        return render_tree(self, width)

    def device_text(self, limit: int | None = None, width: int | None = None) -> str:
        """Return what the streams of devices did, and the table of the `limit` modules that took longest, times in ms.

        It is empty where the recording has no device times.
        """
        return render_device(self.device, limit, width)

    def steps_text(self, limit: int | None = None, width: int | None = None) -> str:
        """Return the table of the `limit` slowest steps, times in ms."""
        return render_steps(self, limit, width)

    def to_markdown(self) -> str:
        """Return a GitHub table, times in ms; module names can neither break it nor render as anything but text."""
        return render_markdown(self)

    def steps_markdown(self, limit: int | None = None) -> str:
        """Return the `limit` slowest steps as a GitHub table, times in ms."""
        return render_steps_markdown(self, limit)

    def to_csv(self) -> str:
        """Return CSV with a header line; times in ns, unprintable characters of names as escapes."""
        return render_csv(self)

    def steps_csv(self) -> str:
        """Return the steps as CSV with a header line; times in ns."""
        return render_steps_csv(self)

    def to_html(self) -> str:
        """Return header, table of modules and table of the slowest steps, times in ms."""
        return render_html(self)

    def to_json(self) -> str:
        """Return a JSON object: `rows` and `steps` (times in ns), `overview`, `modules`, and `gpu` if profiled."""
        return render_json(self)

    def to_json_values(self, *, sparse: bool = False) -> dict[str, Any]:
        """Return rows, losses and GPU time as JSON values.

        Args:
            sparse: leave out what is 0 in a row.
        """
        return to_json_values(self, sparse=sparse)

    @classmethod
    def from_json_values(cls, values: Mapping[str, Any]) -> Summary:
        """Read what `to_json_values` returned, sparse or not.

        Raises:
            KeyError: `values` is something else.
            TypeError: `values` is something else.
        """
        return cls(**from_json_values(values))

    def __str__(self) -> str:
        return render_text(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text  # a summary can be made and written without rich

        yield Text(self.to_text(options.max_width), no_wrap=True, overflow="ignore")

    def _repr_html_(self) -> str:
        """Show the tables in a notebook."""
        return self.to_html()
