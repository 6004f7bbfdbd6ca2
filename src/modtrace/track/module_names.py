"""Module names: the path below the nearest open call that contains the module.

A module shared under two parents has two names, one for each path it is called by. Nothing here keeps a module alive.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.fx import GraphModule

from .._exclusive import Exclusive
from ..ring import NameTable
from ..ring.slot_format import NO_NAME
from .module_inspection import attribute, class_name, named_modules
from .other_threads import OutermostModules

__all__ = ["ModuleNames", "OpenCall"]

OpenCall = tuple[nn.Module, int]
"""A call that was entered and not exited yet: its module and the id of its name."""


class ModuleNames:
    """Finds the id of a module's name; asked once per module and call around it, since the engines keep the answer.

    Args:
        table: gives out the ids.
        model: names start at this module, or at one whose class has this name; None starts them at each outermost
            called module, for other threads too.
        forget: called with `id(module)` when a module that was asked for dies.
    """

    def __init__(self, table: NameTable, model: nn.Module | str | None, forget: Callable[[int], object]) -> None:
        self._table = table
        self._forget = forget
        self._models = _Models(model)
        self._outermost = OutermostModules()
        self._fqns: dict[int, str] = {}
        self._last_name_ids: dict[int, int] = {}
        self._death_watches: dict[int, weakref.ref[nn.Module]] = {}
        # By id(parent), checked against the parent itself.
        self._paths: dict[int, tuple[weakref.ref[nn.Module], _Paths]] = {}

    def resolve(self, module: nn.Module, open_calls: Iterable[OpenCall]) -> int:
        """Return the id of `module`'s name when it is called inside `open_calls` (innermost first).

        `NO_NAME` where it is not to be shown: what torch.compile runs in place of a module.
        """
        open_calls = list(open_calls)
        if open_calls and _is_wrapper_of(open_calls[0][0], module):
            return NO_NAME
        name_id = self._relative_to(open_calls, module)
        if name_id is None and issubclass(type(module), GraphModule) and open_calls and _is_compiled(open_calls[0][0]):
            return NO_NAME
        if name_id is None:
            name_id = self._last_name_ids.get(id(module))
        if name_id is None:
            name_id = self._relative_to_model(module)
        if name_id is None and not open_calls:
            name_id = self._relative_to_other_threads(module)
        if name_id is None:
            own_name = class_name(module)
            name_id = self._add(own_name, own_name, own_name)
            if not open_calls:
                self._outermost.add(module, name_id)
        if id(module) not in self._death_watches:
            self._death_watches[id(module)] = weakref.ref(module, self._on_death(id(module)))
        self._last_name_ids[id(module)] = name_id
        return name_id

    def last(self, module: nn.Module) -> str | None:
        """Return the fully qualified name under which `module` was called last, None where it was not."""
        name_id = self._last_name_ids.get(id(module))
        return None if name_id is None else self._fqns[name_id]

    def fqn(self, name_id: int) -> str:
        """Return the fully qualified name behind an id."""
        return self._fqns[name_id]

    def _relative_to(self, open_calls: Iterable[OpenCall], module: nn.Module) -> int | None:
        for parent, parent_name_id in open_calls:
            if parent is module:
                # A module that calls itself keeps its name.
                return parent_name_id
            path = self._path(parent, module)
            if path is not None:
                return self._add_below(self._fqns[parent_name_id], path, module)
        return None

    def _relative_to_model(self, module: nn.Module) -> int | None:
        for model in self._models.candidates(module):
            path = self._path(model, module)
            if path is not None:
                return self._add_below(class_name(model), path, module)
        return None

    def _relative_to_other_threads(self, module: nn.Module) -> int | None:
        found = self._outermost.find(module, self._path)
        return None if found is None else self._add_below(self._fqns[found[0]], found[1], module)

    def _add_below(self, parent_fqn: str, path: str, module: nn.Module) -> int:
        own_name = class_name(module)
        return self._add(f"{path}: {own_name}", f"{parent_fqn}.{path}", own_name)

    def _add(self, label: str, fqn: str, module_class: str) -> int:
        name_id = self._table.name(label, fqn, module_class)
        self._fqns[name_id] = fqn
        return name_id

    def _path(self, parent: nn.Module, module: nn.Module) -> str | None:
        known = self._paths.get(id(parent))
        if known is None or known[0]() is not parent:
            known = self._paths[id(parent)] = (weakref.ref(parent), _Paths())
        return known[1].find(parent, module)

    def _on_death(self, module_id: int) -> Callable[[Any], None]:
        def on_death(_: Any) -> None:
            self._death_watches.pop(module_id, None)
            self._last_name_ids.pop(module_id, None)
            self._paths.pop(module_id, None)
            self._forget(module_id)

        return on_death


def _is_compiled(module: nn.Module) -> bool:
    return _is_optimized(module) or attribute(module, "_compiled_call_impl") is not None


def _is_wrapper_of(module: nn.Module, inner: nn.Module) -> bool:
    return _is_optimized(module) and getattr(module, "_orig_mod", None) is inner


def _is_optimized(module: nn.Module) -> bool:
    # Where nothing was compiled, torch._dynamo is not imported, and importing it takes seconds.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and issubclass(type(module), dynamo.OptimizedModule)


class _Models:
    """The modules at which names may start: the one that is given, or those whose class has the name that is given."""

    def __init__(self, model: nn.Module | str | None) -> None:
        self._class_name = model if isinstance(model, str) else None
        self._models = [weakref.ref(model)] if isinstance(model, nn.Module) else []
        self._searches = _Backoff()

    def candidates(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the models below which `module` may lie; those of a class are looked for when they are needed."""
        if class_name(module) == self._class_name:
            return
        yield from self._alive(module)
        if self._class_name is not None and self._searches.is_due():
            # The recording may have started before the model was made, so the class's name is all there is.
            self._models = [
                weakref.ref(value)
                for value in gc.get_objects()
                if issubclass(type(value), nn.Module) and class_name(value) == self._class_name
            ]
            yield from self._alive(module)

    def _alive(self, module: nn.Module) -> Iterator[nn.Module]:
        for ref in self._models:
            model = ref()
            if model is not None and model is not module:
                yield model


class _Backoff:
    """Says when something costly that failed is due again: at the 1st, 2nd, 4th, 8th … time of asking."""

    def __init__(self) -> None:
        self._asked = 0

    def is_due(self) -> bool:
        self._asked += 1
        return self._asked & (self._asked - 1) == 0


class _Paths:
    """The path of each module below one parent: by `id(module)`, checked against the module itself."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        # Modules can be added later; one made anew in every call must not cost a walk in every call.
        self._walks = _Backoff()
        self._exclusive = Exclusive()

    def find(self, parent: nn.Module, module: nn.Module) -> str | None:
        path = self._known(module)
        if path is None:
            # A thread that misses what another is about to find waits for it.
            self._exclusive.run(lambda: self._walk_if_due(parent, module))
            path = self._known(module)
        return path

    def _walk_if_due(self, parent: nn.Module, module: nn.Module) -> None:
        if self._known(module) is None and self._walks.is_due():
            self._by_id = {id(inner): (weakref.ref(inner), path) for path, inner in named_modules(parent)}

    def _known(self, module: nn.Module) -> str | None:
        entry = self._by_id.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None
