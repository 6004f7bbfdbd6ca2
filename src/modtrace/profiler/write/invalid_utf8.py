"""Bytes of a trace that are no UTF-8: where they are, and a copy without them."""

from __future__ import annotations

import os
from array import array
from typing import BinaryIO

from ...formats.trace_kind import BYTE_ORDER_MARK

__all__ = ["InvalidUtf8", "readable_envelope"]

_IN_ITS_PLACE = b"?"
"""One byte for one, so that all others stay where they are."""


def readable_envelope(data: bytes) -> bytes:
    """Return what stands around a trace's events without what readers refuse: a byte order mark, bytes of no UTF-8."""
    return data.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "replace").encode()


class InvalidUtf8:
    """Takes the blocks of a file in order.

    Attributes:
        offsets: in the file, of each byte that is part of no character.
    """

    def __init__(self) -> None:
        self.offsets = array("Q")
        self._rest = b""
        self._end = 0

    def add(self, block: bytes | bytearray | memoryview) -> None:
        """Look through the next block."""
        data = self._rest + block
        begin = self._end - len(self._rest)
        self._end += len(block)
        self._rest = b""
        if data.isascii():
            return
        view, first = memoryview(data), 0
        while True:
            try:
                str(view[first:], "utf-8")
                return
            except UnicodeDecodeError as error:
                bad, end = first + error.start, first + error.end
                if error.reason == "unexpected end of data":  # the next block may have the rest of the character
                    self._rest = data[bad:]
                    return
            self.offsets.extend(range(begin + bad, begin + end))
            first = end

    def finish(self) -> None:
        """Take the end of the file for the end of what was given."""
        self.offsets.extend(range(self._end - len(self._rest), self._end))
        self._rest = b""

    def replace_in(self, copy: BinaryIO, moved: int) -> None:
        """Replace each of them in a copy of the file.

        Args:
            copy: a file that can be written anywhere; it stands at its end thereafter.
            moved: by how many bytes all lies further behind in it.
        """
        for offset in self.offsets:
            copy.seek(offset + moved)
            copy.write(_IN_ITS_PLACE)
        copy.seek(0, os.SEEK_END)
