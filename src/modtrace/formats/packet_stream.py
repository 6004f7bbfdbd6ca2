"""Framing of a Perfetto file: packets, each after a tag and its length as a varint."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

from .limits import MAX_PACKET_BYTES, MIN_CHECKED_PACKET_BYTES, LimitError, check_packet

PACKET_TAG = 0x0A
"""The byte before every packet: field 1 of the message Trace, with a length."""

MAX_VARINT_BYTES = 10
_SHORT = 0x80
"""A shorter packet has one byte for its length, as most have: to find where they end takes most of the time."""


def varint_bytes(value: int) -> bytes:
    """Return a number, which is not negative, as a varint: seven bits to a byte, the lowest first."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def read_varint(data: bytes | bytearray, offset: int) -> tuple[int, int]:
    """Return the varint at `offset` and where it ends; raises IndexError if it is cut off, ValueError if it is none."""
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
        offset: where the packet should begin.
        kind: whether it is none, is larger than any that is read, or is cut off by the end of the file.
    """

    def __init__(self, message: str, offset: int, kind: Literal["none", "too large", "cut off"] = "none") -> None:
        super().__init__(message)
        self.offset = offset
        self.kind = kind


def packet_bounds(data: bytes | bytearray, offset: int) -> tuple[int, int] | None:
    """Return the bounds of the packet at `offset`, None if the data end before it; raises FramingError if none is."""
    if data[offset] != PACKET_TAG:
        raise FramingError(f"a packet should begin here, and there is 0x{data[offset]:02x}", offset)
    try:
        length, begin = read_varint(data, offset + 1)
    except IndexError:
        return None
    except ValueError:
        raise FramingError("the length of a packet is not a number", offset) from None
    if length > MAX_PACKET_BYTES:
        message = f"a packet of {length:,} bytes; none is read that has more than {MAX_PACKET_BYTES:,}"
        raise FramingError(message, offset, "too large")
    return (begin, begin + length) if begin + length <= len(data) else None


def _checked_bounds(data: bytearray, offset: int) -> tuple[int, int] | None:
    """Return what `packet_bounds` does; raises FramingError also for a packet that takes too much memory."""
    bounds = packet_bounds(data, offset)
    if bounds is not None and bounds[1] - bounds[0] >= MIN_CHECKED_PACKET_BYTES:
        try:
            with memoryview(data) as view, view[slice(*bounds)] as content:
                check_packet(content)
        except LimitError as error:
            raise FramingError(str(error), offset, "too large") from None
    return bounds


def packet_batches(blocks: Iterable[bytes], size: int) -> Iterator[tuple[int, bytes]]:
    """Yield some whole packets, first one alone, then up to `size` bytes: their offset, and their bytes.

    A packet that has more bytes than `size` comes alone. Raises FramingError, after the packets before it, if the bytes
    where a packet should begin are none, or the last packet is cut off.
    """
    data, base = bytearray(), 0
    for block in itertools.chain(blocks, [None]):
        data += block or b""
        begin = end = 0
        fault = None
        last = len(data) - _SHORT - 1
        while end < len(data):
            until = min(last, begin + size - _SHORT) if base + begin else 0
            while end < until and data[end] == PACKET_TAG and (length := data[end + 1]) < _SHORT:
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
            if end > begin and bounds[1] - begin > size:
                yield base + begin, bytes(data[begin:end])
                begin = end
            end = bounds[1]
            if base + begin == 0:
                yield 0, bytes(data[:end])
                begin = end
        if end > begin:
            yield base + begin, bytes(data[begin:end])
        if fault is not None:
            raise fault
        del data[:end]
        base += end
