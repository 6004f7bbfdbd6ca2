"""The path of each module below another one, found by one walk for all; and whose work a thread does.

A thread of a pool, or of `nn.DataParallel`, has no call around its outermost one. What it calls is most often a part of
a module that another thread has called, and has a name there.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import nn

from .module_kinds import attribute, can_wrap, is_original, named_modules, wrapping_of


class Backoff:
    """Says when something costly that failed is due again: at the 1st, 2nd, 4th, 8th … time of asking."""

    def __init__(self) -> None:
        self._asked = 0

    def is_due(self) -> bool:
        """Count one time of asking, and return whether it is due."""
        self._asked += 1
        return self._asked & (self._asked - 1) == 0


# Fields of the reference, not a tuple around it: every object that the garbage collector looks at brings its next run
# nearer, and a full run takes longer than all else that a recording does.
class ModuleRef(weakref.ref[nn.Module]):
    """A module.

    Attributes:
        module_id: its `id()`, where this is the reference that tells its death.
        module_class: its class, where this is the reference that tells its death and it was given a name of its own.
        path: its path, where it is known below another one.
    """

    __slots__ = ("module_class", "module_id", "path")
    module_class: str
    module_id: int
    path: str


class ModulePaths:
    """The path of each module below one parent: by `id(module)`, checked against the module itself.

    Args:
        refer_to: returns a new reference to a module.
        strip_wrappers: leave out the parts by which wrappers hold what they wrap.

    Attributes:
        are_names: whether the path and the class of each module are all that its name takes, below the parent and below
            each module inside; False before the first walk.
    """

    def __init__(self, refer_to: Callable[[nn.Module], ModuleRef], *, strip_wrappers: bool) -> None:
        self._refer_to = refer_to
        self._strip = strip_wrappers
        self.are_names = False
        # Whether what lies below any module inside is what lies below the parent at paths that begin with its own.
        self._holds_inside = False
        self._by_id: dict[int, ModuleRef] = {}
        # Modules can be added later; one made anew in every call must not cost a walk in every call.
        self._walks = Backoff()
        self._walking: deque[None] = deque()  # one for each walk under way

    def find(self, parent: nn.Module, module: nn.Module) -> str | None:
        """Return the path of `module` below the parent; None where it is not there, or no walk is due to see that."""
        path = self.known(module)
        # What another thread's walk is about to find is looked for here too: that walk may wait for this thread, as in
        # a finalizer that runs there.
        if path is None and (self._walks.is_due() or self._walking):
            self._walking.append(None)
            try:
                self._walk(parent)
            finally:
                self._walking.pop()
            path = self.known(module)
        return path

    def between(self, outer: nn.Module, module: nn.Module) -> str | None:
        """Return the path of `module` below `outer`; None if that needs a walk."""
        return self.below(outer, module) if self._holds_inside else None

    def below(self, outer: nn.Module, module: nn.Module) -> str | None:
        """Return the path of `module` below `outer`; None if a path is unknown, or `outer` does not contain it."""
        path, outer_path = self.known(module), self.known(outer)
        if path is None or outer_path is None or not path.startswith(f"{outer_path}."):
            return None
        return path[len(outer_path) + 1 :]

    def _walk(self, parent: nn.Module) -> None:
        repeated: list[nn.Module] = []
        kinds = {type(parent)}
        by_id = self._by_id_of(named_modules(parent, repeated), kinds)
        wrapped = self._strip and any(map(can_wrap, kinds))
        if wrapped:
            by_id = self._by_id_of(_without_wrappers(parent, named_modules(parent)), kinds)
        self._holds_inside = not (repeated or wrapped)
        self.are_names = self._holds_inside and self._strip and all(map(is_original, kinds))
        self._by_id = by_id

    def _by_id_of(self, named: Iterable[tuple[str, nn.Module]], kinds: set[type[nn.Module]]) -> dict[int, ModuleRef]:
        """Return the modules by id, with their paths, and add their classes to `kinds`."""
        by_id = {}
        for path, module in named:
            kinds.add(type(module))
            ref = by_id[id(module)] = self._refer_to(module)
            ref.path = path
        return by_id

    def known(self, module: nn.Module) -> str | None:
        """Return the path of `module` below the parent where a walk has found it."""
        ref = self._by_id.get(id(module))
        return ref.path if ref is not None and ref() is module else None


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
