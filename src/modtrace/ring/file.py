"""A new ring file, as a process writes it, see `file_format`.

The space of header, slots and the first part of the log is reserved when the file is made, so a full disk is an error
then, and never a signal while training runs.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
import zlib
from collections.abc import Mapping

import orjson

from .._errors import RingError
from .file_format import HEADER, MAGIC, RECORD, SLOTS_OFFSET, VERSION
from .name_table import Record
from .slot_format import SLOT_BYTES
from .slots import prefault

__all__ = ["RingFile"]

_LOG_CHUNK_BYTES = 1 << 20
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


class RingFile:
    """A new ring file that this process writes; its mapping outlives the process in the file.

    Args:
        path: where; a regular file that is there already is replaced.
        capacity: slots in the ring.
        metadata: about the recording, JSON values; together at most about 4,000 bytes.

    Attributes:
        buffer: the mapping of header and slots; the first slot begins at byte `SLOTS_OFFSET`.

    Raises:
        RingError: the file cannot be made, its space cannot be reserved, or the metadata does not fit the header.
    """

    def __init__(self, path: str | os.PathLike[str], capacity: int, metadata: Mapping[str, object]) -> None:
        self.path = os.fspath(path)
        self.capacity = capacity
        self._log_start = SLOTS_OFFSET + capacity * SLOT_BYTES
        self._reserved = self._log_start + _LOG_CHUNK_BYTES
        text = orjson.dumps(dict(metadata))
        head = HEADER.pack(MAGIC, VERSION, 0, capacity, SLOTS_OFFSET, self._log_start, len(text), zlib.crc32(text))
        if len(head) + len(text) > SLOTS_OFFSET:
            raise RingError(f"{self.path}: the metadata does not fit the header ({len(text)} bytes)")
        if not hasattr(os, "posix_fallocate"):
            raise RingError(f"{self.path}: a file behind the ring needs Linux; without one the ring is in memory")
        _refuse_special(self.path)
        # The old file is unlinked, not truncated: another process may still have it mapped. Nobody can know the new
        # one's name before, and it is never what someone else put there, nor where a link of theirs leads.
        partial = f"{self.path}.{os.getpid()}.{secrets.token_hex(8)}.new"
        try:
            fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            self._descriptor: _Descriptor | None = _Descriptor(fd)
            try:
                os.posix_fallocate(fd, 0, self._reserved)
                os.pwrite(fd, head + text, 0)
                os.lseek(fd, self._log_start, os.SEEK_SET)
                self.buffer = mmap.mmap(fd, self._log_start)
                prefault(self.buffer)
                os.replace(partial, self.path)
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
            os.posix_fallocate(fd, reserved, _LOG_CHUNK_BYTES)
            self._reserved = reserved + _LOG_CHUNK_BYTES
        os.write(fd, framed)

    def close(self) -> None:
        """Close the file, once no thread appends to it; the mapping goes when nothing holds it any more."""
        self._descriptor = None


class _Descriptor:
    """Closes a file descriptor when nobody uses it any more: its number may be another file's from then on."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def _refuse_special(path: str) -> None:
    """Refuse to put a ring where something else stands than a ring or an empty file, or a link that leads to such."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # what is wrong with the path, making the file tells
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
