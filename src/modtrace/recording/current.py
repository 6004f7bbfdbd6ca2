"""The recording that runs in this process: one at a time, started and stopped by one thread at a time.

A recording is the one that runs from before anything of it is switched on until all of it is off, so that what an
interrupt left half done is found: by another `stop` of it, or by the next recording, which first stops it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from .._errors import RecordingError
from .._exclusive import Exclusive

__all__ = ["change_alone", "is_running", "running", "start_alone", "stop_alone"]


class _Recording(Protocol):
    replaceable: bool
    replaced_by: Any

    def _switch_off(self) -> None: ...

    def _stop_and_log(self, when: str) -> None: ...

    def _after_fork(self) -> None: ...


_exclusive = Exclusive()
_current: _Recording | None = None
_complete = False
"""Whether all of `_current` is switched on; False while it is started or stopped."""


def running() -> _Recording | None:
    """Return the recording that runs, None where none does."""
    return _current if _complete else None


def is_running(recording: _Recording) -> bool:
    """Whether it is this one that runs."""
    return _current is recording and _complete


def start_alone(recording: _Recording, switch_on: Callable[[], None]) -> None:
    """Make `recording` the one that runs, by `switch_on`; one that is replaceable is stopped first.

    Where that raises, `stop_alone` is still to be called.

    Raises:
        RecordingError: another one runs.
    """

    def start() -> None:
        global _current, _complete
        if _current is not None and not _complete:
            _current._switch_off()
            _current = None
        if _current is not None and _current.replaceable:
            _current.replaced_by = recording
            _current._stop_and_log("when another one started")
        if _current is not None:
            raise RecordingError("a recording is running in this process; stop it before starting another")
        _complete = False
        _current = recording
        switch_on()
        _complete = True

    if _exclusive.entered:
        raise RecordingError("this thread is just starting or stopping a recording; start another one after that")
    _exclusive.run(start)


def change_alone(recording: _Recording, change: Callable[[], None]) -> None:
    """Call `change` where `recording` runs, and nothing starts or stops one meanwhile."""

    def change_if_running() -> None:
        if is_running(recording):
            change()

    _exclusive.run(change_if_running)


def stop_alone(recording: _Recording) -> bool:
    """Switch `recording` off where it is not off already, and return whether it ran until now."""
    ran = False

    def stop() -> None:
        nonlocal ran
        global _current, _complete
        if _current is recording:
            ran, _complete = _complete, False
            recording._switch_off()
            _current = None

    _exclusive.run(stop)
    return ran


def _after_fork_in_child() -> None:
    global _current
    recording, _current = _current, None
    if recording is not None:
        recording._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
