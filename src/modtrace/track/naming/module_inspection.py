"""What a module is made of, read without running code of its class: that can raise, or compare as a tensor does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["attribute", "class_name", "module_of_class", "name_of_class", "named_modules"]

_class_name = type.__dict__["__name__"].__get__
_class_module = type.__dict__["__module__"].__get__


def name_of_class(kind: type) -> str:
    """Return the name of a class, also where its metaclass says something else, or raises."""
    name: str = _class_name(kind)
    return name


def module_of_class(kind: type) -> str:
    """Return the name of the module in which a class was made; empty where it does not say."""
    try:
        module = _class_module(kind)
    except AttributeError:
        return ""
    return module if isinstance(module, str) else ""


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, also where its metaclass says something else."""
    return name_of_class(type(module))


def attribute(module: nn.Module, name: str) -> Any:
    """Return what a module holds under a name, past a `__getattribute__` of its own; None where it holds nothing."""
    try:
        return object.__getattribute__(module, name)
    except AttributeError:
        return None


def named_modules(module: nn.Module, repeated: list[nn.Module] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and module of each module below one, as `nn.Module.named_modules` does, each module once.

    A `named_modules` of its own is not asked: it is the user's code, which can wait for a lock or draw a random number.
    Names that are no text are turned into it.

    Args:
        module: where paths start.
        repeated: gets each module that lies in another place too, once for each of those.
    """
    seen = {id(module)}
    # The last is the next. Two lists, as a tuple for each is more for the garbage collector to count.
    paths, todo = [""], [module]
    while todo:
        path, inner = paths.pop(), todo.pop()
        if inner is not module:
            if id(inner) in seen:
                if repeated is not None:
                    repeated.append(inner)
                continue
            seen.add(id(inner))
            yield path, inner
        children = attribute(inner, "_modules")
        if children:
            prefix = f"{path}." if path else ""
            for name, child in zip(reversed(list(children.keys())), reversed(list(children.values())), strict=True):
                if child is not None:
                    paths.append(f"{prefix}{name if type(name) is str else _text(name)}")
                    todo.append(child)


def _text(name: object) -> str:
    try:
        return str(name)
    except Exception:
        return f"<{_class_name(type(name))}>"
