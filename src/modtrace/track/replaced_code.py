"""Functions whose code is replaced by a call of ours: those who imported them earlier call it too."""

from collections.abc import Callable
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any

from .unseen import skip_frame

_INNER = "_modtrace_inner"


def _call_inner(*args: Any, _modtrace_inner: Callable[..., Any], **kwargs: Any) -> Any:
    __tracebackhide__ = __traceback_hide__ = True
    return _modtrace_inner(*args, **kwargs)


def replace_code(function: Any, call: Callable[..., Any]) -> None:
    """Have a function call `call` with what it did until now, followed by its arguments, once per process.

    Args:
        function: it; what is not written in Python stays as it is.
        call: returns what the function returns.
    """
    defaults = getattr(function, "__kwdefaults__", None) or {}
    if not isinstance(function, FunctionType) or _INNER in defaults:
        return
    code, attributes = function.__code__, dict(vars(function))
    inner = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    inner.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(inner, function)
    vars(inner).pop("__wrapped__")
    vars(inner).update(attributes)
    vars(function)["__wrapped__"] = inner  # for its signature
    # What pickles the functions of a script by their parts can pickle this too.
    function.__kwdefaults__ = {**defaults, _INNER: partial(call, inner)}
    # As many variables of an outer function as it has; where it is says whether torch.compile looks into it.
    place = {name: getattr(code, name) for name in ("co_name", "co_freevars", "co_filename", "co_firstlineno")}
    function.__code__ = _call_inner.__code__.replace(**place)
    skip_frame(function)
