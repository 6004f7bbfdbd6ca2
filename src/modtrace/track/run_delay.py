"""How long threads were ready to run and waited for a processor: what a busy machine does, and no program."""

import os
import threading


class RunDelay:
    """Reads from Linux how long the thread that calls has waited; a call costs some 5 µs."""

    def __init__(self) -> None:
        self._file, self._inode, self._thread, self._waited_ns = -1, 0, 0, 0

    def __call__(self) -> int:
        """Return how long this thread has waited since the last call, in nanoseconds; 0 if that is not known."""
        thread = threading.get_native_id()
        try:
            if is_other := thread != self._thread or not self._is_open():
                self.close()
                # The flag is of Windows, which has no such file.
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | getattr(os, "O_BINARY", 0))
                self._thread = thread
                self._inode = os.fstat(self._file).st_ino
            before, self._waited_ns = self._waited_ns, int(os.pread(self._file, 64, 0).split()[1])
        except (OSError, ValueError, IndexError):
            self.close()
            return 0
        return 0 if is_other else self._waited_ns - before

    def close(self) -> None:
        """Close the file."""
        if self._is_open():
            os.close(self._file)
        self._file, self._thread = -1, 0

    def _is_open(self) -> bool:
        """Say whether the file is open: a program may close all that are, and its own then have their numbers."""
        try:
            return self._file >= 0 and os.fstat(self._file).st_ino == self._inode
        except OSError:
            return False
