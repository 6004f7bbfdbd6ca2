"""Timelines of PyTorch modules: forward, backward and recompute as nested slices, in Perfetto and Chrome traces.

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
    from .merging import MergeResult as MergeResult
    from .merging import merge as merge
    from .profiler import on_trace_ready as on_trace_ready
    from .read import load as load
    from .recording import Recording as Recording
    from .recording import record as record
    from .timeline import Span as Span
    from .timeline import Timeline as Timeline
    from .track.live.trackers import ModTracker as ModTracker
    from .track.live.trackers import ModuleTracker as ModuleTracker

__all__ = [
    "EngineError",
    "MergeResult",
    "ModTracker",
    "ModtraceError",
    "ModuleTracker",
    "Recording",
    "RecordingError",
    "RingError",
    "Span",
    "Timeline",
    "TraceError",
    "WriteError",
    "__version__",
    "load",
    "merge",
    "on_trace_ready",
    "record",
]

# Reading and converting a file must start fast, on a machine without torch: each name is loaded when it is first used.
_HOMES = {
    "ModTracker": ".track.live.trackers",
    "ModuleTracker": ".track.live.trackers",
    "Recording": ".recording",
    "Span": ".timeline",
    "Timeline": ".timeline",
    "load": ".read",
    "MergeResult": ".merging",
    "merge": ".merging",
    "on_trace_ready": ".profiler",
    "record": ".recording",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home, __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if os.environ.get("MODTRACE"):
    importlib.import_module(".autorecord", __name__).start_from_variable()
