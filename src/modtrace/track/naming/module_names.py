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

from ..._exclusive import Exclusive
from ...ring import NameTable
from ...ring.slot_format import NO_NAME
from ..compiled_regions import CompiledRegion, is_inside_region
from ..method_call import MethodCall
from .module_inspection import attribute, class_name, named_modules
from .other_threads import OutermostModules
from .wrappers import can_wrap, is_inside, original_class_name, wrapping_of

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
        strip_wrappers: name modules as if those that only wrap others were not there (DistributedDataParallel's
            `module.`, torch.compile's `_orig_mod.`, PEFT's `base_model.model.`).
    """

    def __init__(
        self,
        table: NameTable,
        model: nn.Module | str | None,
        forget: Callable[[int], object],
        *,
        strip_wrappers: bool,
    ) -> None:
        self._table = table
        self._forget = forget
        self._strip = strip_wrappers
        self._models = _Models(model)
        self._outermost = OutermostModules()
        self._fqns: dict[int, str] = {}
        # What the names of those inside begin with: of a wrapper, as if it was not there.
        self._prefixes: dict[int, str] = {}
        self._last_name_ids: dict[int, int] = {}
        self._death_watches: dict[int, weakref.ref[nn.Module]] = {}
        # By id(parent), checked against the parent itself.
        self._paths: dict[int, tuple[weakref.ref[nn.Module], _Paths]] = {}
        self._walking = Exclusive()

    def resolve(self, module: nn.Module, open_calls: Iterable[OpenCall]) -> int:
        """Return the id of `module`'s name when it is called inside `open_calls` (innermost first).

        `NO_NAME` where it is not to be shown: what torch.compile runs in place of a module, and what is called by a
        module that only wraps it and is shown as what it wraps.
        """
        open_calls = list(open_calls)
        if open_calls and self._is_shown_by(open_calls[0][0], module):
            self._note(module, open_calls[0][1])
            return NO_NAME
        if type(module) is CompiledRegion:
            return self._resolve_region(module, open_calls)
        if type(module) is MethodCall:
            return self._resolve_method(module, open_calls)
        name_id = self._relative_to(open_calls, module)
        if name_id is None and (is_inside_region() or self._is_compiled_graph(module, open_calls)):
            return NO_NAME
        if name_id is None:
            name_id = self._last_name_ids.get(id(module))
        if name_id is None:
            name_id = self._relative_to_model(module)
        if name_id is None and not open_calls:
            name_id = self._relative_to_other_threads(module)
        if name_id is None:
            name_id = self._add_below("", "", module)
            if not open_calls:
                self._outermost.add(module, name_id)
        self._note(module, name_id)
        return name_id

    def _resolve_region(self, region: CompiledRegion, open_calls: list[OpenCall]) -> int:
        """Return the name of a compiled function; `NO_NAME` where it is part of the call of a module, which has one."""
        if region.is_generated or (open_calls and (region.is_call_of_module or _is_compiled(open_calls[0][0]))):
            return NO_NAME
        prefix = f"{self._prefixes[open_calls[0][1]]}." if open_calls else ""
        name_id = self._table.name(region.label, f"{prefix}{region.label}", "CompiledFunction")
        self._fqns[name_id] = self._prefixes[name_id] = f"{prefix}{region.label}"
        return name_id

    def _resolve_method(self, call: MethodCall, open_calls: list[OpenCall]) -> int:
        """Return the name of a method's call; `NO_NAME` directly inside a call of its module, which shows it."""
        owner = call.owner()
        if owner is None or (open_calls and open_calls[0][0] is owner):
            return NO_NAME
        around = self.fqn(self.resolve(owner, open_calls))
        own_name = self._class_name(owner)
        name_id = self._table.name(f"{own_name}.{call.method}", f"{around}.{call.method}", own_name)
        self._fqns[name_id], self._prefixes[name_id] = f"{around}.{call.method}", around
        return name_id

    def _is_compiled_graph(self, module: nn.Module, open_calls: list[OpenCall]) -> bool:
        """Whether torch.compile made the module, also of what compiled autograd traced of a backward pass."""
        graph = getattr(module, "_orig_mod", None) if _is_optimized(module) else module
        if graph is None or not issubclass(type(graph), GraphModule):
            return False
        if class_name(graph).startswith("CompiledAutograd"):
            return True
        return graph is module and bool(open_calls) and _is_compiled(open_calls[0][0])

    def _is_shown_by(self, outer: nn.Module, module: nn.Module) -> bool:
        if self._strip:
            return is_inside(outer, module)
        return _is_optimized(outer) and getattr(outer, "_orig_mod", None) is module

    def _note(self, module: nn.Module, name_id: int) -> None:
        if id(module) not in self._death_watches:
            self._death_watches[id(module)] = weakref.ref(module, self._on_death(id(module)))
        self._last_name_ids[id(module)] = name_id

    def last(self, module: nn.Module) -> str | None:
        """Return the fully qualified name under which `module` was called last, None where it was not."""
        name_id = self._last_name_ids.get(id(module))
        return None if name_id is None else self._fqns[name_id]

    def fqn(self, name_id: int) -> str:
        """Return the fully qualified name behind an id."""
        return self._fqns[name_id]

    def _relative_to(self, open_calls: list[OpenCall], module: nn.Module) -> int | None:
        outermost = open_calls[-1][0] if open_calls else None
        for called, parent_name_id in open_calls:
            parent = called.owner() if type(called) is MethodCall else called
            if parent is None or (parent is module and parent is not called):
                continue
            if parent is module:
                # A module that calls itself keeps its name.
                return parent_name_id
            path = self._path_inside(outermost, parent, module) or self._path(parent, module)
            if path is not None:
                return self._add_below(self._prefixes[parent_name_id], path, module)
        return None

    def _relative_to_model(self, module: nn.Module) -> int | None:
        for model in self._models.candidates(module):
            path = self._path(model, module)
            if path is not None:
                return self._add_below(self._class_name(model), path, module)
        return None

    def _relative_to_other_threads(self, module: nn.Module) -> int | None:
        found = self._outermost.find(module, self._path)
        return None if found is None else self._add_below(self._prefixes[found[0]], found[1], module)

    def _add_below(self, parent_fqn: str, path: str, module: nn.Module) -> int:
        """Add the name of a module whose path below the parent is `path`; both are empty where names start at it."""
        own_name = self._class_name(module)
        prefix = fqn = ".".join(part for part in (parent_fqn, path) if part) or own_name
        wrapped = wrapping_of(module) if self._strip else None
        if wrapped is not None and wrapped[1].works:
            # Its own time is not that of what it wraps, whose name is to be the same with and without it.
            inner = self._innermost(wrapped[0])
            prefix = prefix if parent_fqn else inner
            fqn = f"{own_name}({prefix})" if parent_fqn else own_name
        name_id = self._table.name(f"{path}: {own_name}" if path else own_name, fqn, own_name)
        self._fqns[name_id], self._prefixes[name_id] = fqn, prefix
        return name_id

    def _class_name(self, module: nn.Module) -> str:
        return original_class_name(module) if self._strip else class_name(module)

    def _innermost(self, module: nn.Module) -> str:
        """Return the class of what a wrapper wraps, over others too."""
        wrapped = wrapping_of(module)
        while wrapped is not None:
            module = wrapped[0]
            wrapped = wrapping_of(module)
        return self._class_name(module)

    def _path_inside(self, outermost: nn.Module | None, parent: nn.Module, module: nn.Module) -> str | None:
        """Return the path of `module` below `parent` as the outermost module tells it: without a walk of its own."""
        known = self._paths.get(id(outermost))
        if outermost is parent or known is None or known[0]() is not outermost:
            return None
        return known[1].between(parent, module)

    def _path(self, parent: nn.Module, module: nn.Module) -> str | None:
        known = self._paths.get(id(parent))
        if known is None or known[0]() is not parent:
            known = self._paths[id(parent)] = (weakref.ref(parent), _Paths(self._strip, self._walking))
        return known[1].find(parent, module)

    def _on_death(self, module_id: int) -> Callable[[Any], None]:
        def on_death(_: Any) -> None:
            self._death_watches.pop(module_id, None)
            self._last_name_ids.pop(module_id, None)
            self._paths.pop(module_id, None)
            self._forget(module_id)

        return on_death


