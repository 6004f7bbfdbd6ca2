"""What one event is: four 64-bit integers, the same for both engines.

A slot is `meta · time · value · stamp`:

- meta: `lap << 48 | kind << 40 | thread << 24 | name`; the lap is how often the ring had been filled, modulo 2**15.
- time: monotonic nanoseconds.
- value: by kind, see `Kind`.
- stamp: the event's serial number plus one; 0 in a slot that was never written.

Meta is written first and the stamp last. A reader copies the stamp first and meta last; a slot is whole where the
lap in meta is the lap of the stamp. So torn and overwritten slots are told apart without a lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .._typing import AnyArray, Int8Array, Int32Array, Int64Array

__all__ = [
    "ABANDONED",
    "CALLS_IN",
    "CALLS_OUT",
    "KEY_BITS",
    "KIND_SHIFT",
    "LAP_MASK",
    "LAP_SHIFT",
    "NAME_BITS",
    "NO_NAME",
    "NUMBER_BITS",
    "RECOMPUTE_BIT",
    "SEQUENCE_BITS",
    "SLOT_BYTES",
    "THREAD_BITS",
    "THREAD_SHIFT",
    "WORDS",
    "Events",
    "Kind",
]

WORDS = 4
SLOT_BYTES = 8 * WORDS

NAME_BITS = 24
THREAD_BITS = 16
THREAD_SHIFT = NAME_BITS
KIND_SHIFT = THREAD_SHIFT + THREAD_BITS
LAP_SHIFT = 48
LAP_MASK = (1 << 15) - 1

NO_NAME = (1 << NAME_BITS) - 1
"""The name of what belongs to no module."""

SEQUENCE_BITS = 38
NUMBER_BITS = 25
"""A call's value holds `number << SEQUENCE_BITS | sequence number`; both wrap at their width."""
RECOMPUTE_BIT = 1 << NUMBER_BITS
KEY_BITS = NUMBER_BITS + 1
"""A call is known by its name and its key: its number, and `RECOMPUTE_BIT` where it ran inside backward."""
ABANDONED = 1 << 62
"""In the value of a `BACKWARD_OVER`: the graph task had ended by an exception some time before."""


class Kind(IntEnum):
    """The kinds of event; the value's meaning stands beside each."""

    FORWARD_ENTER = 1  # call number · the thread's sequence number
    FORWARD_EXIT = 2  # the same
    RECOMPUTE_ENTER = 3  # a forward inside backward: number among the recomputations · sequence number
    RECOMPUTE_EXIT = 4  # the same
    NODE_BEGIN = 5  # sequence number; name: low byte the graph task, above it the forward thread
    NODE_END = 6  # the same
    NODE_SEQUENCE = 7  # the thread's sequence number just before and just after a node that builds a graph
    BACKWARD = 8  # graph task << KEY_BITS | key of the call whose nodes run from now on (NO_NAME: no module's)
    BACKWARD_OVER = 9  # graph task, or pass
    STEP = 10  # the number of the step that ended
    MARK = 11  # name: a text; value free
    COUNTER = 12  # name: a text; the sampled value
    SHAPES = 13  # name: a text; the call entered just before on this thread has these inputs
    ACCUMULATED = 14  # the end of an AccumulateGrad, which counts to the node before it; name: as of a node
    STRETCH = 15  # pass << SEQUENCE_BITS | number of the first node of those that run from now on; name: as of a node


CALLS_IN = (Kind.FORWARD_ENTER, Kind.RECOMPUTE_ENTER)
CALLS_OUT = (Kind.FORWARD_EXIT, Kind.RECOMPUTE_EXIT)


@dataclass(frozen=True, slots=True)
class Events:
    """Whole events in serial order, as columns of equal length.

    Attributes:
        serial: int64, ascending, with gaps where slots were torn.
        time: int64, monotonic nanoseconds.
        kind: int8, a `Kind`.
        thread: int32, index into the threads of the name table.
        name: int32, index into its names.
        value: int64, by kind.
    """

    serial: Int64Array
    time: Int64Array
    kind: Int8Array
    thread: Int32Array
    name: Int32Array
    value: Int64Array

    def __len__(self) -> int:
        return len(self.serial)

    def take(self, index: AnyArray) -> Events:
        """Return the events at `index` (positions or a mask)."""
        return Events(
            self.serial[index],
            self.time[index],
            self.kind[index],
            self.thread[index],
            self.name[index],
            self.value[index],
        )
