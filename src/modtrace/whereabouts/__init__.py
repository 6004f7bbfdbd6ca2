"""Where each rank of a run is, or was when it died: from its ring file, also while the process runs."""

from __future__ import annotations

from .flight_recorder import FlightRecord, find_all_hangs
from .hangs import Hang, find_hangs
from .look import WhereResult, read_job, where
from .places import RankGroup, group_ranks, headline
from .python_stack import NO_STACKS, python_stacks
from .rank_state import RankState, rank_state_of, read_rank_state
from .streams import StreamState

__all__ = [
    "NO_STACKS",
    "FlightRecord",
    "Hang",
    "RankGroup",
    "RankState",
    "StreamState",
    "WhereResult",
    "find_all_hangs",
    "find_hangs",
    "group_ranks",
    "headline",
    "python_stacks",
    "rank_state_of",
    "read_job",
    "read_rank_state",
    "where",
]
