"""Which columns the tables of a summary are shown with, and the text of their cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...._tables import CellKind, Table
from ..module_times import GpuStepTimes, ModuleTimes
from ..step_times import StepTimes

if TYPE_CHECKING:
    from ..module_summary import Summary

__all__ = ["module_table", "step_table"]


class _Column(NamedTuple):
    """A column.

    Attributes:
        heading: what stands above it; times are in ms.
        field: of `ModuleTimes` or `StepTimes`; "share" is the total's part of all steps.
        rank: how soon it is left out where there is no room; 0 never.
        optional: True where it is left out if it is 0 in every row.
    """

    heading: str
    field: str
    rank: int = 0
    optional: bool = False


_CPU_COLUMNS = (
    _Column("module", "fqn"),
    _Column("class", "module_class", 6),
    _Column("calls", "calls", 2),
    _Column("% step", "share"),
    _Column("total ms", "total_ns"),
    _Column("self", "self_ns"),
    _Column("mean", "mean_ns", 8),
    _Column("step p50", "step_p50_ns", 4),
    _Column("step p95", "step_p95_ns", 5),
    _Column("forward", "forward_ns", 1),
    _Column("forward self", "forward_self_ns", 9),
    _Column("backward", "backward_ns", 1),
    _Column("backward self", "backward_self_ns", 9),
    _Column("recompute", "recompute_ns", 3, optional=True),
    _Column("recompute self", "recompute_self_ns", 9, optional=True),
)
# Beside GPU times, the CPU's self times of the single phases and its percentiles have no place.
_GPU_COLUMNS = (
    _Column("module", "fqn"),
    _Column("class", "module_class", 6),
    _Column("calls", "calls", 3),
    _Column("forward ms", "forward_ns", 5, optional=True),
    _Column("backward ms", "backward_ns", 5, optional=True),
    _Column("recompute ms", "recompute_ns", 5, optional=True),
    _Column("self ms", "self_ns", 2, optional=True),
    _Column("kernels", "kernels", 4, optional=True),
    _Column("GPU forward ms", "gpu_forward_ns", 1, optional=True),
    _Column("GPU backward ms", "gpu_backward_ns", 1, optional=True),
    _Column("GPU recompute ms", "gpu_recompute_ns", 1, optional=True),
    _Column("GPU self ms", "gpu_self_ns", 0, optional=True),
    _Column("communication ms", "communication_ns", 0, optional=True),
    _Column("overlapped", "communication_overlap_ns", 2, optional=True),
)
_STEP_COLUMNS = (
    _Column("step", "step"),
    _Column("duration ms", "duration_ns"),
    _Column("forward", "forward_ns", 1),
    _Column("backward", "backward_ns", 1),
    _Column("recompute", "recompute_ns", 2, optional=True),
    _Column("before", "before_ns", 5),
    _Column("between", "between_ns", 4),
    _Column("after", "after_ns", 3),
    _Column("backward()", "backward_pass_ns", 6, optional=True),
)
_GPU_STEP_COLUMNS = (
    _Column("GPU", "gpu_ns", 1, optional=True),
    _Column("communication", "communication_ns", 2, optional=True),
    _Column("overlapped", "communication_overlap_ns", 7, optional=True),
)


def module_table(summary: Summary) -> Table:
    """Return the table of modules, or of classes where the summary is by class."""
    columns: Sequence[_Column] = _CPU_COLUMNS if summary.gpu is None else _GPU_COLUMNS
    if summary.by == "class":
        columns = (_Column("class", "module_class"), *columns[2:])
    if not summary.steps_ns:
        columns = tuple(column for column in columns if column.field != "share")
    return _table(columns, summary.rows, summary)


def step_table(summary: Summary) -> Table:
    """Return the table of steps, slowest first; one that is not whole has a `+` behind its duration."""
    steps = sorted(summary.steps, key=lambda step: step.duration_ns, reverse=True)
    table = _table(_STEP_COLUMNS, steps, summary)
    for cells, step in zip(table.rows, steps, strict=True):
        cells[1] += "" if step.whole else "+"
    gpu_of = {gpu.step: gpu for gpu in summary.gpu_steps}
    beside = _table(_GPU_STEP_COLUMNS, [gpu_of.get(step.step, GpuStepTimes(step.step)) for step in steps], summary)
    rows = [[*cells, *more] for cells, more in zip(table.rows, beside.rows, strict=True)]
    return Table(
        [*table.headings, *beside.headings], rows, [*table.kinds, *beside.kinds], [*table.ranks, *beside.ranks]
    )


def _table(
    columns: Sequence[_Column],
    rows: Sequence[ModuleTimes] | Sequence[StepTimes] | Sequence[GpuStepTimes],
    summary: Summary,
) -> Table:
    shown = [column for column in columns if not column.optional or any(getattr(row, column.field) for row in rows)]
    kinds: list[CellKind] = ["name" if column.field in {"fqn", "module_class"} else "number" for column in shown]
    cells = [[_cell(row, column.field, summary) for column in shown] for row in rows]
    return Table([column.heading for column in shown], cells, kinds, [column.rank for column in shown])


def _cell(row: ModuleTimes | StepTimes | GpuStepTimes, field: str, summary: Summary) -> str:
    if field == "share":
        return f"{100 * row.total_ns / summary.steps_ns:.1f}" if isinstance(row, ModuleTimes) else ""
    value = getattr(row, field)
    return f"{int(value) / 1e6:.3f}" if field.endswith("_ns") else str(value)
