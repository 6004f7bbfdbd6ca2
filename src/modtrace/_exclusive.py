"""Sections of code that one thread at a time runs, which neither an interrupt nor a fork leaves closed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ._weak_map import WeakMap

__all__ = ["Exclusive"]


class Exclusive:
    """Lets one thread at a time run a function.

    A thread that is inside of it runs another one at once: what a finalizer or the handler of a signal calls there
    must not wait for what it interrupted. In a forked child it is open, whoever was inside in the parent.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all[self] = None

    @property
    def entered(self) -> bool:
        """Whether this thread is inside."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def run(self, function: Callable[[], object]) -> None:
        """Call `function` while no other thread is inside."""
        lock = self._lock
        if lock._is_owned():  # type: ignore[attr-defined]
            function()
            return
        try:
            lock.acquire()
            function()
            lock.release()
        except BaseException:
            # Also where an exception of a signal's handler comes right behind the lock's acquisition.
            if lock._is_owned():  # type: ignore[attr-defined]
                lock.release()
            raise

    def _renew(self) -> None:
        self._lock = threading.RLock()


_all: WeakMap[Exclusive, None] = WeakMap()


def _renew_all_in_child() -> None:
    # Another thread of the parent, which the child does not have, may have been inside.
    for exclusive in _all:
        exclusive._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all_in_child)
