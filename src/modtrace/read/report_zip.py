"""The trace inside a report's `.zip`."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .._errors import TraceError
from .file_kind import ZIP_MAGIC

__all__ = ["extract_trace", "trace_path"]


@contextmanager
def trace_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the path of a trace: of the one in a report's `.zip`, extracted for as long as the block runs, else `path`.

    Raises:
        TraceError: the file cannot be read, or is an archive without a trace; what is wrong with the trace inside an
            archive is said of the archive.
    """
    with tempfile.TemporaryDirectory(prefix="modtrace-") as folder:
        inner = extract_trace(path, Path(folder))
        try:
            yield inner
        except TraceError as error:
            if inner == Path(path):
                raise
            raise TraceError(path, f"{inner.name}: {error.message}", error.offset) from error


def extract_trace(path: str | os.PathLike[str], folder: Path) -> Path:
    """Return the path of the trace of a report's `.zip`, extracted into `folder`; `path` itself if it is no archive.

    Raises:
        TraceError: the file cannot be read, or is an archive without a trace.
    """
    try:
        with open(path, "rb") as file:
            if file.read(len(ZIP_MAGIC)) != ZIP_MAGIC:
                return Path(path)
            with zipfile.ZipFile(file) as archive:
                for name in archive.namelist():
                    # Only what a report calls its trace: nothing of the archive's can choose where it is written.
                    if name in ("trace.pftrace.gz", "trace.json.gz"):
                        with archive.open(name) as member, open(folder / name, "wb") as extracted:
                            shutil.copyfileobj(member, extracted)
                        return folder / name
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise TraceError(path, f"it is a ZIP archive that is not whole, or damaged: {error}") from error
    except OSError as error:
        raise TraceError(path, f"cannot be read: {error.strerror or error}") from error
    raise TraceError(path, "it is a ZIP archive, but no report of modtrace; unpack it and open the trace inside")
