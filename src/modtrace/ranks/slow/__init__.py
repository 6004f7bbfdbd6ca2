"""Who is late: per step and over the run, which rank kept the others waiting, and in which module."""

from __future__ import annotations

from .findings import LateRank, PartOfRun, RankTables, SlowRun, find_late, join_parts, lateness_matrix
from .late_steps import Bounds
from .step_finding import OUTSIDE, ModuleExcess, StepFinding

__all__ = [
    "OUTSIDE",
    "Bounds",
    "LateRank",
    "ModuleExcess",
    "PartOfRun",
    "RankTables",
    "SlowRun",
    "StepFinding",
    "find_late",
    "join_parts",
    "lateness_matrix",
]
