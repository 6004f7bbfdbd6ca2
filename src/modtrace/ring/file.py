"""A ring file: a header, the slots, and behind them the name table as an append-only log.

```
0      magic "MODTRACE" · version u32 · 0 u32 · capacity u64 · slots offset u64 · log offset u64
       metadata length u32 · crc32 of metadata u32 · metadata (JSON)
4096   slots: capacity × 32 bytes
…      log: records of (length u32 · crc32 u32 · JSON), until a length of 0 or the end of the file
```

All numbers are little endian. The space of header, slots and the first part of the log is reserved when the file is
made, so a full disk is an error then, and never a signal while training runs.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson

from .._errors import RingError
from .name_table import Record
from .slot_format import SLOT_BYTES, WORDS_PER_SLOT
from .slots import BLOCK_SLOTS, SlotBlock, SlotSnapshot, prefault, read_slots
from .validate import validate

__all__ = ["MAGIC", "SLOTS_OFFSET", "VERSION", "RingFile", "RingSnapshot", "read_ring"]

MAGIC = b"MODTRACE"
VERSION = 2
SLOTS_OFFSET = 4096
_HEADER = struct.Struct("<8sIIQQQII")
_RECORD = struct.Struct("<II")
_LOG_CHUNK_BYTES = 1 << 20
_MAX_RECORD_BYTES = 1 << 20
_CLOSING_KINDS = ("anchor", "stop")
_CLOSING_BYTES = 256
"""Reserved for the records that end a recording, so that it ends in good order on a disk that became full."""
_MAX_REREADS = 20
_BYTES_PER_BLOCK = 512
"""What `st_blocks` counts in, on every system."""
_MIN_BYTES_WITH_HOLES = 1 << 32
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
        self._log_end = self._log_start
        self._reserved = self._log_start + _LOG_CHUNK_BYTES
        text = orjson.dumps(dict(metadata))
        head = _HEADER.pack(MAGIC, VERSION, 0, capacity, SLOTS_OFFSET, self._log_start, len(text), zlib.crc32(text))
        if len(head) + len(text) > SLOTS_OFFSET:
            raise RingError(f"{self.path}: the metadata does not fit the header ({len(text)} bytes)")
        _refuse_special(self.path)
        # The old file is unlinked, not truncated: another process may still have it mapped. Nobody can know the new
        # one's name before, and it is never what someone else put there, nor where a link of theirs leads.
        partial = f"{self.path}.{os.getpid()}.{secrets.token_hex(8)}.new"
        try:
            self._fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(self._fd, 0, self._reserved)
                os.pwrite(self._fd, head + text, 0)
                self.buffer = mmap.mmap(self._fd, self._log_start)
                prefault(self.buffer)
                os.replace(partial, self.path)
            except BaseException:
                os.close(self._fd)
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
        """Append one record to the log.

        Raises:
            OSError: the disk is full.
        """
        text = orjson.dumps(dict(record))
        framed = _RECORD.pack(len(text), zlib.crc32(text)) + text
        kept = 0 if record["kind"] in _CLOSING_KINDS else _CLOSING_BYTES
        if self._log_end + len(framed) + _RECORD.size + kept > self._reserved:
            os.posix_fallocate(self._fd, self._reserved, _LOG_CHUNK_BYTES)
            self._reserved += _LOG_CHUNK_BYTES
        os.pwrite(self._fd, framed, self._log_end)
        self._log_end += len(framed)

    def close(self) -> None:
        """Close the file; the mapping goes when nothing holds it any more."""
        os.close(self._fd)


def _refuse_special(path: str) -> None:
    """Refuse to put a ring where something else than a regular file stands, or a link that leads to such."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # what is wrong with the path, making the file tells
    if not stat.S_ISREG(mode):
        what = _SPECIAL_FILES.get(stat.S_IFMT(mode), "no regular file")
        raise RingError(f"{path}: it is {what}, which a ring does not replace. Name another place.")


class RingSnapshot(NamedTuple):
    """What a ring held when it was read.

    Attributes:
        slots: the events, and how many were lost.
        records: the name table's records, in the order in which they were noted.
        metadata: about the recording, from the header.
    """

    slots: SlotSnapshot
    records: list[Record]
    metadata: Mapping[str, object]


