"""Any file that modtrace reads → one that the Perfetto UI draws with module tracks."""

from __future__ import annotations

import os
from pathlib import Path

from ..profiler import merge
from ..profiler.trace.trace_file import TraceFile
from ..read import FileKind, errors_about, extract_trace, file_kind, load

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
    with errors_about(path, trace):
        return _viewable(trace, folder)


def _viewable(trace: Path, folder: Path) -> tuple[Path, list[str]]:
    kind = file_kind(trace)
    made = folder / "viewable.pftrace"
    if kind is FileKind.PROFILE:
        return made, merge(trace, None, made).notes
    if kind in (FileKind.RING, FileKind.OTHER):
        load(trace).save(made)
        return made, []
    with TraceFile(trace) as source:
        if source.gzipped:
            for _ in source.blocks():
                pass  # what no reader of ours would unpack is not for a browser either
    return trace, []
