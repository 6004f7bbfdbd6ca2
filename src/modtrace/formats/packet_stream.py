"""The packets of a Perfetto file, some at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .._errors import TraceError

__all__ = ["packet_parts"]

PACKET = 0x0A
"""What stands before every packet: field 1 of Trace, with a length."""

LONGEST_VARINT = 10


def packet_parts(path: Path, file: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of some whole packets: the first one alone, then about `size` bytes each.

    Raises:
        TraceError: something else stands where a packet should begin, or the last one is cut off.
    """
    data, base = b"", 0
    while True:
        # A packet may claim any length: what is asked for follows what is there.
        more = file.read(max(size, len(data)))
        data += more
        at = begin = 0
        while at < len(data):
            end = _end(path, data, at, base)
            if end > len(data):
                if not more:
                    raise TraceError(path, "it is cut off within a packet", base + at)
                break
            at = end
            if base == begin == 0:
                yield 0, data[:at]
                begin = at
        if at > begin:
            yield base + begin, data[begin:at]
        if not more:
            return
        data, base = data[at:], base + at


def _end(path: Path, data: bytes, at: int, base: int) -> int:
    """Return where the packet at `at` ends; some place behind the data if that does not tell."""
    if data[at] != PACKET:
        raise TraceError(path, f"a packet should begin here, and there is 0x{data[at]:02x}", base + at)
    length = shift = 0
    for place in range(at + 1, min(at + 1 + LONGEST_VARINT, len(data))):
        length |= (data[place] & 0x7F) << shift
        if data[place] < 0x80:
            return place + 1 + length
        shift += 7
    if len(data) > at + LONGEST_VARINT:
        raise TraceError(path, "the length of a packet is not a number", base + at)
    return len(data) + 1
