"""The bytes of a trace file, which may be gzip; the kind of the file; the metadata of a merged trace."""

import enum
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import orjson

from .._errors import TraceError
from .._files import open_regular, read_at
from ..ring import MAGIC as RING_MAGIC
from .limits import MAX_TAIL_BYTES, LimitError, check_nested_json, check_unpacked, escaped_json
from .packet_stream import PACKET_TAG

BLOCK_BYTES = 1 << 16
"""Size of a block of bytes. Parsing is fastest if a block and its parsed events stay in the CPU's cache."""

GZIP_MAGIC = b"\x1f\x8b"
ZIP_MAGIC = b"PK\x03\x04"

Progress = Callable[[int], None]
"""A function that is called with the number of bytes read from the file since its last call."""


class TraceFile:
    """A trace file that is read once and never written.

    Attributes:
        path: the file.
        size: its size on disk in bytes.
        gzipped: whether the file starts with the bytes of gzip, regardless of its name.
        damage: the fault of the compressed data, or of data after it, once `blocks` has reached it; None before that.
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
        """Close the file; blocks cannot be read any more."""
        self._file.close()

    def fileno(self) -> int:
        """Return the descriptor, for reading at an offset."""
        return self._file.fileno()

    def blocks(self) -> Iterator[bytes]:
        """Yield the uncompressed bytes in blocks of up to `BLOCK_BYTES`.

        The blocks end if compressed data is cut off or broken; then `damage` describes the fault. Raises TraceError if
        the file cannot be read, or unpacks to more than the limit.
        """
        return self._inflated() if self.gzipped else self._raw()

    def whole_blocks(self) -> Iterator[bytes]:
        """Yield the bytes as `blocks` does; raises TraceError also if the compressed data has a fault."""
        yield from self.blocks()
        if self.damage is not None:
            raise TraceError(self.path, f"it is incomplete or damaged: {self.damage}")

    def _raw(self) -> Iterator[bytes]:
        # Not more than the size of the file; an empty file, and files of /proc, have size 0.
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
        reader = gzip.GzipFile(fileobj=self._file)
        packed_bytes = unpacked_bytes = 0
        try:
            while block := reader.read1(BLOCK_BYTES):
                self._progress(self._file.tell() - packed_bytes)
                packed_bytes = self._file.tell()
                unpacked_bytes += len(block)
                check_unpacked(unpacked_bytes, packed_bytes)
                yield block
        except LimitError as error:
            raise TraceError(self.path, str(error)) from None
        except EOFError:
            self.damage = f"the gzip data ends early, at byte {self._file.tell()}"
        except (gzip.BadGzipFile, zlib.error) as error:
            position = f"before byte {self._file.tell()} ({error})"
            self.damage = f"the gzip data is broken, or other data follows it, {position}"
        except OSError as error:
            raise TraceError(self.path, f"cannot be read: {error.strerror}", self._file.tell()) from error


TEXT_PROBE_BYTES = 64
"""Number of bytes searched for control characters, to distinguish a Perfetto trace from JSON after an empty line."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def format_of(head: bytes) -> Literal["chrome", "perfetto"] | None:
    """Return the format of a trace: Chrome's JSON, Perfetto's protobuf, or None for neither.

    A Perfetto trace starts with the tag of a packet, which is also a line feed, and the packet's length may equal a
    bracket. Such a trace has control characters near its start, and JSON has none. `head` should have some kilobytes,
    as JSON may begin with empty lines.
    """
    has_bracket = head.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] in (b"[", b"{")
    if head[:1] != bytes([PACKET_TAG]):
        return "chrome" if has_bracket else None
    is_text = all(byte >= 0x20 or byte in b"\t\n\r" for byte in head[:TEXT_PROBE_BYTES])
    return "chrome" if has_bracket and is_text else "perfetto"


MERGED = "modtrace"
"""The top-level key of the metadata of a merged trace."""

MERGED_PACKET = f"{MERGED}_merge"
"""The name of the metadata in the first packets of a merged `.pftrace`."""

