"""Ring: the slots and the name table of one recording, in memory or in a file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import numpy as np

from .._errors import RingError
from ..record_options import check_capacity
from .file import RingFile
from .file_format import SLOTS_OFFSET
from .name_table import NameTable
from .read_file import RingSnapshot
from .slot_format import SLOT_BYTES, WORDS_PER_SLOT
from .slots import WriteSlot, allocate, make_writer, read_slots, slot_blocks

__all__ = ["Ring"]


class Ring:
    """The slots and the name table of one recording.

    Args:
        capacity: events kept; the oldest are overwritten.
        path: a file behind the ring, which then survives the process; None keeps it in memory.
        metadata: about the recording (versions, pid, rank), JSON values; in the file's header.

    Attributes:
        buffer: the mapping that holds the slots.
        offset: bytes before the first slot.
        names: the name table.

    Raises:
        RingError: the capacity is out of range or beyond the memory that can be had, or the file cannot be made.
    """

    def __init__(
        self, capacity: int, path: str | os.PathLike[str] | None = None, metadata: Mapping[str, object] | None = None
    ) -> None:
        try:
            check_capacity(capacity)
        except ValueError as error:
            raise RingError(str(error)) from None
        self.capacity = capacity
        self.metadata = dict(metadata or {})
        self._file: RingFile | None = None
        self._closed = False
        if path is None:
            self.buffer = allocate(capacity)
            self.offset = 0
            self.names = NameTable()
        else:
            self._file = RingFile(path, capacity, self.metadata)
            self.buffer = self._file.buffer
            self.offset = SLOTS_OFFSET
            self.names = NameTable(self._file.append)
        self.names.anchor()

    def make_writer(self, clock: Callable[[], int] = time.monotonic_ns) -> WriteSlot:
        """Return the function that writes one event from Python; make one per ring, since it counts the serials.

        Args:
            clock: returns monotonic nanoseconds.
        """
        return make_writer(self.buffer, self.offset, self.capacity, clock)

    def read(self) -> RingSnapshot:
        """Read what the ring holds now; other threads may go on writing."""
        words = np.frombuffer(self.buffer, np.int64, self.capacity * WORDS_PER_SLOT, self.offset)
        view = words.reshape(-1, WORDS_PER_SLOT)
        return RingSnapshot(read_slots(slot_blocks(view), self.capacity), list(self.names.records), self.metadata)

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
