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

import errno
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson

from .._errors import RingError
from .name_table import Record
from .slot_format import SLOT_BYTES, WORDS_PER_SLOT
from .slots import SlotSnapshot, prefault, read_slots
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


class RingFile:
    """A new ring file that this process writes; its mapping outlives the process in the file.

    Args:
        path: where; a file that is there already is replaced.
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
        # The old file is unlinked, not truncated: another process may still have it mapped.
        partial = f"{self.path}.{os.getpid()}.new"
        try:
            self._fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(self._fd, 0, self._reserved)
                os.pwrite(self._fd, head + text, 0)
                self.buffer = mmap.mmap(self._fd, self._log_start)
                prefault(self.buffer)
                os.replace(partial, self.path)
            except BaseException:
                os.close(self._fd)
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
            log = b""
            if size > header.log_start:
                file.seek(header.log_start)
                log = file.read()
    except OSError as error:
        raise RingError(f"{name}: cannot be read: {error.strerror}") from error
    return RingSnapshot(*validate(slots, _read_log(log), header.metadata))


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
    if not count:
        return read_slots(np.zeros((0, WORDS_PER_SLOT), np.int64), capacity)
    # A mapping, not a read: beside a live writer the order in which the words are copied matters.
    with mmap.mmap(descriptor, SLOTS_OFFSET + count * SLOT_BYTES, access=mmap.ACCESS_READ) as mapping:
        view = np.frombuffer(mapping, np.int64, count * WORDS_PER_SLOT, SLOTS_OFFSET).reshape(-1, WORDS_PER_SLOT)
        try:
            slots = read_slots(view, capacity)
            for _ in range(_MAX_REREADS):
                # Read again where serials are missing: the writer overtook a reader that had to pause. What is missing
                # still when nothing was written since is missing in the file.
                recorded = slots.recorded
                if not len(slots.events) or np.all(np.diff(slots.events.serial) == 1):
                    break
                slots = read_slots(view, capacity)
                if slots.recorded == recorded:
                    break
            return slots
        finally:
            del view


def _read_log(log: bytes) -> list[Record]:
    records: list[Record] = []
    offset = 0
    while offset + _RECORD.size <= len(log):
        length, crc = _RECORD.unpack_from(log, offset)
        text = log[offset + _RECORD.size : offset + _RECORD.size + length]
        if not 0 < length <= _MAX_RECORD_BYTES or len(text) != length or zlib.crc32(text) != crc:
            break
        record = _parse_object(text)
        if record is not None:
            records.append(record)
        offset += _RECORD.size + length
    return records


def _parse_object(text: bytes) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
