"""Reading: every kind of file that modtrace writes or merges → `Timeline`.

`read_timeline` is the one way in; `file_kind` says what a file is, `trace_path` opens a report.
"""

import itertools
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from .._errors import TraceError
from .._files import open_regular, work_folder
from ..formats.limits import LimitError, check_unpacked
from ..formats.trace_file import BLOCK_BYTES, ZIP_MAGIC, FileKind, TraceFile, file_kind, file_kind_by_head

if TYPE_CHECKING:
    from ..timeline import Timeline

__all__ = [
    "NO_PROFILE",
    "FileKind",
    "errors_about",
    "extract_trace",
    "file_kind",
    "file_kind_by_head",
    "read_timeline",
    "trace_path",
]

NO_PROFILE = (FileKind.RING, FileKind.SAVED_JSON, FileKind.PERFETTO, FileKind.MERGED_PERFETTO, FileKind.ZIP)
"""What is no trace of a profiler, which a recording could be laid over."""
_MAX_DIRECTORY_BYTES = 1 << 20
_MAX_END_BYTES = 20 + 22 + (1 << 16)
"""How far from an archive's end its last record can begin, and what ZIP64 puts before it."""
_UNPACK = "unpack it and open the trace inside"


@contextmanager
def trace_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a trace: of the one in a report's `.zip`, extracted for as long as the block runs, else `path`.

    Raises TraceError if the file cannot be read, or is an archive without a trace; what is wrong with the trace inside
    an archive is told of the archive; ModtraceError if there is nowhere to extract an archive to.
    """
    if not _is_archive(path):
        yield Path(path)  # also where nothing can be written
        return
    with work_folder() as folder:
        inner = extract_trace(path, folder)
        with errors_about(path, inner):
            yield inner


@contextmanager
def errors_about(path: str | os.PathLike[str], inner: Path) -> Iterator[None]:
    """Name the archive in errors about the trace inside it, whose own path means nothing to the user."""
    try:
        yield
    except TraceError as error:
        if inner == Path(path):
            raise
        raise TraceError(path, f"{inner.name}: {error.message}", error.offset) from error


def extract_trace(path: str | os.PathLike[str], folder: Path) -> Path:
    """Return the trace of a report's `.zip`, extracted into `folder`, or `path`; raises TraceError if it has none."""
    if not _is_archive(path):
        return Path(path)
    try:
        with open(path, "rb") as file:
            if _directory_bytes(file) > _MAX_DIRECTORY_BYTES:
                raise TraceError(path, f"its table of files is too large for a report of modtrace; {_UNPACK}")
            with zipfile.ZipFile(file) as archive:
                for name in archive.namelist():
                    # Only what a report calls its trace: nothing of the archive's can choose where it is written.
                    if name in ("trace.pftrace.gz", "trace.json.gz"):
                        packed_bytes = archive.getinfo(name).compress_size
                        with archive.open(name) as member, open(folder / name, "wb") as extracted:
                            while block := member.read(BLOCK_BYTES):
                                check_unpacked(extracted.tell() + len(block), packed_bytes)
                                extracted.write(block)
                        return folder / name
    except LimitError as error:
        raise TraceError(path, f"{name} in it: {error}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise TraceError(path, f"it is a ZIP archive that is not whole, or damaged: {error}") from error
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror or error}") from error
    raise TraceError(path, f"it is a ZIP archive, but no report of modtrace; {_UNPACK}")


def _is_archive(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file is an archive; raises TraceError if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(len(ZIP_MAGIC)) == ZIP_MAGIC
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror or error}") from error


def _directory_bytes(file: BinaryIO) -> int:
    """Return how long an archive's table of files is, all of which `zipfile` reads before anything else.

    Of one so large that other fields say it (ZIP64) no less than 2^32.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - _MAX_END_BYTES, 0))
    end = file.read()
    end_record = end.rfind(b"PK\5\6")
    if end_record < 0 or len(end) < end_record + 16:
        return 0  # no archive, as zipfile will say
    if end[end_record - 20 : end_record - 16] == b"PK\6\7":
        return 1 << 32
    return int.from_bytes(end[end_record + 12 : end_record + 16], "little")


_WHAT_TO_DO = "load the file as modtrace saved it, or the ring file of the recording"
_READABLE = "modtrace reads ring files, reports, traces of torch.profiler, and .json, .pftrace and .html that it wrote"


def read_timeline(path: str | os.PathLike[str]) -> "Timeline":
    """Read a timeline from any file that modtrace knows; see `modtrace.load`."""
    try:
        with trace_path(path) as trace:
            return _read(trace)
    except RecursionError as error:
        raise TraceError(path, "something in it is nested too deeply to be read") from error
    except OSError as error:
        raise TraceError(path, f"it cannot be read: {error.strerror or error}") from error


def _read(path: Path) -> "Timeline":
    # Each reader is imported when it is needed: protobuf alone takes longer to import than a small file to read.
    kind = file_kind(path)
    if kind is FileKind.RING:
        from .ring_file import load_ring

        return load_ring(path)
    if kind is FileKind.PROFILE:
        from ..profiler.merge import load_profile

        return load_profile(path)
    carrying = {
        FileKind.SAVED_JSON: "chrome",
        FileKind.MERGED_JSON: "chrome",
        FileKind.PERFETTO: "perfetto",
        FileKind.MERGED_PERFETTO: "perfetto",
        FileKind.PAGE: "page",
    }
    with TraceFile(path) as source:
        if kind not in carrying:
            if not b"".join(itertools.islice(source.whole_blocks(), 2)):  # damage is known after the first
                raise TraceError(path, "it is empty")
            raise TraceError(path, "it is neither a ring file nor a trace in JSON or Perfetto's format")
        from ..formats.own_table import read_table

        carried = read_table(source.whole_blocks(), carrying[kind])
    if carried.timeline is not None:
        return carried.timeline
    if carrying[kind] != "chrome":
        if kind is FileKind.PAGE and not carried.is_changed:
            raise TraceError(path, f"it is a page that modtrace did not write; {_READABLE}")
        problem = "another program has changed or cut it" if carried.is_changed else "it holds no table of modtrace"
        why = f" ({carried.fault})" if carried.fault else ""
        raise TraceError(path, f"{problem}{why}, and only as modtrace wrote it can it be read; {_WHAT_TO_DO}")
    from ..profiler.merge import load_profile

    timeline = load_profile(path)
    note = "another program has changed this trace since modtrace wrote it; it was read as a profiler's"
    changed = [note, *timeline.metadata["notes"]]
    return replace(timeline, metadata={**timeline.metadata, "notes": changed})
