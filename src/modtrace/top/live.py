"""The screen of a job: drawn anew while a thread reads the rings, and changed by keys."""

import contextlib
import importlib.util
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console
from rich.live import Live

from .._terminal import is_terminal
from .screen import JobView, ScreenState, render

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
    """Reads keys from standard input while the `with` block runs, and restores the terminal after it.

    Where standard input is no terminal, or the system is not POSIX, no key ever comes.

    Attributes:
        can_come: whether any can.
    """

    def __init__(self) -> None:
        self.can_come = _IS_POSIX and is_terminal(sys.stdin)
        self._descriptor = sys.stdin.fileno() if self.can_come else None
        self._before: list[object] = []
        self._unread = b""

    def __enter__(self) -> "TerminalKeys":
        if self._descriptor is not None:
            import termios
            import tty

            self._before = termios.tcgetattr(self._descriptor)
            tty.setcbreak(self._descriptor)  # Ctrl-C is a signal still
        return self

    def __exit__(self, *_: object) -> None:
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


_POLL_S = 0.1


def show_live(read: Callable[[], JobView], console: Console, refresh_s: float) -> None:
    """Show the job on a terminal until q, Ctrl-C or a signal that ends the process; the terminal is restored.

    Args:
        read: reads the job; called on a thread of its own.
        console: the terminal.
        refresh_s: seconds from one reading to the next, at least.
    """
    screen, latest, over = ScreenState(), _Latest(), threading.Event()
    reader = threading.Thread(target=_read_on, args=(read, screen, latest, over, refresh_s), daemon=True)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _ended_by_signals(),
        TerminalKeys() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        drawn: object = None
        if not keys.can_come:
            screen.help = "Ctrl-C quits"
        try:
            reader.start()
            while not screen.quits:
                for key in keys.read(_POLL_S):
                    screen.press(key, len(latest.job.ranks), latest.job.depth)
                if latest.error is not None:
                    raise latest.error
                wanted = (latest.job, console.size, repr(screen))
                if wanted != drawn:
                    live.update(render(latest.job, screen, console.width, console.height), refresh=True)
                    drawn = wanted
        finally:
            over.set()


class _Latest:
    """What was read last; written by one thread, read by the other."""

    def __init__(self) -> None:
        self.job = JobView((), ("reading …",), 0.0)
        self.error: BaseException | None = None


def _read_on(
    read: Callable[[], JobView], screen: ScreenState, latest: _Latest, over: threading.Event, refresh_s: float
) -> None:
    while not over.is_set():
        begin = time.monotonic()
        if not screen.paused:
            try:
                job = read()
            except Exception as error:
                latest.error = error
                return
            if not screen.paused:  # nor what a reading found that was under way
                latest.job = job
        # Reading takes no more than a part of one core, however many rings there are.
        took = time.monotonic() - begin
        over.wait(max(refresh_s - took, took, 0.05))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let signals that end a process end the block first."""

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (a signal handler's signature)
        raise SystemExit(128 + number)

    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]  # Windows has no SIGHUP
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
