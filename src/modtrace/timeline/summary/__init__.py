"""What each module of a timeline took, and each step, as tables in many forms."""

from __future__ import annotations

from .groups import GroupBy
from .module_summary import SORT_KEYS, Summary
from .module_times import GpuStepTimes, GpuTotals, ModuleTimes
from .overview import Overview
from .step_times import StepTimes, measure_steps
from .totals import self_times, summarize
from .typical_step import find_typical_step, warm_up_steps

__all__ = [
    "SORT_KEYS",
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
