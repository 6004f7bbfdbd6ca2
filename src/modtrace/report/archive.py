"""ZIP files that are the same, byte for byte, whenever their contents are."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping

from ..write.atomic_file import atomic_writer

__all__ = ["write_archive", "zip_bytes"]

_EARLIEST_DATE = (1980, 1, 1, 0, 0, 0)
"""The earliest date that a ZIP can hold: the real one would say when and make archives differ."""
_CREATED_ON_UNIX = 3
_FILE_MODE = 0o100644 << 16


def zip_bytes(files: Mapping[str, bytes]) -> bytes:
    """Return a ZIP file of the files by name, in their order, without any time, user or machine in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _EARLIEST_DATE)
            entry.create_system = _CREATED_ON_UNIX
            entry.external_attr = _FILE_MODE
            entry.compress_type = zipfile.ZIP_STORED if name.endswith(".gz") else zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return buffer.getvalue()


def write_archive(files: Mapping[str, bytes], path: str | os.PathLike[str]) -> None:
    """Write a ZIP file of the files by name.

    Raises:
        WriteError: it cannot be written; an existing file at `path` is intact.
    """
    with atomic_writer(path) as file:
        file.write(zip_bytes(files))
