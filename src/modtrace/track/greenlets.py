"""Greenlets, such as gevent's: each is recorded as a separate thread.

Until `greenlet` is imported, each thread has one greenlet, and this module does nothing.
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
"""The first id (tid) of a greenlet, which has none in the system; Linux does not use ids from here on."""


def current_greenlet() -> Any:
    """Return the running greenlet; None for a thread's first greenlet, or if `greenlet` is not imported."""
    get_current = getattr(sys.modules.get("greenlet"), "getcurrent", None)
    greenlet = None if get_current is None else get_current()
    return None if greenlet is None or greenlet.parent is None else greenlet


def _first_greenlet(greenlet: Any) -> Any:
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
        self.count = 0  # number of tracks
        self.free: list[_GreenletRef] = []  # dead greenlets, whose tracks can be reused


class ThreadNumbers:
    """Numbers the threads and greenlets of a recording.

    A greenlet gets the number of a dead greenlet of its thread, if there is one. So a server with a greenlet for each
    request has one track for each simultaneous request.
    """

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._refs: WeakMap[Any, _GreenletRef] = WeakMap()
        self._tracks: WeakMap[Any, _Tracks] = WeakMap()  # by the thread's first greenlet
        self._tids = itertools.count(FIRST_TID)

    def number(self, torch_thread_id: int = -1) -> int:
        """Return the number of the running greenlet, or a new number for the thread if it has only one."""
        greenlet, (name, tid) = current_greenlet(), describe_thread()
        if greenlet is None:
            return self._names.thread(name, tid, torch_thread_id)
        known_ref = self._refs.get(greenlet)
        if known_ref is not None:
            return known_ref.number
        first = _first_greenlet(greenlet)
        tracks = self._tracks.get(first)
        if tracks is None:
            tracks = self._tracks[first] = _Tracks()
        # The callback runs no Python code: see `WeakMap`.
        ref = _GreenletRef(greenlet, tracks.free.append)
        if tracks.free:
            ref.number = tracks.free.pop().number
        else:
            tracks.count += 1
            track = f"{name} · greenlet {tracks.count}"
            ref.number = self._names.thread(track, next(self._tids), torch_thread_id)
        self._refs[greenlet] = ref
        return ref.number


class PerGreenlet(Generic[_Value]):
    """A value for each thread, as in `threading.local`; once `greenlet` is imported, for each greenlet."""

    local: Any

    def __init__(self, make: Callable[[], _Value]) -> None:
        class Local(threading.local):
            value: Any

        self._make = make
        self._class: Any = Local
        self._values: WeakMap[Any, _Value] = WeakMap()
        self.local = Local()  # its attribute `value` is the value, once `get` has made it
        _instances[self] = None
        call_after_import("greenlet", _follow)

    def get(self) -> _Value:
        """Return the value; the first call makes it."""
        try:
            value: _Value = self.local.value
        except AttributeError:
            value = self.local.value = self._make()
        return value

    @staticmethod
    def resume_sequence() -> int:
        """Return the sequence number at which the running greenlet resumed; 0 if `greenlet` is not imported."""
        return _Switches.watch().sequence if hasattr(sys.modules.get("greenlet"), "gettrace") else 0

    def follow(self) -> None:
        """From now on, find the value by the running greenlet."""
        self._class.value = property(self._greenlet_value, self._set_greenlet_value)

    def _greenlet_value(self, local: Any) -> _Value:
        greenlet = sys.modules["greenlet"].getcurrent()
        _Switches.watch()
        value = self._values.get(greenlet)
        # The thread's value from before `greenlet` was imported belongs to its first greenlet.
        if value is None and (thread_value := vars(local).pop("value", None)) is not None:
            first = _first_greenlet(greenlet)
            self._values[first] = thread_value
            value = thread_value if first is greenlet else None
        if value is None:
            raise AttributeError("value")
        return value

    def _set_greenlet_value(self, _local: Any, value: _Value) -> None:
        self._values[sys.modules["greenlet"].getcurrent()] = value

    def switch(self, suspended: Any, resumed: Any, sequences: range) -> None:
        """Handle a switch of greenlets on this thread; the suspended one made the nodes of these sequence numbers."""


_instances: WeakMap[PerGreenlet[Any], None] = WeakMap()


def _follow() -> None:
    for values in _instances:
        values.follow()
    _Switches.watch()


class _Switches:
    """The function that `greenlet` calls when greenlets of a thread switch (`greenlet.settrace`)."""

    def __init__(self, replaced: Callable[[str, Any], object] | None) -> None:
        self.sequence = sequence_number()  # the thread's sequence number at the last switch
        self._replaced = replaced
        self._runs = False

    @staticmethod
    def watch() -> "_Switches":
        """Return the function of this thread; install it if it is not installed."""
        greenlet: Any = sys.modules["greenlet"]
        trace = greenlet.gettrace()
        if type(trace) is not _Switches:
            trace = _Switches(trace)
            greenlet.settrace(trace)
        return trace

    def __call__(self, event: str, greenlets: tuple[Any, Any]) -> None:
        if self._runs:  # the replaced function may call this one
            return
        self._runs = True
        try:
            sequences = range(self.sequence, sequence_number())
            self.sequence = sequences.stop
            for values in _instances:
                values.switch(*greenlets, sequences)
            if self._replaced is not None:
                self._replaced(event, greenlets)
        finally:
            self._runs = False
