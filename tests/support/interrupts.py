"""Interrupts at one position of modtrace's own Python code after the other: at each line, or at each bytecode.

What `threading` does for it belongs to it: an interrupt there can leave a lock taken.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import modtrace

__all__ = ["Interrupt", "every", "interrupted_at", "positions"]

_SOURCES = (str(Path(modtrace.__file__).parent), threading.__file__)


class Interrupt(BaseException):
    """An interrupt that is no Exception, like KeyboardInterrupt."""


class _Positions:
    """Counts the positions that run, and raises at one of them.

    Attributes:
        count: so far.
        where: file, line and bytecode at which it raised.
        comes_out: whether what was raised can; CPython itself drops it in a finalizer.
    """

    def __init__(self, event: str, raise_at: int | None) -> None:
        self._event = event
        self._raise_at = None if raise_at is None else raise_at + 1
        self._count = self._count_one  # bound once
        self.count = 0
        self.where = ""
        self.comes_out = False

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Any:
        """Trace a frame that begins."""
        if not frame.f_code.co_filename.startswith(_SOURCES):
            return None
        frame.f_trace_opcodes = self._event == "opcode"
        return self._count

    def _count_one(self, frame: FrameType, event: str, _argument: object) -> Any:
        # Called a hundred thousand times in each run: no more than that.
        if event == self._event:
            self.count += 1
            if self.count == self._raise_at:
                self._raise_in(frame)
        return self._count

    def _raise_in(self, frame: FrameType) -> NoReturn:
        self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name} +{frame.f_lasti}"
        self.comes_out = not _is_in_finalizer(frame)
        raise Interrupt


def _is_in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def positions(event: str, run: Callable[[], object]) -> int:
    """Return how many positions `run` has: of `event` "line" or "opcode"."""
    counted = _Positions(event, None)
    sys.settrace(counted)
    try:
        run()
    finally:
        sys.settrace(None)
    return counted.count


def interrupted_at(event: str, number: int, run: Callable[[], object]) -> str | None:
    """Call `run`, interrupted at this position; return where that was, None where it ended before.

    Raises:
        AssertionError: the interrupt did not come out of it.
    """
    raising = _Positions(event, number)
    came_out = False
    sys.settrace(raising)
    try:
        run()
    except Interrupt:
        came_out = True
    finally:
        sys.settrace(None)
    assert came_out == raising.comes_out, f"swallowed: {raising.where}"
    return raising.where or None


def every(count: int, part: int) -> Iterator[int]:
    """Yield about `part` of the numbers below `count`, spread evenly, both ends among them."""
    step = max(1, count // part)
    yield from sorted({*range(0, count, step), *range(min(count, 12)), *range(max(0, count - 12), count)})
