"""The table that a written trace carries: in JSON under a key, in Perfetto's format as packets, in a page as a script.

Other readers skip it. A checksum of all bytes reveals whether another program has changed the trace since: then the
table no longer describes the trace.
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
"""Tag of the TracePacket field with the table: number 46,773, which Perfetto does not know."""
_PACKET_BYTES = 1 << 20
_CHECKSUM = struct.Struct("<I")
_ROW_BYTES = 8
"""Minimum size of a slice in a trace."""


def _packet(data: bytes) -> bytes:
    field = _PACKET_FIELD + varint_bytes(len(data)) + data
    return bytes([PACKET_TAG]) + varint_bytes(len(field)) + field


_PACKET_MARK = _packet(b"modtrace table\xff\xff")
"""The packet before the table's packets; its last bytes occur in no text."""


class Checksum:
    """Passes bytes to a sink, and computes their checksum."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self.value = 0

    def write(self, data: bytes) -> None:
        """Write the bytes to the sink."""
        self.value = zlib.crc32(data, self.value)
        self._write(data)


def json_table(table: bytes, checksum: int, trailer: bytes) -> bytes:
    """Return the table as JSON and the trailer after it; `checksum` is over all bytes before the table."""
    return _JSON_MARK + base64.b64encode(_add_checksum(table, checksum, b'"' + trailer)) + b'"' + trailer


def page_table(table: bytes, checksum: int, trailer: bytes) -> bytes:
    """Return the table as an element of a page and the trailer after it; see `json_table`."""
    return PAGE_ELEMENT + base64.b64encode(_add_checksum(table, checksum, b"<" + trailer)) + b"<" + trailer


def packet_table(table: bytes, checksum: int) -> Iterator[bytes]:
    """Yield the packets of the table, which end a trace in Perfetto's format; see `json_table`."""
    yield _PACKET_MARK
    data = _add_checksum(table, checksum, b"")
    for first in range(0, len(data), _PACKET_BYTES):
        yield _packet(data[first : first + _PACKET_BYTES])


def _add_checksum(table: bytes, checksum: int, trailer: bytes) -> bytes:
    return _CHECKSUM.pack(zlib.crc32(trailer, zlib.crc32(table, checksum))) + table


class CarriedTable(NamedTuple):
    """The result of reading the table of a trace."""

    timeline: Timeline | None  # None if the trace has no table, or was changed since
    is_changed: bool = False  # whether the trace has a table, and another program changed the trace
    fault: str | None = None  # the error of reading the table, if any


def read_table(blocks: Iterable[bytes], kind: str) -> CarriedTable:
    """Return the table of a trace from all its uncompressed bytes; `kind` is chrome, perfetto or page."""
    mark = {"chrome": _JSON_MARK, "perfetto": _PACKET_MARK, "page": PAGE_ELEMENT}[kind]
    checksum = size = 0
    pending, table_parts = b"", list[bytes]()
    for block in blocks:
        if table_parts:
            table_parts.append(block)
            continue
        head, has_mark, table_start = (pending + block).partition(mark)
        # A mark can start in one block and end in the next.
        end = len(head) if has_mark else max(len(head) - len(mark) + 1, 0)
        checksum, size, pending = zlib.crc32(head[:end], checksum), size + end, head[end:]
        if has_mark:
            table_parts.append(table_start)
    if not table_parts:
        return CarriedTable(None)
    data = b"".join(table_parts)
    try:
        closing = b"<" if kind == "page" else b'"'
        content, trailer = _split_packets(data) if kind == "perfetto" else _split_text(data, closing)
        table = content[_CHECKSUM.size :]
        if _CHECKSUM.unpack_from(content)[0] != zlib.crc32(trailer, zlib.crc32(table, checksum)):
            return CarriedTable(None, is_changed=True)
        return CarriedTable(unpack_table(table, max((size + len(trailer)) // _ROW_BYTES, 1 << 10)))
    except (binascii.Error, *DAMAGED) as error:
        return CarriedTable(None, is_changed=True, fault=str(error))


def _split_text(data: bytes, closing: bytes) -> tuple[bytes, bytes]:
    """Return the checksum with the table, and the trailer."""
    text, _, trailer = data.partition(closing)
    return base64.b64decode(text, validate=True), closing + trailer


def _split_packets(data: bytes) -> tuple[bytes, bytes]:
    """Return the checksum with the table, and the trailer."""
    parts, end = list[bytes](), 0
    while data[end : end + 1] == bytes([PACKET_TAG]):
        packet_bytes, start = read_varint(data, end + 1)
        if not data.startswith(_PACKET_FIELD, start):
            break
        field_bytes, field_start = read_varint(data, start + len(_PACKET_FIELD))
        end = start + packet_bytes
        if field_start + field_bytes != end or end > len(data):
            raise ValueError("its table is cut off")
        parts.append(data[field_start:end])
    return b"".join(parts), data[end:]
