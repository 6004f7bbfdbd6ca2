"""Events → nested spans; Timeline; summaries."""

from __future__ import annotations

from .build import build_timeline
from .columns import BACKWARD, FORWARD, PHASES, RECOMPUTE, Columns
from .summary import GpuTotals, ModuleTimes, Summary
from .timeline import CounterSeries, Mark, Name, Process, Span, Spans, Stats, Timeline, Track

__all__ = [
    "BACKWARD",
    "FORWARD",
    "PHASES",
    "RECOMPUTE",
    "Columns",
    "CounterSeries",
    "GpuTotals",
    "Mark",
    "ModuleTimes",
    "Name",
    "Process",
    "Span",
    "Spans",
    "Stats",
    "Summary",
    "Timeline",
    "Track",
    "build_timeline",
]
