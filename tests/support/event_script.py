"""Events written by hand: a real ring whose clock says what the test says."""

from __future__ import annotations

from modtrace.ring import Events, Kind, Ring, RingSnapshot
from modtrace.ring.slot_format import (
    ABANDONED_BIT,
    CALL_KEY_BITS,
    FORWARD_THREAD_SHIFT,
    KIND_SHIFT,
    NO_NAME,
    RECOMPUTE_BIT,
    SEQUENCE_BITS,
    THREAD_SHIFT,
)

__all__ = ["WALL", "Script"]

WALL = 1_700_000_000_000_000_000
"""What the wall clock says when the monotonic one says 0."""


class Script:
    """Writes events; each method takes the monotonic nanosecond at which it happens.

    Args:
        capacity: events that the ring keeps.
    """

    def __init__(self, capacity: int = 64) -> None:
        self._ring = Ring(capacity)
        self._now = 0
        self._write = self._ring.make_writer(lambda: self._now)
        self._thread = self.add_thread("MainThread", tid=1, torch_thread_id=1)

    def add_thread(self, name: str, tid: int, torch_thread_id: int = -1) -> int:
        """Note a thread; `torch_thread_id` is torch's number of it."""
        return self._ring.names.thread(name, tid, torch_thread_id)

    def on(self, thread: int) -> None:
        """Let what follows happen on this thread."""
        self._thread = thread

    def name(self, fqn: str, label: str = "", module_class: str = "M") -> int:
        """Note a module's name."""
        return self._ring.names.name(label or fqn, fqn, module_class)

    def event(self, at: int, kind: Kind, name: int, value: int) -> None:
        """Write any event."""
        self._now = at
        self._write(kind << KIND_SHIFT | self._thread << THREAD_SHIFT | name, value)

    def enter(self, at: int, name: int, number: int = 0, sequence: int = 0, *, again: bool = False) -> None:
        kind = Kind.RECOMPUTE_ENTER if again else Kind.FORWARD_ENTER
        self.event(at, kind, name, number << SEQUENCE_BITS | sequence)

    def leave(self, at: int, name: int, number: int = 0, sequence: int = 0, *, again: bool = False) -> None:
        kind = Kind.RECOMPUTE_EXIT if again else Kind.FORWARD_EXIT
        self.event(at, kind, name, number << SEQUENCE_BITS | sequence)

    def node(self, begin: int, end: int, sequence: int, *, task: int = 0, origin: int = 1) -> None:
        """A node of the native engine that holds nothing."""
        self.begin(begin, sequence, task=task, origin=origin)
        self.end(end, sequence, task=task, origin=origin)

    def begin(self, at: int, sequence: int, *, task: int = 0, origin: int = 1) -> None:
        self.event(at, Kind.NODE_BEGIN, origin << FORWARD_THREAD_SHIFT | task, sequence)

    def end(self, at: int, sequence: int, *, task: int = 0, origin: int = 1) -> None:
        self.event(at, Kind.NODE_END, origin << FORWARD_THREAD_SHIFT | task, sequence)

    def accumulated(self, at: int, *, task: int = 0, origin: int = 0) -> None:
        self.event(at, Kind.ACCUMULATE_END, origin << FORWARD_THREAD_SHIFT | task, 0)

    def sequence(self, at: int, sequence: int) -> None:
        """What a node that builds a graph notes beside its begin and end."""
        self.event(at, Kind.GRAPH_BUILT, NO_NAME, sequence)

    def goes_on(self, at: int, name: int, number: int = 0, *, task: int = 0, again: bool = False) -> None:
        """From now on the nodes of this call run, says the portable engine."""
        key = number | RECOMPUTE_BIT if again else number
        self.event(at, Kind.CALL_BACKWARD, name, task << CALL_KEY_BITS | key)

    def over(self, at: int, *, task: int = 0, abandoned: bool = False) -> None:
        self.event(at, Kind.BACKWARD_OVER, NO_NAME, task | ABANDONED_BIT if abandoned else task)

    def step(self, at: int, number: int) -> None:
        self.event(at, Kind.STEP, NO_NAME, number)

    def mark(self, at: int, text: str) -> None:
        self.event(at, Kind.MARK, self._ring.names.text(text), 0)

    def events(self) -> Events:
        """What the ring holds."""
        return self._ring.read().slots.events

    def snapshot(self) -> RingSnapshot:
        """What the ring holds, with clocks that run alike from `WALL` on."""
        snapshot = self._ring.read()
        records = [record for record in snapshot.records if record["kind"] != "anchor"]
        return snapshot._replace(records=[*records, {"kind": "anchor", "monotonic": 0, "wall": WALL}])
