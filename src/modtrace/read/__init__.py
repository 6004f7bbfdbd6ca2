"""Reading: every kind of file that modtrace writes or merges → `Timeline`.

`load` is the one way in, for commands as for users; `file_kind` says what a file is, `trace_path` opens a report.
"""

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from .._errors import TraceError
from ..formats.trace_file import TraceFile
from .file_kind import FileKind, file_kind, file_kind_by_head
from .report_zip import errors_about, extract_trace, trace_path

if TYPE_CHECKING:
    from ..timeline import Timeline

__all__ = ["FileKind", "errors_about", "extract_trace", "file_kind", "file_kind_by_head", "load", "trace_path"]

# What a file is that cannot be read, by how it begins.
_OTHERS = {
    b"<": "it is a page: open it in a browser, or give the trace that it was made from",
    b"\x89HDF": "it is an HDF5 file",
    b"\x7fELF": "it is a program",
}
_READABLE = "modtrace reads ring files, reports, traces of torch.profiler, and .json and .pftrace that it wrote"


def load(path: str | os.PathLike[str]) -> "Timeline":
    """Read a timeline from any file that modtrace knows; what it is follows from its content, not from its name.

    Args:
        path: a ring file, also of a running or a killed process; `.json` or `.pftrace` (also `.gz`) that modtrace
            saved or merged; a report's `.zip`; or a trace of torch.profiler, of whose `nn.Module` slices module tracks
            are made (profile with `with_stack=True`; what cannot be known is in `timeline.metadata["notes"]`).

    Returns:
        The spans of modules. Of a merged trace or a profiler's, the profiler's own events are not in it.

    Raises:
        RingError: a ring file is damaged beyond reading.
        TraceError: the file cannot be read, is broken, or is something else; says what.

    Example:
        >>> modtrace.load("step.pftrace").summary()
    """
    try:
        with trace_path(path) as trace:
            return _load(trace)
    except RecursionError as error:
        raise TraceError(path, "something in it is nested too deeply to be read") from error
    except OSError as error:
        raise TraceError(path, f"it cannot be read: {error.strerror or error}") from error


def _load(path: Path) -> "Timeline":
    # Each reader is imported when it is needed: protobuf alone takes longer to import than a small file to read.
    kind = file_kind_by_head(path)
    if kind is FileKind.RING:
        from .ring_file import load_ring

        return load_ring(path)
    if kind is FileKind.PROFILE:
        from .recorded_json import load_profile

        return load_profile(path)
    if kind is FileKind.MERGED_PERFETTO:
        from .merged_perfetto import load_merged_perfetto

        return load_merged_perfetto(path)
    with TraceFile(path) as source:
        if kind is FileKind.SAVED_JSON:
            from .recorded_json import load_chrome

            return load_chrome(path, source)
        if kind is FileKind.PERFETTO:
            from .saved_perfetto import load_perfetto

            return load_perfetto(path, source.whole_blocks())
        head = b"".join(itertools.islice(source.whole_blocks(), 2))  # behind the first, damage is known
    if not head:
        raise TraceError(path, "it is empty")
    for start, what in _OTHERS.items():
        if head.startswith(start):
            raise TraceError(path, f"{what}; {_READABLE}")
    raise TraceError(path, "it is neither a ring file nor a trace in JSON or Perfetto's format")
