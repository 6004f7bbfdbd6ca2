"""What kind of file a trace is, by its content and never by its name."""

import enum
import os

from ..formats.trace_file import MERGED_PACKET, TraceFile, format_of, read_merge_metadata
from ..ring import MAGIC as RING_MAGIC

ZIP_MAGIC = b"PK\x03\x04"

_MERGED_PACKET = MERGED_PACKET.encode()


class FileKind(enum.Enum):
    """What a file is; the value says it in words."""

    RING = "a ring file"
    SAVED_JSON = "a recording that modtrace saved, in JSON"
    PERFETTO = "a trace in Perfetto's format"
    PROFILE = "a trace of torch.profiler"
    MERGED_JSON = "a merged trace, in JSON"
    MERGED_PERFETTO = "a merged trace, in Perfetto's format"
    ZIP = "a ZIP archive"
    PAGE = "a page"
    OTHER = "something else"


def file_kind(path: str | os.PathLike[str]) -> FileKind:
    """Return what a file is; of JSON the end has to be read, and all of it where it is compressed.

    Raises:
        TraceError: it cannot be read.
    """
    kind = file_kind_by_head(path)
    if kind is FileKind.PROFILE and read_merge_metadata(path) is not None:
        return FileKind.MERGED_JSON
    return kind


def file_kind_by_head(path: str | os.PathLike[str]) -> FileKind:
    """Return what a file is by its first MiB; `PROFILE` also for a merged trace in JSON, which says it at its end.

    Raises:
        TraceError: it cannot be read.
    """
    with TraceFile(path) as file:
        head = next(file.blocks(), b"")
    if head.startswith(RING_MAGIC):
        return FileKind.RING
    if head.startswith(ZIP_MAGIC):
        return FileKind.ZIP
    format_ = format_of(head)
    if format_ == "perfetto":
        return FileKind.MERGED_PERFETTO if _MERGED_PACKET in head else FileKind.PERFETTO
    if format_ == "chrome":
        return FileKind.SAVED_JSON if _is_saved(head) else FileKind.PROFILE
    return FileKind.PAGE if head.lstrip()[:1] == b"<" else FileKind.OTHER


def _is_saved(head: bytes) -> bool:
    """Tell whether JSON begins as modtrace saves it, with what it says of the recording before the events."""
    return b'"modtrace"' in head.partition(b'"traceEvents"')[0].partition(b'"otherData"')[2]
