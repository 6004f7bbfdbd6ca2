"""Which format a trace is in."""

from __future__ import annotations

from typing import Literal

from .packet_stream import PACKET

__all__ = ["format_of"]

TOLD_BY = 64
"""Bytes by whose first few control characters a Perfetto trace is told from JSON behind an empty line."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def format_of(head: bytes) -> Literal["chrome", "perfetto"] | None:
    """Tell the formats apart: Chrome's JSON, Perfetto's protobuf, or neither.

    A Perfetto trace starts with the tag of a packet, which is also a line feed, and the packet's length can be a
    bracket. So what tells is that JSON has no other control characters that early.

    Args:
        head: what the trace begins with, unzipped.
    """
    bracket = head.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] in (b"[", b"{")
    if head[:1] != bytes([PACKET]):
        return "chrome" if bracket else None
    is_text = all(byte >= 0x20 or byte in b"\t\n\r" for byte in head[:TOLD_BY])
    return "chrome" if bracket and is_text else "perfetto"
