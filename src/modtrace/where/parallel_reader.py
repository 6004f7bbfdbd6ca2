"""Reading many files by several processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from types import TracebackType
from typing import TypeVar

from .._errors import ModtraceError
from .._system.processor_count import processor_count

__all__ = ["ParallelReader"]

T = TypeVar("T")

_MIN_FILES_IN_PROCESSES = 128
"""To start processes takes as long as to read so many files."""
_FILES_AT_ONCE = 32
_MAX_PROCESSES = 32


class ParallelReader:
    """Reads files, many of them in processes of its own, which end with the `with` block."""

    def __init__(self) -> None:
        self._processes: ProcessPoolExecutor | None = None

    def __enter__(self) -> ParallelReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._processes is not None:
            self._processes.shutdown(cancel_futures=True)

    def read(self, read: Callable[[str], T], paths: Sequence[str]) -> tuple[list[T], list[str]]:
        """Return what `read` returns for each file, and what is wrong with those of which it raised a ModtraceError.

        Args:
            read: can be pickled, as its results can.
            paths: the files.

        Raises:
            ModtraceError: one of the processes was killed.
        """
        if len(paths) < _MIN_FILES_IN_PROCESSES:
            found = [_result_or_error(read, path) for path in paths]
        else:
            if self._processes is None:
                self._processes = ProcessPoolExecutor(
                    min(processor_count(), _MAX_PROCESSES),
                    multiprocessing.get_context("spawn"),
                    _ignore_interrupts,
                )
            try:
                found = list(self._processes.map(partial(_result_or_error, read), paths, chunksize=_FILES_AT_ONCE))
            except BrokenProcessPool as error:
                raise ModtraceError("a process that read files was killed, most often for want of memory") from error
        return [r for r, error in found if error is None and r is not None], [e for _, e in found if e is not None]


def _result_or_error(read: Callable[[str], T], path: str) -> tuple[T | None, str | None]:
    try:
        return read(path), None
    except ModtraceError as error:
        return None, str(error)


def _ignore_interrupts() -> None:
    # Ctrl-C goes to all processes of a terminal; the command ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
