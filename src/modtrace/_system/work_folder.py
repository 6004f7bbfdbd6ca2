"""A folder for files that are needed only for a while."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .._errors import ModtraceError

__all__ = ["work_folder"]


@contextmanager
def work_folder() -> Iterator[Path]:
    """Make a folder among the system's temporary files, and remove it when the block ends.

    Raises:
        ModtraceError: none can be made, as where all disks are full or read-only.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix="modtrace-")
    except OSError as error:
        raise ModtraceError(
            f"no folder for temporary files can be made ({error.strerror or error}); "
            "free some space, or set TMPDIR to a folder that can be written"
        ) from error
    with made as folder:
        yield Path(folder)
