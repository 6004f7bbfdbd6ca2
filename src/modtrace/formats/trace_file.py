"""A trace file's bytes, from front to back, plain or gzip, in blocks of bounded size."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from .._errors import TraceError
from .._system.files import open_regular
from .limits import LimitError, check_unpacked

BLOCK_BYTES = 1 << 16
"""Bytes handed out at once. Parsing is fastest where a block and what it parses to stay in the CPU's cache."""

GZIP_MAGIC = b"\x1f\x8b"

_INFLATE_BYTES = 1 << 15
"""Compressed bytes taken at once: where they are broken, so many are gone through one by one."""

Progress = Callable[[int], None]
"""Called with the number of bytes of the file that have been read since the last call."""


class TraceFile:
    """A trace file that is read once and never written.

    Attributes:
        path: the file.
        size: its size on disk in bytes.
        gzipped: whether its first bytes are gzip's, whatever its name says.
        damage: what is wrong with the compressed data, once a block has run into it; else None.
        garbage: where bytes that are neither gzip nor padding follow the last member, once all was read; else None.
    """

    def __init__(self, path: str | os.PathLike[str], progress: Progress | None = None) -> None:
        self.path = os.fspath(path)
        self.damage: str | None = None
        self.garbage: str | None = None
        self._progress = progress or (lambda _: None)
        try:
            self._file = open_regular(self.path)
            self.size = os.fstat(self._file.fileno()).st_size
            self.gzipped = self._file.read(2) == GZIP_MAGIC
            self._file.seek(0)
        except OSError as error:
            raise TraceError(self.path, f"cannot be read: {error.strerror}") from error

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def fileno(self) -> int:
        """Return the descriptor, for reading at an offset."""
        return self._file.fileno()

    def blocks(self) -> Iterator[bytes]:
        """Yield the uncompressed bytes, at most `BLOCK_BYTES` at once.

        Compressed data that is cut off or broken ends the blocks; `damage` then says where.

        Raises:
            TraceError: the file cannot be read, or grows as no trace does when it is uncompressed.
        """
        return self._bounded() if self.gzipped else self._raw()

    def whole_blocks(self) -> Iterator[bytes]:
        """Yield what `blocks` does, of a file that is worth nothing in part.

        Raises:
            TraceError: also where compressed data is cut off or broken, or something follows it.
        """
        yield from self.blocks()
        if (fault := self.damage or self.garbage) is not None:
            raise TraceError(self.path, f"it is not whole, or damaged: {fault}")

    def _bounded(self) -> Iterator[bytes]:
        unpacked_bytes = 0
        for block in self._inflated():
            unpacked_bytes += len(block)
            try:
                check_unpacked(unpacked_bytes, self._file.tell())
            except LimitError as error:
                raise TraceError(self.path, str(error)) from None
            yield block

    def _raw(self) -> Iterator[bytes]:
        # Not more than the file has, whose size is unknown only of a pipe or a device.
        block_bytes = min(BLOCK_BYTES, self.size or BLOCK_BYTES)
        while True:
            try:
                block = self._file.read(block_bytes)
            except OSError as error:
                raise TraceError(self.path, f"cannot be read: {error.strerror}", self._file.tell()) from error
            if not block:
                return
            self._progress(len(block))
            yield block

    def _inflated(self) -> Iterator[bytes]:
        inflate = zlib.decompressobj(wbits=31)
        ended = False
        for block in self._raw():
            for first in range(0, len(block), _INFLATE_BYTES):
                data = block[first : first + _INFLATE_BYTES]
                while data:
                    if ended:
                        # Members may follow one another; anything else after the last one is padding.
                        if not data.startswith(GZIP_MAGIC[:1]):
                            if data.strip(b"\0"):
                                begin = self._file.tell() - len(block) + min(first + _INFLATE_BYTES, len(block))
                                self.garbage = f"something else follows the gzip data, at byte {begin - len(data)}"
                            return
                        inflate, ended = zlib.decompressobj(wbits=31), False
                    before = inflate.copy()
                    try:
                        out = inflate.decompress(data, BLOCK_BYTES)
                    except zlib.error as error:
                        if out := _until_broken(before, data):
                            yield out
                        offset = self._file.tell() - len(block) + first
                        self.damage = (
                            f"the gzip data is broken in the {_INFLATE_BYTES} bytes from byte {offset} on ({error})"
                        )
                        return
                    if out:
                        yield out
                    ended = inflate.eof
                    data = inflate.unused_data if ended else inflate.unconsumed_tail
        if not ended:
            self.damage = f"the gzip data ends early, at byte {self._file.tell()}"
            if out := inflate.flush():
                yield out


def _until_broken(inflate: Any, data: bytes) -> bytes:
    """Return what can be had of data that does not inflate as a whole."""
    out = b""
    with contextlib.suppress(zlib.error):
        for index in range(len(data)):
            out += inflate.decompress(data[index : index + 1])
    return out
