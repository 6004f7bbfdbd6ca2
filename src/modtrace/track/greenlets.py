"""Greenlets, as those of gevent: each is recorded as a thread of its own.

Nothing is looked at before `greenlet` is imported, as long as there is one greenlet per thread.
"""

import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .._after_import import call_after_import
from .._interrupts import WeakMap
from ..ring import NameTable
from .event_sink import describe_thread, sequence_number

_Value = TypeVar("_Value")

FIRST_TID = 1 << 22
"""Greenlets have no id (tid) of the system, and get numbers from here on, beyond all that Linux gives out."""


def current_greenlet() -> Any:
    """Return the greenlet that runs; None for the one that a thread begins with, or if `greenlet` is not imported."""
    get_current = getattr(sys.modules.get("greenlet"), "getcurrent", None)
    greenlet = None if get_current is None else get_current()
    return None if greenlet is None or greenlet.parent is None else greenlet


def _main(greenlet: Any) -> Any:
    while greenlet.parent is not None:
        greenlet = greenlet.parent
    return greenlet


class _GreenletRef(weakref.ref[Any]):
    """A weak reference to a greenlet, with the number of its track."""

    __slots__ = ("number",)
    number: int


class _Tracks:
    """The greenlets of one thread that have a track."""

    def __init__(self) -> None:
        self.count = 0  # how many tracks there are
        self.free: list[_GreenletRef] = []  # those that died, whose tracks others can have


class ThreadNumbers:
    """Gives the threads and greenlets of a recording their numbers, each once.

    A greenlet has the number of one that is dead, if its thread had one. So a server with a greenlet for each request
    has as many tracks as requests at once.
    """

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._of_greenlets: WeakMap[Any, _GreenletRef] = WeakMap()
        self._tracks: WeakMap[Any, _Tracks] = WeakMap()  # by the thread's first greenlet
        self._tids = itertools.count(FIRST_TID)

    def number(self, torch_thread_id: int = -1) -> int:
        """Return the number of the thread that asks, or of its greenlet; of a thread it is a new one each time."""
        greenlet, (name, tid) = current_greenlet(), describe_thread()
        if greenlet is None:
            return self._names.thread(name, tid, torch_thread_id)
        numbered = self._of_greenlets.get(greenlet)
        if numbered is not None:
            return numbered.number
        main = _main(greenlet)
        tracks = self._tracks.get(main)
        if tracks is None:
            tracks = self._tracks[main] = _Tracks()
        # Called when it dies, with no code of ours: see `WeakMap`.
        ref = _GreenletRef(greenlet, tracks.free.append)
        if tracks.free:
            ref.number = tracks.free.pop().number
        else:
            tracks.count += 1
            track = f"{name} · greenlet {tracks.count}"
            ref.number = self._names.thread(track, next(self._tids), torch_thread_id)
        self._of_greenlets[greenlet] = ref
        return ref.number


class PerGreenlet(Generic[_Value]):
    """A value for each thread, as `threading.local` has; once `greenlet` is imported, for each greenlet."""

    local: Any

    def __init__(self, make: Callable[[], _Value]) -> None:
        class Local(threading.local):
            value: Any

        self._make = make
        self._class: Any = Local
        self._values: WeakMap[Any, _Value] = WeakMap()
        self.local = Local()  # its attribute `value` is the value, if there is one yet
        _all[self] = None
        call_after_import("greenlet", _follow)

    def get(self) -> _Value:
        """Return the value, which is made if there is none yet."""
        try:
            value: _Value = self.local.value
        except AttributeError:
            value = self.local.value = self._make()
        return value

    @staticmethod
    def since() -> int:
        """Return the sequence number at which the greenlet that runs went on; 0 if `greenlet` is not imported."""
        return _Switches.watch().sequence if hasattr(sys.modules.get("greenlet"), "gettrace") else 0

    def follow(self) -> None:
        """Find the value by the greenlet that runs, from now on."""
        self._class.value = property(self._of_greenlet, self._set_of_greenlet)

    def _of_greenlet(self, local: Any) -> _Value:
        greenlet = sys.modules["greenlet"].getcurrent()
        _Switches.watch()
        value = self._values.get(greenlet)
        # What the thread had before `greenlet` was imported.
        if value is None and (value_of_thread := vars(local).pop("value", None)) is not None:
            main = _main(greenlet)
            self._values[main] = value_of_thread
            value = value_of_thread if main is greenlet else None
        if value is None:
            raise AttributeError("value")
        return value

    def _set_of_greenlet(self, _local: Any, value: _Value) -> None:
        self._values[sys.modules["greenlet"].getcurrent()] = value

    def switch(self, stopped: Any, goes_on: Any, made: range) -> None:
        """Note that greenlets switched on this thread; the one that stops made nodes of these sequence numbers."""


_all: WeakMap[PerGreenlet[Any], None] = WeakMap()


def _follow() -> None:
    for values in _all:
        values.follow()
    _Switches.watch()


class _Switches:
    """The function that greenlet calls when greenlets of a thread switch (`greenlet.settrace`)."""

    def __init__(self, replaced: Callable[[str, Any], object] | None) -> None:
        self.sequence = sequence_number()  # the thread's sequence number when they switched last
        self._replaced = replaced
        self._runs = False

    @staticmethod
    def watch() -> "_Switches":
        """Return the one of this thread, which is put there if it is not."""
        greenlet: Any = sys.modules["greenlet"]
        trace = greenlet.gettrace()
        if type(trace) is not _Switches:
            trace = _Switches(trace)
            greenlet.settrace(trace)
        return trace

    def __call__(self, event: str, greenlets: tuple[Any, Any]) -> None:
        if self._runs:  # the function that this replaced has been told to call this
            return
        self._runs = True
        try:
            made = range(self.sequence, sequence_number())
            self.sequence = made.stop
            for values in _all:
                values.switch(*greenlets, made)
            if self._replaced is not None:
                self._replaced(event, greenlets)
        finally:
            self._runs = False
