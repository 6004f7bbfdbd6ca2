"""Timelines of PyTorch modules: forward, backward and recompute as nested spans, in Perfetto and Chrome traces.

The names in this package are public. Its submodules are not: what they hold moves without notice.

Example:
    >>> import modtrace
    >>> with modtrace.record("step.pftrace"):
    ...     model(x).sum().backward()
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

from ._errors import EngineError, ModtraceError, RecordingError, RingError, TraceError, WriteError
from ._version import __version__

if TYPE_CHECKING:
    from .compare import Budget as Budget
    from .compare import Change as Change
    from .compare import Diff as Diff
    from .compare import Side as Side
    from .compare import diff as diff
    from .merging import MergeResult as MergeResult
    from .merging import merge as merge
    from .profiler import TraceHandler as TraceHandler
    from .profiler import on_trace_ready as on_trace_ready
    from .read import load as load
    from .recording import Recording as Recording
    from .recording import record as record
    from .timeline import BackwardPass as BackwardPass
    from .timeline import Collective as Collective
    from .timeline import CollectiveName as CollectiveName
    from .timeline import Collectives as Collectives
    from .timeline import Columns as Columns
    from .timeline import CounterSeries as CounterSeries
    from .timeline import DeviceModule as DeviceModule
    from .timeline import DeviceSummary as DeviceSummary
    from .timeline import GpuStepTimes as GpuStepTimes
    from .timeline import GpuTotals as GpuTotals
    from .timeline import Group as Group
    from .timeline import Mark as Mark
    from .timeline import ModuleTimes as ModuleTimes
    from .timeline import Name as Name
    from .timeline import OpenCall as OpenCall
    from .timeline import OperatorTotals as OperatorTotals
    from .timeline import Overview as Overview
    from .timeline import Process as Process
    from .timeline import Span as Span
    from .timeline import Spans as Spans
    from .timeline import Stats as Stats
    from .timeline import StepTimes as StepTimes
    from .timeline import Summary as Summary
    from .timeline import ThreadStack as ThreadStack
    from .timeline import Timeline as Timeline
    from .timeline import Track as Track
    from .track.live.trackers import ModTracker as ModTracker
    from .track.live.trackers import ModuleTracker as ModuleTracker

__all__ = [
    "BackwardPass",
    "Budget",
    "Change",
    "Collective",
    "CollectiveName",
    "Collectives",
    "Columns",
    "CounterSeries",
    "DeviceModule",
    "DeviceSummary",
    "Diff",
    "EngineError",
    "GpuStepTimes",
    "GpuTotals",
    "Group",
    "Mark",
    "MergeResult",
    "ModTracker",
    "ModtraceError",
    "ModuleTimes",
    "ModuleTracker",
    "Name",
    "OpenCall",
    "OperatorTotals",
    "Overview",
    "Process",
    "Recording",
    "RecordingError",
    "RingError",
    "Side",
    "Span",
    "Spans",
    "Stats",
    "StepTimes",
    "Summary",
    "ThreadStack",
    "Timeline",
    "TraceError",
    "TraceHandler",
    "Track",
    "WriteError",
    "__version__",
    "diff",
    "load",
    "merge",
    "on_trace_ready",
    "record",
]

# Reading and converting a file must start fast, on a machine without torch: each name is loaded when it is first used.
_MODULE_OF = {
    "Budget": ".compare",
    "BackwardPass": ".timeline",
    "Change": ".compare",
    "Collective": ".timeline",
    "CollectiveName": ".timeline",
    "Collectives": ".timeline",
    "Group": ".timeline",
    "OperatorTotals": ".timeline",
    "Columns": ".timeline",
    "CounterSeries": ".timeline",
    "Diff": ".compare",
    "DeviceModule": ".timeline",
    "DeviceSummary": ".timeline",
    "GpuStepTimes": ".timeline",
    "GpuTotals": ".timeline",
    "Mark": ".timeline",
    "MergeResult": ".merging",
    "ModTracker": ".track.live.trackers",
    "ModuleTimes": ".timeline",
    "ModuleTracker": ".track.live.trackers",
    "Name": ".timeline",
    "OpenCall": ".timeline",
    "Overview": ".timeline",
    "Process": ".timeline",
    "Recording": ".recording",
    "Side": ".compare",
    "Span": ".timeline",
    "Spans": ".timeline",
    "Stats": ".timeline",
    "StepTimes": ".timeline",
    "Summary": ".timeline",
    "ThreadStack": ".timeline",
    "Timeline": ".timeline",
    "TraceHandler": ".profiler",
    "Track": ".timeline",
    "diff": ".compare",
    "load": ".read",
    "merge": ".merging",
    "on_trace_ready": ".profiler",
    "record": ".recording",
}


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(importlib.import_module(module, __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from ._requirements import TorchMissingError

        raise TorchMissingError from None
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if os.environ.get("MODTRACE"):
    importlib.import_module(".autorecord", __name__).start_from_variable()
