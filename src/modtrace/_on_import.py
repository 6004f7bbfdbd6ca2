"""Doing something right after a module is first imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["after_import"]


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` once `name` is imported, at once where it already is; what it raises leaves the import."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, Watch(name, then))


class Watch(MetaPathFinder):
    """Finds the module as all other finders do, and adds a call to the end of its execution."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 (the protocol's signature)
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the module's spec, the first time."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then(module: ModuleType) -> None:
            execute(module)
            self._then()

        spec.loader.exec_module = execute_then  # type: ignore[method-assign]
        return spec
