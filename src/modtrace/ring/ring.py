"""Ring: the slots and the name table of one recording, in memory or in a file."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import struct
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from .._errors import RingError
from .._typing import Int64Array
from ..record_options import check_capacity
from .file import RingFile, prefault
from .file_header import SLOTS_OFFSET
from .name_table import NameTable
from .read_file import RingSnapshot, read_slots, slot_blocks
from .slot_format import LAP_MASK, LAP_SHIFT, SLOT_BYTES, WORDS_PER_SLOT, Kind

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")

WriteSlot = Callable[[int, int], None]
"""`write(meta, value)`: meta is kind, thread and name packed; the clock is read and the serial number taken inside."""


class Ring:
    """The slots and the name table of one recording.

    Args:
        capacity: events kept; the oldest are overwritten.
        path: a file behind the ring, which then survives the process; None keeps it in memory.
        metadata: about the recording (versions, pid, rank), JSON values; in the file's header.
        keep: how many files of ended processes with this name to keep, under numbers.

    Attributes:
        path: the name that the file got: a numbered one if a running process has the name; None without a file.
        buffer: the mapping that holds the slots.
        offset: bytes before the first slot.
        names: the name table.

    Raises:
        RingError: the capacity is out of range or beyond the memory that can be had, or the file cannot be made.
    """

    def __init__(
        self,
        capacity: int,
        path: str | os.PathLike[str] | None = None,
        metadata: Mapping[str, object] | None = None,
        keep: int = 3,
    ) -> None:
        try:
            check_capacity(capacity)
        except ValueError as error:
            raise RingError(str(error)) from None
        self.capacity = capacity
        self.metadata = dict(metadata or {})
        self._file: RingFile | None = None
        self._closed = False
        self.path: str | None = None
        if path is None:
            self.buffer = _allocate(capacity)
            self.offset = 0
            self.names = NameTable()
        else:
            self._file = RingFile(path, capacity, self.metadata, keep)
            self.path = self._file.path
            self.buffer = self._file.buffer
            self.offset = SLOTS_OFFSET
            self.names = NameTable(self._file.append)
        self.names.anchor()

    def make_writer(self, clock: Callable[[], int] = time.monotonic_ns) -> WriteSlot:
        """Return the function that writes one event from Python; make one per ring, since it counts the serials.

        Args:
            clock: returns monotonic nanoseconds.
        """
        return _make_writer(self.buffer, self.offset, self.capacity, clock)

    def read(self, serials: range | None = None, without: Collection[Kind] = ()) -> RingSnapshot:
        """Read what the ring holds now; other threads may go on writing.

        Args:
            serials: read the events with these numbers alone; None: all.
            without: of `serials`, leave out the events of these kinds, but for the first and the last.
        """
        blocks = slot_blocks(self._slots(), serials)
        slots = read_slots(blocks, self.capacity, *(() if serials is None else (serials, without)))
        return RingSnapshot(slots, list(self.names.records), self.metadata)

    def serials(self) -> range:
        """Return the serial numbers of the events that the ring holds now."""
        recorded = int(self._slots()[:, -1].max())
        return range(max(0, recorded - self.capacity), recorded)

    def _slots(self) -> Int64Array:
        words = np.frombuffer(self.buffer, np.int64, self.capacity * WORDS_PER_SLOT, self.offset)
        return words.reshape(-1, WORDS_PER_SLOT)

    def close(self) -> None:
        """Note that the recording ended in good order, and close the file; the ring stays readable.

        Raises:
            OSError: the disk is full.
        """
        if not self._closed:
            self.names.stop()
        self._closed = True
        file, self._file = self._file, None
        if file is not None:
            file.close()

    @property
    def nbytes(self) -> int:
        """Bytes the slots take."""
        return self.capacity * SLOT_BYTES


def _make_writer(buffer: mmap.mmap, offset: int, capacity: int, clock: Callable[[], int]) -> WriteSlot:
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


def _allocate(capacity: int) -> mmap.mmap:
    """Reserve a ring of `capacity` events that belongs to this process alone (a fork gets a copy).

    Raises:
        RingError: there is not so much memory. The system would give the addresses all the same, and kill the training
            when the ring fills.
    """
    available = _available_memory_bytes()
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


def _available_memory_bytes() -> int | None:
    """Return the bytes that this process can have without the system killing any; None if the system does not say."""
    left = [bytes_left for bytes_left in (_left_on_machine(), *_left_in_groups()) if bytes_left is not None]
    return min(left, default=None)


def _left_on_machine() -> int | None:
    """Return the bytes of memory that are free, can be freed, or swapped out."""
    try:
        lines = _MEMINFO.read_text("utf-8").splitlines()
        kilobytes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return 1024 * (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0))
    except (OSError, ValueError, IndexError, KeyError):
        return None


def _left_in_groups() -> list[int | None]:
    """Return the bytes left in each control group (version 2) that this process is in."""
    with contextlib.suppress(OSError):
        for line in _OWN_GROUPS.read_text("utf-8").splitlines():
            if line.startswith("0::"):
                # A group can have no more than those around it. Inside a container the path may not be there: then its
                # root is what the process sees of its own group.
                group = Path(line[3:])
                return [_left_in_group(_GROUPS / str(folder).lstrip("/")) for folder in (group, *group.parents)]
    return []


def _left_in_group(folder: Path) -> int | None:
    try:
        most, used = (int((folder / f"memory.{name}").read_text("utf-8")) for name in ("max", "current"))
    except (OSError, ValueError):  # no such group, or its limit is the word "max"
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        # Pages of files are given back when memory is asked for.
        for line in (folder / "memory.stat").read_text("utf-8").splitlines():
            if line.startswith("inactive_file "):
                return most - used + int(line.split()[1])
    return most - used
