"""Signals: when one comes, a recording saves or writes Python stacks, even while the main thread hangs."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from .._errors import RecordingError
from .._files import Folder, create_file
from .._processes import is_signal_caught
from ..ring import stacks_path

_CREDENTIALS = struct.Struct("iII")
"""The sender of a datagram from the kernel: its process, user and group."""
_PASS_CREDENTIALS: int | None = getattr(socket, "SO_PASSCRED", None)
_FORWARD_EVERY_S = 0.01


class SaveOnSignal:
    """Calls `save` on a thread of its own for each signal that comes.

    Python runs a handler only when the main thread returns to the interpreter, which a hanging thread never does. But
    Python's C handler writes to the wake-up descriptor at once, and a waiting thread reads it. If another library
    (asyncio) uses the descriptor, the Python handler wakes the thread.

    A forked child has handler and descriptor until Python code runs in it, and would wake the parent's thread. So the
    descriptor is a socket, for which the kernel reports the writing process. Python forgets a signal that came to the
    child before that: if it was SIGTERM, the thread sends it again.

    Args:
        number: the signal; None: only SIGTERM.
        save: called for each signal; it must not raise.
        before_end: called when SIGTERM comes, which then ends the process as usual. None does not handle SIGTERM. A
            handler that the program has, or sets later, has priority.

    Raises:
        RecordingError: there is no such signal.
    """

    def __init__(
        self, number: int | None, save: Callable[[], None], before_end: Callable[[], None] | None = None
    ) -> None:
        try:
            self._numbers = [] if number is None else [signal.Signals(number)]
        except ValueError as error:
            raise RecordingError(f"on_signal is {number!r}; give a signal, such as signal.SIGUSR1") from error
        self._save, self._before_end = save, before_end
        self._handles_term = False
        self._old_handlers: dict[int, Any] = {}
        self._handler = self._handle  # one bound method, to compare by identity
        self._reader: socket.socket | None = None
        self._writer: socket.socket | None = None
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start listening.

        Raises RecordingError outside the main thread, because Python installs handlers only there, and for a signal
        that can have no handler.
        """
        self._handles_term = self._before_end is not None and signal.SIGTERM not in self._numbers and _is_term_free()
        numbers = [*self._numbers, *([signal.SIGTERM] if self._handles_term else [])]
        self._process = os.getpid()
        try:
            for number in numbers:
                # An interrupt during `signal.signal` would lose the old handler that it returns, so it is read first.
                self._old_handlers[number] = signal.getsignal(number)
                signal.signal(number, self._handler)
        except (ValueError, OSError) as error:
            raise RecordingError(f"on_signal: {numbers[0].name} cannot be listened to: {error}") from error
        if not self._old_handlers:
            return
        if self._handles_term:
            # The signal does not interrupt system calls of C code, which may not handle that: the process ends soon.
            signal.siginterrupt(signal.SIGTERM, False)
        self._reader, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        if _PASS_CREDENTIALS is not None:
            self._reader.setsockopt(socket.SOL_SOCKET, _PASS_CREDENTIALS, 1)
        self._writer.setblocking(False)
        other_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if other_fd != -1:
            signal.set_wakeup_fd(other_fd)
        self._thread = threading.Thread(target=self._listen, name="modtrace-signal", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, and restore the old handlers; does nothing outside the main thread.

        Undoes the part of `start` that was done, and can be called again after an interrupt.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        thread = self._thread
        if thread is not None and thread.ident is not None and self._writer is not None:
            with contextlib.suppress(OSError):  # the program may have closed the socket
                self._writer.send(b"\0")
                thread.join()
        self._thread = None
        self._restore()

    def after_fork(self) -> None:
        """Stop in a forked child, where the listening thread does not exist; the signal belongs to the parent."""
        if self._thread is not None:
            self._thread = None
            self._restore()

    def _restore(self) -> None:
        for number, old_handler in self._old_handlers.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, old_handler if old_handler is not None else signal.SIG_DFL)
        for end in (self._reader, self._writer):
            if end is not None:
                with contextlib.suppress(OSError, ValueError):  # the program may have closed the socket
                    if self._owns_wakeup_fd():
                        signal.set_wakeup_fd(-1)
                    end.close()
        self._reader = self._writer = None

    def _owns_wakeup_fd(self) -> bool:
        writer = -1 if self._writer is None else self._writer.fileno()
        current = signal.set_wakeup_fd(-1)
        if current != -1:
            signal.set_wakeup_fd(current, warn_on_full_buffer=current != writer)
        return current == writer != -1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            if os.getpid() != self._process:  # a child whose parent's recording was stopped by another thread
                raise ChildProcessError
            if self._writer is not None and not self._owns_wakeup_fd():
                with contextlib.suppress(BlockingIOError):  # the socket is full of earlier signals
                    self._writer.send(bytes([number]))
        except (OSError, ValueError):  # the program has closed the sockets
            if self._is_ended_by(number):
                _end_by(number)
        old_handler = self._old_handlers.get(number)
        if callable(old_handler):
            old_handler(number, frame)

    def _is_ended_by(self, number: int) -> bool:
        """Whether the signal has to end the process: this handler only delays the end, and the program has set none."""
        return number == signal.SIGTERM and self._handles_term and signal.getsignal(number) is self._handler

    def _listen(self) -> None:
        """Save for each signal, on the waiting thread, until `stop` is called or SIGTERM ends the process."""
        assert self._reader is not None
        # Other threads get these signals: a thread may block SIGTERM to wait for it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, *self._numbers})
        while True:
            data, credentials, _, _ = self._reader.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            number = data[0]
            process = _CREDENTIALS.unpack(credentials[0][2])[0] if credentials else self._process
            if process != self._process:
                _send_again(process, number)
            elif number in self._numbers:
                self._save()
            elif self._is_ended_by(number) and self._before_end is not None:
                try:
                    self._before_end()
                finally:
                    _end_by(number)
            elif not number:
                return


