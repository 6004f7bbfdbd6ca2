"""Which module has which fully qualified name: if two are alive at once, the second gets another one.

A name is free again once its module is dead, for one of the same class: modules that are made anew in each step share
one. Replicas of `nn.DataParallel` and scripted modules share the name of the module they were made of.
The attribute by which the calling code knows a module can make the difference.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import nn

from ..._interrupts import Exclusive
from .module_paths import ModuleRef

_MAX_NUMBER = 64
"""What is made in each step and dies only when the garbage collector runs must not get ever new names."""
_SUFFIXES = ("", *(f"#{number}" for number in range(2, _MAX_NUMBER + 1)))
_REST = f"#{_MAX_NUMBER + 1}+"


class DistinctNames:
    """Gives each module that is alive a name of its own; from the 65th on that would have one name, they share one."""

    def __init__(self) -> None:
        # By name; each reference is the one that tells its module's death, so there is one for each module.
        self._owners: dict[str, ModuleRef] = {}
        self._changing = Exclusive()

    def suffix(self, fqn: str, module: ModuleRef, find_attribute: Callable[[], str | None]) -> str:
        """Return what is put behind `fqn` to make it this module's own, as `#2`; most often nothing.

        Args:
            fqn: the name that it would have if it was alone.
            module: the module; `module_class` is set.
            find_attribute: returns the attribute by which its owner knows it, for `#critic`, or None.
        """
        if _REST in fqn or self._owners.setdefault(fqn, module) is module:
            return ""
        found = ""

        def find() -> None:
            nonlocal found
            found = self._find(fqn, module, find_attribute)

        self._changing.run(find)
        return found

    def _find(self, fqn: str, module: ModuleRef, find_attribute: Callable[[], str | None]) -> str:
        free = None
        for suffix in _SUFFIXES:
            owner = self._owners.get(fqn + suffix)
            if owner is module:
                return suffix
            if free is None and (owner is None or (owner() is None and owner.module_class == module.module_class)):
                free = suffix
            if owner is None:
                break
        attribute = find_attribute() if free != "" else None
        if attribute is not None and self._may_have(f"{fqn}#{attribute}", module):
            free = f"#{attribute}"
        if free is None:
            return _REST
        self._owners[fqn + free] = module
        return free

    def _may_have(self, name: str, module: ModuleRef) -> bool:
        owner = self._owners.get(name, module)
        return owner is module or (owner() is None and owner.module_class == module.module_class)


_READS_LOCALS = frozenset({"dir", "eval", "exec", "locals", "vars"})
_PASSED_OVER = {"<dictcomp>", "<genexpr>", "<lambda>", "<listcomp>", "<setcomp>"}


def calling_object() -> Any:
    """Return the first argument (`self`) of the function that calls the module, over torch's and our own; else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_of_torch_or_ours(frame):
        frame = frame.f_back
    while frame is not None:
        found = _first_argument(frame)
        if found is not None or frame.f_code.co_name not in _PASSED_OVER:
            return found
        frame = frame.f_back
    return None


def attribute_of_caller(module: nn.Module) -> str | None:
    """Return the attribute by which the object whose method calls `module` knows it; None where there is none."""
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
