"""A summary as CSV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...._tables import to_csv
from ..column_arrays import module_columns
from ..step_times import StepTimes

if TYPE_CHECKING:
    from ..module_summary import Summary

__all__ = ["render_csv", "render_steps_csv"]


def render_csv(summary: Summary) -> str:
    """Return a header line of field names and one line per module or class; times in ns."""
    columns = module_columns(summary)
    return to_csv(list(columns), zip(*columns.values(), strict=True))


def render_steps_csv(summary: Summary) -> str:
    """Return a header line of field names and one line per step, in their order; times in ns."""
    return to_csv(StepTimes._fields, summary.steps)
