"""The trace inside a report's `.zip`."""

import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .._errors import TraceError
from .._system.files import open_regular, work_folder
from ..formats.limits import LimitError, check_unpacked
from ..formats.trace_file import BLOCK_BYTES
from .file_kind import ZIP_MAGIC

_MAX_DIRECTORY_BYTES = 1 << 20
_MAX_END_BYTES = 20 + 22 + (1 << 16)
"""How far from an archive's end its last record can begin, and what ZIP64 puts before it."""
_UNPACK = "unpack it and open the trace inside"


@contextmanager
def trace_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a trace: of the one in a report's `.zip`, extracted for as long as the block runs, else `path`.

    Raises:
        TraceError: the file cannot be read, or is an archive without a trace; what is wrong with the trace inside an
            archive is told of the archive.
        ModtraceError: there is nowhere to extract an archive to.
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
    """Say of an archive what is wrong with the trace inside it, whose own path means nothing to the user.

    Args:
        path: the archive, or any other file.
        inner: what `extract_trace` made of it.
    """
    try:
        yield
    except TraceError as error:
        if inner == Path(path):
            raise
        raise TraceError(path, f"{inner.name}: {error.message}", error.offset) from error


def extract_trace(path: str | os.PathLike[str], folder: Path) -> Path:
    """Return the path of the trace of a report's `.zip`, extracted into `folder`; `path` itself if it is no archive.

    Raises:
        TraceError: the file cannot be read, or is an archive without a trace.
    """
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
    """Tell whether a file is an archive.

    Raises:
        TraceError: it cannot be read.
    """
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
    found = end.rfind(b"PK\5\6")
    if found < 0 or len(end) < found + 16:
        return 0  # no archive, as zipfile will say
    if end[found - 20 : found - 16] == b"PK\6\7":
        return 1 << 32
    return int.from_bytes(end[found + 12 : found + 16], "little")
