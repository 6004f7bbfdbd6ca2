"""The object whose method calls a module, found on the stack."""

import inspect
import sys
from types import FrameType
from typing import Any

from torch import nn

_READS_LOCALS = frozenset({"dir", "eval", "exec", "locals", "vars"})
_PASSED_OVER = {"<dictcomp>", "<genexpr>", "<lambda>", "<listcomp>", "<setcomp>"}


def calling_object() -> Any:
    """Return the first argument (`self`) of the function that calls the module, over torch's and our own; else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_of_torch_or_ours(frame):
        frame = frame.f_back
    while frame is not None:
        argument = _first_argument(frame)
        if argument is not None or frame.f_code.co_name not in _PASSED_OVER:
            return argument
        frame = frame.f_back
    return None


def attribute_of_caller(module: nn.Module) -> str | None:
    """Return the attribute by which the object whose method calls `module` knows it; None if there is none."""
    try:
        attributes = object.__getattribute__(calling_object(), "__dict__")
    except AttributeError:
        return None
    if type(attributes) is not dict:
        return None
    held = (name for name, value in list(attributes.items()) if value is module and type(name) is str)
    return next(filter(str.isidentifier, held), None)


def _is_of_torch_or_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    return type(name) is str and name.partition(".")[0] in ("torch", "modtrace")


def _first_argument(frame: FrameType) -> object:
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED or not _READS_LOCALS.isdisjoint(code.co_names):
        # The code of a module or a class, or one that can see that its variables were read.
        return None
    name = "self" if "self" in code.co_freevars else code.co_varnames[0] if code.co_argcount else "."
    if name.startswith("."):  # what a comprehension goes through
        return None
    variables = frame.f_locals
    value = variables.get(name)
    # Before 3.13 the frame keeps a dictionary that was made for this, and so all that its variables hold now.
    if type(variables) is dict and sys.getrefcount(variables) <= 3:
        variables.clear()
    return value
