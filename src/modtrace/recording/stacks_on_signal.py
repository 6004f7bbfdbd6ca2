"""Python stacks beside the ring whenever a signal comes, for `modtrace where --stacks`."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

from .._errors import RecordingError
from .._system.processes import is_signal_caught
from ..ring import stacks_path

__all__ = ["check_signal", "write_stacks_on"]

_descriptors: dict[int, int] = {}
"""Of the files in which the stacks go, for each signal that this process has registered here."""


def check_signal(number: object, ring: object) -> None:
    """Check what `record` was given.

    Raises:
        RecordingError: it is no signal, or there is no ring.
    """
    if number not in set(signal.Signals):
        raise RecordingError(f"stacks_on_signal is {number!r}; it must be a signal, as signal.SIGUSR2")
    if ring is None:
        raise RecordingError("stacks_on_signal needs a ring: the stacks are written beside its file")


def write_stacks_on(number: int, ring: str) -> None:
    """Let faulthandler append the stacks of all threads to a file beside the ring whenever the signal comes.

    It is C code that takes no lock and waits for no thread, so a hang does not stop it; and it restarts the system
    call that it interrupted. It stays when the recording has ended: the signal would else kill the process.

    Raises:
        RecordingError: the program handles that signal itself, it can have no handler, or the file cannot be made.
    """
    name = signal.Signals(number).name
    if number not in _descriptors and is_signal_caught(os.getpid(), number):
        raise RecordingError(f"stacks_on_signal: this program handles {name} itself; take another signal")
    path = stacks_path(ring)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        raise RecordingError(f"stacks_on_signal: {path} cannot be made: {error.strerror}") from error
    try:
        faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    except (OSError, RuntimeError, ValueError) as error:
        os.close(descriptor)
        os.unlink(path)
        raise RecordingError(f"stacks_on_signal: {name} can have no handler: {error}") from error
    former, _descriptors[number] = _descriptors.get(number), descriptor
    if former is not None:
        os.close(former)
