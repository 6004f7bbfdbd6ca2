"""Track events as bytes: the few fields that the profiler's events need, without the cost of building messages."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import orjson
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

from ...formats.escape import escaped
from ...formats.perfetto_ids import PROFILER_SEQUENCE as SEQUENCE

__all__ = [
    "arguments",
    "categories",
    "end_packet",
    "event_packet",
    "flow",
    "sized",
    "utf8",
    "varint",
]


def event_packet(time: int, kind: int, uuid: int, name: tuple[int, bytes], body: bytes) -> bytes:
    """Return a packet of an event: Unix ns, type, track, number of its name and what defines it, fields."""
    number, interned = name
    event = b"\x48" + varint(kind) + b"\x58" + varint(uuid) + b"\x50" + varint(number) + body
    return _whole(time, sized(b"\x5a", event) + interned + b"\x68\x02")


def end_packet(time: int, uuid: int) -> bytes:
    """Return a packet that closes the innermost open slice of a track."""
    event = b"\x48" + varint(TrackEvent.TYPE_SLICE_END) + b"\x58" + varint(uuid)
    return _whole(time, sized(b"\x5a", event) + b"\x68\x02")


def _whole(time: int, rest: bytes) -> bytes:
    return sized(b"\x0a", b"\x40" + varint(time) + b"\x50" + varint(SEQUENCE) + rest)


def categories(category: object) -> bytes:
    """Return the field of an event that holds its category, if it has one."""
    return b"" if category is None else sized(b"\xb2\x01", utf8(str(category)))


def arguments(args: Mapping[str, Any]) -> bytes:
    """Return the fields of an event that hold its args."""
    return b"".join(sized(b"\x22", sized(b"\x52", utf8(key)) + _argument(value)) for key, value in args.items())


def _argument(value: object) -> bytes:
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return b"\x20" + varint(value & (1 << 64) - 1)
    if isinstance(value, float):
        return b"\x29" + struct.pack("<d", value)
    if isinstance(value, str):
        return sized(b"\x32", utf8(value))
    return sized(b"\x32", orjson.dumps(value, default=str))


def utf8(text: str) -> bytes:
    """Return a text as a trace may hold it."""
    return escaped(text).encode("utf-8", "replace")


def sized(tag: bytes, data: bytes) -> bytes:
    """Return a field of bytes, text or a message."""
    return tag + varint(len(data)) + data


def varint(number: int) -> bytes:
    """Return a number that is not negative, seven bits to a byte."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def flow(identity: int) -> bytes:
    """Return the field that says that an arrow leaves or reaches an event."""
    return b"\xf9\x02" + struct.pack("<Q", identity)
