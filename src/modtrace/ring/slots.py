"""The ring's slots in memory: writing one event, and reading back all that are whole, beside a live writer too."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple, cast

import numpy as np

from .._errors import RingError
from .._typing import Int64Array
from .available_memory import available_memory_bytes
from .slot_format import (
    KIND_MASK,
    KIND_SHIFT,
    LAP_MASK,
    LAP_SHIFT,
    NAME_MASK,
    SLOT_BYTES,
    THREAD_MASK,
    THREAD_SHIFT,
    WORDS_PER_SLOT,
    Events,
    Kind,
)

__all__ = [
    "BLOCK_SLOTS",
    "SlotBlock",
    "SlotSnapshot",
    "WriteSlot",
    "allocate",
    "make_writer",
    "prefault",
    "read_slots",
    "slot_blocks",
]

BLOCK_SLOTS = 1 << 20
"""Slots that are looked at together: 32 MiB."""

_MAX_PREFAULT_BYTES = 1 << 28
_POPULATE_BYTES = 1 << 20
_MADV_POPULATE_WRITE = 23
_KNOWN_KINDS = np.array(list(Kind), np.int64)

WriteSlot = Callable[[int, int], None]
"""`write(meta, value)`: meta is kind, thread and name packed; the clock is read and the serial number taken inside."""


def allocate(capacity: int) -> mmap.mmap:
    """Reserve a ring of `capacity` events that belongs to this process alone (a fork gets a copy).

    Raises:
        RingError: there is not so much memory. The system would give the addresses all the same, and kill the training
            when the ring fills.
    """
    available = available_memory_bytes()
    if available is not None and capacity * SLOT_BYTES > available:
        raise RingError(
            f"a ring of {capacity:,} events takes {capacity * SLOT_BYTES:,} bytes, and {available:,} bytes of memory "
            "can be had; lower capacity"
        )
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            buffer = mmap.mmap(-1, capacity * SLOT_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:  # Windows
            buffer = mmap.mmap(-1, capacity * SLOT_BYTES)
    except OSError as error:  # as of `ulimit -v`
        raise RingError(
            f"a ring of {capacity:,} events takes {capacity * SLOT_BYTES:,} bytes, which this process does not get: "
            f"{error.strerror}; lower capacity"
        ) from error
    prefault(buffer)
    return buffer


def prefault(buffer: mmap.mmap) -> None:
    """Map the pages of a new buffer, up to 256 MiB: the first ones now, the others on a thread, ahead of the writer.

    The first touch of a page costs as much as many events, and the training must not pay for it. A kernel before
    Linux 5.14, or another system, cannot do it without writing; there it does.
    """
    if _madvise() is None:
        return
    length = min(len(buffer), _MAX_PREFAULT_BYTES)
    _populate(buffer, 0, min(length, _POPULATE_BYTES))
    if length > _POPULATE_BYTES:
        threading.Thread(target=_populate_rest, args=(buffer, length), name="modtrace-prefault", daemon=True).start()


def _populate_rest(buffer: mmap.mmap, length: int) -> None:
    # In parts: while it runs, no other thread can map or unmap memory.
    for offset in range(_POPULATE_BYTES, length, _POPULATE_BYTES):
        _populate(buffer, offset, min(length - offset, _POPULATE_BYTES))


def _populate(buffer: mmap.mmap, offset: int, length: int) -> None:
    # By ctypes: what mmap.madvise does, without the interpreter's lock.
    madvise = _madvise()
    if madvise is not None:
        held = np.frombuffer(buffer, np.uint8)
        madvise(held.ctypes.data + offset, length, _MADV_POPULATE_WRITE)


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the C library's `madvise`; None where there is none, as on Windows."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (TypeError, OSError, AttributeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return cast("Callable[[int, int, int], int]", madvise)


def make_writer(
    buffer: mmap.mmap, offset: int, capacity: int, clock: Callable[[], int] = time.monotonic_ns
) -> WriteSlot:
    """Return the function that writes one event; safe from any thread that holds the interpreter.

    Args:
        buffer: the mapping.
        offset: bytes before the first slot.
        capacity: slots in the ring.
        clock: returns monotonic nanoseconds.
    """
    serials = itertools.count().__next__
    pack = struct.Struct(f"{WORDS_PER_SLOT}q").pack_into

    def write(meta: int, value: int) -> None:
        serial = serials()
        lap, index = divmod(serial, capacity)
        # Native packing stores whole words in order: meta with the new lap first, the stamp last.
        pack(buffer, offset + index * SLOT_BYTES, (lap & LAP_MASK) << LAP_SHIFT | meta, clock(), value, serial + 1)

    return write


class SlotBlock(NamedTuple):
    """Some slots of a ring.

    Attributes:
        first: the number of the first one.
        slots: int64[n, 4], a view of the mapping; it may be written to meanwhile.
    """

    first: int
    slots: Int64Array


class SlotSnapshot(NamedTuple):
    """The slots that a ring held when it was read, and how many it had lost.

    Attributes:
        events: the whole events, in serial order.
        recorded: number of events written since the ring was made.
        overwritten: of these, those whose slots were used again, or that were not asked for.
        torn: of these, those whose slots were half written, or damaged.
    """

    events: Events
    recorded: int
    overwritten: int
    torn: int


def slot_blocks(slots: Int64Array) -> Iterator[SlotBlock]:
    """Yield all slots of a view."""
    for first in range(0, len(slots), BLOCK_SLOTS):
        yield SlotBlock(first, slots[first : first + BLOCK_SLOTS])


def read_slots(blocks: Iterable[SlotBlock], capacity: int, first_serial: int = 0) -> SlotSnapshot:
    """Read the whole events of a ring, dead or alive, in memory that follows the number of events and not of slots.

    Args:
        blocks: the slots that may hold events.
        capacity: slots in the ring; more than there are where the file was cut short.
        first_serial: leave out the events before this one, and count them as overwritten.
    """
    parts = [_whole_slots(block, capacity) for block in blocks]
    serial, time_ns, value, meta = np.concatenate([np.empty((4, 0), np.int64), *parts], axis=1)
    whole = np.ones(len(serial), np.bool_)
    recorded = int(serial.max()) + 1 if len(serial) else 0
    if recorded > capacity:
        # All serials of a ring lie within one capacity. One that is damaged must not make all others look overwritten.
        middle = np.partition(serial, len(serial) // 2)[len(serial) // 2]
        whole = np.abs(serial - middle) < capacity
        recorded = int(serial[whole].max()) + 1
    oldest = max(min(first_serial, recorded), recorded - capacity)
    whole &= serial >= oldest
    order = np.flatnonzero(whole)
    order = order[np.argsort(serial[order], kind="stable")]
    meta = meta[order]
    events = Events(
        serial=serial[order],
        time=time_ns[order],
        kind=(meta >> KIND_SHIFT & KIND_MASK).astype(np.int8),
        thread=(meta >> THREAD_SHIFT & THREAD_MASK).astype(np.int32),
        name=(meta & NAME_MASK).astype(np.int32),
        value=value[order],
    )
    kept = len(events)
    return SlotSnapshot(events, recorded, oldest, recorded - oldest - kept)


def _whole_slots(block: SlotBlock, capacity: int) -> Int64Array:
    """Return serial, time, value and meta of the whole events of a block, int64[4, n]."""
    slots = block.slots
    # The order matters beside a live writer: the stamp is written last and so copied first, meta the other way round.
    stamp = slots[:, 3].copy()
    if not stamp.any():
        return np.empty((4, 0), np.int64)
    time_ns = slots[:, 1].copy()
    value = slots[:, 2].copy()
    meta = slots[:, 0].copy()
    # Python's struct clears a slot before it fills it, so a stamp can also vanish meanwhile.
    whole = slots[:, 3] == stamp
    serial = stamp - 1
    whole &= (stamp > 0) & (serial % capacity == np.arange(block.first, block.first + len(slots)))
    whole &= (serial // capacity & LAP_MASK) == meta >> LAP_SHIFT
    whole &= np.isin(meta >> KIND_SHIFT & KIND_MASK, _KNOWN_KINDS)
    return np.stack([column[whole] for column in (serial, time_ns, value, meta)])
