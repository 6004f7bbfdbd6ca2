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

from .._weak_map import WeakMap
from ..ring import NameTable
from .skip_dynamo import skip_all
from .steps.optimizer_hook import OptimizerRef, stepped_in_graph

__all__ = [
    "GRAPHS_MODULE",
    "Captured",
    "CompiledModuleNames",
    "InnerModule",
    "captured_in",
    "inner_names",
    "note_captured",
    "note_installed",
]

InnerModule = tuple[str, str]
"""Where a module is found in the function that was compiled (`L['self'].blocks.0`), and its class."""

GRAPHS_MODULE = "torch._dynamo.output_graph"
"""torch's, which captures them."""

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
_last = threading.local()
"""What the backend made last is what is installed next on its thread."""


_unwrapped = threading.Lock()
"""Taken by who wraps what captures graphs, for good."""


def note_captured() -> None:
    """Note the modules and optimizers in each graph that torch.compile captures from now on, for good."""
    graphs: Any = getattr(sys.modules.get(GRAPHS_MODULE), "OutputGraph", None)
    original = getattr(graphs, "call_user_compiler", None)
    if original is None or not _unwrapped.acquire(blocking=False):
        return

    def call_user_compiler(output: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        captured = Captured(_modules_in(graph), stepped_in_graph(getattr(output, "graph", None)))
        compiled = original(output, graph, *args, **kwargs)
        _last.captured = captured
        return compiled

    graphs.call_user_compiler = skip_all(call_user_compiler)


def note_installed(function: Callable[..., Any]) -> None:
    """Note what the graph that was compiled last on this thread became."""
    captured, _last.captured = getattr(_last, "captured", None), None
    if captured is not None:
        with contextlib.suppress(TypeError):  # where no weak reference to it can be had
            _captured_by[function] = captured


def captured_in(function: Callable[..., Any]) -> Captured:
    """Return what is in what was compiled to `function`; nothing where that was before `note_captured`."""
    return _captured_by.get(function) or Captured()


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
