"""Timelines: the spans of a recording, how they are built from a ring's events, selected and summed up."""

from __future__ import annotations

from ..ring.collective_text import CollectiveName
from .collectives import Collective, CollectiveDetails, Collectives, Group, launching_spans
from .communication_totals import OperatorTotals
from .contents import BackwardPass, CounterSeries, Mark, Name, Process, Range, Stats, Track
from .decode import AFTER_BACKWARD, OpenCall, RingAnalysis, ThreadStack, build_timeline
from .gpu_work import GpuWork
from .slices import BACKWARD, FORWARD, PHASES, RECOMPUTE, Columns, Slices
from .spans import Span, Spans
from .summary import (
    DeviceModule,
    DeviceSummary,
    FlopModule,
    FlopSummary,
    GpuStepTimes,
    GpuTotals,
    Holder,
    MemoryModule,
    MemorySummary,
    ModuleTimes,
    Overview,
    PartTimes,
    StepFlops,
    StepParts,
    StepTimes,
    Summary,
    UnitTimes,
)
from .timeline import Timeline

__all__ = [
    "AFTER_BACKWARD",
    "BACKWARD",
    "FORWARD",
    "PHASES",
    "RECOMPUTE",
    "BackwardPass",
    "Collective",
    "CollectiveDetails",
    "CollectiveName",
    "Collectives",
    "Columns",
    "CounterSeries",
    "DeviceModule",
    "DeviceSummary",
    "FlopModule",
    "FlopSummary",
    "GpuStepTimes",
    "GpuTotals",
    "GpuWork",
    "Group",
    "Holder",
    "Mark",
    "MemoryModule",
    "MemorySummary",
    "ModuleTimes",
    "Name",
    "OpenCall",
    "OperatorTotals",
    "Overview",
    "PartTimes",
    "Process",
    "Range",
    "RingAnalysis",
    "Slices",
    "Span",
    "Spans",
    "Stats",
    "StepFlops",
    "StepParts",
    "StepTimes",
    "Summary",
    "ThreadStack",
    "Timeline",
    "Track",
    "UnitTimes",
    "build_timeline",
    "launching_spans",
]
