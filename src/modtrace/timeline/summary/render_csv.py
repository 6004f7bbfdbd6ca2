"""A summary as CSV."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from ..._terminal import printable
from .module_times import CPU_FIELDS, ModuleTimes

if TYPE_CHECKING:
    from .module_summary import Summary

__all__ = ["render_csv"]


def render_csv(summary: Summary) -> str:
    """Return a header line of field names and one line per row; times in ns."""
    fields = CPU_FIELDS if summary.gpu is None else ModuleTimes._fields
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(fields)
    for row in summary.rows:
        writer.writerow([printable(row.fqn), printable(row.module_class), *row[2 : len(fields)]])
    return out.getvalue()
