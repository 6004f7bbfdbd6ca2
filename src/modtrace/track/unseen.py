"""Hides modtrace's own code from torch.compile, tracing and modes; finds the tensors in a call's values."""

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
# A class's name, its bases, and whether there can be weak references to its objects, without calling its metaclass.
class_name: Callable[[type], str] = type.__dict__["__name__"].__get__
class_bases: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
weakref_offset: Callable[[type], int] = type.__dict__["__weakrefoffset__"].__get__


def attribute_of(module: Any, name: str) -> Any:
    """Return an attribute of a module without calling a `__getattribute__` of its class; None if there is none."""
    try:
        return object.__getattribute__(module, name)
    except AttributeError:
        return None


def skip_frame(function: _Function) -> _Function:
    """Exclude a function from torch.compile, but not the functions that it calls. Returns the function."""
    return _skip(function, recursive=False)


def skip_all(function: _Function) -> _Function:
    """Exclude a function, and all that it calls, from torch.compile. Returns the function."""
    return _skip(function, recursive=True)


def _skip(function: _Function, *, recursive: bool) -> _Function:
    assert isinstance(function, FunctionType)
    action: Any = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if recursive else action.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def hide_wrapper(wrapper: _Function, wrapped: Callable[..., Any]) -> _Function:
    """Make torch.compile trace the wrapped function instead of its wrapper. Returns the wrapper.

    Do not use it for a method in whose call a graph can break: torch then calls the wrapped function without `self`.
    A function that is not written in Python is not traced.
    """
    if isinstance(wrapped, FunctionType):
        vars(wrapper)["_torchdynamo_inline"] = wrapped
    return skip_frame(wrapper)


def is_backward_compiled() -> bool:
    """Return whether compiled autograd traces the backward pass of this code: it would trace modtrace's hooks too."""
    # Another thread may be importing the module at this moment.
    compiled_autograd = _imported("torch._dynamo.compiled_autograd")
    return compiled_autograd is not None and getattr(compiled_autograd, "compiled_autograd_enabled", False)


_MAX_DEPTH = 8


def unseen_by_modes() -> AbstractContextManager[None]:
    """Return a context that hides the inspection of tensors from the user's modes and subclasses, and from traces."""
    trace_state = torch._C._get_tracing_state()
    return torch._C.DisableTorchFunction() if trace_state is None else _unseen_by_trace(trace_state)


@contextmanager
def _unseen_by_trace(trace_state: Any) -> Iterator[None]:
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        torch._C._set_tracing_state(trace_state)  # type: ignore[attr-defined]


def tensors_in(value: Any, depth: int = 0, entered: dict[int, tuple[int, Any]] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, in order.

    Values deeper than 8 levels are left out. `entered` has the least depth of each container, so that cycles end.
    """
    value_class = type(value)  # `isinstance` would read the `__class__` of the user's object
    if issubclass(value_class, Tensor):
        yield value
        return
    if depth >= _MAX_DEPTH:
        return
    inner: Iterable[Any]
    if issubclass(value_class, (tuple, list)):
        inner = value
    elif issubclass(value_class, Mapping):
        inner = value.values()
    elif is_dataclass(value_class) and not issubclass(value_class, type):
        inner = (getattr(value, field.name, None) for field in fields(value))
    else:
        return
    if entered is None:  # the outermost container: most hold only tensors, and noting it would cost 50 % more time
        entered = {}
    elif entered.get(id(value), (_MAX_DEPTH,))[0] > depth:
        entered[id(value)] = depth, value
    else:
        return
    for item in inner:
        yield from tensors_in(item, depth + 1, entered)
