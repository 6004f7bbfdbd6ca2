"""Where each rank of a run is, or was when it died: from its ring file, also while the process runs."""

from __future__ import annotations

from .flight_recorder import rank_of_dump
from .hangs import Hang, find_hangs
from .join_flight_records import find_all_hangs
from .parallel_reader import ParallelReader
from .python_stack import NO_STACKS, python_stacks
from .rank_groups import RankGroup, group_ranks, headline
from .rank_state import RankState, rank_state_of, read_rank_state
from .read_states import States, read_states
from .stream_state import StreamState

__all__ = [
    "NO_STACKS",
    "Hang",
    "ParallelReader",
    "RankGroup",
    "RankState",
    "States",
    "StreamState",
    "find_all_hangs",
    "find_hangs",
    "group_ranks",
    "headline",
    "python_stacks",
    "rank_of_dump",
    "rank_state_of",
    "read_rank_state",
    "read_states",
]
