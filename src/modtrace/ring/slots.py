"""The ring's slots in memory: writing one event, and reading back all that are whole."""

from __future__ import annotations

import itertools
import mmap
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .._typing import Int64Array
from .slot_format import (
    KIND_SHIFT,
    LAP_MASK,
    LAP_SHIFT,
    NO_NAME,
    SLOT_BYTES,
    THREAD_BITS,
    THREAD_SHIFT,
    WORDS,
    Events,
    Kind,
)

__all__ = ["Reading", "Write", "memory", "read_slots", "touch", "writer"]

_MOST_TOUCHED = 1 << 28
_KINDS = np.array(list(Kind), np.int64)

Write = Callable[[int, int], None]
"""`write(meta, value)`: meta is kind, thread and name packed; the clock is read and the serial number taken inside."""


def memory(capacity: int) -> mmap.mmap:
    """Reserve a ring of `capacity` events that belongs to this process alone (a fork gets a copy)."""
    buffer = mmap.mmap(-1, capacity * SLOT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    touch(buffer)
    return buffer


def touch(buffer: mmap.mmap) -> None:
    """Map every page of a new buffer: its first touch costs as much as many events, and the training must not pay."""
    if len(buffer) <= _MOST_TOUCHED:
        np.frombuffer(buffer, np.uint8)[:: mmap.PAGESIZE] |= 0


def writer(buffer: mmap.mmap, offset: int, capacity: int, clock: Callable[[], int] = time.monotonic_ns) -> Write:
    """Return the function that writes one event; safe from any thread that holds the interpreter.

    Args:
        buffer: the mapping.
        offset: bytes before the first slot.
        capacity: slots in the ring.
        clock: monotonic nanoseconds.
    """
    serials = itertools.count().__next__
    pack = struct.Struct(f"{WORDS}q").pack_into

    def write(meta: int, value: int) -> None:
        serial = serials()
        lap, index = divmod(serial, capacity)
        # Native packing stores whole words in order: meta with the new lap first, the stamp last.
        pack(buffer, offset + index * SLOT_BYTES, (lap & LAP_MASK) << LAP_SHIFT | meta, clock(), value, serial + 1)

    return write


class Reading(NamedTuple):
    """What a ring held when it was read.

    Attributes:
        events: the whole events, in serial order.
        recorded: events written since the ring was made.
        overwritten: of these, those whose slots were used again.
        torn: those whose slots were half written.
    """

    events: Events
    recorded: int
    overwritten: int
    torn: int


def read_slots(slots: Int64Array, capacity: int) -> Reading:
    """Read the whole events of a ring, dead or alive.

    Args:
        slots: int64[n, 4], a view of the mapping; it may be written to meanwhile.
        capacity: slots in the ring; more than n where the file was cut.
    """
    # The order matters beside a live writer: the stamp is written last and so copied first, meta the other way round.
    stamp = slots[:, 3].copy()
    time_ns = slots[:, 1].copy()
    value = slots[:, 2].copy()
    meta = slots[:, 0].copy()
    # Python's struct clears a slot before it fills it, so a stamp can also vanish meanwhile.
    whole = slots[:, 3] == stamp
    serial = stamp - 1
    whole &= (stamp > 0) & (serial % capacity == np.arange(len(slots)))
    whole &= (serial // capacity & LAP_MASK) == meta >> LAP_SHIFT
    whole &= np.isin(meta >> KIND_SHIFT & 0xFF, _KINDS)
    recorded = int(serial[whole].max()) + 1 if whole.any() else 0
    if recorded > capacity:
        # All serials of a ring lie within one capacity. One that is damaged must not make all others look overwritten.
        numbers = serial[whole]
        middle = np.partition(numbers, len(numbers) // 2)[len(numbers) // 2]
        whole &= np.abs(serial - middle) < capacity
        recorded = int(serial[whole].max()) + 1
    oldest = max(0, recorded - capacity)
    whole &= serial >= oldest
    order = np.flatnonzero(whole)
    order = order[np.argsort(serial[order], kind="stable")]
    meta = meta[order]
    events = Events(
        serial=serial[order],
        time=time_ns[order],
        kind=(meta >> KIND_SHIFT & 0xFF).astype(np.int8),
        thread=(meta >> THREAD_SHIFT & (1 << THREAD_BITS) - 1).astype(np.int32),
        name=(meta & NO_NAME).astype(np.int32),
        value=value[order],
    )
    kept = len(events)
    return Reading(events, recorded, oldest, recorded - oldest - kept)
