"""The table of slices under its former name."""

from __future__ import annotations

from .slices import (
    BACKWARD,
    DTYPES,
    FORWARD,
    PHASES,
    RECOMPUTE,
    Columns,
    in_start_order,
    join_columns,
    sort_by_start,
)

__all__ = [
    "BACKWARD",
    "DTYPES",
    "FORWARD",
    "PHASES",
    "RECOMPUTE",
    "Columns",
    "in_start_order",
    "join_columns",
    "sort_by_start",
]
