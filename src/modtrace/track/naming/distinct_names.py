"""Which module has which fully qualified name: of two that are alive at once, the second gets another one.

A name is free again once its module is dead, for one of the same class: modules that are made anew in each step share
one. What stands for another module shares the name of that one: replicas of `nn.DataParallel`, and what was scripted.
"""

from __future__ import annotations

from collections.abc import Callable

from ..._exclusive import Exclusive
from .module_paths import ModuleRef

__all__ = ["DistinctNames"]

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
