"""Any file that modtrace reads → one that the Perfetto UI draws with module tracks."""

from __future__ import annotations

import os
from pathlib import Path

from ..profiler import merge
from ..read import FileKind, extract_trace, file_kind, load

__all__ = ["ensure_viewable"]


def ensure_viewable(path: str | os.PathLike[str], folder: Path) -> tuple[Path, list[str]]:
    """Return a file that the Perfetto UI draws module tracks of, and what the user should know.

    Args:
        path: any file that `modtrace.load` reads, or another tool's trace in Perfetto's format.
        folder: where the file is made, if `path` is not drawn as it is.

    Raises:
        RingError: a ring file is damaged beyond reading.
        TraceError: it is no trace, or broken.
    """
    trace = extract_trace(path, folder)
    kind = file_kind(trace)
    made = folder / "viewable.pftrace"
    if kind is FileKind.PROFILE:
        return made, merge(trace, None, made).notes
    if kind in (FileKind.RING, FileKind.OTHER):
        load(trace).save(made)
        return made, []
    return trace, []
