"""Which columns a summary is shown with, and the text of their cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .module_summary import Summary

__all__ = ["TEXT_COLUMNS", "headings_and_cells"]

TEXT_COLUMNS = 2
"""How many of the columns, from the first on, hold names; all others hold numbers."""


class _Column(NamedTuple):
    """A column for people.

    Attributes:
        heading: what stands above it.
        field: of `ModuleTimes`.
        optional: True where it is left out if it is 0 in every row.
    """

    heading: str
    field: str
    optional: bool = False


_NAME_COLUMNS = (_Column("module", "fqn"), _Column("class", "module_class"), _Column("calls", "calls"))
_CPU_COLUMNS = (
    *_NAME_COLUMNS,
    _Column("forward ms", "forward_ns"),
    _Column("self", "forward_self_ns"),
    _Column("backward ms", "backward_ns"),
    _Column("self", "backward_self_ns"),
    _Column("recompute ms", "recompute_ns", optional=True),
)
# Terminals are narrow: beside GPU times, self times of the single phases have no place.
_GPU_COLUMNS = (
    *_NAME_COLUMNS,
    _Column("forward ms", "forward_ns", optional=True),
    _Column("backward ms", "backward_ns", optional=True),
    _Column("recompute ms", "recompute_ns", optional=True),
    _Column("self ms", "self_ns", optional=True),
    _Column("kernels", "kernels", optional=True),
    _Column("GPU forward ms", "gpu_forward_ns", optional=True),
    _Column("GPU backward ms", "gpu_backward_ns", optional=True),
    _Column("GPU recompute ms", "gpu_recompute_ns", optional=True),
    _Column("GPU self ms", "gpu_self_ns", optional=True),
)


def headings_and_cells(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return the headings, and for each row of the summary its cells, names as they are, times in ms."""
    columns = [
        column
        for column in (_CPU_COLUMNS if summary.gpu is None else _GPU_COLUMNS)
        if not column.optional or any(getattr(row, column.field) for row in summary.rows)
    ]
    rows = [[_cell(getattr(row, column.field), column.field) for column in columns] for row in summary.rows]
    return [column.heading for column in columns], rows


def _cell(value: str | int, field: str) -> str:
    return f"{int(value) / 1e6:.3f}" if field.endswith("_ns") else str(value)
