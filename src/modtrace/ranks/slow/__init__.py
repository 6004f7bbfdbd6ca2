"""Late ranks: which rank kept the others waiting, per step and over the run, and in which module."""

from .findings import find_late_in_rings, find_slow_ranks, slow_of_recordings, worst_ranks
from .late_steps import LateVerdict, StepFinding
from .role_waits import RoleWait
from .slow_run import LateRank, PartOfRun, SlowRun

__all__ = [
    "LateRank",
    "LateVerdict",
    "PartOfRun",
    "RoleWait",
    "SlowRun",
    "StepFinding",
    "find_late_in_rings",
    "find_slow_ranks",
    "slow_of_recordings",
    "worst_ranks",
]
