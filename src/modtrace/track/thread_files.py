"""Reads from Linux how long a thread waited for a processor, and how much memory its process holds."""

import os
import threading

from .._interrupts import raised_by_handler


class ThreadFile:
    """A file in `/proc/thread-self`, which stays open; to read it costs some 5 µs."""

    def __init__(self, name: str) -> None:
        self._path = f"/proc/thread-self/{name}"
        self._file, self._inode, self._thread = -1, 0, 0

    def read(self) -> list[bytes]:
        """Return the words in the file of the thread that calls; none if the system has no such file."""
        try:
            if (thread := threading.get_native_id()) != self._thread or not self._is_open():
                self.close()
                # The flag is of Windows, which has no such file.
                self._file = os.open(self._path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
                self._thread = thread
                self._inode = os.fstat(self._file).st_ino
            return os.pread(self._file, 128, 0).split()
        except OSError as error:
            if raised_by_handler(error):  # as the TimeoutError of a time limit
                raise
            self.close()
            return []

    def close(self) -> None:
        """Close the file."""
        if self._is_open():
            os.close(self._file)
        self._file, self._thread = -1, 0

    def _is_open(self) -> bool:
        """Say whether the file is open: a program may close all that are, and its own then have their numbers."""
        try:
            return self._file >= 0 and os.fstat(self._file).st_ino == self._inode
        except OSError as error:
            if raised_by_handler(error):
                raise
            return False


class RunDelay:
    """Reads how long the thread that calls has waited for a processor: what a busy machine does, and no program."""

    def __init__(self) -> None:
        self._file, self._thread, self._waited_ns = ThreadFile("schedstat"), 0, 0

    def __call__(self) -> int:
        """Return how long this thread has waited since the last call, in nanoseconds; 0 if that is not known."""
        last_thread, self._thread, last_ns = self._thread, threading.get_native_id(), self._waited_ns
        words = self._file.read()
        self._waited_ns = int(words[1]) if len(words) > 1 else 0
        return max(0, self._waited_ns - last_ns) if last_thread == self._thread else 0

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._thread = 0


class ResidentMemory:
    """Reads how many bytes the process holds in memory."""

    def __init__(self) -> None:
        self._file = ThreadFile("statm")
        self.close = self._file.close

    def __call__(self) -> int:
        """Return the bytes; 0 if they are not known."""
        words = self._file.read()
        return int(words[1]) * os.sysconf("SC_PAGESIZE") if len(words) > 1 else 0
