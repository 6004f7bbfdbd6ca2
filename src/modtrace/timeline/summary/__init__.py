"""What each module of a timeline took, as a table in many forms."""

from __future__ import annotations

from .module_summary import SORT_KEYS, Summary
from .module_times import GpuTotals, ModuleTimes
from .totals import summarize

__all__ = ["SORT_KEYS", "GpuTotals", "ModuleTimes", "Summary", "summarize"]
