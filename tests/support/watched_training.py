"""A training that `modtrace watch` follows, written to its ring step by step."""

from __future__ import annotations

import os
import time
from pathlib import Path

from modtrace.ring import Kind
from modtrace.ring.event_text import range_text
from tests.support.event_script import EventScript

MS = 1_000_000


SECOND = 1000 * MS


class Training:
    """Steps written by hand: data loading, then Net with Net.head in it, then 1 ms of nothing; `ms` for each."""

    def __init__(self, path: Path, capacity: int = 4096, begin: int | None = None, **metadata: object) -> None:
        begin = begin or time.monotonic_ns() + SECOND  # no event is before the recording
        self.script = EventScript(capacity, path, {"pid": os.getpid(), **metadata}, lambda at: begin + at)
        self.net, self.head = self.script.name("Net"), self.script.name("Net.head")
        self.now = self.number = 0

    def step(self, *, data: int = 1, head: int = 5, gc: int = 0, marks: int = 1) -> None:
        script, text = self.script, range_text("fetch", "data loading")
        script.collective(self.now, Kind.RANGE_BEGIN, text, self.number)
        script.collective(self._after(data), Kind.RANGE_END, text, self.number)
        script.enter(self.now, self.net, self.number)
        script.enter(self._after(2), self.head, self.number)
        script.exit(self._after(head), self.head, self.number)
        script.exit(self._after(1), self.net, self.number)
        self._after(1 + gc)
        if gc:
            script.event(self.now, Kind.COLLECTION, (1 << 24) - 1, gc * MS << 22)
        for _ in range(marks):
            script.event(self._after(1), Kind.OPTIMIZER_STEP, (1 << 24) - 1, self.number)
        self.number += 1

    def _after(self, ms: int) -> int:
        self.now += ms * MS
        return self.now
