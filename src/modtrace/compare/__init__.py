"""Comparing: two sets of recordings → which modules became slower or faster, and how sure that is."""

from __future__ import annotations

from .budget_file import Budget
from .changes import Change
from .compare import diff
from .diff_result import Diff, suffix_of
from .side_by_side import Side

__all__ = ["Budget", "Change", "Diff", "Side", "diff", "suffix_of"]
