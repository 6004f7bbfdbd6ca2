"""Saving a recording on a signal, also while the main thread is stuck inside a call into C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["SignalDump"]


class SignalDump:
    """Calls `dump` on a thread of its own for each signal that comes.

    Python runs a handler only when the main thread comes back to it, which a hang never does. The wake-up descriptor
    is written by the C handler itself, at once; a waiting thread reads it.

    Args:
        number: the signal.
        dump: what to call; it must not raise.
    """

    def __init__(self, number: int, dump: Callable[[], None]) -> None:
        self._number = signal.Signals(number)
        self._dump = dump
        self._old_handler: Any = None
        self._old_descriptor = -1
        self._read = self._write = -1
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen; must be called on the main thread, as Python wants it.

        Raises:
            ValueError: it is not the main thread.
        """
        self._old_handler = signal.signal(self._number, self._handle)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._old_descriptor = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if self._old_descriptor != -1:
            # Somebody (asyncio) needs the descriptor; then the handler does the work when it is run.
            signal.set_wakeup_fd(self._old_descriptor)
            return
        self._thread = threading.Thread(target=self._wait, name="modtrace-signal", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and put back what was there."""
        if self._read == -1:
            return
        signal.signal(self._number, self._old_handler if self._old_handler is not None else signal.SIG_DFL)
        if self._thread is not None:
            signal.set_wakeup_fd(-1)
            os.write(self._write, b"\0")
            self._thread.join()
            self._thread = None
        self._close()

    def after_fork(self) -> None:
        """In a forked child: the waiting thread is gone, and the signal is the parent's business."""
        if self._read != -1:
            if self._thread is not None:
                signal.set_wakeup_fd(-1)
                self._thread = None
            signal.signal(self._number, self._old_handler if self._old_handler is not None else signal.SIG_DFL)
            self._close()

    def _close(self) -> None:
        os.close(self._read)
        os.close(self._write)
        self._read = self._write = -1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._thread is None:
            self._dump()
        if callable(self._old_handler):
            self._old_handler(number, frame)

    def _wait(self) -> None:
        while numbers := os.read(self._read, 64):
            if 0 in numbers:
                return
            if self._number in numbers:
                self._dump()
