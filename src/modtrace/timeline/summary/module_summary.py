"""Summary: one row per module or class, sorted, filtered, and written in many forms."""

from __future__ import annotations

import fnmatch
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._tables import json_values, to_csv
from ..._typing import AnyArray
from . import render
from .device_summary import DeviceModule, DeviceSummary, render_device
from .flop_summary import FlopSummary, render_flops, render_rates
from .memory_summary import MemorySummary, render_memory
from .module_rows import CPU_FIELDS, GpuStepTimes, GpuTotals, ModuleTimes, fold_below
from .overview import Overview
from .parts import Around, PartTimes, StepParts, sum_up_parts
from .step_times import StepTimes, counted_steps
from .units import UnitTimes

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

SORT_KEYS = ("gpu", "self", "total", "forward", "backward", "recompute", "mean", "p50", "p95", "calls", "name")

_DEVICE_FIELDS = tuple(name for name in DeviceModule._fields if name not in {"fqn", "module_class"})
_DERIVED_FIELDS = ("total_ns", "self_ns", "mean_ns")
_SORT_FIELDS = {"gpu": "gpu_self_ns", "calls": "calls", "p50": "step_p50_ns", "p95": "step_p95_ns"}


@dataclass(frozen=True, slots=True)
class Summary:
    """One row per module or class, in the order in which they were first called.

    Attributes:
        rows: the rows shown.
        modules: how many rows there were before a limit.
        incomplete: spans whose enter or exit is missing; they count with the time that is known of them.
        overwritten: events that the ring had to drop, which no row can count.
        gpu: the GPU time of the whole trace; None if no GPU was profiled, and then there are no GPU columns.
        overview: what was recorded; None if that is not known.
        steps: what each step took; `overview.step_by` says what a step is.
        by: what has a row, "module" or "class".
        gpu_steps: what each step launched on GPUs, if optimizers or `Recording.step` end the steps; else empty.
        others_ns: nanoseconds of all processes but the first, added up. Their steps are not marked, so each counts from
            the start of its first span to the end of its last.
        device: what the streams of devices did; None if the recording has no device times.
        step_parts: each step in parts, and why a slow one was slow; in the order of `steps`.
        units: if steps are calls or ranges: percentiles of how long they took by name and thread, and how many there
            are per second; else empty.
        flops: what modules and steps cost; None if no operators were counted.
        around: what is before, between and after the steps, by part.
        memory: what modules took and kept of memory; None if it was not recorded.

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
    step_parts: Sequence[StepParts] = ()
    units: Sequence[UnitTimes] = ()
    around: Around = field(default_factory=Around)
    memory: MemorySummary | None = None
    flops: FlopSummary | None = None

    @property
    def parts(self) -> list[PartTimes]:
        """What the steps were spent on: their totals add up to the time of all whole steps of the first process.

        If calls of several modules are steps, percentiles are of those that took most.
        """
        counted = {step.step for step in counted_steps(self.steps)}
        steps, total_ns = [step for step in self.step_parts if step.step in counted], Counter[str]()
        for step in steps:
            total_ns[step.name] += sum(step.parts.values())
        most = max(total_ns.values(), default=0)
        return sum_up_parts(steps, [step.step for step in steps if total_ns[step.name] == most])

    def sort_by(self, key: str | None = None, limit: int | None = None) -> Summary:
        """Sort the rows, times and calls descending, names ascending, and keep the first `limit` of them.

        Args:
            key: "gpu" (GPU self time), "self", "total", a phase (CPU total), "mean" of calls, "p50", "p95" of steps,
                "calls" or "name"; None: GPU self time if there are GPU columns, else CPU self time.
            limit: how many rows to keep; None: all.

        Raises:
            ValueError: the key is not one of them, or is "gpu" without GPU columns.
        """
        key = key or ("gpu" if self.gpu else "self")
        known = SORT_KEYS if self.gpu else SORT_KEYS[1:]
        if key not in known:
            raise ValueError(f"this summary sorts by {', '.join(known)}, not by {key!r}")
        if key == "name":
            rows = sorted(self.rows, key=lambda row: (row.fqn, row.module_class))
        else:
            sorted_by = _SORT_FIELDS.get(key, f"{key}_ns")
            rows = sorted(self.rows, key=lambda row: getattr(row, sorted_by), reverse=True)
        return replace(self, rows=rows[:limit])

    def only(self, pattern: str | None = None, max_depth: int | None = None) -> Summary:
        """Keep the rows whose module, or class in a summary by class, matches; their times stay as they are.

        Args:
            pattern: a shell pattern over the whole name, case matters: `GPT.h.*`; `*` also matches dots. None: all.
            max_depth: how many levels of names to keep, counted after those left out by the pattern; the self times
                below count to the module around them. None: all.
        """
        if pattern is None and max_depth is None:
            return self

        wanted = "*" if pattern is None else pattern

        def matching(rows: Sequence[Any]) -> list[Any]:
            return [row for row in rows if fnmatch.fnmatchcase(row.fqn or row.module_class, wanted)]

        rows = matching(self.rows) if max_depth is None else fold_below(matching(self.rows), max_depth)
        named = {(row.fqn, row.module_class) for row in rows}

        def of_rows(costs: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(cost for cost in costs if (cost.fqn, cost.module_class) in named)

        device, memory, flops = self.device, self.memory, self.flops
        return replace(
            self,
            rows=rows,
            modules=len(rows),
            device=device and device._replace(rows=tuple(matching(device.rows))),
            memory=memory and memory._replace(rows=of_rows(memory.rows)),
            flops=flops and flops._replace(rows=of_rows(flops.rows), rates=of_rows(flops.rates)),
        )

    @property
    def steps_ns(self) -> int:
        """What the whole steps took together, and other processes, in nanoseconds: the 100 % of the table."""
        return sum(step.duration_ns for step in counted_steps(self.steps)) + self.others_ns

    @property
    def outside(self) -> Mapping[str, int]:
        """The nanoseconds between steps by part, on all threads together."""
        return self.around.between

    @property
    def note(self) -> str:
        """The GPU time of the whole trace and how many rows are not shown; without an overview, the losses too."""
        return self._note(with_losses=self.overview is None)

    @property
    def footer(self) -> str:
        """The GPU time of the whole trace, and which rows and time are missing; empty if nothing is."""
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

    def columns(self) -> dict[str, AnyArray]:
        """Return a NumPy array per column: what `pandas.DataFrame` or `polars.DataFrame` take.

        There is one for each field of `ModuleTimes` and for `total_ns`, `self_ns` and `mean_ns`: times are int64 ns,
        names are objects, and so is what some rows do not have (bytes, FLOPs; None). What no row has is left out. If
        the recording has device times, those of `DeviceModule` follow with `device_` before them, 0 for a module
        without any.
        """
        fields = (*(CPU_FIELDS if self.gpu is None else ModuleTimes._fields), *_DERIVED_FIELDS)
        columns: dict[str, AnyArray] = {
            name: np.array(values, np.object_ if name in {"fqn", "module_class"} or None in values else np.int64)
            for name in fields
            for values in [[getattr(row, name) for row in self.rows]]
            if not values or values.count(None) < len(values)
        }
        if self.device is not None:
            on_device = {(row.fqn, row.module_class): row for row in self.device.rows}
            for name in _DEVICE_FIELDS:
                values = [getattr(on_device.get((row.fqn, row.module_class)), name, 0) for row in self.rows]
                columns[f"device_{name}"] = np.array(values, np.int64)
        return columns

    to_text = render.modules_text
    to_tree = render.modules_tree
    to_markdown = render.modules_markdown
    to_html = render.summary_html
    parts_text = render.parts_text
    units_text = render.units_text
    steps_text = render.steps_text
    steps_markdown = render.steps_markdown

    def device_text(self, limit: int | None = None, width: int | None = None) -> str:
        """Return what the streams of devices did, and the table of the `limit` modules that took longest, times in ms.

        It is empty if the recording has no device times.
        """
        return render_device(self.device, limit, width)

    def memory_text(self, limit: int | None = None, width: int | None = None) -> str:
        """Return what modules took and kept of memory, highest peak first, and who held it at the peak.

        It is empty if the recording has no memory.
        """
        return "" if self.memory is None else render_memory(self.memory, limit, width)

    def flops_text(self, limit: int | None = None, width: int | None = None) -> str:
        """Return what a step cost, and the table of the `limit` modules that cost most; empty if none was counted."""
        return "" if self.flops is None else render_flops(self.flops, limit, width)

    def rates_text(self, limit: int | None = None, width: int | None = None) -> str:
        """Return how well modules use their time in each phase, `limit` rows; empty if that is not known."""
        return render_rates(self.flops, limit, width) if self.flops and self.flops.rates else ""

    def to_csv(self) -> str:
        """Return CSV with a header line; times in ns, unprintable characters of names as escapes."""
        columns = self.columns()
        return to_csv(list(columns), zip(*columns.values(), strict=True))

    def steps_csv(self) -> str:
        """Return the steps as CSV with a header line; times in ns."""
        return to_csv(StepTimes._fields, self.steps)

    def to_json(self) -> str:
        """Return a JSON object: `rows`, `steps`, `parts`, `units` and more; times in ns."""
        fields = (*(CPU_FIELDS if self.gpu is None else ModuleTimes._fields), *_DERIVED_FIELDS)
        values: dict[str, Any] = {
            "rows": [{name: getattr(row, name) for name in fields} for row in self.rows],
            **{name: getattr(self, name) for name in ("modules", "incomplete", "overwritten", "by", "outside")},
            "before": self.around.before,
            "after": self.around.after,
            **{name: json_values(getattr(self, name)) for name in ("parts", "units")},
        }
        if self.gpu is not None:
            values |= {"gpu": json_values(self.gpu), "gpu_steps": json_values(self.gpu_steps)}
        in_parts = {
            step.step: {"name": step.name, "parts": step.parts, "cause": step.cause} for step in self.step_parts
        }
        values["steps"] = [step._asdict() | in_parts.get(step.step, {}) for step in self.steps]
        known = {name: getattr(self, name) for name in ("device", "memory", "flops", "overview")}
        values |= {name: json_values(part) for name, part in known.items() if part is not None}
        if self.overview is not None:
            del values["overview"]["kept"]
        text = io.StringIO()  # `json.dumps` keeps each token of a million steps until it joins them
        json.dump(values, text, indent=2)
        text.write("\n")
        return text.getvalue()

    def __str__(self) -> str:
        return self.to_text()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text  # a summary can be made and written without rich

        yield Text(self.to_text(options.max_width), no_wrap=True, overflow="ignore")

    def _repr_html_(self) -> str:
        """Show the tables in a notebook."""
        return self.to_html()