def _send_again(child: int, number: int) -> None:
    """Send SIGTERM again to a forked child whose Python has forgotten it; see `SaveOnSignal`."""
    if number == signal.SIGTERM and child > 0:
        with contextlib.suppress(OSError):
            os.kill(child, number)
        time.sleep(_FORWARD_EVERY_S)


def _is_term_free() -> bool:
    """Whether SIGTERM would end this process, and could wake a thread even while the main thread hangs."""
    if _PASS_CREDENTIALS is None or threading.current_thread() is not threading.main_thread():
        return False
    other_fd = signal.set_wakeup_fd(-1)
    if other_fd != -1:
        signal.set_wakeup_fd(other_fd)
    is_default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return other_fd == -1 and is_default and not is_signal_caught(os.getpid(), signal.SIGTERM)


def _end_by(number: int) -> None:
    """End the process by a signal as if it had no handler; Python would remove a handler only in the main thread."""
    ctypes.CDLL(None).signal(number, None)
    os.kill(os.getpid(), number)


_descriptors: dict[int, int] = {}
"""The file descriptors for stacks, by the registered signal."""


def write_stacks_on(number: int, ring: str, folder: Folder) -> None:
    """Let faulthandler append the stacks of all threads to a file next to the ring whenever the signal comes.

    Its C handler needs no lock and waits for no thread, so a hang does not stop it, and interrupted system calls are
    restarted. The handler stays after the recording, because the signal would kill the process without it. Raises
    RecordingError if the program handles the signal itself, it can have no handler, or the file cannot be made.
    """
    name = signal.Signals(number).name
    if number not in _descriptors and is_signal_caught(os.getpid(), number):
        raise RecordingError(f"stacks_on_signal: this program handles {name} itself; choose another signal")
    path = stacks_path(os.path.join(folder.path, os.path.basename(ring)))
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        descriptor = create_file(path, 0o600)
    except OSError as error:
        raise RecordingError(f"stacks_on_signal: {stacks_path(ring)} cannot be made: {error.strerror}") from error
    try:
        faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    except (OSError, RuntimeError, ValueError) as error:
        os.close(descriptor)
        os.unlink(path)
        raise RecordingError(
            f"stacks_on_signal: Python cannot handle {name}: {error}; choose another signal"
        ) from error
    old_descriptor, _descriptors[number] = _descriptors.get(number), descriptor
    if old_descriptor is not None:
        os.close(old_descriptor)
