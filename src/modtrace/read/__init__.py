"""Files → timelines: a ring file, or a trace that modtrace wrote."""

from __future__ import annotations

import gzip
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from .._errors import TraceError
from ..formats.trace_kind import format_of

if TYPE_CHECKING:
    from ..timeline import Timeline

__all__ = ["load"]

RING = b"MODTRACE"
GZIP = b"\x1f\x8b"

HEAD = 4096
"""Bytes that are looked at to tell what a file is; JSON may begin with empty lines."""

# What a file is that we cannot read, by how it begins.
_OTHERS = {
    b"PK": "it is a ZIP archive; unpack it and load the trace inside",
    b"<": "it is a page; load the trace that it was made from",
    b"\x89HDF": "it is an HDF5 file",
    b"\x7fELF": "it is a program",
}


def load(path: str | os.PathLike[str]) -> Timeline:
    """Read a timeline from a ring file, also of a killed process, or from a `.json` or `.pftrace` that modtrace saved.

    What the file is follows from its content, not from its name.

    Raises:
        RingError: a ring file is damaged beyond reading.
        TraceError: the file cannot be read, is broken, or is something else; says what.
    """
    try:
        with open(path, "rb") as plain:
            head = plain.read(len(RING))
            plain.seek(0)
            if head == RING:
                return _ring(path)
            if not head.startswith(GZIP):
                return _trace(path, plain)
            with gzip.open(plain) as unpacked:
                return _trace(path, unpacked)  # type: ignore[arg-type]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(path, f"it is not whole, or damaged: {error}") from error
    except OSError as error:
        raise TraceError(path, f"it cannot be read: {error.strerror or error}") from error


def _ring(path: str | os.PathLike[str]) -> Timeline:
    from ..ring import read_ring
    from ..timeline import build_timeline

    return build_timeline(read_ring(path))


def _trace(path: str | os.PathLike[str], file: BinaryIO) -> Timeline:
    head = file.read(HEAD)
    file.seek(0)
    format_ = format_of(head)
    if format_ == "chrome":
        from .chrome import load_chrome

        return load_chrome(Path(path), file)
    if format_ == "perfetto":
        from .perfetto import load_perfetto

        return load_perfetto(Path(path), file)
    if not head:
        raise TraceError(path, "it is empty")
    for start, what in _OTHERS.items():
        if head.startswith(start):
            raise TraceError(path, f"{what}; modtrace loads ring files, and .json and .pftrace that it saved")
    raise TraceError(path, "it is neither a ring file nor a trace in JSON or Perfetto's format")
