"""Traces of torch.profiler: read them, align a recording with them, attribute kernels to modules, merge."""

from __future__ import annotations

from .handler import TraceHandler, on_trace_ready
from .result import MergeResult
from .write.json_merge import merge
from .write.merge_metadata import read_merge_metadata, read_merged_summary

__all__ = [
    "MergeResult",
    "TraceHandler",
    "merge",
    "on_trace_ready",
    "read_merge_metadata",
    "read_merged_summary",
]