def read_ring(path: str | os.PathLike[str]) -> RingSnapshot:
    """Read a ring file: of a running, a stopped or a killed process, or a part of one.

    A file that was cut gives the events of the slots that are there. What is damaged is left out; a name that is lost
    with it becomes a number.

    Raises:
        RingError: it cannot be read, is no ring file, or its header is damaged.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = _read_header(name, file.read(SLOTS_OFFSET))
            slots = _read_slots(file.fileno(), size, header.capacity)
            # The log is read after the slots: a name is noted before its number is used.
            records = _read_log(file, header.log_start) if size > header.log_start else []
            if not len(slots.events) and not records and _is_hollow(file.fileno()):
                raise RingError(
                    f"{name}: no event is in it, and most of its {size:,} bytes are a hole; copy the ring again, whole"
                )
    except OSError as error:
        raise RingError(f"{name}: cannot be read: {error.strerror}") from error
    return RingSnapshot(*validate(slots, records, header.metadata))


def _is_hollow(descriptor: int) -> bool:
    """Tell whether less than half of a file is there: that of a new ring is reserved."""
    status = os.fstat(descriptor)
    return status.st_blocks * _BYTES_PER_BLOCK < status.st_size // 2


class _Header(NamedTuple):
    capacity: int
    log_start: int
    metadata: Mapping[str, object]


def _read_header(name: str, head: bytes) -> _Header:
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise RingError(f"{name}: not a ring file (it does not begin with {MAGIC.decode()} and a header)")
    _, version, _, capacity, slots_offset, log_start, length, crc = _HEADER.unpack_from(head)
    if version != VERSION:
        raise RingError(
            f"{name}: ring format {version}; this modtrace reads {VERSION}. Read it with the version that wrote it."
        )
    text = head[_HEADER.size : _HEADER.size + length]
    metadata = _parse_object(text) if len(text) == length and zlib.crc32(text) == crc else None
    if (
        metadata is None
        or slots_offset != SLOTS_OFFSET
        or capacity < 1
        or log_start != SLOTS_OFFSET + capacity * SLOT_BYTES
    ):
        raise RingError(f"{name}, byte {len(MAGIC)}: the header is damaged; nothing can be recovered from this file")
    return _Header(capacity, log_start, metadata)


def _read_slots(descriptor: int, size: int, capacity: int) -> SlotSnapshot:
    count = max(0, min(capacity, (size - SLOTS_OFFSET) // SLOT_BYTES))
    slots = read_slots(_slot_blocks(descriptor, count), capacity)
    for _ in range(_MAX_REREADS):
        # Read again where serials are missing: the writer overtook a reader that had to pause. What is missing still
        # when nothing was written since is missing in the file.
        recorded = slots.recorded
        if not len(slots.events) or np.all(np.diff(slots.events.serial) == 1):
            break
        slots = read_slots(_slot_blocks(descriptor, count), capacity)
        if slots.recorded == recorded:
            break
    return slots


def _slot_blocks(descriptor: int, count: int) -> Iterator[SlotBlock]:
    """Yield the slots of a file, without those that lie in its holes.

    Each block is mapped only while it is looked at. A mapping, not a read: beside a live writer the order in which the
    words are copied matters.
    """
    for begin, end in _data_ranges(descriptor, SLOTS_OFFSET, SLOTS_OFFSET + count * SLOT_BYTES):
        last = -(-(end - SLOTS_OFFSET) // SLOT_BYTES)
        for first in range((begin - SLOTS_OFFSET) // SLOT_BYTES, last, BLOCK_SLOTS):
            length = min(BLOCK_SLOTS, last - first)
            offset = SLOTS_OFFSET + first * SLOT_BYTES
            aligned = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            mapping = mmap.mmap(
                descriptor, offset - aligned + length * SLOT_BYTES, access=mmap.ACCESS_READ, offset=aligned
            )
            words = np.frombuffer(mapping, np.int64, length * WORDS_PER_SLOT, offset - aligned)
            del mapping  # so that it goes with the block
            yield SlotBlock(first, words.reshape(-1, WORDS_PER_SLOT))


def _data_ranges(descriptor: int, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a large file between its holes; it has some where its space was not reserved as ours is.

    A smaller file is gone through as a whole: not every file system knows at once where another process wrote.
    """
    if end - begin < _MIN_BYTES_WITH_HOLES or not _is_hollow(descriptor):
        yield (begin, end)
        return
    while begin < end:
        try:
            begin = os.lseek(descriptor, begin, os.SEEK_DATA)
        except OSError:  # nothing but a hole follows
            return
        hole = os.lseek(descriptor, begin, os.SEEK_HOLE)
        if begin < end:
            yield (begin, min(hole, end))
        begin = hole


def _read_log(file: BinaryIO, offset: int) -> list[Record]:
    """Read the records one by one, so that memory follows them and not what the file claims."""
    records: list[Record] = []
    size = os.fstat(file.fileno()).st_size
    file.seek(offset)
    while len(head := file.read(_RECORD.size)) == _RECORD.size:
        length, crc = _RECORD.unpack(head)
        if not 0 < length <= min(_MAX_RECORD_BYTES, size - file.tell()):
            break
        text = file.read(length)
        if zlib.crc32(text) != crc:
            break
        record = _parse_object(text)
        if record is not None:
            # A record holds texts and numbers; what else a damaged one holds could be of any size.
            records.append({key: value for key, value in record.items() if isinstance(value, str | int)})
    return records


def _parse_object(text: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
