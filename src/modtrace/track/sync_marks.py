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


class SyncMarks:
    """Writes a mark when called while a profiler runs: often at first, then less and less.

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
        """Write a mark where one is due."""
        now = time.monotonic_ns()
        if now < self._next_ns or not torch._C._autograd._profiler_enabled():
            return
        self._interval_ns = min(self._interval_ns * 5 // 4, _MAX_INTERVAL_NS)
        self._next_ns = now + self._interval_ns
        text = f"{_PREFIX}{self._count}"
        self._count += 1
        text_id = self._names.text(text)
        with _RecordFunctionFast(text):
            self._events.write_event(Kind.MARK, text_id, 0)
