"""The slots of a ring file: all of them, or only those of the last events."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

import numpy as np

from .._system.read_at import read_at
from .file_format import SLOTS_OFFSET
from .slot_format import SLOT_BYTES, WORDS_PER_SLOT
from .slots import BLOCK_SLOTS, SlotBlock, SlotSnapshot, read_slots

__all__ = ["is_hollow", "read_file_slots"]

_STAMP = struct.Struct("<q")
_MAX_REREADS = 20
_BYTES_PER_BLOCK = 512
"""What `st_blocks` counts in, on every system."""
_MIN_BYTES_WITH_HOLES = 1 << 32
_SLOTS_AHEAD = 1 << 10
"""Slots behind the newest event that are read with it: the writer goes on meanwhile."""

SlotRange = tuple[int, int]
"""The number of the first slot, and that behind the last one."""


def read_file_slots(descriptor: int, size: int, capacity: int, last_events: int | None = None) -> SlotSnapshot:
    """Read the whole events of a ring file.

    Args:
        descriptor: the file's.
        size: its bytes.
        capacity: slots in the ring; more than there are where the file was cut short.
        last_events: read no more than about so many, the last ones, and count the others as overwritten; None: all.
    """
    count = max(0, min(capacity, (size - SLOTS_OFFSET) // SLOT_BYTES))
    slots = _read_once(descriptor, count, capacity, last_events)
    for _ in range(_MAX_REREADS):
        # Read again where serials are missing: the writer overtook a reader that had to pause. What is missing still
        # when nothing was written since is missing in the file.
        recorded = slots.recorded
        if not len(slots.events) or np.all(np.diff(slots.events.serial) == 1):
            break
        slots = _read_once(descriptor, count, capacity, last_events)
        if slots.recorded == recorded:
            break
    return slots


def is_hollow(descriptor: int) -> bool:
    """Tell whether less than half of a file is there: that of a new ring is reserved."""
    status = os.fstat(descriptor)
    blocks = getattr(status, "st_blocks", None)  # None on Windows, which has no holes in a file that was copied there
    return blocks is not None and blocks * _BYTES_PER_BLOCK < status.st_size // 2


def _read_once(descriptor: int, count: int, capacity: int, last_events: int | None) -> SlotSnapshot:
    if last_events is not None and last_events + _SLOTS_AHEAD < count:
        newest = _find_newest(descriptor, count, capacity)
        if newest is not None:
            oldest = max(0, newest + 1 - last_events)
            ranges = _slots_of(oldest, newest + 1 + _SLOTS_AHEAD, count, capacity)
            return read_slots(_slot_blocks(descriptor, ranges), capacity, oldest)
    return read_slots(_slot_blocks(descriptor, _data_ranges(descriptor, count)), capacity)


def _find_newest(descriptor: int, count: int, capacity: int) -> int | None:
    """Return the serial number of the newest event by bisection: behind it, slots are a lap older, or empty.

    None where no event is in the first slot, or where a slot says what it cannot: then only all slots together tell.
    """

    def serial_in(slot: int) -> int:
        stamp = read_at(descriptor, _STAMP.size, SLOTS_OFFSET + (slot + 1) * SLOT_BYTES - _STAMP.size)
        return int(_STAMP.unpack(stamp)[0]) - 1

    first = serial_in(0)
    if first < 0 or first % capacity:
        return None
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        serial = serial_in(middle)
        if serial == first + middle:
            low = middle
        elif serial == first + middle - capacity or (serial == -1 and first == 0):
            high = middle
        else:
            return None
    return first + low


def _slots_of(oldest: int, end: int, count: int, capacity: int) -> list[SlotRange]:
    """Return where the events of some serial numbers are, `oldest` to `end`, without those that a cut took away."""
    begin, stop = oldest % capacity, (end - 1) % capacity + 1
    ranges = [(begin, stop)] if begin < stop else [(0, stop), (begin, capacity)]
    return [(first, min(last, count)) for first, last in ranges if first < count]


def _slot_blocks(descriptor: int, ranges: Iterator[SlotRange] | list[SlotRange]) -> Iterator[SlotBlock]:
    """Yield some slots of a file.

    Each block is mapped only while it is looked at. A mapping, not a read: beside a live writer the order in which the
    words are copied matters.
    """
    for begin, end in ranges:
        for first in range(begin, end, BLOCK_SLOTS):
            length = min(BLOCK_SLOTS, end - first)
            offset = SLOTS_OFFSET + first * SLOT_BYTES
            aligned = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            mapping = mmap.mmap(
                descriptor, offset - aligned + length * SLOT_BYTES, access=mmap.ACCESS_READ, offset=aligned
            )
            words = np.frombuffer(mapping, np.int64, length * WORDS_PER_SLOT, offset - aligned)
            del mapping  # so that it goes with the block
            yield SlotBlock(first, words.reshape(-1, WORDS_PER_SLOT))


def _data_ranges(descriptor: int, count: int) -> Iterator[SlotRange]:
    """Yield the slots of a large file between its holes; it has some where its space was not reserved as ours is.

    A smaller file is gone through as a whole: not every file system knows at once where another process wrote.
    """
    if count * SLOT_BYTES < _MIN_BYTES_WITH_HOLES or not is_hollow(descriptor):
        yield (0, count)
        return
    begin, end = SLOTS_OFFSET, SLOTS_OFFSET + count * SLOT_BYTES
    while begin < end:
        try:
            begin = os.lseek(descriptor, begin, os.SEEK_DATA)
        except OSError:  # nothing but a hole follows
            return
        hole = os.lseek(descriptor, begin, os.SEEK_HOLE)
        if begin < end:
            yield ((begin - SLOTS_OFFSET) // SLOT_BYTES, -(-(min(hole, end) - SLOTS_OFFSET) // SLOT_BYTES))
        begin = hole
