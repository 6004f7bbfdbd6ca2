"""A progress bar for what takes long enough to need one."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["with_progress"]

PATIENCE = 1.0
"""Seconds for which a bar is not worth drawing."""

Part = TypeVar("Part")


def with_progress(parts: Iterable[tuple[int, Part]], what: str, total: int) -> Iterator[Part]:
    """Pass the parts on, and show on a terminal how much of `total` they come to once it has taken a second."""
    if not sys.stderr.isatty():
        yield from (part for _, part in parts)
        return
    begun = time.monotonic()
    bar = None
    done = 0
    try:
        for size, part in parts:
            yield part
            done += size
            if bar is None and time.monotonic() - begun > PATIENCE:
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
