"""Which name a module has where it is called.

A name is the path below the nearest open call that contains the module, so a module shared under two parents has two
names, each by the path it was called by. Nothing here keeps a module alive.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.fx import GraphModule

from ..ring import NameTable
from ..ring.slot_format import NO_NAME

__all__ = ["ModuleNames", "Open"]

Open = tuple[nn.Module, int]
"""An open call: its module and the number of its name."""


class ModuleNames:
    """Finds the number of a module's name; asked once per module and place, since the engines keep the answer.

    Args:
        table: gives the numbers.
        model: names start at this module; None starts them at each outermost called one.
        forget: called with `id(module)` when a module that was asked for dies.
    """

    def __init__(self, table: NameTable, model: nn.Module | None, forget: Callable[[int], object]) -> None:
        self._table = table
        self._forget = forget
        self._model = None if model is None else weakref.ref(model)
        self._fqns: dict[int, str] = {}
        self._last: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[nn.Module]] = {}
        self._paths: weakref.WeakKeyDictionary[nn.Module, _Paths] = weakref.WeakKeyDictionary()

    def find(self, module: nn.Module, open_calls: Iterable[Open]) -> int:
        """Return the number of `module`'s name when it is called inside `open_calls` (innermost first).

        `NO_NAME` where it is not to be shown: what torch.compile runs in place of a module.
        """
        open_calls = list(open_calls)
        if open_calls and _stands_for(open_calls[0][0], module):
            return NO_NAME
        number = self._below(module, open_calls)
        if number is None and isinstance(module, GraphModule) and open_calls and _is_compiled(open_calls[0][0]):
            return NO_NAME
        if number is None:
            number = self._last.get(id(module))
        if number is None:
            number = self._from_model(module)
        if number is None:
            name = type(module).__name__
            number = self._number(name, name, name)
        if id(module) not in self._watched:
            self._watched[id(module)] = weakref.ref(module, self._died(id(module)))
        self._last[id(module)] = number
        return number

    def last(self, module: nn.Module) -> str | None:
        """Return the fully qualified name under which `module` was called last, None where it was not."""
        number = self._last.get(id(module))
        return None if number is None else self._fqns[number]

    def fqn(self, number: int) -> str:
        """Return the fully qualified name behind a number."""
        return self._fqns[number]

    def _below(self, module: nn.Module, open_calls: Iterable[Open]) -> int | None:
        for parent, parent_number in open_calls:
            if parent is module:
                # A module that calls itself keeps its name.
                return parent_number
            path = self._path(parent, module)
            if path is not None:
                name = type(module).__name__
                return self._number(f"{path}: {name}", f"{self._fqns[parent_number]}.{path}", name)
        return None

    def _from_model(self, module: nn.Module) -> int | None:
        model = None if self._model is None else self._model()
        if model is None or model is module:
            return None
        path = self._path(model, module)
        if path is None:
            return None
        name = type(module).__name__
        return self._number(f"{path}: {name}", f"{type(model).__name__}.{path}", name)

    def _number(self, label: str, fqn: str, module_class: str) -> int:
        number = self._table.name(label, fqn, module_class)
        self._fqns[number] = fqn
        return number

    def _path(self, parent: nn.Module, module: nn.Module) -> str | None:
        paths = self._paths.get(parent)
        if paths is None:
            paths = self._paths.setdefault(parent, _Paths())
        return paths.find(parent, module)

    def _died(self, identity: int) -> Callable[[Any], None]:
        def died(_: Any) -> None:
            self._watched.pop(identity, None)
            self._last.pop(identity, None)
            self._forget(identity)

        return died


def _is_compiled(module: nn.Module) -> bool:
    return _is_optimized(module) or module._compiled_call_impl is not None


def _stands_for(module: nn.Module, inner: nn.Module) -> bool:
    return _is_optimized(module) and getattr(module, "_orig_mod", None) is inner


def _is_optimized(module: nn.Module) -> bool:
    # Where nothing was compiled, torch._dynamo is not imported, and importing it takes seconds.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


class _Paths:
    """Where each module lies below one parent, by identity, checked against the module itself."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._misses = 0
        self._lock = threading.RLock()

    def find(self, parent: nn.Module, module: nn.Module) -> str | None:
        path = self._look(module)
        if path is None:
            # A thread that misses what another is about to find waits for it.
            with self._lock:
                path = self._look(module)
                if path is None:
                    self._misses += 1
                    # Modules can be added later; one made anew in every call must not cost a walk in every call.
                    if self._misses & (self._misses - 1) == 0:
                        self._walk(parent)
                        path = self._look(module)
        return path

    def _look(self, module: nn.Module) -> str | None:
        entry = self._by_id.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def _walk(self, parent: nn.Module) -> None:
        self._by_id = {
            id(module): (weakref.ref(module), path) for path, module in parent.named_modules() if module is not parent
        }
