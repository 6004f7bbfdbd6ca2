"""Timelines: the spans of a recording, how they are built from a ring's events, selected and summed up."""

from __future__ import annotations

from ..ring.collective_text import CollectiveName
from .collectives import Collective, CollectiveDetails, Collectives, Group, launching_spans
from .communication_totals import OperatorTotals
from .contents import BackwardPass, CounterSeries, Mark, Name, Process, Range, Stats, Track
from .decode import (
    AFTER_BACKWARD,
    CrossedError,
    OpenCall,
    ReadRing,
    RingAnalysis,
    ThreadStack,
    build_in_pieces,
    build_timeline,
    find_pieces,
)
from .gpu_work import GpuWork
from .slices import BACKWARD, FORWARD, PHASES, RECOMPUTE, Columns, Slices
from .spans import Span, Spans
from .summary import ModuleTimes, StepTimes, Summary
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
    "CrossedError",
    "GpuWork",
    "Group",
    "Mark",
    "ModuleTimes",
    "Name",
    "OpenCall",
    "OperatorTotals",
    "Process",
    "Range",
    "ReadRing",
    "RingAnalysis",
    "Slices",
    "Span",
    "Spans",
    "Stats",
    "StepTimes",
    "Summary",
    "ThreadStack",
    "Timeline",
    "Track",
    "build_in_pieces",
    "build_timeline",
    "find_pieces",
    "launching_spans",
]
