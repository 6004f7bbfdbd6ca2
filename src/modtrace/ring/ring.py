"""Ring: the slots and the name table of one recording, in memory or in a file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import numpy as np

from .._errors import RingError
from .file import SLOTS_OFFSET, RingFile, RingImage
from .name_table import NameTable
from .slot_format import SLOT_BYTES, WORDS
from .slots import Write, memory, read_slots, writer

__all__ = ["Ring"]

_SMALLEST, _LARGEST = 16, 1 << 34


class Ring:
    """The slots and the name table of one recording.

    Args:
        capacity: events kept; the oldest are overwritten.
        path: a file behind the ring, which then survives the process; None keeps it in memory.
        metadata: what is known of the recording, JSON values.

    Raises:
        RingError: the capacity makes no sense, or the file cannot be made.
    """

    def __init__(
        self, capacity: int, path: str | os.PathLike[str] | None = None, metadata: Mapping[str, object] | None = None
    ) -> None:
        if not _SMALLEST <= capacity <= _LARGEST:
            raise RingError(f"capacity is {capacity}; it must lie between {_SMALLEST} and {_LARGEST:,} events")
        self.capacity = capacity
        self.metadata = dict(metadata or {})
        self._file: RingFile | None = None
        if path is None:
            self.buffer = memory(capacity)
            self.offset = 0
            self.names = NameTable()
        else:
            self._file = RingFile(path, capacity, self.metadata)
            self.buffer = self._file.buffer
            self.offset = SLOTS_OFFSET
            self.names = NameTable(self._file.append)
        self.names.anchor()

    def writer(self, clock: Callable[[], int] = time.monotonic_ns) -> Write:
        """Return the function that writes one event from Python; one per ring, since it counts the serials."""
        return writer(self.buffer, self.offset, self.capacity, clock)

    def image(self) -> RingImage:
        """Read what the ring holds now; other threads may go on writing."""
        view = np.frombuffer(self.buffer, np.int64, self.capacity * WORDS, self.offset).reshape(-1, WORDS)
        return RingImage(read_slots(view, self.capacity), list(self.names.records), self.metadata)

    def close(self) -> None:
        """Note that the recording ended in good order; the ring stays readable."""
        self.names.stop()
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def nbytes(self) -> int:
        """Bytes the slots take."""
        return self.capacity * SLOT_BYTES
