"""Module names: the path below the nearest open call that contains the module.

A module shared under two parents has two names, one for each path it is called by. If two modules that are alive at
once would have one name, the second gets another. Nothing here keeps a module alive.
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
"""A call that was entered and not exited yet: its module and the id of its name."""


class ModuleNames:
    """Finds the id of a module's name; asked once per module and call around it, since the engines keep the answer.

    Args:
        table: gives out the ids.
        model: names start at this module, or at one whose class has this name, wherever it is called from. None
            starts them at each outermost called module, for other threads too, or at the module whose method calls it.
        forget: called with `id(module)` of modules that were asked for and died, by `forget_dead`.
        strip_wrappers: name modules as if those that only wrap others were not there (DistributedDataParallel's
            `module.`, torch.compile's `_orig_mod.`, PEFT's `base_model.model.`).
        tell_apart: give each module that is alive a name of its own; False names each outermost one by its class alone,
            as torch's trackers do.
        on_outermost: called when a module is first called outside of all others.
    """

    def __init__(
        self,
        table: NameTable,
        model: nn.Module | str | None,
        forget: Callable[[int], object],
        *,
        strip_wrappers: bool,
        tell_apart: bool = True,
        on_outermost: Callable[[], object] | None = None,
    ) -> None:
        self._table, self._forget, self._on_outermost = table, forget, on_outermost
        self._strip = strip_wrappers
        self._models = None if model is None else _Models(model)
        self._distinct = _DistinctNames() if tell_apart else None
        self._outermost = OutermostModules()
        # By the name of a span, the modules that run inside it, compiled, and the graphs.
        self._compiled: dict[int, tuple[dict[str, None], list[dict[str, Any]]]] = {}
        self._fqns: dict[int, str] = {}
        # What the names of those inside begin with: of a wrapper, as if it was not there.
        self._prefixes: dict[int, str] = {}
        self._last_name_ids: dict[int, int] = {}
        # By id, a reference that is put into `dead` when the module dies.
        self._watched: dict[int, ModuleRef] = {}
        # References to modules that died and are not forgotten yet. A new module may have the id of one: whoever keeps
        # answers by id looks here first, and calls `forget_dead` where it is not empty.
        self.dead: list[ModuleRef] = []
        # What references call is not Python code: the exception of a signal's handler can come at any bytecode, and
        # there the interpreter would ignore it.
        self._on_death = self.dead.append
        # By id(parent), checked against the parent itself.
        self._paths: dict[int, tuple[weakref.ref[nn.Module], ModulePaths]] = {}

    def resolve(self, module: nn.Module, open_calls: Sequence[OpenCall]) -> int:
        """Return the id of `module`'s name when it is called inside `open_calls` (innermost first).

        It is `NO_NAME` if the call is not shown: that of a graph which torch.compile runs in place of a module, or a
        call by a wrapper that is shown as what it wraps.
        """
        if self.dead:
            self.forget_dead()
        watched = self._watched.get(id(module))
        if watched is None or watched() is not module:
            self._refer_to(module)
        if not open_calls and self._on_outermost is not None:
            self._on_outermost()
        name_id = self._by_path(module, open_calls) if self._models is None else None
        if name_id is not None:
            return name_id
        if open_calls and self._is_shown_by(open_calls[0][0], module):
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
            name_id = self._outside_of_calls(module) if not open_calls else self._by_itself(module)
        self._last_name_ids[id(module)] = name_id
        return name_id

    def _outside_of_calls(self, module: nn.Module) -> int:
        """Return the name of an outermost called module: below one that another thread has called, if that has it."""
        place = self._outermost.find(module, self._path)
        if place is not None:
            return self._add_below(self._prefixes[place[0]], place[1], module)
        name_id = self._by_itself(module)
        self._outermost.add(module, name_id)
        return name_id

    def _by_itself(self, module: nn.Module) -> int:
        """Return the name of a module that no open call contains: below the object whose method calls it, or alone."""
        name_id = self._relative_to_caller(module) if self._distinct is not None else None
        return self._add_below("", "", module) if name_id is None else name_id

    def _by_path(self, module: nn.Module, open_calls: Sequence[OpenCall]) -> int | None:
        """Return the id of a name that is made of a path and a class alone, as most are; None if it takes more."""
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
        """Return the name of a compiled function; `NO_NAME` where it is part of the call of a module, which has one."""
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
        """Note that a region runs inside the calls of a name, beside those that are known to."""
        modules, graphs = self._compiled.setdefault(name_id, ({}, []))
        inner, graph = region.describe_inner(strip_wrappers=self._strip)
        if not modules.keys() >= inner.keys() or graph not in graphs:
            modules.update(inner)
            graphs.append(graph)
            self._table.compiled(name_id, ", ".join(modules), graph)
            if region.graph.kernels is not None:
                region.graph.kernels.tell(self, name_id, lambda names: names._note_compiled(name_id, region))

    def _resolve_method(self, call: MethodCall, open_calls: Sequence[OpenCall]) -> int:
        """Return the name of a method's call; `NO_NAME` directly inside a call of its module, which shows it."""
        owner = call.owner()
        if owner is None or (open_calls and open_calls[0][0] is owner):
            return NO_NAME
        owner_fqn = self.fqn(self.resolve(owner, open_calls))
        module_class = self._class_name(owner)
        return self._add(f"{module_class}.{call.method}", f"{owner_fqn}.{call.method}", module_class, owner_fqn)

    def _is_compiled_graph(self, module: nn.Module, open_calls: Sequence[OpenCall]) -> bool:
        """Whether torch.compile made the module, also of what compiled autograd traced of a backward pass."""
        graph = without_compile(module)
        if not issubclass(type(graph), GraphModule):
            return False
        is_of_module = graph is module and bool(open_calls) and is_compiled(open_calls[0][0])
        return is_of_module or type(graph).__name__.startswith(COMPILED_AUTOGRAD)

    def _is_shown_by(self, outer: nn.Module, module: nn.Module) -> bool:
        if self._strip:
            return is_inside(outer, module)
        return is_optimized(outer) and getattr(outer, "_orig_mod", None) is module

    def last(self, module: nn.Module) -> str | None:
        """Return the fully qualified name under which `module` was called last, None if it was not."""
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
        """Return the name that begins at the model that contains `module`, or is it; None if there is no such model."""
        inside = [call for call in open_calls if models.is_start(call[0], self._class_name(call[0]))]
        if models.is_start(self._unwrapped(module), self._class_name(module)):
            # A module of the class inside another one has its name there.
            name_id = self._relative_to(inside, module)
            return self._add_below("", "", module) if name_id is None else name_id
        for model in models.candidates(module):
            path = self._path(model, module)
            if path is not None:
                models.matched = True
                inside = [call for call in open_calls if self._is_part_of(model, call[0])]
                name_id = self._relative_to(inside, module) if inside else self._last_name_ids.get(id(module))
                return self._add_below(self._root_prefix(model), path, module) if name_id is None else name_id
        return None

    def _is_part_of(self, model: nn.Module, called: nn.Module) -> bool:
        module = called.owner() if type(called) is MethodCall else self._unwrapped(called)
        return module is not None and (module is model or self._path(model, module) is not None)

    def _relative_to_caller(self, module: nn.Module) -> int | None:
        """Return the name below the module whose own method calls this one, outside of its forward."""
        owner = calling_object()
        if not issubclass(type(owner), nn.Module) or owner is module:
            return None
        self._refer_to(owner)
        path = self._path(owner, module)
        return self._add_below(self._root_prefix(owner), path, module) if path else None

    def _add_below(self, parent_fqn: str, path: str, module: nn.Module) -> int:
        """Add the name of a module whose path below the parent is `path`; both are empty if names start at it."""
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
            # Its own time is not that of what it wraps, whose name is to be the same with and without it.
            own_suffix = "" if parent_fqn else self._suffix(module_class, worker, module_class)
            fqn = f"{module_class}({prefix})" if parent_fqn else module_class + own_suffix
        label = f"{path}{suffix}: {module_class}" if path else module_class if parent_fqn else fqn
        return self._add(label, fqn, module_class, prefix)

    def _add(self, label: str, fqn: str, module_class: str, prefix: str | None = None) -> int:
        """Add a name; those of modules inside begin with the prefix, or with the name itself."""
        name_id = self._table.name(label, fqn, module_class)
        self._fqns[name_id], self._prefixes[name_id] = fqn, fqn if prefix is None else prefix
        return name_id

    def _root_prefix(self, module: nn.Module) -> str:
        """Return what the names of those inside begin with where names start at `module`: its class."""
        module_class = self._class_name(self._innermost(module))
        return module_class + self._suffix_of_innermost(module_class, module)

    def _suffix_of_innermost(self, fqn: str, module: nn.Module) -> str:
        inner = self._innermost(module)
        return self._suffix(fqn, inner, self._class_name(inner))

    def _suffix(self, fqn: str, module: nn.Module, module_class: str) -> str:
        """Return what is added to a module's name if others have the same one, see `_DistinctNames`."""
        if self._distinct is None or not fqn or object.__getattribute__(module, "__dict__").get("_is_replica") is True:
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
        """Return what a wrapper wraps, over others too."""
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
        """Return a new reference to a module; only the first one reports its death."""
        module_id = id(module)
        watched = self._watched.get(module_id)
        if watched is not None and watched() is module:
            return ModuleRef(module)
        ref = ModuleRef(module, self._on_death)
        ref.module_id = module_id
        self._watched[module_id] = ref
        return ref

    def called(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that were called and are alive, with their fully qualified names."""
        for module_id, ref in [*self._watched.items()]:
            module, name_id = ref(), self._last_name_ids.get(module_id)
            if module is not None and name_id in self._fqns:
                yield self._fqns[name_id], module

    def unmatched_model(self) -> str | None:
        """Return the class given as `model=` if names started at no module of it; else None."""
        return None if self._models is None or self._models.matched else self._models.class_name

    def forget_dead(self) -> None:
        """Forget all that is known of the modules in `dead`, whose ids others may have by now.

        If an interrupt came in between, or another thread does the same, this is done again. If a module with such an
        id is named meanwhile, what is known of it may be lost too, and it is asked for again. Its reference stays, so
        its own death is still told.
        """
        for ref in list(self.dead):
            # None if an interrupt came before it was set.
            module_id = getattr(ref, "module_id", None)
            if module_id is not None:
                if self._watched.get(module_id) is ref:
                    watched = self._watched.pop(module_id, ref)
                    if watched is not ref:
                        # Another thread has named a new module there in between.
                        self._watched.setdefault(module_id, watched)
                self._last_name_ids.pop(module_id, None)
                self._paths.pop(module_id, None)
                self._forget(module_id)
            with contextlib.suppress(ValueError):  # where another thread has done it
                self.dead.remove(ref)


class _Models:
    """The modules at which names start: a module, or all whose class has a name."""

    def __init__(self, model: nn.Module | str) -> None:
        self._is_class = isinstance(model, str)
        self.class_name = model if isinstance(model, str) else type(model).__name__
        self._models = [weakref.ref(model)] if isinstance(model, nn.Module) else []
        self._searches = Backoff()
        self.matched = False  # whether names started at one

    def is_start(self, module: nn.Module, module_class: str) -> bool:
        """Whether names start at a module, which has this class."""
        is_start = module_class == self.class_name if self._is_class else self._models[0]() is module
        self.matched = self.matched or is_start
        return is_start

    def candidates(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield the models below which `module` may lie; those of a class are looked for when they are needed."""
        yield from self._alive(module)
        if self._is_class and self._searches.is_due():
            # The recording may have started before the model was made, so the class's name is all there is.
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
"""Modules that are made in each step, and die only when the garbage collector runs, must not get ever new names."""
_SUFFIXES = ("", *(f"#{number}" for number in range(2, _MAX_NUMBER + 1)))
_REST = f"#{_MAX_NUMBER + 1}+"


class _DistinctNames:
    """Gives each module that is alive a name of its own; after 64 of one name, all others share one.

    Once its module is dead, a name is free for one of the same class: modules that are made anew in each step share a
    name. Replicas of `nn.DataParallel` share the name of the module they were made of.
    The attribute by which the calling code knows a module can make the difference.
    """

    def __init__(self) -> None:
        # By name. A module that two threads named at once has two references; each tells its death.
        self._owners: dict[str, ModuleRef] = {}
        self._changing = Exclusive()

    def suffix(self, fqn: str, module: ModuleRef, find_attribute: Callable[[], str | None]) -> str:
        """Return what makes `fqn` this module's own, as `#2`, or `#critic` by its owner's attribute; often nothing."""
        if _REST in fqn or self._owners.setdefault(fqn, module)() is module():
            return ""
        return self._changing.run(lambda: self._find(fqn, module, find_attribute))

    def _find(self, fqn: str, module: ModuleRef, find_attribute: Callable[[], str | None]) -> str:
        free = None
        for suffix in _SUFFIXES:
            owner = self._owners.get(fqn + suffix)
            if owner is not None and owner() is module():
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
        return owner() is module() or (owner() is None and owner.module_class == module.module_class)