def _is_compiled(module: nn.Module) -> bool:
    compiled = type(module) is not MethodCall and attribute(module, "_compiled_call_impl") is not None
    return compiled or _is_optimized(module)


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
    """The path of each module below one parent: by `id(module)`, checked against the module itself.

    Args:
        strip_wrappers: leave out the parts by which wrappers hold what they wrap.
        walking: entered by a thread that walks through a parent.
    """

    def __init__(self, strip_wrappers: bool, walking: Exclusive) -> None:
        self._strip = strip_wrappers
        # Whether what lies below any module inside is what lies below the parent at paths that begin with its own.
        self._holds_inside = False
        self._by_id: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        # Modules can be added later; one made anew in every call must not cost a walk in every call.
        self._walks = _Backoff()
        self._exclusive = walking

    def find(self, parent: nn.Module, module: nn.Module) -> str | None:
        path = self._known(module)
        if path is None:
            # A thread that misses what another is about to find waits for it.
            self._exclusive.run(lambda: self._walk_if_due(parent, module))
            path = self._known(module)
        return path

    def between(self, outer: nn.Module, module: nn.Module) -> str | None:
        """Return the path of `module` below another one that lies below the parent, where no walk is needed for it."""
        if not self._holds_inside:
            return None
        outer_path, path = self._known(outer), self._known(module)
        if outer_path is None or path is None or not path.startswith(f"{outer_path}."):
            return None
        return path[len(outer_path) + 1 :]

    def _walk_if_due(self, parent: nn.Module, module: nn.Module) -> None:
        if self._known(module) is None and self._walks.is_due():
            repeated: list[nn.Module] = []
            named = list(named_modules(parent, repeated))
            kinds = {type(parent), *(type(inner) for _, inner in named)}
            wrapped = self._strip and any(map(can_wrap, kinds))
            if wrapped:
                named = list(_without_wrappers(parent, named))
            own = any(kind.named_modules is not nn.Module.named_modules for kind in kinds)
            self._holds_inside = not (repeated or wrapped or own)
            self._by_id = {id(inner): (weakref.ref(inner), path) for path, inner in named}

    def _known(self, module: nn.Module) -> str | None:
        entry = self._by_id.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None


def _without_wrappers(parent: nn.Module, named: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yield paths without the parts by which wrappers hold what they wrap; that of what `parent` wraps is empty."""
    shown = {"": ""}
    modules = {"": parent}
    for path, module in named:
        outer, _, name = path.rpartition(".")
        wrapped = wrapping_of(modules[outer]) if outer in modules else None
        prefix = shown.get(outer, outer)
        if wrapped is not None and wrapped[0] is module:
            shown[path] = prefix
        else:
            shown[path] = f"{prefix}.{name}" if prefix else name
        modules[path] = module
        yield shown[path], module
