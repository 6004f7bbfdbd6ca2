"""Garbage collections, for the Python engine: the time, the thread and the trigger of each."""

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

    tid: int  # the system's id of the thread that collected
    end_ns: int  # time of its end
    value: int  # value of its event


class _Notes(deque[Any]):
    start = stop = property(fset=deque.append)
    """Setting the attribute named as a phase of `gc` appends the value: the `info` of `gc`."""


_notes = _Notes(maxlen=1 << 16)
"""At each start and end of a collection: phase, the values of `_READERS`, the `info` of `gc`. Old notes drop out."""
_READERS = (time.monotonic_ns, threading.get_native_id, gc.isenabled, gc.get_count, gc.get_threshold)


def _calling(function: Callable[[Any], object]) -> Callable[[str, Any], object]:
    """Return a callable, not written in Python, that calls a function with the first of two arguments."""
    return property(function).__get__


_CALLBACKS: tuple[Callable[[Any, Any], object], ...] = (
    _calling(_notes.append),
    _calling(partial(next, map(_notes.append, zip(*(starmap(read, repeat(())) for read in _READERS), strict=False)))),
    partial(setattr, _notes),
)


class PythonCollections:
    """Reads the notes on garbage collections; the callbacks that write them stay, and keep only the last notes.

    Python ignores an interrupt that comes in a callback with bytecode. So these callbacks consist of C functions of the
    standard library. They only note the `info` of `gc`, the time and the thread; the engine writes the events later,
    before its own next event.
    """

    def __init__(self) -> None:
        self._start_note: tuple[Any, ...] = ()

    def start(self) -> None:
        """Start with the next collection."""
        call_at_collections(*_CALLBACKS)
        _notes.clear()
        self._start_note = ()

    def read(self) -> Iterator[Collection]:
        """Yield the collections that have ended since this was last called."""
        if not _notes:
            return
        notes = []
        with suppress(IndexError):  # another thread has read them
            # Without bytecode, so that no other thread can run in between.
            notes = list(starmap(_notes.popleft, repeat((), len(_notes))))
        for phase, note, info in zip(*[iter(notes)] * 3, strict=False):
            start_note, self._start_note = self._start_note, note if phase == "start" else ()
            if phase == "stop" and start_note and (duration_ns := note[0] - start_note[0]) >= MIN_COLLECTION_NS:
                yield Collection(note[1], note[0], _value(duration_ns, info) | _trigger_bit(*start_note[2:]))


def _value(duration_ns: int, info: Mapping[str, int]) -> int:
    collected, generation = min(info["collected"], COLLECTED_MASK), min(info["generation"], GENERATION_MASK)
    return (duration_ns << COLLECTED_BITS | collected) << GENERATION_BITS | generation


def _trigger_bit(is_enabled: bool, count: Sequence[int], threshold: Sequence[int]) -> int:
    """Return the trigger of a collection: Python collects if the youngest generation exceeds its threshold above 0.

    If not, or while the collector is disabled, a call of `gc.collect` started the collection.
    """
    return AUTOMATIC_BIT if is_enabled and 0 < threshold[0] < count[0] else REQUESTED_BIT
