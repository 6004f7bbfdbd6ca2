"""A progress bar for what takes long enough to need one."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from .._terminal import is_terminal

BAR_DELAY_S = 1.0
"""Seconds for which a bar is not worth drawing."""

Part = TypeVar("Part")


def show_progress(parts: Iterable[tuple[int, Part]], what: str, total: int | None) -> Iterator[Part]:
    """Pass the parts on; from the second second on, show on a terminal how much of the whole they are.

    Args:
        parts: sizes and parts.
        what: the text beside the bar.
        total: what the sizes add up to; None if that is not known.
    """
    if not is_terminal(sys.stderr):
        yield from (part for _, part in parts)
        return
    started = time.monotonic()
    bar = None
    done = 0
    try:
        for size, part in parts:
            yield part
            done += size
            if bar is None and time.monotonic() - started > BAR_DELAY_S:
                # rich takes longer to import than most files to write
                from rich.console import Console
                from rich.progress import Progress

                bar = Progress(console=Console(stderr=True), transient=True)
                task = bar.add_task(what, total=total)
                bar.start()
            if bar is not None:
                bar.update(task, completed=done)
    finally:
        if bar is not None:
            bar.stop()
