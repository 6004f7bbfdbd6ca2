"""Work on several processors, by processes that end as soon as the one that started them is interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TypeVar

from .._errors import ModtraceError

__all__ = ["map_in_processes"]

T = TypeVar("T")
R = TypeVar("R")

_MAX_ON_WINDOWS = 61
"""It waits for no more processes at a time."""


def map_in_processes(function: Callable[[T], R], items: Iterable[T], processes: int) -> Iterator[tuple[T, R]]:
    """Yield each item with what a function returns for it, in the order in which they are done.

    Args:
        function: called with an item, here where one process is enough; it, the items and its results can be pickled.
        items: what it is called with.
        processes: how many run at a time.

    Raises:
        Exception: what the function raised for an item; what had not begun then is not done.
        ModtraceError: one of the processes was killed.
    """
    left = list(items)
    if min(processes, len(left)) <= 1:
        for item in left:
            yield item, function(item)
        return
    count = min(processes, len(left), *([_MAX_ON_WINDOWS] if os.name == "nt" else []))
    pool = ProcessPoolExecutor(count, get_context("spawn"), _end_when_interrupted)
    try:
        with _interrupts_held_back():
            tasks = {pool.submit(function, item): item for item in left}
        for done in as_completed(tasks):
            yield tasks.pop(done), done.result()
    except BrokenProcessPool as error:
        raise ModtraceError("a process was killed, most often for want of memory; try with fewer") from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    # A process takes over what is held back where it is started. It prints a traceback of its own for a Ctrl-C that
    # comes before it has got as far as `_end_when_interrupted`, unless that waits until then.
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it is started with the first process else, and lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_when_interrupted() -> None:
    # Ctrl-C goes to all processes of a terminal. One that were to handle it would take it for the fault of what it
    # works on, and go on with the next.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
