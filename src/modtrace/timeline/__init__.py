"""Timelines: the spans of a recording, how they are built from a ring's events, selected and summed up."""

from __future__ import annotations

from .build import build_timeline
from .columns import BACKWARD, FORWARD, PHASES, RECOMPUTE, Columns
from .contents import BackwardPass, CounterSeries, Mark, Name, Process, Stats, Track
from .open_calls import AFTER_BACKWARD, OpenCall, ThreadStack, open_stacks
from .spans import Span, Spans
from .summary import GpuTotals, ModuleTimes, Overview, StepTimes, Summary
from .timeline import Timeline

__all__ = [
    "AFTER_BACKWARD",
    "BACKWARD",
    "FORWARD",
    "PHASES",
    "RECOMPUTE",
    "BackwardPass",
    "Columns",
    "CounterSeries",
    "GpuTotals",
    "Mark",
    "ModuleTimes",
    "Name",
    "OpenCall",
    "Overview",
    "Process",
    "Span",
    "Spans",
    "Stats",
    "StepTimes",
    "Summary",
    "ThreadStack",
    "Timeline",
    "Track",
    "build_timeline",
    "open_stacks",
]
