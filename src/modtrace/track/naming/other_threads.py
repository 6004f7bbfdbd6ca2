"""Whose work a thread does: the module that another thread called, of which the module called here is a part.

A thread of a pool, or of `nn.DataParallel`, has no call around its outermost one. What it calls is most often a part of
a module that another thread has called, and has a name there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from .module_inspection import attribute, named_modules

__all__ = ["OutermostModules"]

_MAX_MODULES = 64


class _Outermost(NamedTuple):
    module: weakref.ref[nn.Module]
    name_id: int
    thread: int


class OutermostModules:
    """The modules that were called outside of all others and named by themselves: the last 64 of them."""

    def __init__(self) -> None:
        self._by_id: dict[int, _Outermost] = {}

    def add(self, module: nn.Module, name_id: int) -> None:
        """Note that this thread called a module, outside of all others, and that it has this name."""
        self._by_id.pop(id(module), None)
        self._by_id[id(module)] = _Outermost(weakref.ref(module), name_id, threading.get_ident())
        while len(self._by_id) > _MAX_MODULES:
            self._by_id.pop(next(iter(self._by_id)), None)

    def find(
        self, module: nn.Module, path_below: Callable[[nn.Module, nn.Module], str | None]
    ) -> tuple[int, str] | None:
        """Return the name of the module that another thread called and `module` is a part of, and its path there.

        Args:
            module: what this thread calls outside of all others; also a replica that `nn.DataParallel` made.
            path_below: returns the path of the second module below the first; None where it is not there.
        """
        here, is_replica = threading.get_ident(), attribute(module, "_is_replica") is True
        for outermost in reversed(list(self._by_id.values())):
            outer = outermost.module()
            if outer is None or outer is module or outermost.thread == here:
                continue
            path = _path_of_original(outer, module) if is_replica else path_below(outer, module)
            if path is not None:
                return outermost.name_id, path
        return None


def _path_of_original(outer: nn.Module, replica: nn.Module) -> str | None:
    """Return the path of the module that a replica was copied from: the two have the same dictionary of hooks."""
    hooks = attribute(replica, "_forward_hooks")
    for path, inner in named_modules(outer):
        if attribute(inner, "_forward_hooks") is hooks:
            return path
    return None
