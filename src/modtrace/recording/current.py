"""The recording that runs in this process: one at a time, started and stopped by one thread at a time.

A recording is the current one from before anything of it is switched on until all of it is off. So what an interrupt
left half done is found: by another `stop` of it, or by the next recording, which first stops it. An interrupt does not
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
    """A descriptor: when the `__exit__` that it binds dies, the block is over."""

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
    """Make a method the `__exit__` of a class; `_stop_and_log` is called where a block ended without it.

    The exception of a signal's handler can come at the end of `__enter__`, and before the first line of `__exit__`.
    The recording would go on after the block. But a `with` statement holds the bound `__exit__` from before it calls
    `__enter__` until it is over, so the block ends when that dies. Once nothing is left to do, the class sets `_block`
    to None.

    Args:
        function: the method. The class also has `_entered`, which `__enter__` sets, and `_block`, which is ours.
    """
    return cast("_Function", _BlockExit(function))


_exclusive = Exclusive()
_current: Recording | None = None
_complete = False
"""Whether all of `_current` is switched on; False while it is started or stopped."""


def current() -> Recording | None:
    """Return the recording that runs in this process, or None; `modtrace.current().stop()` ends it."""
    return _current if _complete else None


def is_running(recording: Recording) -> bool:
    """Whether this recording runs."""
    return _current is recording and _complete


def start_alone(recording: Recording) -> None:
    """Switch `recording` on, as the one that runs; one that is replaceable is stopped first.

    Where that raises, `stop_alone` is still to be called.

    Raises:
        RecordingError: another one runs.
    """

    def start() -> None:
        global _current, _complete
        if _current is not None and not _complete:
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
        _complete = False
        _current = recording
        recording._switch_on()
        _complete = True

    _exclusive.run(start)


def change_alone(recording: Recording, change: Callable[[], None]) -> None:
    """Call `change` where `recording` runs, and nothing starts or stops one meanwhile."""

    def change_if_running() -> None:
        if is_running(recording):
            change()

    _exclusive.run(change_if_running)


def stop_alone(recording: Recording) -> bool:
    """Switch `recording` off, and return whether it ran until now."""

    def stop() -> bool:
        global _current, _complete
        if _current is not recording:
            return False
        ran, _complete = _complete, False
        recording._switch_off()
        _current = None
        return ran

    return _exclusive.run(stop)


@in_forked_child
def _after_fork_in_child() -> None:
    global _current
    recording, _current = _current, None
    if recording is not None:
        recording._after_fork()
