"""The recording that runs in this process: one at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ._errors import RecordingError

__all__ = ["is_running", "running", "starting", "stopping"]


class _Recording(Protocol):
    replaceable: bool

    def _stop_and_log(self, when: str) -> None: ...

    def _after_fork(self) -> None: ...


_lock = threading.RLock()
_running: _Recording | None = None


def running() -> _Recording | None:
    """Return the recording that runs, None where none does."""
    return _running


def is_running(recording: _Recording) -> bool:
    """Whether it is this one that runs."""
    return _running is recording


@contextmanager
def starting(recording: _Recording) -> Iterator[None]:
    """Make `recording` the one that runs, at the end of the block; one that is replaceable is stopped first.

    Raises:
        RecordingError: another one runs.
    """
    global _running
    with _lock:
        if _running is not None and _running.replaceable:
            _running._stop_and_log("when another one started")
        if _running is not None:
            raise RecordingError("a recording is running in this process; stop it before starting another")
        yield
        _running = recording


@contextmanager
def stopping(recording: _Recording) -> Iterator[bool]:
    """Tell whether `recording` runs; at the end of the block it does not."""
    global _running
    with _lock:
        runs = _running is recording
        yield runs
        if runs:
            _running = None


def _after_fork_in_child() -> None:
    global _running, _lock
    # Another thread of the parent may have held it.
    _lock = threading.RLock()
    recording, _running = _running, None
    if recording is not None:
        recording._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
