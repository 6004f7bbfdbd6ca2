"""Bounds of the trace formats, of the programs that read them, and of what is read of a file that may be hostile.

Nothing here bounds the size of a trace. What has no end by itself, as one event or what stands before the events, is
read up to a bound, so that reading takes at most 300 MB more than the spans and events that are kept.
"""

import numpy as np

MAX_CHROME_NS = 10**15
"""Nanoseconds from the base (11.5 days) below which a double of µs in JSON is exact to the nanosecond."""

MAX_TIME_NS = 1 << 62
"""Nanoseconds from 1970 beyond which no time lies: 146 years, to both sides."""

MAX_LINK = 1 << 62
"""Links from here on get no flow: neither format has room for a larger flow id."""

BIND_ID_OFFSET = 1 << 32
"""Added to a link to make a `bind_id` of it: Perfetto counts flow events from 0 in the same space of ids."""

MAX_HEAD_BYTES = 64 << 20
"""Bytes that a trace in JSON may have before its events."""

MAX_TAIL_BYTES = 16 << 20
"""Bytes that a trace in JSON may have after its events."""

MAX_EVENT_BYTES = 4 << 20
"""Bytes of one event in JSON."""

MAX_PACKET_BYTES = 16 << 20
"""Bytes of one packet of a Perfetto trace."""

MIN_CHECKED_PACKET_BYTES = 2 << 20
"""Size from which on a packet is looked through by `check_packet` before it is parsed."""

_FREE_UNPACKED_BYTES = 64 << 20
_MAX_UNPACKED_RATIO = 200
"""Traces pack to a tenth or a fiftieth of their size, and what deflate can do at most is a thousandth."""

_MAX_PARSED_BYTES = 128 << 20
_BYTES_PER_TEXT, _BYTES_PER_VALUE, _BYTES_PER_LIST, _BYTES_PER_OBJECT = 60, 40, 64, 240
"""What Python's objects take at least."""
_MAX_SHORT_FIELDS = 1 << 20


class LimitError(ValueError):
    """A part of a file is larger than anything that is read of it."""


def check_unpacked(unpacked_bytes: int, packed_bytes: int) -> None:
    """Raise LimitError for packed data that grow more than any trace does: a small file could fill memory or a disk."""
    if unpacked_bytes > _FREE_UNPACKED_BYTES + _MAX_UNPACKED_RATIO * packed_bytes:
        raise LimitError(
            f"its first {packed_bytes:,} bytes unpack to more than {unpacked_bytes - 1:,}, more than "
            f"{_MAX_UNPACKED_RATIO} times as many, as those of no trace do; if it is one, unpack it yourself"
        )


def check_nested_json(data: bytes | bytearray) -> None:
    """Raise LimitError for JSON that would take over 128 MiB, far more than it is long: `[],[],[]`."""
    if len(data) * _BYTES_PER_OBJECT <= _MAX_PARSED_BYTES:
        return
    parsed_bytes = (
        data.count(b'"') // 2 * _BYTES_PER_TEXT
        + data.count(b",") * _BYTES_PER_VALUE
        + data.count(b"[") * _BYTES_PER_LIST
        + data.count(b"{") * _BYTES_PER_OBJECT
    )
    if parsed_bytes > _MAX_PARSED_BYTES:
        raise LimitError(f"{len(data):,} bytes of JSON here would take {parsed_bytes:,} bytes of memory")


def check_packet(data: memoryview) -> None:
    """Refuse a large packet of a Perfetto trace that is not mostly text, which would take far more memory than it has.

    A message in a packet takes a hundred bytes of memory and at least two in the file, one of which is its length: a
    control character where the message is short. Raises LimitError if it holds more than a million short messages.
    """
    short_fields = int(np.count_nonzero(np.frombuffer(data, np.uint8) < ord(" ")))
    if short_fields > _MAX_SHORT_FIELDS:
        raise LimitError(
            f"a packet of {len(data):,} bytes holds {short_fields:,} fields; none is read that has so many"
        )
