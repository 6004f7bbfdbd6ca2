"""`modtrace.merge`: a recording over a trace of torch.profiler, each given as a file or the recording as a Timeline."""

import os

from ._errors import TraceError
from .formats.trace_file import Progress
from .profiler.merge import MergeResult, merge_timeline
from .read import FileKind, file_kind_by_head, load
from .timeline import Timeline

__all__ = ["MergeResult", "merge"]

_NO_PROFILE = (FileKind.RING, FileKind.SAVED_JSON, FileKind.PERFETTO, FileKind.MERGED_PERFETTO, FileKind.ZIP)


def merge(
    profiler_trace: str | os.PathLike[str],
    timeline: Timeline | str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    *,
    capture: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> MergeResult:
    """Lay a recording over a trace of torch.profiler.

    The profiler's events are kept byte for byte, and its file is never written. Events that are broken JSON, as torch
    writes some names, are repaired or left out, and the result says so. Module tracks are above the threads of
    the process; above each stream of a GPU is a track of the modules whose kernels ran.

    Args:
        profiler_trace: `.json` or `.json.gz`, as `export_chrome_trace` writes it.
        timeline: the recording, or any file that `modtrace.load` reads; None makes module tracks from what the trace
            knows of modules.
        out: `.json`, `.json.gz`, `.pftrace` or `.pftrace.gz`.
        capture: another torch.profiler trace, which contains the capture of the CUDA graphs replayed here; not needed
            if `profiler_trace` contains it.
        progress: called with the number of bytes of the trace that were read since the last call.

    Raises:
        RingError: the recording is a ring file that is damaged beyond reading.
        TraceError: a file is cut off or not a trace, or the two do not overlap in time.
        WriteError: `out` cannot be written; an existing file there is intact.

    Example:
        >>> print(modtrace.merge("profile.json", "run.modtrace", "merged.pftrace"))
    """
    kind = file_kind_by_head(profiler_trace)
    if kind in _NO_PROFILE:
        advice = "give the profiler's trace first, as `export_chrome_trace` wrote it, then the recording"
        raise TraceError(profiler_trace, f"it is {kind.value}; {advice}")
    if timeline is not None and not isinstance(timeline, Timeline):
        if file_kind_by_head(timeline) is FileKind.ZIP:
            # Every report begins at the same made-up moment, so nothing says where it lies in the profiler's trace.
            raise TraceError(
                timeline, "a report does not tell when it was recorded; give the recording it was made from"
            )
        timeline = load(timeline)
    try:
        return merge_timeline(profiler_trace, timeline, out, capture=capture, progress=progress)
    except RecursionError as error:
        raise TraceError(profiler_trace, "something in it is nested too deeply to be read") from error
