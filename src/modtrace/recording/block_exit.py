"""The end of a `with` block, which an interrupt cannot skip."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar, cast

__all__ = ["block_exit"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Block(Protocol):
    _entered: bool
    _block: object

    def _on_block_left(self) -> None: ...


class _BlockExit:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, block: _Block | None, owner: type | None = None) -> Callable[..., Any]:
        if block is None:
            return self._function
        bound = partial(self._function, block)
        if not block._entered:
            known = weakref.ref(block)
            block._block = weakref.ref(bound, lambda _: _on_end(known()))
        return bound


def _on_end(block: _Block | None) -> None:
    if block is not None and block._entered:
        block._on_block_left()


def block_exit(function: _Function) -> _Function:
    """Make a method the `__exit__` of a class; `_on_block_left` is called where a block ended without it.

    The exception of a signal's handler can come at the end of `__enter__`, and before the first line of `__exit__`;
    what was begun would go on behind the block. But a `with` statement holds the bound `__exit__` from before it calls
    `__enter__` until it is over, so the block ends when that dies. Once nothing is left to do, the class sets `_block`
    to None.

    Args:
        function: the method. The class also has `_entered`, which `__enter__` sets, and `_block`, which is ours.
    """
    return cast("_Function", _BlockExit(function))
