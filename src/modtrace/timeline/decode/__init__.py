"""A ring's events → a timeline: pair, nest, attribute the nodes to calls, cut backward spans, convert the clock."""

from __future__ import annotations

from .attribution import attribute_nodes
from .call_tree import Intervals, build_intervals
from .clock import Clock
from .from_ring import build_timeline
from .module_events import module_events
from .name_lookup import NameLookup
from .pair_collectives import is_communication
from .pairing import call_ids, segment_pass
from .passes import PassColumns, pair_passes
from .steps import step_ends

__all__ = [
    "Clock",
    "Intervals",
    "NameLookup",
    "PassColumns",
    "attribute_nodes",
    "build_intervals",
    "build_timeline",
    "call_ids",
    "is_communication",
    "module_events",
    "pair_passes",
    "segment_pass",
    "step_ends",
]
