"""Tells the format of a trace by how its content begins."""

from typing import Literal

from .packet_stream import PACKET_TAG

TEXT_PROBE_BYTES = 64
"""Bytes looked through for control characters, to tell a Perfetto trace from JSON behind an empty line."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def format_of(head: bytes) -> Literal["chrome", "perfetto"] | None:
    """Tell the formats apart: Chrome's JSON, Perfetto's protobuf, or neither (None).

    A Perfetto trace starts with the tag of a packet, which is also a line feed, and the packet's length can be a
    bracket. The mark is that JSON has no other control characters that early.

    Args:
        head: what the trace begins with, unzipped; some kilobytes, as JSON may begin with empty lines.
    """
    bracket = head.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] in (b"[", b"{")
    if head[:1] != bytes([PACKET_TAG]):
        return "chrome" if bracket else None
    is_text = all(byte >= 0x20 or byte in b"\t\n\r" for byte in head[:TEXT_PROBE_BYTES])
    return "chrome" if bracket and is_text else "perfetto"
