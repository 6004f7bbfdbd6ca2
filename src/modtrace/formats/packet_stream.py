"""Framing of a Perfetto file: packets, each after a tag and its length as a varint."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

from .limits import MAX_PACKET_BYTES, MIN_CHECKED_PACKET_BYTES, LimitError, check_packet

PACKET_TAG = 0x0A
"""The byte before every packet: field 1 of the message Trace, with a length."""

MAX_VARINT_BYTES = 10
_SHORT_BYTES = 0x80
"""Size below which the length of a packet is a single byte; most packets are this short, and handled in a fast loop."""


def varint_bytes(value: int) -> bytes:
    """Return a number of 0 or more as a varint: seven bits per byte, the lowest first."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def read_varint(data: bytes | bytearray, offset: int) -> tuple[int, int]:
    """Return the varint at `offset` and its end; raises IndexError if it is cut off, ValueError if it is too long."""
    value = shift = 0
    for end, byte in enumerate(data[offset : offset + MAX_VARINT_BYTES], offset + 1):
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, end
        shift += 7
    if len(data) < offset + MAX_VARINT_BYTES:
        raise IndexError("a varint is cut off")
    raise ValueError("a varint of more than 64 bits")


class FramingError(ValueError):
    """The bytes are not a packet, or not one that modtrace reads.

    Attributes:
        offset: the expected start of the packet.
        kind: "none" if no packet starts there, "too large" if it exceeds a limit, "cut off" by the end of the file.
    """

    def __init__(self, message: str, offset: int, kind: Literal["none", "too large", "cut off"] = "none") -> None:
        super().__init__(message)
        self.offset = offset
        self.kind = kind


def packet_bounds(data: bytes | bytearray, offset: int) -> tuple[int, int] | None:
    """Return start and end of the packet at `offset`; None if the data end in it; raises FramingError for no packet."""
    if data[offset] != PACKET_TAG:
        raise FramingError(f"expected the start of a packet (0x0a), found 0x{data[offset]:02x}", offset)
    try:
        length, start = read_varint(data, offset + 1)
    except IndexError:
        return None
    except ValueError:
        raise FramingError("the length of a packet is not a number", offset) from None
    if length > MAX_PACKET_BYTES:
        message = f"a packet of {length:,} bytes; packets of more than {MAX_PACKET_BYTES:,} are not read"
        raise FramingError(message, offset, "too large")
    return (start, start + length) if start + length <= len(data) else None


def _checked_bounds(data: bytearray, offset: int) -> tuple[int, int] | None:
    """Return the result of `packet_bounds`; raises FramingError also for a packet that would need too much memory."""
    bounds = packet_bounds(data, offset)
    if bounds is not None and bounds[1] - bounds[0] >= MIN_CHECKED_PACKET_BYTES:
        try:
            with memoryview(data) as view, view[slice(*bounds)] as content:
                check_packet(content)
        except LimitError as error:
            raise FramingError(str(error), offset, "too large") from None
    return bounds


def packet_batches(blocks: Iterable[bytes], size: int) -> Iterator[tuple[int, bytes]]:
    """Yield offset and bytes of batches of complete packets: first a single packet, then up to `size` bytes.

    A packet larger than `size` is a batch of its own. Raises FramingError, after all earlier packets, at bytes that are
    not a packet, or if the last packet is cut off.
    """
    data, base = bytearray(), 0
    for block in itertools.chain(blocks, [None]):
        data += block or b""
        start = end = 0
        fault = None
        last = len(data) - _SHORT_BYTES - 1
        while end < len(data):
            limit = min(last, start + size - _SHORT_BYTES) if base + start else 0
            while end < limit and data[end] == PACKET_TAG and (length := data[end + 1]) < _SHORT_BYTES:
                end += 2 + length
            try:
                bounds = _checked_bounds(data, end)
            except FramingError as error:
                fault = FramingError(str(error), base + end, error.kind)
                break
            if bounds is None:
                if block is None:
                    fault = FramingError("it is cut off within a packet", base + end, "cut off")
                break
            if end > start and bounds[1] - start > size:
                yield base + start, bytes(data[start:end])
                start = end
            end = bounds[1]
            if base + start == 0:
                yield 0, bytes(data[:end])
                start = end
        if end > start:
            yield base + start, bytes(data[start:end])
        if fault is not None:
            raise fault
        del data[:end]
        base += end