_JSON_KEY = f',\n"{MERGED}":'.encode()
_PACKET_KEY = MERGED_PACKET.encode()


def metadata_json(metadata: Mapping[str, Any]) -> bytes:
    """Return the metadata of a merge as JSON; texts are escaped if they have lone surrogates, which are not UTF-8."""
    try:
        return orjson.dumps(metadata)
    except orjson.JSONEncodeError:
        return orjson.dumps(escaped_json(dict(metadata)))


def read_merge_metadata(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the metadata that `merge` wrote into a file, None for any other; raises TraceError if unreadable."""
    with TraceFile(path) as source:
        if not source.gzipped:
            # In JSON the metadata is after the events, so these need not be read.
            start = max(source.size - MAX_TAIL_BYTES, 0)
            metadata = _metadata(read_at(source.fileno(), MAX_TAIL_BYTES, start))
            if metadata is not None or start == 0:
                return metadata
        return _search_from_start(source)


def _search_from_start(source: TraceFile) -> dict[str, Any] | None:
    """Search a compressed file, or one in Perfetto's format, which has its metadata at the start."""
    data = b""
    for block in source.blocks():
        if not data and format_of(block) is None:
            return None  # not a trace: a ring file can be huge
        has_key = _JSON_KEY in data or _PACKET_KEY in data
        data = (data if has_key else data[-len(_JSON_KEY) - len(_PACKET_KEY) :]) + block
        if len(data) > MAX_TAIL_BYTES:
            break
        if has_key and (metadata := _metadata(data)) is not None:
            return metadata
    return _metadata(data)


def _metadata(data: bytes) -> dict[str, Any] | None:
    """Return the metadata of a merge if `data` contains all of it."""
    for key in (_JSON_KEY, _PACKET_KEY):
        position = data.rfind(key)
        # `{"`, not `{`: the length of the metadata comes before it, and one of its bytes may be a brace.
        start = data.find(b'{"', position)
        if position < 0 or start < 0:
            continue
        try:
            check_nested_json(data[start:])
            metadata, _ = json.JSONDecoder().raw_decode(data[start:].decode("utf-8", "ignore"))
        except (ValueError, RecursionError):
            continue
        return metadata if isinstance(metadata, dict) else None
    return None


class FileKind(enum.Enum):
    """The kinds of files, with the words for each."""

    RING = "a ring file"
    SAVED_JSON = "a recording that modtrace saved, in JSON"
    PERFETTO = "a trace in Perfetto's format"
    PROFILE = "a trace of torch.profiler"
    MERGED_JSON = "a merged trace, in JSON"
    MERGED_PERFETTO = "a merged trace, in Perfetto's format"
    ZIP = "a ZIP archive"
    PAGE = "a page"
    OTHER = "a file of another kind"


def file_kind(path: str | os.PathLike[str]) -> FileKind:
    """Return the kind of a file; for JSON its end is read, or all if compressed; raises TraceError if unreadable."""
    kind = file_kind_by_head(path)
    if kind is FileKind.PROFILE and read_merge_metadata(path) is not None:
        return FileKind.MERGED_JSON
    return kind


def file_kind_by_head(path: str | os.PathLike[str]) -> FileKind:
    """Return the kind of a file by its first block, `PROFILE` for merged JSON too; raises TraceError if unreadable."""
    with TraceFile(path) as file:
        head = next(file.blocks(), b"")
    if head.startswith(RING_MAGIC):
        return FileKind.RING
    if head.startswith(ZIP_MAGIC):
        return FileKind.ZIP
    trace_format = format_of(head)
    if trace_format == "perfetto":
        return FileKind.MERGED_PERFETTO if _PACKET_KEY in head else FileKind.PERFETTO
    if trace_format == "chrome":
        # A saved recording has modtrace's key in the header before its events.
        header = head.partition(b'"traceEvents"')[0].partition(b'"otherData"')[2]
        return FileKind.SAVED_JSON if b'"modtrace"' in header else FileKind.PROFILE
    return FileKind.PAGE if head.lstrip()[:1] == b"<" else FileKind.OTHER
