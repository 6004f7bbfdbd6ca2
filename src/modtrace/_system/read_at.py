"""Reading at an offset of a file, whatever else reads the file meanwhile."""

from __future__ import annotations

import os
import threading

__all__ = ["read_at", "read_into_at"]

_position = threading.Lock()
"""Held while the position of a descriptor is not what its other readers left."""


def read_at(descriptor: int, count: int, offset: int) -> bytes:
    """Return at most `count` bytes from `offset` on; where the file stands does not change.

    Raises:
        OSError: they cannot be read.
    """
    if hasattr(os, "pread"):
        return os.pread(descriptor, count, offset)
    with _position:  # Windows
        before = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            os.lseek(descriptor, offset, os.SEEK_SET)
            return os.read(descriptor, count)
        finally:
            os.lseek(descriptor, before, os.SEEK_SET)


def read_into_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill `buffer` from `offset` on, as far as there is something; return how many bytes were read.

    Raises:
        OSError: they cannot be read.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    data = read_at(descriptor, len(buffer), offset)
    buffer[: len(data)] = data
    return len(data)
