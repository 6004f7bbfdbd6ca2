"""Keeping what modtrace runs unseen by torch.compile, by tracing and by modes; and the tensors in a call's values."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame

_imported: Callable[[str], Any] = sys.modules.get
_Function = TypeVar("_Function", bound=Callable[..., Any])
# What a class is called, is made of, and whether its objects can be followed, past what a user's metaclass may do.
class_name: Callable[[type], str] = type.__dict__["__name__"].__get__
class_bases: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
weakref_offset: Callable[[type], int] = type.__dict__["__weakrefoffset__"].__get__


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


def hide_wrapper(wrapper: _Function, wrapped: Callable[..., Any]) -> _Function:
    """Have torch.compile look at what a function wraps in its place. Returns it.

    It is not for a method in whose call a graph can break: torch then calls what it wraps without `self`. A function
    that is not written in Python is not looked at.
    """
    if isinstance(wrapped, FunctionType):
        vars(wrapper)["_torchdynamo_inline"] = wrapped
    return skip_frame(wrapper)


def is_backward_compiled() -> bool:
    """Whether compiled autograd traces the backward pass of what runs now: it would trace hooks of ours with it."""
    # Another thread may just be importing it.
    compiled_autograd = _imported("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and getattr(compiled_autograd, "compiled_autograd_enabled", False)


_MAX_DEPTH = 8


def unseen_by_modes() -> AbstractContextManager[None]:
    """Return what to look at tensors in: modes and subclasses of the user's may count or refuse it, traces note it."""
    tracing = torch._C._get_tracing_state()
    return torch._C.DisableTorchFunction() if tracing is None else _unseen_by_trace(tracing)


@contextmanager
def _unseen_by_trace(tracing: Any) -> Iterator[None]:
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def tensors_in(value: Any, depth: int = 0, entered: dict[int, tuple[int, Any]] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, in order.

    What lies deeper than 8 levels is left out, and what was `entered` is so once, so that cycles end.
    """
    if isinstance(value, Tensor):
        yield value
        return
    if depth >= _MAX_DEPTH:
        return
    inner: Iterable[Any]
    if isinstance(value, (tuple, list)):
        inner = value
    elif isinstance(value, Mapping):
        inner = value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        inner = (getattr(value, field.name, None) for field in fields(value))
    else:
        return
    if entered is None:  # most often values that hold no others, for which the memory would cost half as much again
        entered = {}
    elif entered.get(id(value), (_MAX_DEPTH,))[0] > depth:
        entered[id(value)] = depth, value
    else:
        return
    for item in inner:
        yield from tensors_in(item, depth + 1, entered)
