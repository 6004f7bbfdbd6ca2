"""What each module of a timeline took, and each step, as tables in many forms."""

from __future__ import annotations

from .device_summary import DeviceModule, DeviceSummary
from .groups import GroupBy
from .module_summary import SORT_KEYS, Summary
from .module_times import GpuStepTimes, GpuTotals, ModuleTimes
from .overview import Overview
from .self_times import self_times
from .step_times import StepTimes, measure_steps
from .totals import summarize
from .typical_step import find_typical_step, warm_up_steps

__all__ = [
    "SORT_KEYS",
    "DeviceModule",
    "DeviceSummary",
    "GpuStepTimes",
    "GpuTotals",
    "GroupBy",
    "ModuleTimes",
    "Overview",
    "StepTimes",
    "Summary",
    "find_typical_step",
    "measure_steps",
    "self_times",
    "summarize",
    "warm_up_steps",
]
