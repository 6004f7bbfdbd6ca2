"""The screen of a job, drawn anew while a thread reads the rings."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from rich.console import Console
from rich.live import Live

from .screen import JobView, render
from .shown import View
from .terminal_keys import TerminalKeys

__all__ = ["show_live"]

_POLL_S = 0.1


def show_live(read: Callable[[], JobView], console: Console, refresh_s: float) -> None:
    """Show the job on a terminal until q, Ctrl-C or a signal that ends the process; the terminal is restored.

    Args:
        read: reads the job; called on a thread of its own.
        console: the terminal.
        refresh_s: seconds from one reading to the next, at least.
    """
    view, latest, over = View(), _Latest(), threading.Event()
    reader = threading.Thread(target=_read_on, args=(read, view, latest, over, refresh_s), daemon=True)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _ended_by_signals(),
        TerminalKeys() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        drawn: object = None
        if not keys.can_come:
            view.help = "Ctrl-C quits"
        try:
            reader.start()
            while not view.quits:
                for key in keys.read(_POLL_S):
                    view.press(key, len(latest.job.ranks), latest.job.depth)
                if latest.error is not None:
                    raise latest.error
                wanted = (latest.job, console.size, repr(view))
                if wanted != drawn:
                    live.update(render(latest.job, view, console.width, console.height), refresh=True)
                    drawn = wanted
        finally:
            over.set()


class _Latest:
    """What was read last; written by one thread, read by the other."""

    def __init__(self) -> None:
        self.job = JobView((), ("reading …",), 0.0)
        self.error: BaseException | None = None


def _read_on(read: Callable[[], JobView], view: View, latest: _Latest, over: threading.Event, refresh_s: float) -> None:
    while not over.is_set():
        begin = time.monotonic()
        if not view.paused:
            try:
                job = read()
            except Exception as error:
                latest.error = error
                return
            if not view.paused:  # nor what a reading found that was under way
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
