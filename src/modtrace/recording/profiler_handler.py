"""The handler for `torch.profiler.profile(on_trace_ready=…)`, which records, exports and merges."""

import logging
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from torch.profiler import profile

from .._errors import WriteError
from .._files import work_folder
from .._ranks import rank_in
from ..profiler.merge import merge_timeline
from . import current, record

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..record_options import RecordOptions

_log = logging.getLogger("modtrace")


class TraceHandler:
    """Starts a recording, and merges each trace of a profiler with it; made by `on_trace_ready`.

    Attributes:
        paths: the traces written so far.
    """

    def __init__(self, folder: str | os.PathLike[str], worker_name: str | None, options: "RecordOptions") -> None:
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WriteError(f"{self._folder}: the folder cannot be made: {error.strerror}") from error
        rank = rank_in(os.environ)
        self._worker = worker_name or (f"pid{os.getpid()}" if rank is None else f"rank{rank}")
        self.paths: list[Path] = []
        running_recording = current()
        self._recording = running_recording or record(**options)
        self._is_ours = running_recording is None
        if self._is_ours:
            # torch does not report the final end of a profiler, so the recording ends with the handler. The finalizer
            # is made first, because an interrupt can come as soon as the recording runs.
            self._close = weakref.finalize(self, self._recording.stop)
            self._recording.start()

    def __call__(self, profiler: profile) -> None:
        """Export and merge the profiler's trace; log an error, and keep the trace that cannot be merged."""
        name = f"{self._worker}.{len(self.paths)}.json.gz"
        out = self._folder / name
        with work_folder(self._folder) as folder:
            exported = str(folder / "exported.json")
            profiler.export_chrome_trace(exported)
            try:
                _log.info("%s", merge_timeline(exported, self._recording.snapshot(), out))
            except Exception as error:  # if a handler raises, torch stops its profiler twice and crashes
                out = self._folder / f"{self._worker}.{len(self.paths)}.unmerged.json"
                os.replace(exported, out)
                _log.error("the profiler's trace is in %s; it could not be merged: %s", out, error)
            self.paths.append(out)

    def close(self) -> None:
        """Stop the recording, unless it ran before the handler was made."""
        if self._is_ours:
            # Called directly, because a finalizer runs only once, and an interrupt may make a second stop necessary.
            self._recording.stop()
            self._close.detach()

    def __enter__(self) -> "TraceHandler":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def on_trace_ready(
    folder: str | os.PathLike[str], *, worker_name: str | None = None, **options: "Unpack[RecordOptions]"
) -> TraceHandler:
    """Return a handler that writes each trace of a profiler, merged with a recording, to a folder.

    The recording starts at once, so make the handler with the profiler. It ends with the handler (`close`, the end of a
    with block, or the last reference to it). A recording that already runs is used, and continues.

    Args:
        folder: the folder for `<worker>.<number>.json.gz`; made if it does not exist.
        worker_name: the start of the files' names; None uses the rank, or the process id.
        options: the keyword arguments of `modtrace.record` (`engine`, `capacity`, `model`, `shapes`, …).

    Raises:
        RecordingError: an option is invalid.
        RingError: the ring's file cannot be made.
        EngineError: the options require the native engine, and it cannot be loaded.
        WriteError: the folder cannot be made.

    Example:
        >>> with modtrace.on_trace_ready("traces") as ready, torch.profiler.profile(on_trace_ready=ready):
        ...     train_step()
    """
    return TraceHandler(folder, worker_name, options)
