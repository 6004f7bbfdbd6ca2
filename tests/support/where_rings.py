"""Ring files of a process whose position a test sets, and states of ranks made without any."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import Any

from modtrace.live.where import RankState
from modtrace.ring import Kind, Ring
from modtrace.ring.slot_format import (
    KIND_SHIFT,
    SEQUENCE_BITS,
    THREAD_SHIFT,
)
from modtrace.timeline import OpenCall, ThreadStack

__all__ = ["SECOND", "Writer", "state"]

SECOND = 1_000_000_000
_alive: list[object] = []
"""Keeps every ring alive, and so its lock."""


class Writer:
    """A ring file of a process whose position the test sets; methods take seconds since the recording's start."""

    def __init__(self, file: Path, rank: int | None = None, **metadata: object) -> None:
        host = hashlib.sha256(f"modtrace {socket.gethostname()}".encode()).hexdigest()[:12]
        known = {"pid": os.getpid(), "engine": "native", "host": host, "rank": rank}
        self.ring = Ring(64, file, {key: value for key, value in (known | metadata).items() if value is not None})
        _alive.append(self)
        self.start = self.ring.names.records[0]["monotonic"]
        self.now = 0
        self.write = self.ring.make_writer(lambda: self.start + self.now)
        self.thread = self.ring.names.thread("MainThread", 7, 1)

    def event(self, at: float, kind: Kind, name: int, value: int) -> None:
        self.now = int(at * SECOND)
        self.write(kind << KIND_SHIFT | self.thread << THREAD_SHIFT | name, value)

    def call(self, at: float, kind: Kind, fqn: str, number: int = 0, sequence: int = 0) -> None:
        self.event(at, kind, self.ring.names.name(fqn, fqn, "M"), number << SEQUENCE_BITS | sequence)

    def enter(self, at: float, *fqns: str) -> None:
        for fqn in fqns:
            self.call(at, Kind.FORWARD_ENTER, fqn)

    def leave(self, at: float, *fqns: str) -> None:
        for fqn in fqns:
            self.call(at, Kind.FORWARD_EXIT, fqn)


def state(rank: int | None, *stack: tuple[str, str], step: int | None = 5, **fields: Any) -> RankState:
    calls = tuple(OpenCall(fqn, phase, 100 * SECOND) for fqn, phase in stack)
    threads = (ThreadStack("MainThread", 1, calls, 101 * SECOND), ThreadStack("other", 2, (), 0))
    known: dict[str, Any] = {"path": f"run-{rank}.modtrace", "pid": 1, "engine": "native", "state": "running"}
    return RankState(
        **(known | {"now_ns": 112 * SECOND, "last_unix_ns": 0} | fields), rank=rank, step=step, threads=threads
    )
