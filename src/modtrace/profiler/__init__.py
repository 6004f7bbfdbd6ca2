"""Traces of torch.profiler: read them, align a recording with them, attribute kernels to modules, merge."""

from __future__ import annotations

from .handler import TraceHandler, on_trace_ready
from .merged import merged_facts, module_totals
from .merging import merge
from .result import Merged
from .totals import ModuleTotal, ModuleTotals

__all__ = [
    "Merged",
    "ModuleTotal",
    "ModuleTotals",
    "TraceHandler",
    "merge",
    "merged_facts",
    "module_totals",
    "on_trace_ready",
]
