"""A ZIP file of the same bytes whenever its files are the same."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Mapping

from ..write.atomic_file import replacing

__all__ = ["archive", "write_archive"]

_LONG_AGO = (1980, 1, 1, 0, 0, 0)
_UNIX = 3
_MODE = 0o100644 << 16


def archive(files: Mapping[str, bytes]) -> bytes:
    """Return a ZIP file of the files by name, in their order, with no time, no user and no machine in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _LONG_AGO)
            entry.create_system = _UNIX
            entry.external_attr = _MODE
            entry.compress_type = zipfile.ZIP_STORED if name.endswith(".gz") else zipfile.ZIP_DEFLATED
            packed.writestr(entry, data)
    return out.getvalue()


def write_archive(files: Mapping[str, bytes], path: str | os.PathLike[str]) -> None:
    """Write a ZIP file.

    Raises:
        WriteError: it cannot be written; an existing file there is intact.
    """
    with replacing(path) as file:
        file.write(archive(files))
