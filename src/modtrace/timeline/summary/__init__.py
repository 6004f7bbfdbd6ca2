"""What each module of a timeline took, and each step, as tables in many forms."""

from .device_summary import DeviceModule, DeviceSummary
from .flop_summary import FlopModule, FlopSummary, PhaseRate, StepFlops, step_flops
from .memory_summary import Holder, MemoryModule, MemorySummary
from .module_rows import GpuStepTimes, GpuTotals, GroupBy, ModuleTimes, outer_modules
from .module_summary import SORT_KEYS, Summary
from .overview import Overview, kept_sentence
from .parts import PARTS, PartTimes, StepParts, divide_steps, sum_up_parts
from .self_times import self_times
from .step_bounds import find_step_bounds, take_steps
from .step_times import StepTimes, find_typical_step, measure_steps, warm_up_steps
from .totals import summarize, summarize_pieces
from .units import UnitTimes

__all__ = [
    "PARTS",
    "SORT_KEYS",
    "DeviceModule",
    "DeviceSummary",
    "FlopModule",
    "FlopSummary",
    "GpuStepTimes",
    "GpuTotals",
    "GroupBy",
    "Holder",
    "MemoryModule",
    "MemorySummary",
    "ModuleTimes",
    "Overview",
    "PartTimes",
    "PhaseRate",
    "StepFlops",
    "StepParts",
    "StepTimes",
    "Summary",
    "UnitTimes",
    "divide_steps",
    "find_step_bounds",
    "find_typical_step",
    "kept_sentence",
    "measure_steps",
    "outer_modules",
    "self_times",
    "step_flops",
    "sum_up_parts",
    "summarize",
    "summarize_pieces",
    "take_steps",
    "warm_up_steps",
]
