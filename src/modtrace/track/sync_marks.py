"""Sync marks: moments that both the ring and a running torch.profiler note, by which the two are aligned later."""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch._C._profiler import _RecordFunctionFast

from ..ring import Kind, NameTable

__all__ = ["SyncMarks"]

_SHORTEST_NS, _LONGEST_NS = 2_000_000, 100_000_000
_PREFIX = "modtrace.sync#"


class _Notes(Protocol):
    def event(self, kind: Kind, name: int, value: int) -> None: ...


class SyncMarks:
    """Emits a mark when called while a profiler runs: often at first, then less and less.

    Args:
        engine: writes the event.
        names: takes the mark's text.
    """

    def __init__(self, engine: _Notes, names: NameTable) -> None:
        self._engine = engine
        self._names = names
        self._count = 0
        self._next = 0
        self._wait = _SHORTEST_NS

    def __call__(self) -> None:
        """Emit a mark where one is due."""
        now = time.monotonic_ns()
        if now < self._next or not torch._C._autograd._profiler_enabled():
            return
        self._wait = min(self._wait * 5 // 4, _LONGEST_NS)
        self._next = now + self._wait
        text = f"{_PREFIX}{self._count}"
        self._count += 1
        name = self._names.text(text)
        with _RecordFunctionFast(text):
            self._engine.event(Kind.MARK, name, 0)
