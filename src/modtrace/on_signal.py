"""Signals: saving a recording on one, also while the main thread is stuck inside a call into C; errors of handlers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from ._errors import RecordingError

__all__ = ["SignalDump", "raised_by_handler"]


class SignalDump:
    """Calls `dump` on a thread of its own for each signal that comes.

    Python runs a handler only when the main thread comes back to it, which a hang never does. The wake-up descriptor
    is written by the C handler itself, at once; a waiting thread reads it. Where somebody else (asyncio) has the
    descriptor, the Python handler wakes the thread.

    Args:
        number: the signal.
        dump: what to call; it must not raise.

    Raises:
        RecordingError: there is no such signal.
    """

    def __init__(self, number: int, dump: Callable[[], None]) -> None:
        try:
            self._number = signal.Signals(number)
        except ValueError as error:
            raise RecordingError(f"on_signal is {number!r}; it must be a signal, as signal.SIGUSR1") from error
        self._dump = dump
        self._old_handler: Any = None
        self._read = self._write = -1
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen.

        Raises:
            RecordingError: it is not the main thread, where alone Python takes handlers, or the signal has none.
        """
        try:
            self._old_handler = signal.signal(self._number, self._handle)
        except (ValueError, OSError) as error:
            raise RecordingError(f"on_signal: {self._number.name} cannot be listened to: {error}") from error
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        others = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
        self._thread = threading.Thread(target=self._wait, name="modtrace-signal", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening and put back what was there; away from the main thread an idle handler stays on."""
        if self._thread is None:
            return
        os.write(self._write, b"\0")
        self._thread.join()
        self._thread = None
        # Only the main thread can free the descriptor that the C handler writes to.
        if threading.current_thread() is threading.main_thread():
            self._restore()

    def after_fork(self) -> None:
        """In a forked child: the waiting thread is gone, and the signal is the parent's business."""
        if self._thread is not None:
            self._thread = None
            self._restore()

    def _restore(self) -> None:
        if signal.getsignal(self._number) == self._handle:
            signal.signal(self._number, self._old_handler if self._old_handler is not None else signal.SIG_DFL)
        if self._has_descriptor():
            signal.set_wakeup_fd(-1)
        os.close(self._read)
        os.close(self._write)
        self._read = self._write = -1

    def _has_descriptor(self) -> bool:
        current = signal.set_wakeup_fd(-1)
        if current != -1:
            signal.set_wakeup_fd(current, warn_on_full_buffer=current != self._write)
        return current == self._write

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._thread is not None and not self._has_descriptor():
            with contextlib.suppress(BlockingIOError):  # so many are waiting already
                os.write(self._write, bytes([number]))
        if callable(self._old_handler):
            self._old_handler(number, frame)

    def _wait(self) -> None:
        while numbers := os.read(self._read, 64):
            if self._number in numbers:
                self._dump()
            if 0 in numbers:
                return


def raised_by_handler(error: BaseException) -> bool:
    """Say whether the handler of a signal raised `error`: it is the user's then, whatever code it interrupted."""
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    if not callable(handler):
        return None
    while isinstance(handler, partial):
        handler = handler.func
    function = handler if isinstance(handler, FunctionType | MethodType) else type(handler).__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None
