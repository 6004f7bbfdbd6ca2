"""Traces of torch.profiler: read them, align a recording with them, attribute kernels to modules, merge."""

from __future__ import annotations

from .attribute.module_times import ModuleTotal, ModuleTotals
from .handler import TraceHandler, on_trace_ready
from .result import MergeResult
from .write.json_merge import merge
from .write.merge_metadata import module_totals, read_merge_metadata

__all__ = [
    "MergeResult",
    "ModuleTotal",
    "ModuleTotals",
    "TraceHandler",
    "merge",
    "module_totals",
    "on_trace_ready",
    "read_merge_metadata",
]
