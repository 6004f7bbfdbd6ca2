"""Pools of processes: work on all processors of this machine, or on an executor's."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

from ._errors import ModtraceError

T = TypeVar("T")
R = TypeVar("R")


def processor_count() -> int:
    """Return the number of processors this process may use, or of the machine's if the system cannot report it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_NICENESS = 10


def lower_priority() -> None:
    """Give other processes priority over this one and its children, if the system supports it."""
    if hasattr(os, "nice"):  # not on Windows
        os.nice(_NICENESS)


def map_in_processes(
    function: Callable[[T], R], items: Iterable[T], processes: int, executor: Executor | None = None
) -> Iterator[tuple[T, R]]:
    """Yield each item with the result of `function`, in the order of completion.

    Args:
        function: called with an item, in this process if one process is enough. It can be pickled, as can its results.
        items: arguments for the calls; they can be pickled.
        processes: number of processes without an executor.
        executor: makes the calls, on any machine, and stays open. None: processes of this machine make them.

    Raises:
        Exception: `function` raised it for an item; items not started by then are skipped.
        ModtraceError: one of the processes was killed, or the executor is broken.
    """
    tasks = list(items)
    if executor is not None:
        yield from _map(
            executor,
            function,
            tasks,
            "the executor lost a worker and accepts no more work; restart its workers and run this again",
        )
    elif min(processes, len(tasks)) <= 1:
        for item in tasks:
            yield item, function(item)
    else:
        with ProcessPoolExecutor(min(processes, len(tasks)), get_context("spawn"), _end_when_interrupted) as pool:
            message = "a worker process was killed, most often because memory ran out; use fewer processes"
            yield from _map(pool, function, tasks, message)


def _map(executor: Executor, function: Callable[[T], R], items: Iterable[T], message: str) -> Iterator[tuple[T, R]]:
    tasks: dict[Future[R], T] = {}
    try:
        tasks |= {executor.submit(function, item): item for item in items}
        for done in as_completed(tasks):
            yield tasks.pop(done), done.result()
    except BrokenExecutor as error:
        raise ModtraceError(message) from error
    finally:
        for task in tasks:
            task.cancel()


def _end_when_interrupted() -> None:
    # Ctrl-C reaches all processes of a terminal. A worker that handled it would report it as an error of its item, and
    # go on with the next item.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


_MIN_FILES_IN_PROCESSES = 128
"""Number of files that can be read in the time that processes need to start."""
_FILES_AT_ONCE = 32
_MAX_PROCESSES = 32


class ParallelReader(ExitStack):
    """Reads files; if they are many, in processes of its own, which end with the `with` block."""

    _processes: ProcessPoolExecutor | None = None

    def read(self, read: Callable[[str], T], paths: Sequence[str]) -> tuple[list[T], list[str]]:
        """Return the result of `read` per file, and the messages of ModtraceErrors; raises one if a process died."""
        if len(paths) < _MIN_FILES_IN_PROCESSES:
            results = [_result_or_error(read, path) for path in paths]
        else:
            if self._processes is None:
                count = min(processor_count(), _MAX_PROCESSES)
                self._processes = ProcessPoolExecutor(count, get_context("spawn"), _end_when_interrupted)
                self.callback(self._processes.shutdown, cancel_futures=True)
            try:
                results = list(self._processes.map(partial(_result_or_error, read), paths, chunksize=_FILES_AT_ONCE))
            except BrokenProcessPool as error:
                raise ModtraceError(
                    "a process that read files was killed, most often because memory ran out; read fewer files"
                ) from error
        return [r for r, error in results if error is None and r is not None], [e for _, e in results if e is not None]


def _result_or_error(read: Callable[[str], T], path: str) -> tuple[T | None, str | None]:
    try:
        return read(path), None
    except ModtraceError as error:
        return None, str(error)
