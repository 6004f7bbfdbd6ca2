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
        offset: where.
        kind: whether no packet begins there, one that is larger than any that is read, or one that the file cuts off.
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


def packet_batches(blocks: Iterable[bytes], size: int) -> Iterator[tuple[int, bytes, list[int]]]:
    """Yield some whole packets, first one alone, then up to `size` bytes: their offset, their bytes, where each ends.

    A packet that has more bytes than `size` comes alone. Raises FramingError if something else stands where a packet
    should begin, or the last one is cut off. The packets before it were yielded.
    """
    data, base = bytearray(), 0
    for block in itertools.chain(blocks, [None]):
        data += block or b""
        begin = end = 0
        ends: list[int] = []
        fault = None
        last = len(data) - _SHORT - 1
        while end < len(data):
            until = min(last, begin + size - _SHORT) if base + begin else 0
            while end < until and data[end] == PACKET_TAG and (length := data[end + 1]) < _SHORT:
                end += 2 + length
                ends.append(end - begin)
            try:
                bounds = packet_bounds(data, end)
                if bounds is not None and bounds[1] - bounds[0] >= MIN_CHECKED_PACKET_BYTES:
                    with memoryview(data) as view, view[slice(*bounds)] as content:
                        check_packet(content)
            except FramingError as error:
                fault = FramingError(str(error), base + end, error.kind)
                break
            except LimitError as error:
                fault = FramingError(str(error), base + end, "too large")
                break
            if bounds is None:
                if block is None:
                    fault = FramingError("it is cut off within a packet", base + end, "cut off")
                break
            if end > begin and bounds[1] - begin > size:
                yield base + begin, bytes(data[begin:end]), ends
                begin, ends = end, []
            end = bounds[1]
            ends.append(end - begin)
            if base + begin == 0:
                yield 0, bytes(data[:end]), ends
                begin, ends = end, []
        if end > begin:
            yield base + begin, bytes(data[begin:end]), ends
        if fault is not None:
            raise fault
        del data[:end]
        base += end
