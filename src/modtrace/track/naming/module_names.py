"""Module names: the path below the nearest open call that contains the module.

A module shared under two parents has two names, one for each path. If two living modules would have the same name, the
second module gets a suffix. Nothing here keeps a module alive.
"""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule

from ..._interrupts import Exclusive
from ...ring import NameTable
from ...ring.slot_format import NO_NAME
from ...timeline.contents import COMPILED_CLASS
from ..compiled_regions import COMPILED_AUTOGRAD, CompiledRegion, is_inside_region
from ..unseen import attribute_of
from .modules import (
    Backoff,
    MethodCall,
    ModulePaths,
    ModuleRef,
    OutermostModules,
    attribute_of_caller,
    calling_object,
    is_compiled,
    is_inside,
    is_optimized,
    is_torch_graph,
    original_class_name,
    unwrapped,
    without_compile,
    wrapped_in,
    wrapping_of,
)

OpenCall = tuple[nn.Module, int]
"""A call that was entered and not yet exited: its module and the id of its name."""


class ModuleNames:
    """Finds the id of a module's name. Engines cache it per module and outer call.

    Args:
        table: gives out the ids.
        model: names start at this module, or at each module of the class with this name, whatever calls it. None
            starts them at each outermost called module, for other threads too, or at the module whose method calls it.
        forget: called by `forget_dead` with the `id()` of each module that was named and died.
        strip_wrappers: name modules as if there were no wrappers (DistributedDataParallel's `module.`, torch.compile's
            `_orig_mod.`, PEFT's `base_model.model.`).
        distinct: give each living module its own name; False names each outermost module only by its class, as torch's
            trackers do.
        on_outermost: called when a module is first called outside all other calls.
    """

    def __init__(
        self,
        table: NameTable,
        model: nn.Module | str | None,
        forget: Callable[[int], object],
        *,
        strip_wrappers: bool,
        distinct: bool = True,
        on_outermost: Callable[[], object] | None = None,
    ) -> None:
        self._table, self._forget, self._on_outermost = table, forget, on_outermost
        self._strip = strip_wrappers
        self._models = None if model is None else _Models(model)
        self._distinct = _DistinctNames() if distinct else None
        self._outermost = OutermostModules()
        # By the id of a span's name: the compiled modules that run inside it, and the graphs.
        self._compiled: dict[int, tuple[dict[str, None], list[dict[str, Any]]]] = {}
        self._fqns: dict[int, str] = {}
        # By name id, the prefix of the names of inner modules; a wrapper's prefix omits the wrapper.
        self._prefixes: dict[int, str] = {}
        self._last_name_ids: dict[int, int] = {}
        # By `id()` of a module, the reference that is added to `dead` when the module dies.
        self._watched: dict[int, ModuleRef] = {}
        # References to modules that died and are not forgotten yet. A new module may have the same `id()`: a caller
        # that caches names by it calls `forget_dead` first, if this is not empty.
        self.dead: list[ModuleRef] = []
        # The references' callback is not Python code: a signal's handler can raise at any bytecode, and in a callback
        # the interpreter would ignore the exception.
        self._on_death = self.dead.append
        # By id(parent); the reference shows whether it is still that parent.
        self._paths: dict[int, tuple[weakref.ref[nn.Module], ModulePaths]] = {}

    def resolve(self, module: nn.Module, open_calls: Sequence[OpenCall]) -> int:
        """Return the id of `module`'s name if it is called inside `open_calls` (innermost first).

        It is `NO_NAME` for a call that gets no span: of a graph that torch.compile runs in place of a module, or by a
        wrapper that has the name of the wrapped module.
        """
        if self.dead:
            self.forget_dead()
        watched = self._watched.get(id(module))
        if watched is None or watched() is not module:
            self._refer_to(module)
        if not open_calls and self._on_outermost is not None:
            self._on_outermost()
        name_id = self._find_by_path(module, open_calls) if self._models is None else None
        if name_id is not None:
            return name_id
        if open_calls and self._has_span_of(open_calls[0][0], module):
            self._last_name_ids[id(module)] = open_calls[0][1]
            return NO_NAME
        if type(module) is CompiledRegion:
            return self._resolve_region(module, open_calls)
        if type(module) is MethodCall:
            return self._resolve_method(module, open_calls)
        if self._models is not None:
            name_id = self._below_model(self._models, open_calls, module)
        if name_id is None:
            name_id = self._relative_to(open_calls, module)
        if name_id is None and (is_inside_region() or self._is_compiled_graph(module, open_calls)):
            return NO_NAME
        if name_id is None:
            name_id = self._last_name_ids.get(id(module))
        if name_id is None and is_torch_graph(module):
            return NO_NAME
        if name_id is None:
            name_id = self._name_outermost(module) if not open_calls else self._name_by_itself(module)
        self._last_name_ids[id(module)] = name_id
        return name_id

    def _name_outermost(self, module: nn.Module) -> int:
        """Return the name id of an outermost called module: below the module of another thread that contains it."""
        parent = self._outermost.find(module, self._path)
        if parent is not None:
            return self._add_below(self._prefixes[parent[0]], parent[1], module)
        name_id = self._name_by_itself(module)
        self._outermost.add(module, name_id)
        return name_id

    def _name_by_itself(self, module: nn.Module) -> int:
        """Return the name id of a module in no open call: below the module whose method calls it, or its own name."""
        name_id = self._relative_to_caller(module) if self._distinct is not None else None
        return self._add_below("", "", module) if name_id is None else name_id

    def _find_by_path(self, module: nn.Module, open_calls: Sequence[OpenCall]) -> int | None:
        """Return the id of a name that needs only a path and a class, as most names do; None for other names."""
        for outer, _ in reversed(open_calls):
            entry = self._paths.get(id(outer))
            if entry is not None and entry[1].are_names and entry[0]() is outer:
                break
        else:
            return None
        parent, parent_name_id = open_calls[0]
        path = entry[1].known(module) if parent is outer else entry[1].below(parent, module)
        prefix = self._prefixes[parent_name_id]
        if not path or not prefix:
            return None
        module_class, fqn = type(module).__name__, f"{prefix}.{path}"
        suffix = self._suffix(fqn, module, module_class)
        label = f"{path}{suffix}: {module_class}"
        name_id = self._last_name_ids[id(module)] = self._add(label, fqn + suffix, module_class)
        return name_id

    def _resolve_region(self, region: CompiledRegion, open_calls: Sequence[OpenCall]) -> int:
        """Return the name id of a compiled function; `NO_NAME` if it is part of a module's call, which has a name."""
        if region.is_generated:
            return NO_NAME
        if open_calls:
            called, name_id = open_calls[0]
            owner = called.owner() if type(called) is MethodCall else called
            if owner is not None:
                region.find_variables(owner, self._path)
            if region.is_call_of_module or is_compiled(called):
                self._note_compiled(name_id, region)
                return NO_NAME
        prefix = f"{self._prefixes[open_calls[0][1]]}." if open_calls else ""
        name_id = self._add(region.label, f"{prefix}{region.label}", COMPILED_CLASS)
        self._note_compiled(name_id, region)
        return name_id

    def _note_compiled(self, name_id: int, region: CompiledRegion) -> None:
        """Add a region to those that run inside the calls of a name."""
        modules, graphs = self._compiled.setdefault(name_id, ({}, []))
        inner_modules, graph = region.describe_inner(strip_wrappers=self._strip)
        if not modules.keys() >= inner_modules.keys() or graph not in graphs:
            modules.update(inner_modules)
            graphs.append(graph)
            self._table.compiled(name_id, ", ".join(modules), graph)
            if region.graph.kernels is not None:
                region.graph.kernels.add_listener(self, name_id, lambda names: names._note_compiled(name_id, region))

    def _resolve_method(self, call: MethodCall, open_calls: Sequence[OpenCall]) -> int:
        """Return the name id of a method's call; `NO_NAME` directly inside a call of its module, which has a span."""
        owner = call.owner()
        if owner is None or (open_calls and open_calls[0][0] is owner):
            return NO_NAME
        owner_fqn = self.fqn(self.resolve(owner, open_calls))
        module_class = self._class_name(owner)
        return self._add(f"{module_class}.{call.method}", f"{owner_fqn}.{call.method}", module_class, owner_fqn)

    def _is_compiled_graph(self, module: nn.Module, open_calls: Sequence[OpenCall]) -> bool:
        """Return whether torch.compile or compiled autograd made the module."""
        graph = without_compile(module)
        if not issubclass(type(graph), GraphModule):
            return False
        runs_for_caller = graph is module and bool(open_calls) and is_compiled(open_calls[0][0])
        return runs_for_caller or type(graph).__name__.startswith(COMPILED_AUTOGRAD)

    def _has_span_of(self, outer: nn.Module, module: nn.Module) -> bool:
        if self._strip:
            return is_inside(outer, module)
        return is_optimized(outer) and getattr(outer, "_orig_mod", None) is module

    def last(self, module: nn.Module) -> str | None:
        """Return the fully qualified name of the last call of `module`; None if there was no call."""
        if self.dead:
            self.forget_dead()
        name_id = self._last_name_ids.get(id(module))
        return None if name_id is None else self._fqns[name_id]

    def fqn(self, name_id: int) -> str:
        """Return the fully qualified name of an id."""
        return self._fqns[name_id]

    def _relative_to(self, open_calls: Sequence[OpenCall], module: nn.Module) -> int | None:
        for called, parent_name_id in open_calls:
            parent = called.owner() if type(called) is MethodCall else called
            if parent is None or (parent is module and parent is not called):
                continue
            if parent is module:
                # A module that calls itself keeps its name.
                return parent_name_id
            path = self._path(parent, module)
            if path is not None:
                return self._add_below(self._prefixes[parent_name_id], path, module)
        return None

    def _below_model(self, models: "_Models", open_calls: Sequence[OpenCall], module: nn.Module) -> int | None:
        """Return the id of the name that starts at the model of `module` (or at `module`); None if no model has it."""
        model_calls = [call for call in open_calls if models.is_start(call[0], self._class_name(call[0]))]
        if models.is_start(self._unwrapped(module), self._class_name(module)):
            # A model inside another model has its name there.
            name_id = self._relative_to(model_calls, module)
            return self._add_below("", "", module) if name_id is None else name_id
        for model in models.candidates(module):
            path = self._path(model, module)
            if path is not None:
                models.matched = True
                part_calls = [call for call in open_calls if self._is_part_of(model, call[0])]
                name_id = self._relative_to(part_calls, module) if part_calls else self._last_name_ids.get(id(module))
                return self._add_below(self._root_prefix(model), path, module) if name_id is None else name_id
        return None

    def _is_part_of(self, model: nn.Module, called: nn.Module) -> bool:
        module = called.owner() if type(called) is MethodCall else self._unwrapped(called)
        return module is not None and (module is model or self._path(model, module) is not None)

    def _relative_to_caller(self, module: nn.Module) -> int | None:
        """Return the name id below the module whose method calls `module` outside its forward."""
        owner = calling_object()
        if not issubclass(type(owner), nn.Module) or owner is module:
            return None
        self._refer_to(owner)
        path = self._path(owner, module)
        return self._add_below(self._root_prefix(owner), path, module) if path else None

    def _add_below(self, parent_fqn: str, path: str, module: nn.Module) -> int:
        """Add the name of a module at `path` below the parent; both texts are empty if names start at the module."""
        module_class = self._class_name(module)
        worker = self._unwrapped(module)
        does_own_work = self._strip and wrapping_of(worker) is not None
        if path:
            fqn = f"{parent_fqn}.{path}" if parent_fqn else path
            suffix = self._suffix_of_innermost(fqn, module)
            prefix = fqn = fqn + suffix
        else:
            suffix, prefix = "", parent_fqn or self._root_prefix(module)
            fqn = prefix
        if does_own_work:
            # The wrapper's own time needs its own name; the wrapped module has the same name with and without it.
            wrapper_suffix = "" if parent_fqn else self._suffix(module_class, worker, module_class)
            fqn = f"{module_class}({prefix})" if parent_fqn else module_class + wrapper_suffix
        label = f"{path}{suffix}: {module_class}" if path else module_class if parent_fqn else fqn
        return self._add(label, fqn, module_class, prefix)

    def _add(self, label: str, fqn: str, module_class: str, prefix: str | None = None) -> int:
        """Add a name; names of inner modules start with the prefix, by default the fully qualified name."""
        name_id = self._table.name(label, fqn, module_class)
        self._fqns[name_id], self._prefixes[name_id] = fqn, fqn if prefix is None else prefix
        return name_id

    def _root_prefix(self, module: nn.Module) -> str:
        """Return the prefix of inner names if names start at `module`: its class, with a suffix if needed."""
        module_class = self._class_name(self._innermost(module))
        return module_class + self._suffix_of_innermost(module_class, module)

    def _suffix_of_innermost(self, fqn: str, module: nn.Module) -> str:
        inner = self._innermost(module)
        return self._suffix(fqn, inner, self._class_name(inner))

    def _suffix(self, fqn: str, module: nn.Module, module_class: str) -> str:
        """Return the suffix of a module's name if other modules have the same name, see `_DistinctNames`."""
        if self._distinct is None or not fqn or attribute_of(module, "_is_replica") is True:
            return ""
        watched = self._watched.get(id(module))
        if watched is None or watched() is not module:
            self._refer_to(module)
            watched = self._watched[id(module)]
        watched.module_class = module_class
        return self._distinct.suffix(fqn, watched, lambda: attribute_of_caller(module))

    def _class_name(self, module: nn.Module) -> str:
        return original_class_name(module) if self._strip else type(module).__name__

    def _innermost(self, module: nn.Module) -> nn.Module:
        """Return the module inside all wrappers; without `strip_wrappers`, `module`."""
        return [*wrapped_in(module, by_workers=True)][-1] if self._strip else module

    def _unwrapped(self, module: nn.Module) -> nn.Module:
        return unwrapped(module) if self._strip else module

    def _path(self, parent: nn.Module, module: nn.Module) -> str | None:
        entry = self._paths.get(id(parent))
        if entry is None or entry[0]() is not parent:
            paths = ModulePaths(self._refer_to, strip_wrappers=self._strip)
            entry = self._paths[id(parent)] = weakref.ref(parent), paths
        return entry[1].find(parent, module)

    def _refer_to(self, module: nn.Module) -> ModuleRef:
        """Return a new reference to a module; only the first reference reports its death."""
        module_id = id(module)
        watched = self._watched.get(module_id)
        if watched is not None and watched() is module:
            return ModuleRef(module)
        ref = ModuleRef(module, self._on_death)
        ref.module_id = module_id
        self._watched[module_id] = ref
        return ref

    def called(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the living modules that were called, with their fully qualified names."""
        for module_id, ref in [*self._watched.items()]:
            module, name_id = ref(), self._last_name_ids.get(module_id)
            if module is not None and name_id in self._fqns:
                yield self._fqns[name_id], module

    def unmatched_model(self) -> str | None:
        """Return the class given as `model=` if no name started at a module of it; else None."""
        return None if self._models is None or self._models.matched else self._models.class_name

    def forget_dead(self) -> None:
        """Forget all facts about the modules in `dead`, since new modules may have the same `id()`.

        After an interrupt, or in two threads, this may run twice for a module. If a new module with such an `id()` is
        named meanwhile, its name may be lost too, and is found again. Its reference stays and reports its death.
        """
        for ref in list(self.dead):
            # None if an interrupt came before it was set.
            module_id = getattr(ref, "module_id", None)
            if module_id is not None:
                if self._watched.get(module_id) is ref:
                    watched = self._watched.pop(module_id, ref)
                    if watched is not ref:
                        # Meanwhile another thread has named a new module with this `id()`.
                        self._watched.setdefault(module_id, watched)
                self._last_name_ids.pop(module_id, None)
                self._paths.pop(module_id, None)
                self._forget(module_id)
            with contextlib.suppress(ValueError):  # another thread has removed it
                self.dead.remove(ref)


class _Models:
    """The modules at which names start: one module, or all modules of the class with a name."""

    def __init__(self, model: nn.Module | str) -> None:
        self._is_class = isinstance(model, str)
        self.class_name = model if isinstance(model, str) else type(model).__name__
        self._models = [weakref.ref(model)] if isinstance(model, nn.Module) else []
        self._searches = Backoff()
        self.matched = False  # whether a name started at one of them

    def is_start(self, module: nn.Module, module_class: str) -> bool:
        """Return whether names start at a module of this class."""
        is_start = module_class == self.class_name if self._is_class else self._models[0]() is module
        self.matched = self.matched or is_start
        return is_start

    def candidates(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the models that may contain `module`; modules of a class are searched for when they are needed."""
        yield from self._alive(module)
        if self._is_class and self._searches.is_due():
            # The recording may have started before the model was made, so only the class's name is known.
            self._models = [
                weakref.ref(value)
                for value in gc.get_objects()
                if issubclass(type(value), nn.Module) and type(value).__name__ == self.class_name
            ]
            yield from self._alive(module)

    def _alive(self, module: nn.Module) -> Iterator[nn.Module]:
        for ref in self._models:
            model = ref()
            if model is not None and model is not module:
                yield model


_MAX_NUMBER = 64
"""Maximum number in a suffix: modules that each step makes, and that die late, must not get ever new names."""
_SUFFIXES = ("", *(f"#{number}" for number in range(2, _MAX_NUMBER + 1)))
_SHARED_SUFFIX = f"#{_MAX_NUMBER + 1}+"


class _DistinctNames:
    """Gives each living module its own name; after 64 modules of one name, all further ones share a name.

    The name of a dead module is free for a module of the same class: modules that are made again in each step share a
    name. Replicas of `nn.DataParallel` have the name of the original module. A suffix is a number, or the attribute
    that holds the module in the calling code.
    """

    def __init__(self) -> None:
        # By name. A module that two threads named at once has two references; each reports its death.
        self._owners: dict[str, ModuleRef] = {}
        self._changing = Exclusive()

    def suffix(self, fqn: str, module: ModuleRef, find_attribute: Callable[[], str | None]) -> str:
        """Return the suffix that makes `fqn` distinct: mostly "", else a number (`#2`) or an attribute (`#critic`)."""
        if _SHARED_SUFFIX in fqn or self._owners.setdefault(fqn, module)() is module():
            return ""
        return self._changing.run(lambda: self._find(fqn, module, find_attribute))

    def _find(self, fqn: str, module: ModuleRef, find_attribute: Callable[[], str | None]) -> str:
        free_suffix = None
        for suffix in _SUFFIXES:
            owner = self._owners.get(fqn + suffix)
            if owner is not None and owner() is module():
                return suffix
            if free_suffix is None and self._may_have(fqn + suffix, module):
                free_suffix = suffix
            if owner is None:
                break
        attribute = find_attribute() if free_suffix != "" else None
        if attribute is not None and self._may_have(f"{fqn}#{attribute}", module):
            free_suffix = f"#{attribute}"
        if free_suffix is None:
            return _SHARED_SUFFIX
        self._owners[fqn + free_suffix] = module
        return free_suffix

    def _may_have(self, name: str, module: ModuleRef) -> bool:
        owner = self._owners.get(name, module)
        return owner() is module() or (owner() is None and owner.module_class == module.module_class)
