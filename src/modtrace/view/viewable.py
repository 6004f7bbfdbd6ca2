"""Any file that modtrace reads → a file that the Perfetto UI draws."""

import os
from pathlib import Path

from ..formats.trace_file import TraceFile
from ..profiler.merge import merge_timeline
from ..read import FileKind, errors_about, extract_trace, file_kind
from ..read.ring_file import Steps, load_shown, read_pieces
from ..write import write


def ensure_viewable(path: str | os.PathLike[str], folder: Path, steps: Steps | None = None) -> tuple[Path, list[str]]:
    """Return a file that the Perfetto UI draws module tracks of, and what the user should know.

    Args:
        path: any file that `modtrace.load` reads, or another tool's trace in Perfetto's format.
        folder: where the file is made, if `path` is not drawn as it is.
        steps: the first step and the one after the last, of which the modules are shown; None: what `load_shown` does.

    Raises:
        RingError: a ring file is damaged beyond reading.
        TraceError: it is not a trace, or broken.
    """
    trace, made = extract_trace(path, folder), folder / "viewable.pftrace"
    with errors_about(path, trace):
        kind = file_kind(trace)
        if kind is FileKind.PROFILE and steps is None:
            return made, merge_timeline(trace, None, made).notes
        if kind in (FileKind.RING, FileKind.OTHER) or steps is not None:
            if steps == (None, None):
                write(read_pieces(trace), made)
                return made, []
            timeline, notes = load_shown(trace, steps)
            write(timeline, made)
            return made, notes
        with TraceFile(trace) as source:
            for _ in source.blocks() if source.gzipped else ():
                pass  # what no reader of ours would unpack is not for a browser either
    return trace, []
