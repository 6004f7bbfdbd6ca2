"""The rows of a summary as NumPy arrays, one per column."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..._typing import AnyArray
from .device_summary import DeviceModule
from .module_times import CPU_FIELDS, ModuleTimes
from .step_times import StepTimes

if TYPE_CHECKING:
    from .module_summary import Summary

__all__ = ["module_columns", "step_columns"]

_DEVICE_FIELDS = tuple(field for field in DeviceModule._fields if field not in {"fqn", "module_class"})
_DERIVED_FIELDS = ("total_ns", "self_ns", "mean_ns")


def module_columns(summary: Summary) -> dict[str, AnyArray]:
    """Return an array per field of `ModuleTimes` and for `total_ns`, `self_ns` and `mean_ns`; names are objects.

    Of modules with device times, those of `DeviceModule` follow with `device_` before them, 0 where a module has none.
    """
    fields = (*(CPU_FIELDS if summary.gpu is None else ModuleTimes._fields), *_DERIVED_FIELDS)
    columns: dict[str, AnyArray] = {
        field: np.array(
            [getattr(row, field) for row in summary.rows],
            np.object_ if field in {"fqn", "module_class"} else np.int64,
        )
        for field in fields
    }
    if summary.device is not None and summary.by == "module":
        rows = {row.fqn: row for row in summary.device.rows}
        for field in _DEVICE_FIELDS:
            columns[f"device_{field}"] = np.array(
                [getattr(rows.get(row.fqn), field, 0) for row in summary.rows], np.int64
            )
    return columns


def step_columns(summary: Summary) -> dict[str, AnyArray]:
    """Return an array per field of `StepTimes`."""
    return {
        field: np.array([getattr(step, field) for step in summary.steps], np.bool_ if field == "whole" else np.int64)
        for field in StepTimes._fields
    }
