"""A summary as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..._terminal import printable
from .column_arrays import module_columns
from .step_times import StepTimes

if TYPE_CHECKING:
    from .module_summary import Summary

__all__ = ["render_csv", "render_steps_csv"]


def render_csv(summary: Summary) -> str:
    """Return a header line of field names and one line per module or class; times in ns."""
    columns = module_columns(summary)
    return _write(list(columns), zip(*columns.values(), strict=True))


def render_steps_csv(summary: Summary) -> str:
    """Return a header line of field names and one line per step, in their order; times in ns."""
    return _write(StepTimes._fields, summary.steps)


def _write(headings: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(headings)
    for row in rows:
        writer.writerow([printable(cell) if isinstance(cell, str) else cell for cell in row])
    return out.getvalue()
