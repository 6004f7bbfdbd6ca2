"""The header of a ring file.

```
0      magic "MODTRACE" · version u32 · 0 u32 · capacity u64 · slots offset u64 · log offset u64
       metadata length u32 · crc32 of metadata u32 · metadata (JSON)
```

All numbers are little endian. Under `writer` the metadata says which process writes the file, see `owner`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from .._errors import RingError
from .slot_format import SLOT_BYTES

MAGIC = b"MODTRACE"
VERSION = 2
HEADER = struct.Struct("<8sIIQQQII")
"""What precedes the metadata."""
SLOTS_OFFSET = 4096
"""Bytes before the first slot of a file."""
LOG_CHUNK_BYTES = 1 << 20
"""What is reserved for the log at once; a file is never shorter than with the first of these."""
_WRITER = "writer"


class FileHeader(NamedTuple):
    """What the header of a ring file says.

    Attributes:
        capacity: slots in the ring.
        log_start: the byte at which the log begins.
        metadata: about the recording, as written there.
        writer: the process that writes it, as `owner.describe_writer` says it; empty in files of older versions.
    """

    capacity: int
    log_start: int
    metadata: Mapping[str, object]
    writer: Mapping[str, object]


def pack_header(path: str, capacity: int, metadata: Mapping[str, object], writer: Mapping[str, object]) -> bytes:
    """Return the bytes of a header.

    Raises:
        RingError: the metadata does not fit.
    """
    text = orjson.dumps({**metadata, _WRITER: writer})
    log_start = SLOTS_OFFSET + capacity * SLOT_BYTES
    head = HEADER.pack(MAGIC, VERSION, 0, capacity, SLOTS_OFFSET, log_start, len(text), zlib.crc32(text))
    if len(head) + len(text) > SLOTS_OFFSET:
        raise RingError(f"{path}: the metadata does not fit the header ({len(text)} bytes)")
    return head + text


def parse_header(path: str, head: bytes) -> FileHeader:
    """Return what the first `SLOTS_OFFSET` bytes of a file say.

    Raises:
        RingError: it is no ring file, or its header is damaged.
    """
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise RingError(f"{path}: not a ring file (it does not begin with {MAGIC.decode()} and a header)")
    _, version, _, capacity, slots_offset, log_start, length, crc = HEADER.unpack_from(head)
    if version != VERSION:
        raise RingError(
            f"{path}: ring format {version}; this modtrace reads {VERSION}. Read it with the version that wrote it."
        )
    text = head[HEADER.size : HEADER.size + length]
    metadata = parse_object(text) if len(text) == length and zlib.crc32(text) == crc else None
    if (
        metadata is None
        or slots_offset != SLOTS_OFFSET
        or capacity < 1
        or log_start != SLOTS_OFFSET + capacity * SLOT_BYTES
    ):
        raise RingError(f"{path}, byte {len(MAGIC)}: the header is damaged; nothing can be recovered from this file")
    writer = metadata.pop(_WRITER, None)
    return FileHeader(capacity, log_start, metadata, writer if isinstance(writer, dict) else {})


def parse_object(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object that a text is; None if it is none."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
