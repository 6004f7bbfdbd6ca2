"""Garbage collections, for the Python engine: when each ran, on which thread, and who began it."""

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import repeat, starmap
from typing import Any, NamedTuple

from ...ring.slot_format import (
    AUTOMATIC_BIT,
    COLLECTED_BITS,
    COLLECTED_MASK,
    GENERATION_BITS,
    GENERATION_MASK,
    MIN_COLLECTION_NS,
    REQUESTED_BIT,
)
from ..event_sink import call_at_collections


class Collection(NamedTuple):
    """A garbage collection of at least `MIN_COLLECTION_NS`."""

    tid: int  # the thread that collected, as the system knows it
    end_ns: int  # when it ended
    value: int  # of its event


class _Notes(deque[Any]):
    start = stop = property(fset=deque.append)
    """Setting the attribute that is called like the phase appends what `gc` says."""


_notes = _Notes(maxlen=1 << 16)
"""For each begin and end: which it is, what `_READ` say then, and what `gc` says. The last ones, if none is read."""
_READ = (time.monotonic_ns, threading.get_native_id, gc.isenabled, gc.get_count, gc.get_threshold)


def _calling(function: Callable[[Any], object]) -> Callable[[str, Any], object]:
    """Return what calls a function with the first of two arguments."""
    return property(function).__get__


_CALLBACKS: tuple[Callable[[Any, Any], object], ...] = (
    _calling(_notes.append),
    _calling(partial(next, map(_notes.append, zip(*(starmap(read, repeat(())) for read in _READ), strict=False)))),
    partial(setattr, _notes),
)


class PythonCollections:
    """Reads what was noted of garbage collections; the callbacks stay in their place, and keep only the last notes.

    Python ignores an interrupt that comes in a callback with bytecode. So these callbacks are put together of C
    functions of the standard library. They only note what `gc` says, the time and the thread; the engine writes the
    events later, before its own next one.
    """

    def __init__(self) -> None:
        self._began: tuple[Any, ...] = ()

    def start(self) -> None:
        """Begin with the next collection."""
        call_at_collections(*_CALLBACKS)
        _notes.clear()
        self._began = ()

    def read(self) -> Iterator[Collection]:
        """Yield the collections that have ended since this was last called."""
        if not _notes:
            return
        notes = []
        with suppress(IndexError):  # another thread has read them
            # Without bytecode, so that no other thread comes in between.
            notes = list(starmap(_notes.popleft, repeat((), len(_notes))))
        for phase, read, info in zip(*[iter(notes)] * 3, strict=False):
            began, self._began = self._began, read if phase == "start" else ()
            if phase == "stop" and began and read[0] - began[0] >= MIN_COLLECTION_NS:
                yield Collection(read[1], read[0], _value(read[0] - began[0], info) | _trigger_bit(*began[2:]))


def _value(duration_ns: int, info: Mapping[str, int]) -> int:
    collected, generation = min(info["collected"], COLLECTED_MASK), min(info["generation"], GENERATION_MASK)
    return (duration_ns << COLLECTED_BITS | collected) << GENERATION_BITS | generation


def _trigger_bit(is_enabled: bool, count: Sequence[int], threshold: Sequence[int]) -> int:
    """Return who began a collection: Python does once its youngest generation exceeds its threshold, if that is not 0.

    So it never does when gc.collect() is called, but while the collector is disabled.
    """
    return AUTOMATIC_BIT if is_enabled and 0 < threshold[0] < count[0] else REQUESTED_BIT
