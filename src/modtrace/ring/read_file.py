"""A ring file → what it holds: all of it, its name table alone, or its rank."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from typing import Any, BinaryIO, NamedTuple

import orjson

from .._errors import RingError
from .._system.open_file import open_regular
from .file_format import HEADER, MAGIC, MAX_RECORD_BYTES, RECORD, SLOTS_OFFSET, VERSION
from .file_slots import is_hollow, read_file_slots
from .name_table import Record
from .slot_format import SLOT_BYTES
from .slots import SlotSnapshot, read_slots
from .validate import validate

__all__ = ["RingSnapshot", "read_ring", "read_ring_rank", "read_ring_records"]


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


def read_ring(path: str | os.PathLike[str], last_events: int | None = None) -> RingSnapshot:
    """Read a ring file: of a running, a stopped or a killed process, or a part of one.

    A file that was cut gives the events of the slots that are there. What is damaged is left out; a name that is lost
    with it becomes a number.

    Args:
        path: the file.
        last_events: read no more than about so many, the last ones, and count the others as overwritten; None: all.

    Raises:
        RingError: it cannot be read, is no ring file, or its header is damaged.
    """
    with _opened(path) as (file, header):
        size = os.fstat(file.fileno()).st_size
        slots = read_file_slots(file.fileno(), size, header.capacity, last_events)
        # The log is read after the slots: a name is noted before its number is used.
        records = _read_log(file, header.log_start)
        if not len(slots.events) and not records and is_hollow(file.fileno()):
            raise RingError(
                f"{file.name}: no event is in it, and most of its {size:,} bytes are a hole; copy the ring again, whole"
            )
    return RingSnapshot(*validate(slots, records, header.metadata))


def read_ring_records(path: str | os.PathLike[str]) -> list[Record]:
    """Read the name table of a ring file alone: its records, in the order in which they were noted.

    Raises:
        RingError: as of `read_ring`.
    """
    with _opened(path) as (file, header):
        records = _read_log(file, header.log_start)
    return validate(read_slots([], 1), records, {})[1]


def read_ring_rank(path: str | os.PathLike[str]) -> int | None:
    """Return the rank that the header of a ring file tells; None where it tells none.

    Raises:
        RingError: as of `read_ring`.
    """
    with _opened(path) as (_, header):
        rank = validate(read_slots([], 1), [], header.metadata)[2].get("rank")
    return rank if isinstance(rank, int) else None


class _Header(NamedTuple):
    """What the header of a ring file says.

    Attributes:
        capacity: slots in the ring.
        log_start: the byte at which the log begins.
        metadata: about the recording, as it stands there.
    """

    capacity: int
    log_start: int
    metadata: Mapping[str, object]


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[tuple[BinaryIO, _Header]]:
    """Open a ring file and read its header; what goes wrong while the block reads it is a RingError."""
    name = os.fspath(path)
    try:
        with BufferedReader(open_regular(name)) as file:
            yield file, _read_header(name, file.read(SLOTS_OFFSET))
    except OSError as error:
        raise RingError(f"{name}: cannot be read: {error.strerror}") from error


def _read_header(name: str, head: bytes) -> _Header:
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise RingError(f"{name}: not a ring file (it does not begin with {MAGIC.decode()} and a header)")
    _, version, _, capacity, slots_offset, log_start, length, crc = HEADER.unpack_from(head)
    if version != VERSION:
        raise RingError(
            f"{name}: ring format {version}; this modtrace reads {VERSION}. Read it with the version that wrote it."
        )
    text = head[HEADER.size : HEADER.size + length]
    metadata = _parse_object(text) if len(text) == length and zlib.crc32(text) == crc else None
    if (
        metadata is None
        or slots_offset != SLOTS_OFFSET
        or capacity < 1
        or log_start != SLOTS_OFFSET + capacity * SLOT_BYTES
    ):
        raise RingError(f"{name}, byte {len(MAGIC)}: the header is damaged; nothing can be recovered from this file")
    return _Header(capacity, log_start, metadata)


def _read_log(file: BinaryIO, offset: int) -> list[Record]:
    """Read the records one by one, so that memory follows them and not what the file claims."""
    records: list[Record] = []
    size = os.fstat(file.fileno()).st_size
    if offset >= size:  # the file was cut, or says nonsense
        return records
    file.seek(offset)
    while len(head := file.read(RECORD.size)) == RECORD.size:
        length, crc = RECORD.unpack(head)
        if not 0 < length <= min(MAX_RECORD_BYTES, size - file.tell()):
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
