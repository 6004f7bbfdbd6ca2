"""The handler for `torch.profiler.profile(on_trace_ready=…)`: it records, exports and merges by itself."""

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
    """Merges each trace of a profiler with a recording that runs from now on; made by `on_trace_ready`.

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
        running = current()
        self._recording = running or record(**options)
        self._is_ours = running is None
        if self._is_ours:
            # torch does not say that a profiler has ended for good: the recording ends with the handler. An interrupt
            # can come as soon as it runs.
            self._close = weakref.finalize(self, self._recording.stop)
            self._recording.start()

    def __call__(self, profiler: profile) -> None:
        """Export and merge what the profiler has; a trace that cannot be merged is kept as it is, and logged."""
        name = f"{self._worker}.{len(self.paths)}.json.gz"
        out = self._folder / name
        with work_folder(self._folder) as folder:
            exported = str(folder / "exported.json")
            profiler.export_chrome_trace(exported)
            try:
                _log.info("%s", merge_timeline(exported, self._recording.snapshot(), out))
            except Exception as error:  # one that leaves a handler makes torch stop its profiler twice, and crash
                out = self._folder / f"{self._worker}.{len(self.paths)}.unmerged.json"
                os.replace(exported, out)
                _log.error("the profiler's trace is in %s; it could not be merged: %s", out, error)
            self.paths.append(out)

    def close(self) -> None:
        """Stop the recording, unless it ran before the handler was made."""
        if self._is_ours:
            # Again where an interrupt came into it; a finalizer runs once.
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

    The recording begins now, so make the handler where the profiler is made. It ends with the handler (`close`, the
    end of a with block, or when nothing refers to it any more). One that runs already is used, and goes on.

    Args:
        folder: where `<worker>.<number>.json.gz` go; made where it does not exist.
        worker_name: the beginning of the files' names; None takes the rank, or the process id.
        options: the keyword arguments of `modtrace.record` (`engine`, `capacity`, `model`, `shapes`, …).

    Raises:
        RecordingError: the options make no sense.
        RingError: the ring's file cannot be made.
        EngineError: the native engine is asked for and cannot be had.
        WriteError: the folder cannot be made.

    Example:
        >>> with modtrace.on_trace_ready("traces") as ready, torch.profiler.profile(on_trace_ready=ready):
        ...     train_step()
    """
    return TraceHandler(folder, worker_name, options)
