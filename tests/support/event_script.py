"""Events written by hand: a real ring whose clock the test sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from modtrace.ring import Events, Kind, Ring, RingSnapshot
from modtrace.ring.slot_format import (
    ABANDONED_BIT,
    CALL_KEY_BITS,
    DEVICE_TIME_BITS,
    EVENT_NUMBER_MASK,
    FORWARD_THREAD_SHIFT,
    KIND_SHIFT,
    NO_NAME,
    RECOMPUTE_BIT,
    SEQUENCE_BITS,
    THREAD_SHIFT,
)

__all__ = ["WALL", "EventScript"]

WALL = 1_700_000_000_000_000_000
"""Time of the wall clock at monotonic time 0."""


class EventScript:
    """Writes events; each method takes the monotonic nanosecond at which the event happens.

    Args:
        capacity: events that the ring keeps.
        path: a file behind the ring.
        metadata: in the file's header.
        clock: the clock's time, by the time given to a method.
    """

    def __init__(
        self,
        capacity: int = 64,
        path: Path | None = None,
        metadata: Mapping[str, object] | None = None,
        clock: Callable[[int], int] = lambda time: time,
    ) -> None:
        self._ring = Ring(capacity, path, metadata)
        self._clock = clock
        self._now = 0
        self._write = self._ring.make_writer(lambda: self._now)
        self._thread = self.add_thread("MainThread", tid=1, torch_thread_id=1)

    def add_thread(self, name: str, tid: int, torch_thread_id: int = -1) -> int:
        """Note a thread; `torch_thread_id` is torch's number for it."""
        return self._ring.names.thread(name, tid, torch_thread_id)

    def on_thread(self, thread: int) -> None:
        """Write the next events on this thread."""
        self._thread = thread

    def name(self, fqn: str, label: str = "", module_class: str = "M") -> int:
        """Note a module's name."""
        return self._ring.names.name(label or fqn, fqn, module_class)

    def event(self, time: int, kind: Kind, name: int, value: int) -> None:
        """Write any event."""
        self._now = self._clock(time)
        self._write(kind << KIND_SHIFT | self._thread << THREAD_SHIFT | name, value)

    def enter(self, time: int, name: int, call_index: int = 0, sequence: int = 0, *, recompute: bool = False) -> None:
        kind = Kind.RECOMPUTE_ENTER if recompute else Kind.FORWARD_ENTER
        self.event(time, kind, name, call_index << SEQUENCE_BITS | sequence)

    def exit(self, time: int, name: int, call_index: int = 0, sequence: int = 0, *, recompute: bool = False) -> None:
        kind = Kind.RECOMPUTE_EXIT if recompute else Kind.FORWARD_EXIT
        self.event(time, kind, name, call_index << SEQUENCE_BITS | sequence)

    def node(self, begin: int, end: int, sequence: int, *, graph_task: int = 0, forward_thread: int = 1) -> None:
        """Write a node of the native engine with no other node in it."""
        self.node_begin(begin, sequence, graph_task=graph_task, forward_thread=forward_thread)
        self.node_end(end, sequence, graph_task=graph_task, forward_thread=forward_thread)

    def node_begin(self, time: int, sequence: int, *, graph_task: int = 0, forward_thread: int = 1) -> None:
        self.event(time, Kind.NODE_BEGIN, forward_thread << FORWARD_THREAD_SHIFT | graph_task, sequence)

    def node_end(self, time: int, sequence: int, *, graph_task: int = 0, forward_thread: int = 1) -> None:
        self.event(time, Kind.NODE_END, forward_thread << FORWARD_THREAD_SHIFT | graph_task, sequence)

    def accumulate_end(self, time: int, *, graph_task: int = 0, forward_thread: int = 0) -> None:
        self.event(time, Kind.ACCUMULATE_END, forward_thread << FORWARD_THREAD_SHIFT | graph_task, 0)

    def graph_built(self, time: int, sequence: int) -> None:
        """Write the event of a node that builds a graph, beside its begin and end."""
        self.event(time, Kind.GRAPH_BUILT, NO_NAME, sequence)

    def call_backward(
        self, time: int, name: int, call_index: int = 0, *, graph_task: int = 0, recompute: bool = False
    ) -> None:
        """Write the Python engine's event that from now on the nodes of this call run."""
        call_key = call_index | RECOMPUTE_BIT if recompute else call_index
        self.event(time, Kind.CALL_BACKWARD, name, graph_task << CALL_KEY_BITS | call_key)

    def backward_over(self, time: int, *, graph_task: int = 0, abandoned: bool = False) -> None:
        self.event(time, Kind.BACKWARD_OVER, NO_NAME, graph_task | ABANDONED_BIT if abandoned else graph_task)

    def pass_begin(self, time: int, number: int = 1) -> None:
        """Write that the thread calls the function that runs a backward pass."""
        self.event(time, Kind.PASS_BEGIN, NO_NAME, number)

    def pass_end(self, time: int, number: int = 1) -> None:
        self.event(time, Kind.PASS_END, NO_NAME, number)

    def step(self, time: int, number: int) -> None:
        self.event(time, Kind.STEP, NO_NAME, number)

    def mark(self, time: int, text: str) -> None:
        self.event(time, Kind.MARK, self._ring.names.text(text), 0)

    def operator(self, time: int, number: int) -> None:
        """Run an operator by the number of its record."""
        self.event(time, Kind.OPERATOR, NO_NAME, number)

    def note_operator(self, number: int, name: str, dtype: str, flops: int, nbytes: int = 0) -> None:
        """Note the cost of an operator on the CPU."""
        self._ring.names.operator(number, name, "cpu", dtype, flops, nbytes)

    def note_group(self, name: str, ranks: str, description: str) -> None:
        """Note a process group."""
        self._ring.names.group(name, ranks, description)

    def collective(self, time: int, kind: Kind, text: str, value: int) -> None:
        """Write an event of a collective whose name is `text`."""
        self.event(time, kind, self._ring.names.text(text), value)

    def queued(self, time: int, number: int, stream: int = 0) -> None:
        """Write that event `number` of the device follows this thread's last event."""
        self.event(time, Kind.DEVICE_QUEUED, stream, number)

    def reached(self, time: int, number: int, device_ns: int) -> None:
        """Write that event `number` was read: the device reached it at `device_ns` of its own clock."""
        self.event(time, Kind.DEVICE_REACHED, number & EVENT_NUMBER_MASK, device_ns)

    def pending(self, time: int, number: int, stream: int = 0) -> None:
        """Write that the device had not reached event `number` when it was queried."""
        self.event(time, Kind.DEVICE_PENDING, stream, number)

    def device_clock(self, time: int, width_ns: int, device_ns: int, device: int = 0) -> None:
        """Write that the device's clock showed `device_ns` at most `width_ns` before `time`."""
        self.event(time, Kind.DEVICE_CLOCK, width_ns, device << DEVICE_TIME_BITS | device_ns)

    def note(self, record: Mapping[str, object]) -> None:
        """Note any record."""
        self._ring.names.note(record)

    def close(self) -> None:
        """End the recording in good order."""
        self._ring.close()

    def events(self) -> Events:
        """Return the events in the ring."""
        return self._ring.read().slots.events

    def snapshot(self) -> RingSnapshot:
        """Return the content of the ring, with clocks that run alike from `WALL` on."""
        snapshot = self._ring.read()
        records = [record for record in snapshot.records if record["kind"] != "anchor"]
        return snapshot._replace(records=[*records, {"kind": "anchor", "monotonic": 0, "wall": WALL}])
