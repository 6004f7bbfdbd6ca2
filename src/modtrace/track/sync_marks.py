"""Sync marks: moments that both the ring and a running torch.profiler record, by which the two are aligned later."""

from __future__ import annotations

import time

import torch
from torch._C._profiler import _RecordFunctionFast

from ..ring import Kind, NameTable
from .event_sink import EventSink

__all__ = ["SyncMarks"]

_MIN_INTERVAL_NS, _MAX_INTERVAL_NS = 2_000_000, 100_000_000
_PREFIX = "modtrace.sync#"
_BURST = 3


class SyncMarks:
    """Writes some marks when called while a profiler runs: often at first, then less and less.

    Args:
        events: takes the marks.
        names: takes their texts.
    """

    def __init__(self, events: EventSink, names: NameTable) -> None:
        self._events = events
        self._names = names
        self._count = 0
        self._next_ns = 0
        self._interval_ns = _MIN_INTERVAL_NS

    def __call__(self) -> None:
        """Write marks where they are due."""
        now = time.monotonic_ns()
        if now < self._next_ns or not torch._C._autograd._profiler_enabled():
            return
        self._interval_ns = min(self._interval_ns * 5 // 4, _MAX_INTERVAL_NS)
        self._next_ns = now + self._interval_ns
        # The first slice of a burst is long, with cold caches; the last ones are short and tell the offset sharply.
        for _ in range(_BURST):
            text = f"{_PREFIX}{self._count}"
            self._count += 1
            text_id = self._names.text(text)
            slice_ = _RecordFunctionFast(text)
            with slice_:
                self._events.write_event(Kind.MARK, text_id, 0)
