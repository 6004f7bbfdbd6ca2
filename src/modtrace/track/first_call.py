"""Calling a function when a process first calls a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from .._exclusive import Exclusive
from .call_patch import Patch, WrappedFunction
from .skip_dynamo import skip_frame

__all__ = ["call_at_first_module_call"]

_exclusive = Exclusive()


def call_at_first_module_call(function: Callable[[], None]) -> None:
    """Call `function` once, just before a module is called; what it starts sees that call already.

    Modules that run only inside of what torch.compile compiled are not seen.
    """
    begun = False

    def call_if_first() -> None:
        nonlocal begun
        if not begun:
            begun = True
            _PATCH.uninstall()
            function()

    _PATCH.install(lambda: _exclusive.run(call_if_first))


def _make_wrapper(patched: WrappedFunction) -> Callable[..., Any]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  # what it stands for
        __tracebackhide__ = __traceback_hide__ = True
        call_first = patched.observer
        if is_dynamo_compiling() or call_first is None:
            return patched.wrapped(self, *args, **kwargs)
        is_outermost = vars(nn.Module)["__call__"] is patched.wrapper
        call_first()
        # What others put around this wrapper has begun already, and is not called twice.
        return (nn.Module.__call__ if is_outermost else patched.wrapped)(self, *args, **kwargs)

    return skip_frame(__call__)


_PATCH = Patch(_make_wrapper)
