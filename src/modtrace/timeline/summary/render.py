"""The tables of a summary: as text for terminals and pipes, as Markdown, and as HTML for notebooks."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..._tables import CellKind, Table, shortened, to_html, to_markdown, to_text, without_columns
from ..._terminal import counted, printable, wrapped
from .device_summary import device_table, device_totals, times_table
from .flop_summary import flop_table, rate_table
from .memory_summary import memory_tables
from .module_rows import GpuStepTimes, in_tree_order
from .overview import overview_lines, steps_note
from .parts import OTHER
from .percentiles import median
from .step_times import counted_steps
from .units import UnitTimes

if TYPE_CHECKING:
    from .module_summary import Summary


_CPU_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("module", "fqn", 0),
    ("class", "module_class", 6),
    ("calls", "calls", 2),
    ("total ms", "total_ns", 0),
    ("self", "self_ns", 0),
    ("mean", "mean_ns", 8),
    ("step p50", "step_p50_ns", 4),
    ("step p95", "step_p95_ns", 5),
    ("forward", "forward_ns", 1),
    ("forward self", "forward_self_ns", 9),
    ("backward", "backward_ns", 1),
    ("backward self", "backward_self_ns", 9),
    ("recompute", "recompute_ns", 3),
    ("recompute self", "recompute_self_ns", 9),
)
# There is no room for percentiles, and self times of single phases, of the CPU beside GPU times.
_GPU_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("module", "fqn", 0),
    ("class", "module_class", 6),
    ("calls", "calls", 3),
    ("forward ms", "forward_ns", 5),
    ("backward ms", "backward_ns", 5),
    ("recompute ms", "recompute_ns", 5),
    ("self ms", "self_ns", 2),
    ("kernels", "kernels", 4),
    ("GPU forward ms", "gpu_forward_ns", 1),
    ("GPU backward ms", "gpu_backward_ns", 1),
    ("GPU recompute ms", "gpu_recompute_ns", 1),
    ("GPU self ms", "gpu_self_ns", 0),
    ("communication ms", "communication_ns", 0),
    ("overlapped", "communication_overlap_ns", 2),
)
_STEP_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("step", "step", 0),
    ("duration ms", "duration_ns", 0),
    ("forward", "forward_ns", 1),
    ("backward", "backward_ns", 1),
    ("recompute", "recompute_ns", 2),
    ("before", "before_ns", 5),
    ("between", "between_ns", 4),
    ("after", "after_ns", 3),
    ("evaluation", "evaluation_ns", 2),
    ("backward()", "backward_pass_ns", 6),
)
_GPU_STEP_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("GPU", "gpu_ns", 1),
    ("communication", "communication_ns", 2),
    ("overlapped", "communication_overlap_ns", 7),
)


_OPTIONAL = ("recompute_ns", "recompute_self_ns", "evaluation_ns", "backward_pass_ns")
"""Columns that are hidden if they are 0 in every row; so are all times and counts of GPUs, and beside these."""
_OPTIONAL_ON_GPU = [field for _, field, _ in (*_GPU_COLUMNS[3:], *_GPU_STEP_COLUMNS)]


def modules_table(summary: Summary) -> Table:
    """Return the table of modules, or of classes if the summary is by class."""
    columns = _CPU_COLUMNS if summary.gpu is None else _GPU_COLUMNS
    if summary.by == "class":
        columns = (("class", "module_class", 0), *columns[2:])
    table = times_table(columns, summary.rows, _OPTIONAL if summary.gpu is None else _OPTIONAL_ON_GPU)
    if summary.gpu is None and summary.steps_ns:
        shares = [f"{100 * row.in_steps_ns / summary.steps_ns:.1f}" for row in summary.rows]
        at = table.headings.index("calls") + 1
        for cells, share in zip([table.headings, *table.rows], ["% step", *shares], strict=True):
            cells.insert(at, share)
        table.kinds.insert(at, "number")
        table.hide_order.insert(at, 0)
    return table


def steps_table(summary: Summary) -> Table:
    """Return the table of steps, slowest first; the duration of one that is not whole ends with `+`."""
    steps = sorted(summary.steps, key=lambda step: step.training_ns, reverse=True)
    table = times_table(_STEP_COLUMNS, steps, _OPTIONAL)
    names = {step.step: f"{step.name} {step.step}" for step in summary.step_parts if summary.units}
    for cells, step in zip(table.rows, steps, strict=True):
        cells[0] = names.get(step.step, cells[0])
        cells[1] += "" if step.whole else "+"
    # Of steps that are calls no GPU times are known.
    gpu_of = {gpu.step: gpu for gpu in summary.gpu_steps if not summary.units}
    on_gpu = [gpu_of.get(step.step, GpuStepTimes(step.step)) for step in steps]
    return table.beside(times_table(_GPU_STEP_COLUMNS, on_gpu, _OPTIONAL_ON_GPU))


_BAR_WIDTH = 24
_MAX_CAUSES = 5
_MAX_HTML_STEPS = 10
_AFTER = "after: from the last span to the end of the step; the parts of a step say what ran there"


def parts_text(summary: Summary, width: int | None = None) -> str:
    """Return the table of the parts of a step, and below it why the slowest steps were slow; times are in ms.

    Args:
        summary: what to show.
        width: characters in a line: the bars, and then the 95th percentiles, are hidden until it fits.
    """
    rows = []
    for part in summary.parts:
        times = [f"{ns / 1e6:.3f}" for ns in (part.p50_ns, part.p95_ns)]
        rows.append([part.part, *times, f"{100 * part.share:.1f}", "█" * round(_BAR_WIDTH * part.share)])
    headings = ["part of a step", "median ms", "p95", "%", ""]
    kinds: list[CellKind] = ["name", "number", "number", "number", "name"]
    table, _ = without_columns(Table(headings, rows, kinds, [0, 0, 1, 0, 2]), width)
    slow = {step.step: step.cause for step in summary.step_parts if step.cause is not None}
    by_duration = sorted(summary.steps, key=lambda step: step.training_ns, reverse=True)
    causes = [printable(cause) for step in by_duration if (cause := slow.get(step.step)) is not None]
    more = len(causes) - _MAX_CAUSES
    lines = causes[:_MAX_CAUSES] + ([counted(more, "more slow step")] if more > 0 else [])
    return "\n".join([*to_text(table, width), *(part for line in lines for part in wrapped(line, width))])


_MAX_THREADS, _MAX_OUTSIDE = 8, 3


def units_text(summary: Summary, width: int | None = None) -> str:
    """Return how much is between steps that are calls or ranges, and how long these took; the busiest threads last."""
    if not summary.units:
        return ""
    threads = Counter[str]()
    for unit in summary.units:
        threads[unit.thread] += unit.measured
    shown = ["", *(name for name, _ in threads.most_common() if name)][: _MAX_THREADS + 1]
    lines = to_text(
        without_columns(_units_table([unit for unit in summary.units if unit.thread in shown]), width)[0], width
    )
    hidden = len(threads) - len(shown)
    lines += [counted(hidden, "more thread")] if hidden else []
    outside_ns = sum(summary.outside.values())
    if outside_ns:
        share = outside_ns / (outside_ns + sum(step.duration_ns for step in summary.steps))
        parts = ", ".join(f"{part} {ns / 1e6:,.3f} ms" for part, ns in list(summary.outside.items())[:_MAX_OUTSIDE])
        text = f"{share:.1%} of the threads' time is between steps ({parts}); the tables are of the steps"
        lines = [*wrapped(printable(text), width), "", *lines]
    return "\n".join(lines)


def _units_table(units: Sequence[UnitTimes]) -> Table:
    rows = []
    for unit in units:
        what = f"  {unit.stage}" if unit.stage else unit.unit
        times = [f"{ns / 1e6:.3f}" for ns in (unit.p50_ns, unit.p95_ns, unit.p99_ns)]
        counts = [str(unit.measured), str(unit.calls)]
        rows.append([what, unit.thread or "all", *counts, *times, f"{unit.per_second:,.2f}"])
    headings = ["step", "thread", "count", "calls", "p50 ms", "p95", "p99", "per second"]
    kinds: list[CellKind] = ["name", "name", *(["number"] * 6)]  # type: ignore[list-item]
    return Table(headings, rows, kinds, [0, 1, 2, 3, 0, 0, 0, 0])


_GAP = "  "
_MIN_TREE_NAME_WIDTH = 8


def modules_text(summary: Summary, width: int | None = None) -> str:
    """Return header, table and what it leaves out; names are on the left and numbers on the right.

    Args:
        summary: what to show.
        width: characters in a line: first the columns that matter least are hidden, then names are shortened from the
            left. None: nothing is.
    """
    table, left_out = without_columns(modules_table(summary), width)
    lines = [*_header(summary, width), *to_text(table, width)]
    lines += wrapped(summary.note, width)
    if "% step" in table.headings:
        lines += _share_notes(summary, width)
    lines += _left_out(left_out, width)
    return "\n".join(lines)


def steps_text(summary: Summary, limit: int | None = None, width: int | None = None) -> str:
    """Return the table of steps, slowest first, and how to read it."""
    table, left_out = without_columns(steps_table(summary), width)
    shown = table.first_rows(limit)
    lines = to_text(shown, width)
    hidden = len(table.rows) - len(shown.rows)
    if hidden:
        lines.append(counted(hidden, "more step"))
    lines += wrapped(steps_note(summary.overview), width)
    if "after" in table.headings:
        lines += wrapped(_AFTER, width)
    if "backward()" in table.headings:
        waiting = ", with waiting for other ranks" if summary.overview and summary.overview.communication else ""
        lines += wrapped(f"backward(): from its call to its return{waiting}", width)
    if not all(step.whole for step in summary.steps):
        lines += wrapped("+: its beginning or end is not marked, so it may have been longer", width)
    lines += _left_out(left_out, width)
    return "\n".join(lines)


def modules_tree(summary: Summary, width: int | None = None) -> str:
    """Return the modules as a tree, each after its share of all steps and its total and self time in ms."""
    whole = summary.steps_ns or sum(row.self_ns for row in summary.rows) or 1
    cells = [
        [
            f"{100 * (row.in_steps_ns if summary.steps_ns else row.total_ns) / whole:.1f}",
            f"{row.total_ns / 1e6:.3f}",
            f"{row.self_ns / 1e6:.3f}",
        ]
        for row in summary.rows
    ]
    of_row = dict(zip((row.fqn for row in summary.rows), cells, strict=True))
    headings = ["% step", "total ms", "self"]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    drawn = in_tree_order(summary.rows)
    least = max((len(branch) for _, _, branch in drawn), default=0) + _MIN_TREE_NAME_WIDTH
    while width is not None and len(widths) > 1 and sum(widths) + len(_GAP) * len(widths) + least > width:
        widths.pop()
    shown = len(widths)
    lines = [_GAP.join([*map(str.rjust, headings[:shown], widths), "module"])]
    for row, path, branch in drawn:
        numbers = _GAP.join(map(str.rjust, of_row[row.fqn][:shown], widths))
        name = printable(f"{path}: {row.module_class}" if path != row.module_class else path)
        room = None if width is None else max(width - len(numbers) - len(_GAP) - len(branch), _MIN_TREE_NAME_WIDTH)
        lines.append(f"{numbers}{_GAP}{branch}{shortened(name, room)}")
    notes = [*wrapped(summary.note, width), *_share_notes(summary, width), *_left_out(headings[shown:], width)]
    return "\n".join([*_header(summary, width), *lines, *notes])


def _share_notes(summary: Summary, width: int | None) -> list[str]:
    """Say what 100 % is if that is more than the steps shown, or if a row is above it."""
    notes: list[str] = []
    if summary.others_ns:
        notes += wrapped("% step: of the time of all processes, each from its first span to its last", width)
    if summary.steps_ns and any(row.in_steps_ns > summary.steps_ns for row in summary.rows):
        why = ", or modules ran outside of steps" if summary.units else ""
        notes += wrapped(f"% step above 100: threads ran at once, and each counts{why}", width)
    return notes


def _header(summary: Summary, width: int | None) -> list[str]:
    if summary.overview is None:
        return []
    header = [*overview_lines(summary.overview, summary.steps, summary.units), _around_line(summary)]
    return [*(line for text in header for line in wrapped(printable(text), width)), ""]


def _around_line(summary: Summary) -> str:
    """Say how long the recording was before, between and after the steps of trainings, if as long as a step."""
    usual = median([step.duration_ns for step in counted_steps(summary.steps)])
    places = zip(("before the first step", "between trainings", "after the last step"), summary.around, strict=True)
    said = []
    for place, parts in () if summary.units else places:
        longest = [f"{part} {_duration(ns)}" for part, ns in parts.items() if part != OTHER and ns >= usual]
        of_it = f", of it {', '.join(longest[:_MAX_OUTSIDE])}" if longest else ""
        if (total := sum(parts.values())) >= max(usual, 1):
            said.append(f"{place} {_duration(total)}{of_it}")
    return "; ".join(said)


def _duration(ns: int) -> str:
    return f"{ns / 1e9:,.1f} s" if ns >= 1e8 else f"{ns / 1e6:,.3f} ms"


def _left_out(headings: Sequence[str], width: int | None) -> list[str]:
    if not headings:
        return []
    return wrapped(f"hidden: {', '.join(headings)} (widen the terminal or pipe the output)", width)


def modules_markdown(summary: Summary, width: int | None = None) -> str:
    """Return the table of modules, the footer below it, and what devices did if that is known."""
    lines = to_markdown(without_columns(modules_table(summary), width)[0])
    lines += [*_paragraph(summary.footer), *_paragraph(steps_note(summary.overview))]
    lines += _paragraph(_around_line(summary))
    if summary.device is not None:
        devices = device_table(summary.device).first_rows(len(summary.rows))
        lines += ["", device_totals(summary.device), "", *to_markdown(devices)]
    for table in _more_tables(summary):
        lines += ["", *to_markdown(table)]
    return "\n".join(lines) + "\n"


def _more_tables(summary: Summary) -> list[Table]:
    """Return the tables of memory and of FLOPs, if these were recorded."""
    memory = () if summary.memory is None else memory_tables(summary.memory)
    flops = () if summary.flops is None else (flop_table(summary.flops), rate_table(summary.flops))
    return [*memory, *(table for table in flops if table.rows)]


def steps_markdown(summary: Summary, limit: int | None = None) -> str:
    """Return the table of steps, slowest first."""
    lines = to_markdown(steps_table(summary).first_rows(limit))
    return "\n".join([*lines, *_paragraph(steps_note(summary.overview))]) + "\n"


def _paragraph(text: str) -> list[str]:
    return ["", text] if text else []


def summary_html(summary: Summary) -> str:
    """Return header, table of modules and the slowest steps, without script or style sheet; names are escaped."""
    parts = []
    if summary.overview is not None:
        header = [*overview_lines(summary.overview, summary.steps, summary.units), _around_line(summary)]
        parts.append("<p>" + "<br>".join(html.escape(printable(line)) for line in header if line) + "</p>")
    if summary.units:
        parts += to_html(_units_table([unit for unit in summary.units if not unit.thread]), "")
    parts += to_html(modules_table(summary), summary.note)
    if summary.device is not None:
        parts.append(f"<p>{html.escape(device_totals(summary.device))}</p>")
        parts += to_html(device_table(summary.device).first_rows(len(summary.rows)))
    for table in _more_tables(summary):
        parts += to_html(table)
    if len(summary.steps) > 1:
        steps = steps_table(summary)
        hidden = len(steps.rows) - _MAX_HTML_STEPS
        note = f"{hidden:,} more steps; " if hidden > 0 else ""
        parts.append("<p>Slowest steps</p>")
        whose = f"{text}; " if (text := steps_note(summary.overview)) else ""
        parts += to_html(steps.first_rows(_MAX_HTML_STEPS), f"{note}{whose}{_AFTER}")
    return "\n".join(parts) + "\n"
