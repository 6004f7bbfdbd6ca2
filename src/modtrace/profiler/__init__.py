"""Traces of torch.profiler: read them, align a recording with them, attribute kernels to modules, merge."""

from __future__ import annotations

from .merging import merge
from .result import Merged
from .totals import ModuleTotal, ModuleTotals

__all__ = ["Merged", "ModuleTotal", "ModuleTotals", "merge"]
