"""A ring's events → a timeline: pair, nest, attribute the nodes to calls, cut backward spans, convert the clock.

`RingAnalysis` computes each of these at most once per look at a ring.
"""

from __future__ import annotations

from .analysis import RingAnalysis, wall_clock
from .collectives import is_communication
from .from_ring import build_timeline
from .intervals import Intervals
from .open_calls import AFTER_BACKWARD, OpenCall, ThreadStack, lasts_too_long
from .pieces import CrossedError, ReadRing, build_in_pieces, find_pieces

__all__ = [
    "AFTER_BACKWARD",
    "CrossedError",
    "Intervals",
    "OpenCall",
    "ReadRing",
    "RingAnalysis",
    "ThreadStack",
    "build_in_pieces",
    "build_timeline",
    "find_pieces",
    "is_communication",
    "lasts_too_long",
    "wall_clock",
]
