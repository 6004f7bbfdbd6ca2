"""Keeping torch.compile from compiling our own functions where it meets them between the frames of the user."""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_imported: Callable[[str], Any] = sys.modules.get
_Function = TypeVar("_Function", bound=Callable[..., Any])


def skip_frame(function: _Function) -> _Function:
    """Let a function run as it is; what it calls is compiled as if the caller had called it. Returns it."""
    return _skip(function, recursive=False)


def skip_all(function: _Function) -> _Function:
    """Let a function, and all that it calls, run as it is. Returns it."""
    return _skip(function, recursive=True)


def _skip(function: _Function, *, recursive: bool) -> _Function:
    assert isinstance(function, FunctionType)
    action: Any = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if recursive else action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def is_backward_compiled() -> bool:
    """Whether compiled autograd traces the backward pass of what runs now: it would trace hooks of ours with it."""
    # Another thread may just be importing it.
    compiled_autograd = _imported("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and getattr(compiled_autograd, "compiled_autograd_enabled", False)
