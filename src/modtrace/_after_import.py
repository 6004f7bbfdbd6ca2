"""Functions that are called once a module is imported.

A finder is inserted at the front of `sys.meta_path` and stays there. For an awaited module it asks the finders after
it, and wraps `exec_module` of the loader that they find. So a call of `importlib.util.find_spec`, or an import that
fails, calls none of the functions.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[], None]]] = {}
"""The functions to call once a module is imported, by the module's name."""
_thread = threading.local()
"""Attribute `looking_for`: name of the module that this thread is searching."""


def call_after_import(name: str, function: Callable[[], None]) -> None:
    """Call `function` once `name` is imported, at once if it is already. Its exceptions leave the `import` statement.

    The thread that executes the module calls the function once, even if it is registered several times, before any
    `import` of the module returns.
    """
    if name in sys.modules:
        function()
        return
    functions = _waiting.setdefault(name, [])
    if function not in functions:
        functions.append(function)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(MetaPathFinder):
    """Finds awaited modules through the other finders, and wraps their loaders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _waiting.get(fullname) or getattr(_thread, "looking_for", None) == fullname:
            return None
        # Another library's finder may ask every finder, including this one.
        _thread.looking_for = fullname
        try:
            for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
                find_spec = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None if find_spec is None else find_spec(fullname, path, target)
                if spec is not None:
                    _call_after_execution(spec)
                    return spec
            return None
        finally:
            _thread.looking_for = None


_finder = _Finder()


def _call_after_execution(spec: ModuleSpec) -> None:
    """Wrap `exec_module` of a loader so that it calls the waiting functions; the loader keeps its class."""
    loader: Any = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None or isinstance(loader, type):  # a namespace package, or the one loader of all built-in modules
        return

    def execute_then_call(module: ModuleType) -> None:
        execute(module)
        functions = _waiting.get(module.__name__, [])
        while functions:
            functions.pop(0)()

    with contextlib.suppress(AttributeError):  # the loader does not allow new attributes
        loader.exec_module = execute_then_call
