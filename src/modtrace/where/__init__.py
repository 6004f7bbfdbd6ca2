"""Where each rank of a run is, or was when it died: from its ring file, also while the process runs."""

from __future__ import annotations

from .rank_groups import RankGroup, group_ranks, headline
from .rank_state import RankState, read_rank_state

__all__ = ["RankGroup", "RankState", "group_ranks", "headline", "read_rank_state"]
