"""Where each rank of a run is, or was when it died: from its ring file, beside a live process too."""

from __future__ import annotations

from .rank_groups import Group, group, headline
from .rank_state import RankState, look

__all__ = ["Group", "RankState", "group", "headline", "look"]
