"""A ring file: its bytes, and the new one that a process writes.

```
0      header, see `file_header`
4096   slots: capacity × 32 bytes
…      log: records of (length u32 · crc32 u32 · JSON), until a length of 0 or the end of the file
```

The space of header, slots and the first part of the log is reserved when the file is made, so a full disk is an error
then, and never a signal while training runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import stat
import struct
import threading
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import cast

import numpy as np
import orjson

from .._errors import RingError
from .file_header import LOG_CHUNK_BYTES, MAGIC, SLOTS_OFFSET, pack_header
from .kept_rings import take_name
from .name_table import Record
from .owner import WriterLock, describe_writer
from .slot_format import SLOT_BYTES

RECORD = struct.Struct("<II")
"""What precedes each record of the log."""
MAX_RECORD_BYTES = 1 << 20
"""A longer record is damage."""
_CLOSING_KINDS = ("anchor", "stop")
_CLOSING_BYTES = 256
"""Reserved for the records that end a recording, so that it ends in good order on a disk that became full."""
_SPECIAL_FILES = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_MAX_PREFAULT_BYTES = 1 << 28
_POPULATE_BYTES = 1 << 20
_MADV_POPULATE_WRITE = 23

FIRST_STEP = "first_step"
"""The key in the metadata of a ring for the number of the first step, where that is known."""
STACKS_SIGNAL = "stacks_signal"
"""The key in the metadata of a ring for the number of the signal on which its process writes its Python stacks."""


class RingFile:
    """A new ring file that this process writes; its mapping outlives the process in the file.

    Args:
        path: where; what the rings are called that are there already, `kept_rings` says.
        capacity: slots in the ring.
        metadata: about the recording, JSON values; together at most about 3,800 bytes.
        keep: how many rings of ended processes to keep beside it.

    Attributes:
        path: the name that the file got.
        buffer: the mapping of header and slots; the first slot begins at byte `SLOTS_OFFSET`.

    Raises:
        RingError: the file cannot be made, its space cannot be reserved, or the metadata does not fit the header.
    """

    def __init__(
        self, path: str | os.PathLike[str], capacity: int, metadata: Mapping[str, object], keep: int = 3
    ) -> None:
        self.path = os.fspath(path)
        self.capacity = capacity
        self._log_start = SLOTS_OFFSET + capacity * SLOT_BYTES
        self._reserved = self._log_start + LOG_CHUNK_BYTES
        pack_header(self.path, capacity, metadata, {})
        if not hasattr(os, "posix_fallocate"):
            raise RingError(f"{self.path}: a file behind the ring needs Linux; without one the ring is in memory")
        _refuse_special(self.path)
        # The name cannot be guessed, so it is never what another user put there, nor the end of a link of theirs.
        partial = f"{self.path}.{os.getpid()}.{secrets.token_hex(8)}.new"
        try:
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            self._descriptor: _Descriptor | None = _Descriptor(fd)
            try:
                self._lock = WriterLock(partial)
                os.posix_fallocate(fd, 0, self._reserved)
                os.pwrite(fd, pack_header(self.path, capacity, metadata, describe_writer(self._lock, self.path)), 0)
                os.lseek(fd, self._log_start, os.SEEK_SET)
                self.buffer = mmap.mmap(fd, self._log_start)
                prefault(self.buffer)
                self.path = take_name(partial, self.path, keep)
            except BaseException:
                self._descriptor = None
                with contextlib.suppress(FileNotFoundError):  # an interrupt can come after it was moved
                    os.unlink(partial)
                raise
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
            advice = "Free some space, name another place, or lower capacity." if full else "Name another place."
            raise RingError(
                f"{self.path}: cannot reserve {self._reserved:,} bytes for a ring of {capacity:,} events: "
                f"{error.strerror}. {advice}"
            ) from error

    def append(self, record: Record) -> None:
        """Append one record to the log; thread-safe, as the system keeps the end of the log and writes one at a time.

        It does nothing when the file is closed: a thread may still be naming what it was called for.

        Raises:
            OSError: the disk is full.
        """
        descriptor = self._descriptor
        if descriptor is None:
            return
        text = orjson.dumps(dict(record))
        framed = RECORD.pack(len(text), zlib.crc32(text)) + text
        kept = 0 if record["kind"] in _CLOSING_KINDS else _CLOSING_BYTES
        fd, reserved = descriptor.fd, self._reserved
        if os.lseek(fd, 0, os.SEEK_CUR) + len(framed) + RECORD.size + kept > reserved:
            os.posix_fallocate(fd, reserved, LOG_CHUNK_BYTES)
            self._reserved = reserved + LOG_CHUNK_BYTES
        os.write(fd, framed)

    def close(self) -> None:
        """Close the file, once no thread appends to it; the mapping goes with its last holder."""
        self._descriptor = None
        self._lock.release()


class _Descriptor:
    """Closes a file descriptor with its last user: its number may be another file's from then on."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def _refuse_special(path: str) -> None:
    """Raise if the path is anything but a ring, an empty file, or a link to such."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # making the file will say what is wrong with the path
    if not stat.S_ISREG(mode):
        what = _SPECIAL_FILES.get(stat.S_IFMT(mode), "no regular file")
        raise RingError(f"{path}: it is {what}, which a ring does not replace. Name another place.")
    try:
        with open(path, "rb") as file:
            begin = file.read(len(MAGIC))
    except OSError:
        return
    if begin and begin != MAGIC:
        raise RingError(f"{path}: it is a file and no ring, which a ring does not replace. Name another place.")


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
    """Return the C library's `madvise`; None if there is none, as on Windows."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (TypeError, OSError, AttributeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return cast("Callable[[int, int, int], int]", madvise)
