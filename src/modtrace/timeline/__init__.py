"""Timelines: the spans of a recording, how they are built from a ring's events, selected and summed up."""

from __future__ import annotations

from ..ring.collective_text import CollectiveName
from .collectives import Collective, CollectiveDetails, Collectives, Group, launching_spans
from .contents import BackwardPass, CounterSeries, Mark, Name, Process, Range, Stats, Track
from .decode.analysis import RingAnalysis
from .decode.from_ring import build_timeline
from .decode.large import LargeTimeline, find_large
from .decode.open_calls import AFTER_BACKWARD, OpenCall, ThreadStack
from .decode.pieces import ReadRing, build_in_pieces, find_pieces
from .gpu_work import GpuWork
from .slices import BACKWARD, FORWARD, PHASES, RECOMPUTE, Columns, Slices
from .spans import Span, Spans
from .summary import ModuleTimes, StepTimes, Summary
from .summary.overview import OperatorTotals
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
    "GpuWork",
    "Group",
    "LargeTimeline",
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
    "find_large",
    "find_pieces",
    "launching_spans",
]
