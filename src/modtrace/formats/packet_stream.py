"""Framing of a Perfetto file: packets, each behind a tag and its length as a varint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .._errors import TraceError

__all__ = ["MAX_VARINT_BYTES", "PACKET_TAG", "FramingError", "packet_bounds", "read_packet_batches"]

PACKET_TAG = 0x0A
"""The byte before every packet: field 1 of the message Trace, with a length."""

MAX_VARINT_BYTES = 10


class FramingError(ValueError):
    """What stands where a packet should begin is none."""


def packet_bounds(data: bytes, offset: int) -> tuple[int, int] | None:
    """Return where the content of the packet at `offset` begins and ends; None where the data end before it does.

    Raises:
        FramingError: no packet begins there.
    """
    if data[offset] != PACKET_TAG:
        raise FramingError(f"a packet should begin here, and there is 0x{data[offset]:02x}")
    length = shift = 0
    begin = offset + 1
    for byte in data[begin : begin + MAX_VARINT_BYTES]:
        # A varint has seven bits of the number to a byte, the lowest first, and the eighth says whether more follow.
        length |= (byte & 0x7F) << shift
        begin += 1
        if byte < 0x80:
            return (begin, begin + length) if begin + length <= len(data) else None
        shift += 7
    if len(data) > offset + MAX_VARINT_BYTES:
        raise FramingError("the length of a packet is not a number")
    return None


def read_packet_batches(path: Path, file: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of some whole packets: the first one alone, then about `size` bytes each.

    Raises:
        TraceError: something else stands where a packet should begin, or the last one is cut off.
    """
    data, base = b"", 0
    while True:
        # A packet may claim any length, so the next read is as large as what is there already, and no larger.
        more = file.read(max(size, len(data)))
        data += more
        end = begin = 0
        while end < len(data):
            try:
                bounds = packet_bounds(data, end)
            except FramingError as error:
                raise TraceError(path, str(error), base + end) from None
            if bounds is None:
                if not more:
                    raise TraceError(path, "it is cut off within a packet", base + end)
                break
            end = bounds[1]
            if base == begin == 0:
                yield 0, data[:end]
                begin = end
        if end > begin:
            yield base + begin, data[begin:end]
        if not more:
            return
        data, base = data[end:], base + end
