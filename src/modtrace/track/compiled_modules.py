"""The modules inside compiled regions, as torch.compile notes them at the nodes of the graphs that it captures.

The graph is read before the backend gets it, and left as it is.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from .._after_import import call_after_import
from .._weak_map import WeakMap
from ..ring import NameTable
from .skip_dynamo import skip_all
from .steps.optimizer_hook import OptimizerRef, stepped_in_graph

__all__ = ["Captured", "CapturedGraphs", "CompiledModuleNames", "InnerModule", "inner_names"]

InnerModule = tuple[str, str]
"""Where a module is found in the function that was compiled (`L['self'].blocks.0`), and its class."""

_GRAPHS_MODULE = "torch._dynamo.output_graph"
_PART = re.compile(r"\._modules\['(\w+)'\]")
_VARIABLE = re.compile(r"[LG]\['(\w+)'\]\.?")
_CALLED_MODULE = ("self", "fn")
"""What the module itself is called in the functions by which modules are called."""


class Captured(NamedTuple):
    """What a graph that torch.compile captured holds.

    Attributes:
        modules: in the order in which the graph comes to them.
        optimizers: those that step in it.
    """

    modules: tuple[InnerModule, ...] = ()
    optimizers: tuple[OptimizerRef, ...] = ()


_captured_by: WeakMap[Callable[..., Any], Captured] = WeakMap()


class CapturedGraphs:
    """Notes the modules and optimizers in each graph that torch.compile captures, until it is stopped."""

    def __init__(self) -> None:
        self._original: Any = None
        self._patch: Any = None
        self._call_off_install: Callable[[], None] | None = None
        # What the backend made last is what is installed next on its thread.
        self._last = threading.local()

    def start(self) -> None:
        """Begin, at once or when torch.compile is first used."""
        self._call_off_install = call_after_import(_GRAPHS_MODULE, self._install)

    def stop(self) -> None:
        """Put back what was there; what was noted is kept as long as what was compiled."""
        if self._call_off_install is not None:
            self._call_off_install()
        graphs: Any = getattr(sys.modules.get(_GRAPHS_MODULE), "OutputGraph", None)
        if self._patch is not None and graphs.call_user_compiler is self._patch:
            graphs.call_user_compiler = self._original
        self._patch = None

    def note_installed(self, function: object) -> None:
        """Note what the graph that was compiled last on this thread became."""
        captured, self._last.captured = getattr(self._last, "captured", None), None
        if captured is not None and callable(function):
            with contextlib.suppress(TypeError):  # where no weak reference to it can be had
                _captured_by[function] = captured

    def of(self, function: Callable[..., Any]) -> Captured:
        """Return what is in what was compiled to `function`; nothing where no recording ran then."""
        return _captured_by.get(function) or Captured()

    def _install(self) -> None:
        graphs: Any = getattr(sys.modules.get(_GRAPHS_MODULE), "OutputGraph", None)
        original = self._original = getattr(graphs, "call_user_compiler", None)
        if original is None:
            return
        last = self._last

        def call_user_compiler(output: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
            captured = Captured(_modules_in(graph), stepped_in_graph(getattr(output, "graph", None)))
            compiled = original(output, graph, *args, **kwargs)
            last.captured = captured
            return compiled

        self._patch = graphs.call_user_compiler = skip_all(call_user_compiler)


def _modules_in(graph: Any) -> tuple[InnerModule, ...]:
    """Return the modules in the order in which the graph comes to them; none where torch notes them otherwise."""
    try:
        stacks = [node.meta.get("nn_module_stack") or {} for node in graph.graph.nodes]
        entries = [entry for stack in stacks for entry in stack.values()]
        return tuple(dict.fromkeys((str(source), str(kind.__name__)) for source, kind in entries))
    except (AttributeError, TypeError, ValueError):
        return ()


def inner_names(modules: tuple[InnerModule, ...], *, is_call_of_module: bool) -> list[str]:
    """Return how modules are shown: `blocks.0: Block`.

    Args:
        modules: those of a region.
        is_call_of_module: whether they are inside the call of a module: paths start below it, and it is left out.
    """
    names = []
    for source, module_class in modules:
        path = _PART.sub(r".\1", source)
        variable = _VARIABLE.match(path)
        if variable is not None:
            inner = path[variable.end() :]
            own = is_call_of_module and variable[1] in _CALLED_MODULE
            path = inner if own else ".".join(part for part in (variable[1], inner) if part)
        if path:
            names.append(f"{path}: {module_class}")
    return names


class CompiledModuleNames:
    """Notes beside the name of a span which modules run inside it, compiled.

    Args:
        table: takes the notes.
    """

    def __init__(self, table: NameTable) -> None:
        self._table = table
        self._by_name: dict[int, dict[str, None]] = {}

    def add(self, name_id: int, names: list[str]) -> None:
        """Note that these run inside the calls of that name, beside those that are known to."""
        known = self._by_name.setdefault(name_id, {})
        if known.keys() >= set(names):
            return
        known.update(dict.fromkeys(names))
        self._table.compiled(name_id, ", ".join(known))
