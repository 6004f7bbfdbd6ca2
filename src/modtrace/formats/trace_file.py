"""A trace file's bytes, from front to back, plain or gzip, in blocks of bounded size; and which format they have."""

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Literal

from .._errors import TraceError
from .._system.files import open_regular
from .limits import LimitError, check_unpacked
from .packet_stream import PACKET_TAG

BLOCK_BYTES = 1 << 16
"""Bytes handed out at once. Parsing is fastest where a block and what it parses to stay in the CPU's cache."""

GZIP_MAGIC = b"\x1f\x8b"

Progress = Callable[[int], None]
"""Called with the number of bytes of the file that have been read since the last call."""


class TraceFile:
    """A trace file that is read once and never written.

    Attributes:
        path: the file.
        size: its size on disk in bytes.
        gzipped: whether its first bytes are gzip's, whatever its name says.
        damage: what is wrong with the compressed data or what follows it, once a block has run into it; else None.
    """

    def __init__(self, path: str | os.PathLike[str], progress: Progress | None = None) -> None:
        self.path = os.fspath(path)
        self.damage: str | None = None
        self._progress = progress or (lambda _: None)
        try:
            self._file = open_regular(self.path)
            self.size = os.fstat(self._file.fileno()).st_size
            self.gzipped = self._file.read(2) == GZIP_MAGIC
            self._file.seek(0)
        except OSError as error:
            raise TraceError(self.path, f"cannot be read: {error.strerror}") from error

    def __enter__(self) -> "TraceFile":
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
        return self._inflated() if self.gzipped else self._raw()

    def whole_blocks(self) -> Iterator[bytes]:
        """Yield what `blocks` does, of a file that is worth nothing in part.

        Raises:
            TraceError: also where compressed data is cut off or broken, or something follows it.
        """
        yield from self.blocks()
        if self.damage is not None:
            raise TraceError(self.path, f"it is not whole, or damaged: {self.damage}")

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
        packed = gzip.GzipFile(fileobj=self._file)
        taken = unpacked_bytes = 0
        try:
            while block := packed.read1(BLOCK_BYTES):
                self._progress(self._file.tell() - taken)
                taken = self._file.tell()
                unpacked_bytes += len(block)
                check_unpacked(unpacked_bytes, taken)
                yield block
        except LimitError as error:
            raise TraceError(self.path, str(error)) from None
        except EOFError:
            self.damage = f"the gzip data ends early, at byte {self._file.tell()}"
        except (gzip.BadGzipFile, zlib.error) as error:
            before = f"before byte {self._file.tell()} ({error})"
            self.damage = f"the gzip data is broken, or something else follows it, {before}"
        except OSError as error:
            raise TraceError(self.path, f"cannot be read: {error.strerror}", self._file.tell()) from error


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
