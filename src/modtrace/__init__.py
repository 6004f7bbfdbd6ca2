"""Timelines of PyTorch modules: forward, backward and recompute as nested spans, in Perfetto and Chrome traces.

The names in this package are public, and so are `integrations.transformers`, `integrations.lightning` and the result
types that the README next to this file lists. Everything else in submodules may change without notice.

Example:
    >>> import modtrace
    >>> with modtrace.record("step.pftrace"):
    ...     model(x).sum().backward()
"""

import importlib
import os
from typing import TYPE_CHECKING

from . import _errors
from ._errors import ArgumentError as ArgumentError
from ._errors import EngineError as EngineError
from ._errors import ModtraceError as ModtraceError
from ._errors import RecordingError as RecordingError
from ._errors import RingError as RingError
from ._errors import TorchMissingError as TorchMissingError
from ._errors import TraceError as TraceError
from ._errors import WriteError as WriteError
from ._version import __version__ as __version__

if TYPE_CHECKING:  # type checkers read these imports, run time uses `_NAMES`; a test compares them
    from .checking import check as check
    from .compare import Diff as Diff
    from .compare import diff as diff
    from .compare import save_baseline as save_baseline
    from .live.where import where as where
    from .public import Timeline as Timeline
    from .public import load as load
    from .public import merge as merge
    from .ranks import load_ranks as load_ranks
    from .ranks.slow import find_slow_ranks as find_slow_ranks
    from .recording import Recording as Recording
    from .recording import current as current
    from .recording import range as range  # noqa: A004  # only as modtrace.range
    from .recording import record as record
    from .recording.profiler_handler import on_trace_ready as on_trace_ready
    from .reporting import report as report
    from .timeline import Span as Span
    from .timeline import Summary as Summary
    from .track.trackers import ModTracker as ModTracker
    from .track.trackers import ModuleTracker as ModuleTracker

# Reading and converting a file must start fast, on a machine without torch: each name is loaded when it is first used.
_NAMES = {
    ".checking": ("check",),
    ".compare": ("Diff", "diff", "save_baseline"),
    ".live.where": ("where",),
    ".public": ("Timeline", "load", "merge"),
    ".ranks": ("load_ranks",),
    ".ranks.slow": ("find_slow_ranks",),
    ".recording": ("Recording", "current", "range", "record"),
    ".recording.profiler_handler": ("on_trace_ready",),
    ".reporting": ("report",),
    ".timeline": ("Span", "Summary"),
    ".track.trackers": ("ModTracker", "ModuleTracker"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_MODULE_OF, *_errors.__all__, "__version__"])


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if module.startswith((".recording", ".track")):
            importlib.import_module("torch")  # first: a recording that waits for torch needs complete modules
        value = globals()[name] = getattr(importlib.import_module(module, __name__), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise TorchMissingError from None
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if os.environ.get("MODTRACE"):
    importlib.import_module(".integrations.auto_recording", __name__).start_from_variable()
