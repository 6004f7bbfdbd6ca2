"""The tables of a summary, and the sentences above and below them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..._tables import MODULE, MS, NAME, NUMBER, PERCENT, TEXT, Column, Table, Unit, Value, counted, fields_of, ms_text
from .compiled import compiled_table
from .device_summary import DeviceModule, device_table
from .findings import findings_table
from .flop_summary import flop_table, rate_table
from .memory_summary import holders_table, memory_table
from .module_rows import CPU_FIELDS, GpuStepTimes, ModuleTimes, sort_as_tree
from .overview import overview_lines, steps_note
from .parts import OTHER
from .slow_steps import PartTimes
from .step_times import StepTimes
from .units import RangeTimes, UnitTimes, median

if TYPE_CHECKING:
    from .module_summary import Summary

DERIVED_FIELDS = ("total_ns", "self_ns", "mean_ns")
_CPU_COLUMNS = (
    Column("module", "fqn", MODULE, hidden_if="never"),
    Column("class", "module_class", NAME, 6, hidden_if="never"),
    Column("calls", "calls", NUMBER, 2),
    Column("total ms", "total_ns", MS),
    Column("self", "self_ns", MS, repeats=("total_ns",)),
    Column("mean", "mean_ns", MS, 8, repeats=("total_ns",)),
    Column("step p50", "step_p50_ns", MS, 4),
    Column("step p95", "step_p95_ns", MS, 5, repeats=("step_p50_ns",)),
    Column("forward", "forward_ns", MS, 1, repeats=("total_ns",)),
    Column("forward self", "forward_self_ns", MS, 9, repeats=("forward_ns", "self_ns")),
    Column("backward", "backward_ns", MS, 1),
    Column("backward self", "backward_self_ns", MS, 9, repeats=("backward_ns",)),
    Column("recompute", "recompute_ns", MS, 3, hidden_if="zero"),
    Column("recompute self", "recompute_self_ns", MS, 9, hidden_if="zero", repeats=("recompute_ns",)),
)
# The width does not suffice for both GPU times and the CPU's percentiles and self times of single phases.
_GPU_COLUMNS = (
    *_CPU_COLUMNS[:2],
    Column("calls", "calls", NUMBER, 3),
    Column("forward ms", "forward_ns", MS, 5, hidden_if="zero"),
    Column("backward ms", "backward_ns", MS, 5, hidden_if="zero"),
    Column("recompute ms", "recompute_ns", MS, 5, hidden_if="zero"),
    Column("self ms", "self_ns", MS, 2, hidden_if="zero", repeats=("forward_ns",)),
    Column("kernels", "kernels", NUMBER, 4, hidden_if="zero"),
    Column("GPU forward ms", "gpu_forward_ns", MS, 1, hidden_if="zero"),
    Column("GPU backward ms", "gpu_backward_ns", MS, 1, hidden_if="zero"),
    Column("GPU recompute ms", "gpu_recompute_ns", MS, 1, hidden_if="zero"),
    Column("GPU self ms", "gpu_self_ns", MS, hidden_if="zero", repeats=("gpu_forward_ns",)),
    Column("communication ms", "communication_ns", MS, hidden_if="zero"),
    Column("overlapped", "communication_overlap_ns", MS, 2, hidden_if="zero"),
)


_DETAIL_ORDERS = (5, 8, 9)
"""Hide orders of the columns that a short table does not have."""


def modules_table(summary: Summary, *, brief: bool = False) -> Table:
    """Return the table of modules, or of classes if the summary is by class.

    Args:
        summary: what is shown.
        brief: whether to leave out columns of detail, and `backward` if nothing ran backward.
    """
    columns = list(_CPU_COLUMNS if summary.gpu is None else _GPU_COLUMNS)
    if brief and summary.gpu is None:
        columns = [
            column._replace(hidden_if="zero") if column.heading == "backward" else column
            for column in columns
            if column.hide_order not in _DETAIL_ORDERS
        ]
    notes = [summary.note]
    steps_ns = summary.steps_ns
    if summary.gpu is None and steps_ns:
        columns.insert(3, Column("% step", lambda row: row.in_steps_ns / steps_ns, PERCENT))
        notes += _share_notes(summary, steps_ns)
    if summary.by == "class":
        columns = [Column("class", "module_class", NAME), *columns[2:]]
    names = CPU_FIELDS if summary.gpu is None else ModuleTimes._fields
    if summary.rows:
        names = tuple(name for name in names if any(getattr(row, name) is not None for row in summary.rows))
    fields: dict[str, Value] = {name: name for name in (*names, *DERIVED_FIELDS)}
    device_rows = {(row.fqn, row.module_class): row for row in (summary.device.rows if summary.device else ())}

    def device_value(name: str) -> Value:
        return lambda row: getattr(device_rows.get((row.fqn, row.module_class)), name, 0)

    device_fields = DeviceModule._fields[2:] if summary.device is not None else ()
    fields |= {f"device_{name}": device_value(name) for name in device_fields}
    return Table(columns, summary.rows, fields, notes=notes, noun="module")


def _share_notes(summary: Summary, steps_ns: int) -> Iterator[str]:
    """Yield notes about `% step` if other processes count too, or if a row exceeds 100 %."""
    if summary.others_ns:
        yield "% step: of the time of all processes, each from its first span to its last"
    if steps_ns and any(row.in_steps_ns > steps_ns for row in summary.rows):
        reason = ", or modules ran outside steps" if summary.units else ""
        yield f"% step above 100: threads ran at once, and each counts{reason}"


class _Branch(NamedTuple):
    """A row of a tree: a module, and its name with the lines of the tree in front of it."""

    row: ModuleTimes
    name: str


def modules_tree(summary: Summary) -> Table:
    """Return the modules as a tree, with their shares of all steps, total times and self times."""
    steps_ns = summary.steps_ns
    whole_ns = steps_ns or sum(row.self_ns for row in summary.rows) or 1
    columns = (
        Column("% step", lambda line: (line.row.in_steps_ns if steps_ns else line.row.total_ns) / whole_ns, PERCENT),
        Column("total ms", lambda line: line.row.total_ns, MS, 1),
        Column("self", lambda line: line.row.self_ns, MS, 2),
        Column("module", "name", TEXT),
    )
    rows = [
        _Branch(row, f"{branch}{path}" + (f": {row.module_class}" if path != row.module_class else ""))
        for row, path, branch in sort_as_tree(summary.rows)
    ]
    return Table(columns, rows, notes=[summary.note, *_share_notes(summary, steps_ns)])


_PART_RANKS = {"forward": 1, "backward": 1, OTHER: 2}
"""Hide orders of parts in the table of steps; other parts are hidden first."""


def steps_table(summary: Summary) -> Table:
    """Return the table of steps with their parts, slowest first; `+` marks the duration of a step that is not whole."""
    steps, divided = summary.steps.slowest, summary.step_parts
    # GPU times of steps that are calls are unknown.
    gpu_steps = {gpu.step: gpu for gpu in summary.gpu_steps if not summary.units}

    def name(step: StepTimes) -> str:
        return f"{divided.bounds.name[divided.index_of[step.step]]} {step.step}" if summary.units else str(step.step)

    def time_of(part: str) -> Callable[[StepTimes], int]:
        part_ns = divided.ns[:, divided.parts.index(part)]
        return lambda step: int(part_ns[divided.index_of[step.step]])

    def on_gpu(field: str) -> Callable[[StepTimes], int]:
        return lambda step: getattr(gpu_steps.get(step.step, GpuStepTimes(-1)), field)

    parts = {part.part: time_of(part.part) for part in summary.parts}
    columns = [
        Column("step", name),
        Column("duration ms", lambda step: f"{step.duration_ns / 1e6:.3f}{'' if step.whole else '+'}"),
        *(Column(part, part_ns, MS, _PART_RANKS.get(part, 3), hidden_if="zero") for part, part_ns in parts.items()),
        Column("backward()", "backward_pass_ns", MS, 6, hidden_if="zero", repeats=[parts.get("backward", "")]),
        Column("GPU", on_gpu("gpu_ns"), MS, 1, hidden_if="zero"),
        Column("collectives", on_gpu("communication_ns"), MS, 2, hidden_if="zero"),
        Column("overlapped", on_gpu("communication_overlap_ns"), MS, 7, hidden_if="zero"),
    ]
    notes = [steps_note(summary.overview), _between_steps(summary)]
    passes_ns, backward_ns = summary.steps.columns.backward_pass_ns, divided.ns[:, divided.parts.index("backward")]
    if ((passes_ns > 0) & (passes_ns != backward_ns)).any():
        waiting = ", with waiting for other ranks" if summary.overview and summary.overview.communication else ""
        notes.append(f"backward(): from its call to its return{waiting}")
    if cut_count := int((~steps.columns.whole).sum()):
        notes.append(
            f"+: its beginning or end is not marked, so it may have been longer ({counted(cut_count, 'step')})"
        )
    fields = fields_of(StepTimes) | {f"parts.{part}": part_ns for part, part_ns in parts.items()}
    return Table(columns, steps, fields, notes=notes, noun="step")


_BAR_WIDTH = 24
_MAX_CAUSES = 5
_PART_COLUMNS = (
    Column("part of a step", "part", TEXT),
    Column("median ms", "p50_ns", MS),
    Column("p95", "p95_ns", MS, 1),
    Column("%", "share", PERCENT),
    Column("", lambda part: "█" * round(_BAR_WIDTH * part.share), TEXT, 2),
)


def parts_table(summary: Summary, limit: int | None = None) -> Table:
    """Return the table of the parts of a step; below it `Summary.lines`, and the causes of up to 5 slow steps."""
    divided = summary.step_parts
    cause_by_step = {int(divided.bounds.number[index]): cause for index, (cause, _) in divided.causes.items()}
    slowest = summary.steps.slowest.columns.step.tolist()
    causes = [cause_by_step[number] for number in slowest if number in cause_by_step]
    limit = min(_MAX_CAUSES, limit or _MAX_CAUSES)
    hidden_steps = [counted(len(causes) - limit, "more slow step")] if causes[limit:] else []
    notes = [*summary.lines, *causes[:limit], *hidden_steps]
    return Table(_PART_COLUMNS, summary.parts, fields_of(PartTimes), notes=notes, noun="part")


_RANGE_COLUMNS = (
    Column("range", "range", NAME),
    Column("part", "part", NAME, 1),
    Column("calls", "calls", NUMBER),
    Column("total ms", "total_ns", MS),
    Column("p50", "p50_ns", MS),
    Column("p95", "p95_ns", MS, repeats=("p50_ns",)),
)


def ranges_table(summary: Summary) -> Table:
    """Return the table of ranges and garbage collections by name, the longest total first."""
    return Table(_RANGE_COLUMNS, summary.ranges, fields_of(RangeTimes), noun="range")


_MAX_THREADS = 8
"""Maximum number of threads with rows of their own."""
_MAX_OUTSIDE_PARTS = 3
"""Maximum number of parts of the time outside steps that a text names."""
_UNIT_COLUMNS = (
    Column("step", lambda unit: f"  {unit.stage}" if unit.stage else unit.unit, NAME),
    Column("thread", lambda unit: unit.thread or "all", NAME, 1),
    Column("count", "measured", NUMBER, 2),
    Column("calls", "calls", NUMBER, 3),
    Column("p50 ms", "p50_ns", MS),
    Column("p95", "p95_ns", MS),
    Column("p99", "p99_ns", MS),
    Column("per second", "per_second", Unit("number", "{:,.2f}".format)),
)


def units_table(summary: Summary) -> Table:
    """Return the table of steps that are calls or ranges, on all threads and the busiest; above it the time between."""
    threads = Counter[str]()
    for unit in summary.units:
        threads[unit.thread] += unit.measured
    visible_threads = ["", *(name for name, _ in threads.most_common() if name)][: _MAX_THREADS + 1]
    hidden_count = len(threads) - len(visible_threads)
    notes = [counted(hidden_count, "more thread")] if hidden_count > 0 else []
    between = _between_steps(summary)
    sentences = [f"{between}; the tables are of the steps", ""] if between else []
    rows = [unit for unit in summary.units if unit.thread in visible_threads]
    return Table(_UNIT_COLUMNS, rows, fields_of(UnitTimes), sentences, notes)


def _between_steps(summary: Summary) -> str:
    """Return a sentence about the time between steps that are calls or ranges; in a training this has backward too."""
    outside_ns = sum(summary.outside.values()) if summary.units else 0
    share = outside_ns / max(outside_ns + int(summary.steps.columns.duration_ns.sum()), 1)
    parts = ", ".join(f"{part} {ms_text(ns)}" for part, ns in list(summary.outside.items())[:_MAX_OUTSIDE_PARTS])
    return f"{share:.1%} of the threads' time is between steps ({parts})" if outside_ns else ""


def header(summary: Summary) -> list[str]:
    """Return the lines about the recording and the time around the steps; empty without an overview."""
    if summary.overview is None:
        return []
    return [*overview_lines(summary.overview, summary.steps, summary.units), around_line(summary)]


def around_line(summary: Summary) -> str:
    """Return a line about the time before, between and after the steps of trainings, if at least a median step."""
    step_ns = median(summary.steps.counted.columns.duration_ns)
    periods = zip(("before the first step", "between trainings", "after the last step"), summary.around, strict=True)
    sentences = []
    for period, parts in () if summary.units else periods:
        longest = [f"{part} {_duration(ns)}" for part, ns in parts.items() if part != OTHER and ns >= step_ns]
        parts_text = f", of it {', '.join(longest[:_MAX_OUTSIDE_PARTS])}" if longest else ""
        if (total_ns := sum(parts.values())) >= max(step_ns, 1):
            sentences.append(f"{period} {_duration(total_ns)}{parts_text}")
    return "; ".join(sentences)


def _duration(ns: int) -> str:
    return f"{ns / 1e9:,.1f} s" if ns >= 1e8 else ms_text(ns)


def all_tables(summary: Summary) -> dict[str, Table]:
    """Return the tables by name, without tables for which the recording has no data."""
    tables = {"modules": modules_table(summary), "findings": findings_table(summary.findings, summary.looked_at)}
    if summary.units:
        tables["units"] = units_table(summary)
    if summary.step_parts:
        tables["parts"] = parts_table(summary)
    if summary.ranges:
        tables["ranges"] = ranges_table(summary)
    if summary.device is not None:
        tables["device"] = device_table(summary.device)
    if summary.memory is not None:
        tables |= {"memory": memory_table(summary.memory), "holders": holders_table(summary.memory)}
    if summary.flops is not None:
        tables["flops"] = flop_table(summary.flops)
        if summary.flops.rates:
            tables["rates"] = rate_table(summary.flops)
    if summary.compiled:
        tables["compiled"] = compiled_table(summary.compiled)
    if summary.steps:
        tables["steps"] = steps_table(summary)
    return tables
