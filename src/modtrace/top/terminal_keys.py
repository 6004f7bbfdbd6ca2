"""Keys of a terminal, one by one, without waiting for a line."""

from __future__ import annotations

import importlib.util
import os
import select
import sys
import time
from types import TracebackType

from .._terminal import is_terminal

__all__ = ["TerminalKeys"]

_NAMED = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
}
_MAX_KEY_BYTES = 6
_IS_POSIX = importlib.util.find_spec("termios") is not None


class TerminalKeys:
    """Reads keys from standard input while the `with` block runs, and restores the terminal behind it.

    Where standard input is no terminal, or the system is not POSIX, no key ever comes.

    Attributes:
        can_come: whether any can.
    """

    def __init__(self) -> None:
        self.can_come = _IS_POSIX and is_terminal(sys.stdin)
        self._descriptor = sys.stdin.fileno() if self.can_come else None
        self._before: list[object] = []
        self._unread = b""

    def __enter__(self) -> TerminalKeys:
        if self._descriptor is not None:
            import termios
            import tty

            self._before = termios.tcgetattr(self._descriptor)
            tty.setcbreak(self._descriptor)  # Ctrl-C is a signal still
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            import termios

            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)  # type: ignore[arg-type]

    def read(self, timeout_s: float) -> list[str]:
        """Return the keys that were pressed, after the time has passed or once there is one."""
        if self._descriptor is None:
            time.sleep(timeout_s)
            return []
        ready, _, _ = select.select([self._descriptor], [], [], timeout_s)
        if not ready:
            self._unread = b""  # nothing follows the begin of a key: it was Esc
            return []
        data = os.read(self._descriptor, 1024)
        if not data:
            return ["q"]  # the terminal is gone
        self._unread += data
        keys = []
        while self._unread:
            key = next((named for named in _NAMED if self._unread.startswith(named)), None)
            if key is not None:
                keys.append(_NAMED[key])
            elif self._unread[:1] == b"\x1b":
                if len(self._unread) < _MAX_KEY_BYTES and any(named.startswith(self._unread) for named in _NAMED):
                    break  # the rest of it follows
                key = self._unread  # another key's
            else:
                key = self._unread[:1]
                keys.append(key.decode("ascii", "replace"))
            self._unread = self._unread[len(key) :]
        return keys
