"""Events → nested spans; Timeline; summaries."""

from __future__ import annotations

from ._columns import BACKWARD, FORWARD, PHASES, RECOMPUTE, Columns
from ._timeline import Counter, Mark, Name, Process, Span, Spans, Stats, Timeline, Track
from .build import build_timeline

__all__ = [
    "BACKWARD",
    "FORWARD",
    "PHASES",
    "RECOMPUTE",
    "Columns",
    "Counter",
    "Mark",
    "Name",
    "Process",
    "Span",
    "Spans",
    "Stats",
    "Timeline",
    "Track",
    "build_timeline",
]
