"""Who is late: per step and over the run, which rank kept the others waiting, and in which module."""

from __future__ import annotations

from .findings import find_late, find_slow_ranks, slow_of_recordings, worst_ranks
from .late_steps import OUTSIDE, ModuleExcess, StepFinding
from .slow_run import LateRank, PartOfRun, SlowRun, join_parts

__all__ = [
    "OUTSIDE",
    "LateRank",
    "ModuleExcess",
    "PartOfRun",
    "SlowRun",
    "StepFinding",
    "find_late",
    "find_slow_ranks",
    "join_parts",
    "slow_of_recordings",
    "worst_ranks",
]
