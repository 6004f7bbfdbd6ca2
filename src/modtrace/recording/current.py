"""The recording that runs in this process: one at a time, started and stopped by one thread at a time.

A recording becomes the current one before its first part is switched on, and stays it until the last part is off. So
after an interrupt, a second `stop`, or the start of the next recording, finds it and stops it. An interrupt does not
skip the end of a `with` block either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .._errors import RecordingError
from .._interrupts import Exclusive, in_forked_child

if TYPE_CHECKING:
    from .recording import Recording

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _BlockExit:
    """A descriptor that binds `__exit__`; the deletion of the bound method marks the end of the block."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, block: Recording | None, owner: type | None = None) -> Callable[..., Any]:
        if block is None:
            return self._function
        bound = partial(self._function, block)
        if not block._entered:
            block_ref = weakref.ref(block)
            block._block = weakref.ref(bound, lambda _: _on_end(block_ref()))
        return bound


def _on_end(block: Recording | None) -> None:
    if block is not None and block._entered:
        block._stop_and_log("when its block was left")


def block_exit(function: _Function) -> _Function:
    """Make a method the `__exit__` of a class; if a block ends without a call of it, `_stop_and_log` is called.

    The exception of a signal's handler can come at the end of `__enter__`, or before the first line of `__exit__`, and
    the recording would go on after the block. But a `with` statement holds the bound `__exit__` from before its call of
    `__enter__` until its end, so the block ends when that method is deleted. After a stop the class sets `_block` to
    None.

    Args:
        function: the method. `__enter__` of its class sets `_entered`; this descriptor sets `_block`.
    """
    return cast("_Function", _BlockExit(function))


_exclusive = Exclusive()
_current: Recording | None = None
_is_on = False
"""Whether all of `_current` is switched on; False while it starts or stops."""


def current() -> Recording | None:
    """Return the recording that runs in this process, or None; `modtrace.current().stop()` ends it."""
    return _current if _is_on else None


def is_running(recording: Recording) -> bool:
    """Whether this recording runs."""
    return _current is recording and _is_on


def start_alone(recording: Recording) -> None:
    """Make `recording` the current one and switch it on; a replaceable one is stopped first.

    If this raises, call `stop_alone`.

    Raises:
        RecordingError: another recording runs.
    """

    def start() -> None:
        global _current, _is_on
        if _current is not None and not _is_on:
            _current._switch_off()
            _current = None
        if _current is not None and _current.internal.is_replaceable:
            _current.internal.replaced_by = recording
            _current._stop_and_log("when another one started")
        if _current is not None:
            raise RecordingError(
                f"a recording is running in this process, {_current._outputs.destination}; "
                "stop it before starting another: modtrace.current().stop()"
            )
        _is_on = False
        _current = recording
        recording._switch_on()
        _is_on = True

    _exclusive.run(start)


def change_alone(recording: Recording, change: Callable[[], None]) -> None:
    """Call `change` if `recording` runs, while no thread can start or stop a recording."""

    def change_if_running() -> None:
        if is_running(recording):
            change()

    _exclusive.run(change_if_running)


def stop_alone(recording: Recording) -> bool:
    """Switch `recording` off, and return whether it was running."""

    def stop() -> bool:
        global _current, _is_on
        if _current is not recording:
            return False
        was_running, _is_on = _is_on, False
        recording._switch_off()
        _current = None
        return was_running

    return _exclusive.run(stop)


@in_forked_child
def _after_fork_in_child() -> None:
    global _current
    recording, _current = _current, None
    if recording is not None:
        recording._after_fork()
