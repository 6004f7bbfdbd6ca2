"""Garbage collections without C: what `gc` calls is put together of functions of the standard library, which are in C.

Python ignores an interrupt that comes in a callback with bytecode. So the callbacks only note what they are told, the
time and the thread; the engine writes the events later, before its own next one.
"""

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import repeat, starmap
from typing import Any, NamedTuple

from ...ring.slot_format import COLLECTED_BITS, COLLECTED_MASK, GENERATION_BITS, GENERATION_MASK, MIN_COLLECTION_NS


class Collection(NamedTuple):
    """A garbage collection of at least `MIN_COLLECTION_NS`.

    Attributes:
        tid: the thread that collected, as the system knows it.
        end_ns: when it ended.
        value: of its event.
    """

    tid: int
    end_ns: int
    value: int


class _Notes(deque[Any]):
    start = stop = property(fset=deque.append)
    """Setting the attribute that is called like the phase appends what `gc` says."""


_notes = _Notes(maxlen=1 << 16)
"""For each begin and end: which it is, the time, the thread and what `gc` says. The last ones, if none is read."""


def _calling(function: Callable[[Any], object]) -> Callable[[str, Any], object]:
    """Return what calls a function with the first of two arguments."""
    return property(function).__get__


def _noting(read: Callable[[], int]) -> Callable[[str, Any], object]:
    """Return what notes a number that it reads then."""
    return _calling(partial(next, map(_notes.append, starmap(read, repeat(())))))


_CALLBACKS: tuple[Callable[[Any, Any], object], ...] = (
    _calling(_notes.append),
    *map(_noting, (time.monotonic_ns, threading.get_native_id)),
    partial(setattr, _notes),
)


class PortableCollections:
    """Reads what was noted of garbage collections; the callbacks stay in their place, and keep only the last notes."""

    def __init__(self) -> None:
        self._began_ns = 0

    def start(self) -> None:
        """Begin with the next collection."""
        gc.callbacks.extend(callback for callback in _CALLBACKS if callback not in gc.callbacks)
        _notes.clear()
        self._began_ns = 0

    def read(self) -> Iterator[Collection]:
        """Yield the collections that have ended since this was last called."""
        if not _notes:
            return
        notes = []
        with suppress(IndexError):  # another thread has read them
            # Without bytecode, so that no other thread comes in between.
            notes = list(starmap(_notes.popleft, repeat((), len(_notes))))
        for phase, now, tid, info in zip(*[iter(notes)] * 4, strict=False):
            began, self._began_ns = self._began_ns, now if phase == "start" else 0
            if phase == "stop" and began and now - began >= MIN_COLLECTION_NS:
                yield Collection(tid, now, _value(now - began, info))


def _value(duration_ns: int, info: Mapping[str, int]) -> int:
    collected, generation = min(info["collected"], COLLECTED_MASK), min(info["generation"], GENERATION_MASK)
    return (duration_ns << COLLECTED_BITS | collected) << GENERATION_BITS | generation
