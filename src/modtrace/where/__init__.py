"""Where each rank of a run is, or was when it died: from its ring file, also while the process runs."""

from __future__ import annotations

from .hangs import Hang, find_hangs
from .python_stack import NO_PY_SPY, python_stacks
from .rank_groups import RankGroup, group_ranks, headline
from .rank_state import RankState, read_rank_state

__all__ = [
    "NO_PY_SPY",
    "Hang",
    "RankGroup",
    "RankState",
    "find_hangs",
    "group_ranks",
    "headline",
    "python_stacks",
    "read_rank_state",
]
