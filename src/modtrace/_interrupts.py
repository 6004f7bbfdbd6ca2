"""Locks, maps and properties that stay correct during an interrupt, a signal's handler, a finalizer or a fork.

- `WeakMap` maps objects to values, without a callback when an object dies.
- `Exclusive` is a section that one thread at a time runs.
- `cached_property` uses no lock.
- `hold_ctrl_c` lets a file be saved before the program ends.
- `raised_by_handler` distinguishes the user's errors from modtrace's.
- `without_errors_of_users` suppresses errors of the user's classes.
"""

import contextlib
import os
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_MIN_PRUNE_LENGTH = 64
_MIN_PRESS_GAP_NS = 1_000_000_000
"""Minimum time between the delayed Ctrl-C and a second one that aborts; until then it is the same key press."""


class WeakMap(Generic[_Key, _Value]):
    """Values by object, compared by identity. A value is available as long as its object lives.

    The callbacks of `weakref.WeakKeyDictionary` are Python code. If a signal's handler raises inside a callback, the
    interpreter ignores the error, and the user's Ctrl-C is lost. This map has no callbacks: it removes the entries of
    dead objects when the number of entries has doubled since the last removal.
    """

    def __init__(self) -> None:
        # Keys are ids of objects; the weak reference confirms the object.
        self._entries: dict[int, tuple[weakref.ref[_Key], _Value]] = {}
        self._prune_length = _MIN_PRUNE_LENGTH

    def get(self, key: _Key) -> _Value | None:
        """Return the value of an object, or None."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def __setitem__(self, key: _Key, value: _Value) -> None:
        """Set the value of an object; raises TypeError if the object does not support weak references."""
        if len(self._entries) >= self._prune_length:
            self._prune()
            self._prune_length = max(_MIN_PRUNE_LENGTH, 2 * len(self._entries))
        self._entries[id(key)] = weakref.ref(key), value

    def __iter__(self) -> Iterator[_Key]:
        """Yield the objects that are alive."""
        return (key for key, _ in self.items())

    def items(self) -> Iterator[tuple[_Key, _Value]]:
        """Yield the objects that are alive, and their values."""
        # Making a list of the keys runs no other code, so the dictionary cannot change meanwhile.
        for key_id in list(self._entries):
            entry = self._entries.get(key_id)
            key = None if entry is None else entry[0]()
            if entry is not None and key is not None:
                yield key, entry[1]

    def _prune(self) -> None:
        for key_id in list(self._entries):
            entry = self._entries.get(key_id)
            if entry is not None and entry[0]() is None:
                removed = self._entries.pop(key_id, entry)
                if removed is not entry:
                    # Another thread has set the value of a new object in between.
                    self._entries.setdefault(key_id, removed)


class Exclusive:
    """Lets one thread at a time run a function.

    A thread that is inside may enter again: a finalizer or a signal's handler must not wait for the code that it
    interrupted. In a forked child the section is free, even if a thread of the parent was inside.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all[self] = None

    def run(self, function: Callable[[], _Value]) -> _Value:
        """Call `function` while no other thread is inside, and return its result."""
        lock = self._lock
        if lock._is_owned():  # type: ignore[attr-defined]
            return function()
        try:
            lock.acquire()
            value = function()
            lock.release()
            return value
        except BaseException:
            # A signal's handler may have raised right after the lock was acquired.
            if lock._is_owned():  # type: ignore[attr-defined]
                lock.release()
            raise


_all: WeakMap[Exclusive, None] = WeakMap()


def in_forked_child(function: Callable[[], None]) -> Callable[[], None]:
    """Register a function to be called in each child forked from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


@in_forked_child
def _renew_all_in_child() -> None:
    # A thread that exists only in the parent may have been inside.
    for exclusive in _all:
        exclusive._lock = threading.RLock()


class cached_property(Generic[_Value]):  # noqa: N801  # as functools calls it
    """A property that is computed once for each object.

    Before Python 3.12, `functools.cached_property` computes under a lock that all objects of a class share. A child
    that is forked meanwhile would wait for ever. This property has no lock, so two threads may both compute its value.
    """

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, instance: Any, owner: type) -> _Value:
        if instance is None:
            return self  # type: ignore[return-value]  # as properties do
        value = instance.__dict__[self._compute.__name__] = self._compute(instance)
        return value


def raised_by_handler(error: BaseException) -> bool:
    """Return whether a signal's handler raised `error`; such an error is the user's, even inside modtrace's code."""
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


@contextlib.contextmanager
def without_errors_of_users() -> Iterator[None]:
    """Suppress what the user's classes raise when their attributes are read, but not what a signal's handler raises."""
    try:
        yield
    except Exception as error:
        if raised_by_handler(error):
            raise


def _code(handler: Any) -> CodeType | None:
    if not callable(handler):
        return None
    while isinstance(handler, partial):
        handler = handler.func
    function = handler if isinstance(handler, FunctionType | MethodType) else type(handler).__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


def hold_ctrl_c(function: Callable[[], _Value], notify: Callable[[], None]) -> _Value:
    """Call `function` and delay a Ctrl-C until it returns; another Ctrl-C after a second or more aborts it.

    Ctrl-C is delayed only if it would raise KeyboardInterrupt: in the main thread of a program without own handler.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return function()
    first_ns = 0

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal first_ns
        now_ns = time.monotonic_ns()
        if first_ns and now_ns - first_ns >= _MIN_PRESS_GAP_NS:
            first_ns = 0
            signal.default_int_handler(number, frame)
        if not first_ns:
            first_ns = now_ns
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # stderr is closed, or is being written to
                notify()

    try:
        signal.signal(signal.SIGINT, hold)
        return function()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if first_ns:
            raise KeyboardInterrupt
