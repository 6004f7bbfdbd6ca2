"""A summary as JSON, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..module_times import CPU_FIELDS, GpuStepTimes, GpuTotals, ModuleTimes

if TYPE_CHECKING:
    from ..module_summary import Summary

__all__ = ["from_json_values", "render_json", "to_json_values"]


def render_json(summary: Summary) -> str:
    """Return one indented JSON object with all that the summary holds; times in ns."""
    values = to_json_values(summary, sparse=False)
    for row, times in zip(values["rows"], summary.rows, strict=True):
        row |= {"total_ns": times.total_ns, "self_ns": times.self_ns, "mean_ns": times.mean_ns}
    values["by"] = summary.by
    values["steps"] = [step._asdict() for step in summary.steps]
    if summary.device is not None:
        values["device"] = summary.device._asdict() | {"rows": [row._asdict() for row in summary.device.rows]}
    if summary.overview is not None:
        totals = {operator: total._asdict() for operator, total in summary.overview.communication.items()}
        values["overview"] = summary.overview._asdict() | {"communication": totals}
    return json.dumps(values, indent=2) + "\n"


def to_json_values(summary: Summary, *, sparse: bool) -> dict[str, Any]:
    """Return rows, losses and GPU time as JSON values; `sparse` leaves out what is 0 in a row."""
    fields = CPU_FIELDS if summary.gpu is None else ModuleTimes._fields
    values: dict[str, Any] = {
        "rows": [
            {field: value for field, value in zip(fields, row, strict=False) if value != 0 or not sparse}
            for row in summary.rows
        ],
        "modules": summary.modules,
        "incomplete": summary.incomplete,
        "overwritten": summary.overwritten,
    }
    if summary.gpu is not None:
        values["gpu"] = summary.gpu._asdict()
        values["gpu_steps"] = [step._asdict() for step in summary.gpu_steps]
    return values


def from_json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the `Summary` that `values` was made from.

    Raises:
        KeyError: `values` was made from something else.
        TypeError: `values` was made from something else.
    """
    gpu = values.get("gpu")
    return {
        "rows": [ModuleTimes(**row) for row in values["rows"]],
        "modules": values["modules"],
        "incomplete": values["incomplete"],
        "overwritten": values["overwritten"],
        "gpu": None if gpu is None else GpuTotals(**gpu),
        "gpu_steps": tuple(GpuStepTimes(**step) for step in values.get("gpu_steps", ())),
    }
