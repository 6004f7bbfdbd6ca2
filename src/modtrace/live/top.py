"""The screen of a job: drawn anew while a thread reads the rings, and changed by keys."""

import contextlib
import importlib.util
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.live import Live

from .._terminal import is_terminal
from .screen import JobView, ScreenState, render_screen

_NAMED = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
}
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)


@contextlib.contextmanager
def keyboard() -> Iterator[int | None]:
    """Yield the descriptor of standard input, from which each key comes at once; after that the terminal is as before.

    Where standard input is not a terminal, or the system is not POSIX, no key ever comes: None.
    """
    if importlib.util.find_spec("termios") is None or not is_terminal(sys.stdin):
        yield None
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)  # Ctrl-C is a signal still
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def read_keys(descriptor: int | None, timeout_s: float) -> list[str]:
    """Return the keys that were pressed, after the time has passed or once there is one."""
    if descriptor is None:
        time.sleep(timeout_s)
        return []
    if not select.select([descriptor], [], [], timeout_s)[0]:
        return []
    data = os.read(descriptor, 1024)
    if not data:
        return ["q"]  # the terminal is gone
    return [_NAMED.get(key, key.decode("ascii", "replace")) for key in _KEY.findall(data)]


_POLL_S = 0.1


def show_live(read: Callable[[], JobView], console: Console, refresh_s: float) -> None:
    """Show the job on a terminal until q or KeyboardInterrupt; the terminal is restored.

    Args:
        read: reads the job; called on a thread of its own.
        console: the terminal.
        refresh_s: seconds from one reading to the next, at least.
    """
    screen, over = ScreenState(), threading.Event()
    latest = deque([JobView((), ("reading …",), 0.0)], maxlen=1)
    with (
        contextlib.suppress(KeyboardInterrupt),
        keyboard() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
        ThreadPoolExecutor(1) as reader,
    ):
        drawn: object = None
        if keys is None:
            screen.help = "Ctrl-C quits"
        try:
            reading = reader.submit(_read_on, read, screen, latest, over, refresh_s)
            while not screen.quits:
                for key in read_keys(keys, _POLL_S):
                    screen.press(key, len(latest[0].ranks), latest[0].depth)
                if reading.done():
                    reading.result()  # raises what ended it
                job = latest[0]
                wanted = (job, console.size, repr(screen))
                if wanted != drawn:
                    live.update(render_screen(job, screen, console.width, console.height), refresh=True)
                    drawn = wanted
        finally:
            over.set()


def _read_on(
    read: Callable[[], JobView], screen: ScreenState, latest: deque[JobView], over: threading.Event, refresh_s: float
) -> None:
    """Read again and again; `latest` holds what was read last."""
    while not over.is_set():
        begin = time.monotonic()
        if not screen.paused:
            job = read()
            if not screen.paused:  # nor what a reading found that was under way
                latest.append(job)
        # Reading takes no more than a part of one core, however many rings there are.
        took = time.monotonic() - begin
        over.wait(max(refresh_s - took, took, 0.05))
