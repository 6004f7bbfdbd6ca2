"""Traces of torch.profiler: read them, align a recording with them, attribute kernels to modules, merge.

What is public is imported when it is asked for: readers of saved traces take parts of this package, and the writers
that a merge needs take several times as long to import as a small trace to read.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .handler import TraceHandler as TraceHandler
    from .handler import on_trace_ready as on_trace_ready
    from .result import MergeResult as MergeResult
    from .write.json_merge import merge as merge
    from .write.merge_metadata import read_merge_metadata as read_merge_metadata
    from .write.merge_metadata import read_merged_summary as read_merged_summary

__all__ = [
    "MergeResult",
    "TraceHandler",
    "merge",
    "on_trace_ready",
    "read_merge_metadata",
    "read_merged_summary",
]

_MODULE_OF = {
    "MergeResult": ".result",
    "TraceHandler": ".handler",
    "merge": ".write.json_merge",
    "on_trace_ready": ".handler",
    "read_merge_metadata": ".write.merge_metadata",
    "read_merged_summary": ".write.merge_metadata",
}


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module, __name__), name)
    return value
