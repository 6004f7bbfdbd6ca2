"""Calling a function once a module is imported."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["call_after_import"]


def call_after_import(name: str, function: Callable[[], None]) -> Callable[[], None]:
    """Call `function` once `name` is imported, at once where it already is; what it raises leaves the import.

    Returns what calls that off where it has not happened yet, and else does nothing.
    """
    hook = _ImportHook(name, function)
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, hook)
    return hook.remove


class _ImportHook(MetaPathFinder):
    """Finds one module as all other finders do, and adds a call to the end of its execution; used once."""

    def __init__(self, name: str, function: Callable[[], None]) -> None:
        self._name = name
        self._function = function

    def remove(self) -> None:
        """Look for the module no longer."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 (the protocol's signature)
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_then_call(module: ModuleType) -> None:
            execute(module)
            self._function()

        spec.loader.exec_module = execute_then_call  # type: ignore[method-assign]
        return spec
