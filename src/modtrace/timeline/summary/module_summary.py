"""Summary: one row per module or class, sorted, filtered, and written in many forms."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._arrays import AnyArray
from ..._errors import ArgumentError
from ..._tables import SORT_KEYS, SortKey, Table, cut_json, cut_middle, join_texts, json_text, json_values, paragraph
from . import tables
from .compiled import CompiledModule
from .device_summary import DeviceSummary, device_table, device_totals
from .findings import TRACE, Finding, findings_lines, findings_markdown, low_mfu
from .flop_summary import FlopSummary, flops_lines
from .memory_summary import MemorySummary, holders_table, memory_table
from .module_rows import CPU_FIELDS, GpuStepTimes, GpuTotals, GroupBy, ModuleTimes, fold_below
from .overview import Overview, steps_note
from .parts import Around
from .slow_steps import PartTimes, StepsInParts, sum_up_parts
from .step_times import Steps
from .units import RangeTimes, UnitTimes

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_MAX_HOLDERS = 10
"""Maximum number of holders of memory in texts and HTML."""
_MAX_HTML_STEPS = 10
"""Maximum number of steps in HTML."""
_FIRST_SCREENS = ((8, 7), (4, 7), (4, 4), (1, 3), (1, 1))
"""Numbers of modules and of findings with evidence on a first screen: the first pair that fits `FIRST_BYTES`."""
FIRST_BYTES = 2_900
"""Maximum size of a first screen, including the line that the command prints after it."""
_FIRST_WIDTH = 120
"""Width of a first screen with long names: if no pair fits, lines are cut in their middles."""
_BRIEF_ROWS = 10
"""Maximum number of rows for which JSON is kept short."""
_BRIEF_JSON = 6_000
"""Maximum number of characters of short JSON."""
_CUTS = ((300, 40), (150, 20), (60, 12), (24, 8))
"""Limits of the characters of a text and the entries of a list, tried in order if fewer rows are not enough."""
_SORT_FIELDS = {"gpu": "gpu_self_ns", "calls": "calls", "p50": "step_p50_ns", "p95": "step_p95_ns"}


@dataclass(frozen=True, slots=True)
class Summary:
    """One row per module or class, in the order in which they were first called.

    Attributes:
        rows: the rows, after `sort_by` and `only`.
        modules: number of rows before a limit.
        incomplete: number of spans whose enter or exit is missing; their known time counts.
        overwritten: number of events that the ring overwrote; no row counts them.
        gpu: GPU time of the whole trace; None if no GPU was profiled, and then there are no GPU columns.
        overview: the recording, its losses and its steps; None if unknown.
        steps: times of each step; `overview.step_by` defines a step.
        by: the kind of row, "module" or "class".
        gpu_steps: GPU work that each step launched, if optimizers or `Recording.step` end the steps; else empty.
        others_ns: total nanoseconds of all processes except the first. Their steps are not marked, so each counts from
            the start of its first span to the end of its last.
        device: times of the streams of devices; None if the recording has none.
        step_parts: the parts of each step, and the cause of each slow step; in the order of `steps`.
        units: percentiles and rates of steps that are calls or ranges, by name and thread; else empty.
        flops: FLOPs of modules and steps; None if no operators were counted.
        around: time before, between and after the steps, by part.
        memory: memory of modules; None if it was not recorded.
        ranges: times of ranges and garbage collections by name, the longest total first.
        findings: up to seven findings, the most expensive first; about all modules, also if `rows` are fewer.
        looked_at: the checks that looked for findings.
        lines: sentences about time that no finding explains: program lines around much time outside modules and
            ranges, and a few calls that take much of the time of all.
        compiled: modules inside regions that torch.compile compiled, by region and graph.

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
    steps: Steps = field(default_factory=Steps)
    by: GroupBy = "module"
    gpu_steps: Sequence[GpuStepTimes] = ()
    others_ns: int = 0
    device: DeviceSummary | None = None
    step_parts: StepsInParts = field(default_factory=StepsInParts)
    units: Sequence[UnitTimes] = ()
    around: Around = field(default_factory=Around)
    memory: MemorySummary | None = None
    flops: FlopSummary | None = None
    ranges: Sequence[RangeTimes] = ()
    findings: Sequence[Finding] = ()
    looked_at: str = ""
    lines: Sequence[str] = ()
    compiled: Sequence[CompiledModule] = ()

    @property
    def parts(self) -> list[PartTimes]:
        """The parts of all steps: their totals add up to the time of all whole steps of the first process.

        If calls of several modules are steps, percentiles cover the module with the longest total.
        """
        divided = self.step_parts
        return sum_up_parts(divided.take(np.isin(divided.bounds.number, self.steps.counted.columns.step)))

    def sort_by(self, key: SortKey | None = None, limit: int | None = None) -> Summary:
        """Sort the rows, times and calls descending, names ascending, and keep the first `limit` of them.

        Args:
            key: "gpu" (GPU self time), "self", "total", a phase (CPU total), "mean" of calls, "p50", "p95" of steps,
                "calls" or "name"; None: GPU self time if there are GPU columns, else CPU self time.
            limit: maximum number of rows; None: all.

        Raises:
            ArgumentError: the key is not one of them, or is "gpu" without GPU columns.
        """
        key = key or ("gpu" if self.gpu else "self")
        keys = SORT_KEYS if self.gpu else SORT_KEYS[1:]
        if key not in keys:
            raise ArgumentError(f"this summary sorts by {', '.join(keys)}, not by {key!r}")
        if key == "name":
            rows = sorted(self.rows, key=lambda row: (row.fqn, row.module_class))
        else:
            sorted_by = _SORT_FIELDS.get(key, f"{key}_ns")
            rows = sorted(self.rows, key=lambda row: getattr(row, sorted_by), reverse=True)
        return replace(self, rows=rows[:limit])

    def of_file(self, path: str, step_by: str | None = None) -> Summary:
        """Return a copy whose findings' commands have this file and `--step-by` in place of `TRACE`."""
        arguments = " " + shlex.join([path, *(("--step-by", step_by) if step_by is not None else ())])
        findings = [finding._replace(next=finding.next.replace(f" {TRACE}", arguments, 1)) for finding in self.findings]
        return replace(self, findings=findings)

    def with_peak(self, tflops: float) -> Summary:
        """Return a copy for a device of this peak in 10¹² FLOP/s; unchanged if no operators were counted."""
        if self.flops is None:
            return self
        flops = self.flops.with_peak(tflops, self.steps)
        findings = [finding for finding in self.findings if finding not in low_mfu(self.flops)]
        return replace(self, flops=flops, findings=[*findings, *low_mfu(flops)])

    def only(self, pattern: str | None = None, max_depth: int | None = None) -> Summary:
        """Keep the rows whose module, or class in a summary by class, matches; their times stay as they are.

        Args:
            pattern: a shell pattern over the whole name, case matters: `GPT.h.*`; `*` also matches dots. None: all.
            max_depth: number of levels to keep among the matching names; deeper self times count to the module around
                them. None: all.
        """
        if pattern is None and max_depth is None:
            return self

        name_pattern = "*" if pattern is None else pattern

        def matching(rows: Sequence[Any]) -> list[Any]:
            return [row for row in rows if fnmatch.fnmatchcase(row.fqn or row.module_class, name_pattern)]

        rows = matching(self.rows) if max_depth is None else fold_below(matching(self.rows), max_depth)
        keys = {(row.fqn, row.module_class) for row in rows}

        def of_rows(costs: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(cost for cost in costs if (cost.fqn, cost.module_class) in keys)

        device, memory, flops = self.device, self.memory, self.flops
        return replace(
            self,
            rows=rows,
            modules=len(rows),
            device=device and device._replace(rows=tuple(matching(device.rows))),
            memory=memory and memory._replace(rows=of_rows(memory.rows)),
            flops=flops and flops._replace(rows=of_rows(flops.rows), rates=of_rows(flops.rates)),
            compiled=matching(self.compiled),
        )

    @property
    def steps_ns(self) -> int:
        """The time of all whole steps and of other processes, in nanoseconds: the 100 % of the table."""
        return int(self.steps.counted.columns.duration_ns.sum()) + self.others_ns

    @property
    def outside(self) -> Mapping[str, int]:
        """The nanoseconds between steps by part, on all threads together."""
        return self.around.between

    @property
    def note(self) -> str:
        """The GPU time of the whole trace and the number of hidden rows; without an overview, the losses too."""
        return self._note(with_losses=self.overview is None)

    @property
    def footer(self) -> str:
        """The GPU time of the whole trace, and counts of missing rows and events; empty without either."""
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

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name: "modules", "findings", and those for which the recording has data.

        These are "units", "parts", "ranges", "device", "memory", "holders", "flops", "rates", "compiled" and "steps".
        The argument of `Table.to` is the form: "text", "md", "html", "csv", "json", or "frame", a DataFrame.

        Example:
            >>> Path("modules.md").write_text(timeline.summary().tables["modules"].to("md"))
        """
        return tables.all_tables(self)

    def columns(self) -> dict[str, AnyArray]:
        """Return a NumPy array per column, for `pandas.DataFrame` or `polars.DataFrame`.

        The columns are the fields of `ModuleTimes`, `total_ns`, `self_ns` and `mean_ns`. Times are int64 ns. Names are
        objects, and so are columns with None in some rows (bytes, FLOPs); columns with None in all rows are left out.
        If the recording has device times, the fields of `DeviceModule` follow with the prefix `device_`, 0 for a
        module without any.
        """
        return tables.modules_table(self).values()

    def to_text(self, width: int | None = None) -> str:
        """Return the header and the table of modules; for `width` see `Table.to`."""
        return join_texts(tables.header(self), [tables.modules_table(self).to("text", width=width)], width)

    def findings_text(self, width: int | None = None, limit: int | None = None, evidence: int | None = None) -> str:
        """Return a line about the recording and up to `limit` findings, the first `evidence` with their evidence."""
        lines = findings_lines(self.findings, self.looked_at, limit, evidence)
        return join_texts([*tables.header(self)[:1], *lines], [], width)

    def modules_text(self, width: int | None = None) -> str:
        """Return the rest of the header, and the table of modules."""
        modules = tables.modules_table(self).to("text", width=width)
        return join_texts(tables.header(self)[1:], [modules], width)

    def first_screen(self, width: int | None = None) -> str:
        """Return a line about the recording, the findings, the parts of a step, the first 8 rows and findings' rows.

        If the text is longer than 3 kB, it has fewer rows, and the evidence of only the first findings. For `width`
        see `Table.to`.
        """
        for first, evidence_lines in _FIRST_SCREENS:
            text = self._first_blocks(first, evidence_lines, width, width)
            if len(text.encode()) <= FIRST_BYTES:
                return text
        lines = self._first_blocks(1, 1, None, min(width or _FIRST_WIDTH, _FIRST_WIDTH)).splitlines()
        for max_width in range(_FIRST_WIDTH, 0, -10):
            text = "\n".join(cut_middle(line, max_width) for line in lines)
            if len(text.encode()) <= FIRST_BYTES:
                break
        return text

    def _first_blocks(self, first: int, evidence_lines: int, width: int | None, table_width: int | None) -> str:
        finding_fqns = {finding.where for finding in self.findings}
        rows = [row for index, row in enumerate(self.rows) if index < first or row.fqn in finding_fqns]
        parts = (
            tables.parts_table(self)._replace(notes=self.lines).to("text", width=table_width) if self.step_parts else ""
        )
        units = tables.units_table(self).to("text", width=table_width) if self.units else ""
        blocks = [self.findings_text(width, evidence=evidence_lines), units, parts]
        blocks += [join_texts(tables.header(self)[1:], [], width)]
        blocks += [tables.modules_table(replace(self, rows=rows), brief=True).to("text", width=table_width)]
        return "\n\n".join(filter(None, [*blocks, self._costs_lines(width)]))

    def _costs_lines(self, width: int | None) -> str:
        """Return lines about FLOPs, memory and devices, with the option that shows more of each."""
        lines = [f"{line} (--flops: modules)" for line in (flops_lines(self.flops)[:1] if self.flops else ())]
        if self.memory is not None:
            lines += [holders_table(self.memory, 0).notes[0].partition(";")[0] + " (--memory: modules)"]
        lines += [device_totals(self.device)] if self.device else []
        return join_texts(lines, [], width)

    def to_tree(self, width: int | None = None) -> str:
        """Return the header and the modules as a tree."""
        return join_texts(tables.header(self), [tables.modules_tree(self).to("text", width=width)], width)

    def device_text(self, limit: int | None = None, width: int | None = None) -> str:
        """Return the times of devices' streams, and of the `limit` slowest modules; empty without device times."""
        return "" if self.device is None else device_table(self.device).to("text", limit, width)

    def memory_text(self, limit: int | None = None, width: int | None = None) -> str:
        """Return the memory of modules, highest peak first, and its holders at the peak; empty without memory."""
        if self.memory is None:
            return ""
        holders = holders_table(self.memory, min(limit or _MAX_HOLDERS, _MAX_HOLDERS)).to("text", width=width)
        return f"{memory_table(self.memory).to('text', limit, width)}\n\n{holders}"

    def to_markdown(self, width: int | None = None) -> str:
        """Return the findings, and the tables of modules, devices, memory and FLOPs, in GitHub's Markdown."""
        notes = [self.footer, steps_note(self.overview), tables.around_line(self)]
        modules = tables.modules_table(self)._replace(notes=notes).to("md", width=width)
        findings = findings_markdown(self.findings, self.looked_at, tables.header(self)[:1])
        return "\n".join([findings, modules, *(table.to("md", limit) for table, limit in self._costs())]).lstrip()

    def to_html(self) -> str:
        """Return the header, and the tables of modules, of costs and of the slowest steps, as HTML."""
        units = [unit for unit in self.units if not unit.thread]
        blocks = [*paragraph(tables.header(self))]
        blocks += paragraph(findings_lines(self.findings, self.looked_at)) if self.overview is not None else []
        blocks += [tables.units_table(replace(self, units=units)).to("html")] if units else []
        blocks += [tables.modules_table(self).to("html"), *(table.to("html", limit) for table, limit in self._costs())]
        if len(self.steps) > 1:
            blocks += ["<p>Slowest steps</p>", tables.steps_table(self).to("html", _MAX_HTML_STEPS)]
        return "\n".join(text.removesuffix("\n") for text in blocks) + "\n"

    def _costs(self) -> list[tuple[Table, int | None]]:
        cost_tables = tables.all_tables(replace(self, units=(), steps=Steps(), step_parts=StepsInParts(), ranges=()))
        return [
            (table, len(self.rows) if name in ("device", "compiled") else None)
            for name, table in cost_tables.items()
            if name not in ("modules", "findings")
        ]

    def to_csv(self) -> str:
        """Return the rows as CSV with a header line; times in ns, unprintable characters of names as escapes."""
        return str(tables.modules_table(self).to("csv"))

    def steps_csv(self, limit: int | None = None) -> str:
        """Return the `limit` slowest steps, in the order of their numbers, as CSV with a header line; times in ns."""
        table = tables.steps_table(self)
        return str(table._replace(rows=sorted(table.rows[:limit])).to("csv"))

    def to_dict(self, limit: int | None = None) -> dict[str, Any]:
        """Return the summary as JSON values: `findings`, `rows`, `steps`, `parts`, `units` and more; times in ns.

        Args:
            limit: maximum length of each list except `parts`; the slowest steps stay. None: all. With a limit, fields
                that are None in all rows of modules are left out.
        """
        fields = [*(CPU_FIELDS if self.gpu is None else ModuleTimes._fields), *tables.DERIVED_FIELDS]
        if limit is not None:
            fields = [name for name in fields if any(getattr(row, name) is not None for row in self.rows[:limit])]
        values: dict[str, Any] = {
            "findings": json_values(self.findings[:limit]),
            "rows": [{name: getattr(row, name) for name in fields} for row in self.rows[:limit]],
            **{name: getattr(self, name) for name in ("modules", "incomplete", "overwritten", "by", "outside")},
            "before": self.around.before,
            "after": self.around.after,
            "parts": json_values(self.parts),
            "units": json_values(self.units[:limit]),
            "ranges": json_values(self.ranges[:limit]),
            **({"compiled": json_values(self.compiled[:limit])} if self.compiled else {}),
            **({"lines": self.lines} if self.lines else {}),
        }
        step_numbers = {*self.steps.slowest.columns.step[:limit].tolist()}
        if self.gpu is not None:
            gpu_steps = [step for step in self.gpu_steps if step.step in step_numbers or self.units]
            values |= {"gpu": json_values(self.gpu), "gpu_steps": json_values(gpu_steps)}
        steps = self.steps.take(np.isin(self.steps.columns.step, [*step_numbers]))
        divided = self.step_parts.take(np.isin(self.step_parts.bounds.number, [*step_numbers]))
        in_parts = {row.step: {"name": row.name, "parts": row.parts, "cause": row.cause} for row in divided}
        values["steps"] = [step._asdict() | in_parts.get(step.step, {}) for step in steps]
        flops = self.flops and self.flops._replace(
            by_step=[row for row in self.flops.by_step if row.step in step_numbers]
        )
        costs = {"device": self.device, "memory": self.memory, "flops": flops, "overview": self.overview}
        values |= {name: _cut_lists(json_values(cost), limit) for name, cost in costs.items() if cost is not None}
        if self.overview is not None:
            del values["overview"]["kept"]
        return values

    def to_json(self, limit: int | None = None) -> str:
        """Return the values of `to_dict` as JSON text.

        With a limit of up to 10, the text has at most 6 kB: lists are shortened, the list of modules last, then long
        texts are cut.
        """
        values = self.to_dict(limit)
        text = json_text(values)
        if limit is None or limit > _BRIEF_ROWS:
            return text
        rows = entries = limit
        while len(text) > _BRIEF_JSON and rows + entries > 2:
            if entries > 1:
                entries -= 1
            else:
                entries, rows = 1, rows - 1
            text = json_text(_shorten(values, rows, entries))
        for cut in _CUTS:
            if len(text) > _BRIEF_JSON:
                text = json_text(cut_json(_shorten(values, rows, entries), *cut))
        return text

    def __str__(self) -> str:
        return self.to_text()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text  # a summary can be made and written without rich

        yield Text(self.to_text(options.max_width), no_wrap=True, overflow="ignore")

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return self.to_html()


def _cut_lists(values: Mapping[str, Any], length: int | None) -> dict[str, Any]:
    """Return the values, with lists cut to `length` entries; None: as they are."""
    return {name: value[:length] if isinstance(value, list) else value for name, value in values.items()}


def _shorten(values: Mapping[str, Any], rows: int, entries: int) -> dict[str, Any]:
    """Return JSON values with `rows` modules and `entries` in the other lists, except findings and parts."""
    slowest = sorted(values["steps"], key=lambda step: step["evaluation_ns"] - step["duration_ns"])[:entries]
    shorter = _cut_lists(values, entries) | {
        "findings": values["findings"],
        "parts": values["parts"],
        "rows": values["rows"][:rows],
        "steps": [step for step in values["steps"] if step in slowest],
    }
    return {name: _cut_lists(value, entries) if isinstance(value, dict) else value for name, value in shorter.items()}
