"""The table that a written trace carries: in JSON under a key, in Perfetto's format as packets, in a page as a script.

Other readers pass over it. A checksum of all bytes says whether another program has changed the trace since: then
the table is not of what the trace holds now.
"""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ..timeline import Timeline
from .packet_stream import PACKET_TAG, read_varint, varint_bytes
from .table_bytes import DAMAGED, unpack_table

JSON_KEY = "modtraceTable"
PAGE_ELEMENT = b'<script type="application/octet-stream" id="modtrace-table">'
_JSON_MARK = b',\n"%b":"' % JSON_KEY.encode()
_PACKET_FIELD = b"\xaa\xeb\x16"
"""The tag of the field of TracePacket that has the table: number 46,773, which Perfetto does not know."""
_PACKET_BYTES = 1 << 20
_CHECKSUM = struct.Struct("<I")
_ROW_BYTES = 8
"""The least size of a slice in a trace."""


def _packet(data: bytes) -> bytes:
    field = _PACKET_FIELD + varint_bytes(len(data)) + data
    return bytes([PACKET_TAG]) + varint_bytes(len(field)) + field


_PACKET_MARK = _packet(b"modtrace table\xff\xff")
"""The packet before those of the table; no text has such bytes."""


class Checksum:
    """Passes bytes on to a sink, and computes their checksum."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self.value = 0

    def write(self, data: bytes) -> None:
        """Take some bytes."""
        self.value = zlib.crc32(data, self.value)
        self._write(data)


def json_table(table: bytes, before: int, after: bytes) -> bytes:
    """Return the table, with the checksum of what is before it, as it ends a trace in JSON, and what comes after it."""
    return _JSON_MARK + base64.b64encode(_summed(table, before, b'"' + after)) + b'"' + after


def page_table(table: bytes, before: int, after: bytes) -> bytes:
    """Return the table as it is in a page, and what comes after it; see `json_table`."""
    return PAGE_ELEMENT + base64.b64encode(_summed(table, before, b"<" + after)) + b"<" + after


def packet_table(table: bytes, before: int) -> Iterator[bytes]:
    """Yield the packets of the table, which end a trace in Perfetto's format; see `json_table`."""
    yield _PACKET_MARK
    data = _summed(table, before, b"")
    for first in range(0, len(data), _PACKET_BYTES):
        yield _packet(data[first : first + _PACKET_BYTES])


def _summed(table: bytes, before: int, after: bytes) -> bytes:
    return _CHECKSUM.pack(zlib.crc32(after, zlib.crc32(table, before))) + table


class CarriedTable(NamedTuple):
    """The table that a trace carries, and whether it fits the trace."""

    timeline: Timeline | None  # None if the trace has no table, or was changed since
    is_changed: bool = False  # whether it has one, and another program changed the trace
    fault: str | None = None  # what is wrong with the table; None if nothing is


def read_table(blocks: Iterable[bytes], kind: str) -> CarriedTable:
    """Return the table that a trace carries, from all its bytes, unzipped; `kind` is chrome, perfetto or page."""
    mark = {"chrome": _JSON_MARK, "perfetto": _PACKET_MARK, "page": PAGE_ELEMENT}[kind]
    checksum = size = 0
    held, behind = b"", list[bytes]()
    for block in blocks:
        if behind:
            behind.append(block)
            continue
        before, found, rest = (held + block).partition(mark)
        # A mark can begin in one block and end in the next.
        end = len(before) if found else max(len(before) - len(mark) + 1, 0)
        checksum, size, held = zlib.crc32(before[:end], checksum), size + end, before[end:]
        if found:
            behind.append(rest)
    if not behind:
        return CarriedTable(None)
    data = b"".join(behind)
    try:
        closing = b"<" if kind == "page" else b'"'
        summed, after = _from_packets(data) if kind == "perfetto" else _from_text(data, closing)
        table = summed[_CHECKSUM.size :]
        if _CHECKSUM.unpack_from(summed)[0] != zlib.crc32(after, zlib.crc32(table, checksum)):
            return CarriedTable(None, is_changed=True)
        return CarriedTable(unpack_table(table, max((size + len(after)) // _ROW_BYTES, 1 << 10)))
    except (binascii.Error, *DAMAGED) as error:
        return CarriedTable(None, is_changed=True, fault=str(error))


def _from_text(data: bytes, end: bytes) -> tuple[bytes, bytes]:
    """Return the table, and what comes after it."""
    text, _, after = data.partition(end)
    return base64.b64decode(text, validate=True), end + after


def _from_packets(data: bytes) -> tuple[bytes, bytes]:
    """Return the table, and what comes after it."""
    parts, end = list[bytes](), 0
    while data[end : end + 1] == bytes([PACKET_TAG]):
        packet_bytes, begin = read_varint(data, end + 1)
        if not data.startswith(_PACKET_FIELD, begin):
            break
        field_bytes, first = read_varint(data, begin + len(_PACKET_FIELD))
        end = begin + packet_bytes
        if first + field_bytes != end or end > len(data):
            raise ValueError("its table is cut off")
        parts.append(data[first:end])
    return b"".join(parts), data[end:]
