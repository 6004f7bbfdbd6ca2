"""Compiled regions: what torch.compile makes of a function, seen each time that it runs, and the modules inside.

torch.compile leaves what it compiled under a global name of the function's module, `__compiled_fn_…`, and calls it from
there. From the first recording on, a wrapper takes that place. While one runs, its calls are calls of a module for the
engines: so the node of the region's backward is made inside a call, and a compiled function outside of all modules has
a span. The modules inside are noted at the nodes of the captured graph, which is read before the backend gets it.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol

from torch import nn

from .._after_import import call_after_import
from .._interrupts import WeakMap
from ..ring import NameTable
from .optimizer_hook import OptimizerRef, call_listener, step_frames, stepped_in_graph
from .skip_dynamo import skip_all

InnerModule = tuple[str, str]
"""Where a module is found in the function that was compiled (`L['self'].blocks.0`), and its class."""

GRAPHS_MODULE = "torch._dynamo.output_graph"
"""torch's, which captures them."""

_PART = re.compile(r"\._modules\['(\w+)'\]")
_VARIABLE = re.compile(r"[LG]\['(\w+)'\]\.?")
_CALLED_MODULE = ("self", "fn")
"""What the module itself is called in the functions by which modules are called."""


class CompiledGraph(NamedTuple):
    """What a graph that torch.compile captured holds.

    Attributes:
        modules: in the order in which the graph comes to them.
        optimizers: those that step in it.
    """

    modules: tuple[InnerModule, ...] = ()
    optimizers: tuple[OptimizerRef, ...] = ()


_captured_by: WeakMap[Callable[..., Any], CompiledGraph] = WeakMap()
_last = threading.local()
"""What the backend made last is what is installed next on its thread."""


_graphs_unwrapped = threading.Lock()
"""Taken by who wraps what captures graphs, for good."""


def note_captured() -> None:
    """Note the modules and optimizers in each graph that torch.compile captures from now on, for good."""
    graphs: Any = getattr(sys.modules.get(GRAPHS_MODULE), "OutputGraph", None)
    original = getattr(graphs, "call_user_compiler", None)
    if original is None or not _graphs_unwrapped.acquire(blocking=False):
        return

    def call_user_compiler(output: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        captured = CompiledGraph(_modules_in(graph), stepped_in_graph(getattr(output, "graph", None)))
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


def captured_in(function: Callable[..., Any]) -> CompiledGraph:
    """Return what is in what was compiled to `function`; nothing where that was before `note_captured`."""
    return _captured_by.get(function) or CompiledGraph()


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


_PREFIX = "__compiled_fn"
_REGIONS_MODULE = "torch._dynamo.utils"
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")
_CALLS_OF_MODULES = {"forward", "__call__", "_call_impl", "_wrapped_call_impl", "inner"}


class CompiledRegion(nn.Module):
    """What was compiled, as a module for the engines. No hooks of modules run around it.

    Args:
        function: what torch.compile made.
        captured: what is inside.

    Attributes:
        inner_modules: the modules that are inside, in their order.
        label: name of the function that was compiled; empty before the first call.
        is_call_of_module: whether that is how a module is called, which then has a span already.
        is_generated: whether torch made that function: compiled autograd, of a backward pass.
        is_of_step: whether an optimizer steps in it, or it is a part of an optimizer's step.
    """

    def __init__(self, function: Callable[..., Any], captured: CompiledGraph) -> None:
        super().__init__()
        self.inner_modules = captured.modules
        self.is_of_step = bool(captured.optimizers)
        self.label = ""
        self.is_call_of_module = self.is_generated = False
        # `nn.Module.__call__` calls this instead of the forward and its hooks. It may be a module, but not as a part.
        object.__setattr__(self, "_compiled_call_impl", function)

    def describe(self, caller: FrameType) -> None:
        """Take name and kind from the frame that calls it: the function that was compiled, or a part behind a break."""
        code: CodeType = caller.f_code
        self.is_of_step = self.is_of_step or bool(step_frames(caller))
        names: list[str] = getattr(code, "co_qualname", code.co_name).split(".")  # since Python 3.11
        resumed = _RESUMED.match(names[-1])
        name = resumed[1] if resumed else names[-1]
        # torch.compile itself made it, for a backward pass: it is no function of the user's.
        self.is_generated = code.co_filename.startswith("<eval_with_key>")
        self.is_call_of_module = name in _CALLS_OF_MODULES
        owner = names[-2:-1] if names[-2:-1] != ["<locals>"] else []
        self.label = ".".join([*owner, name])


class CompiledBackward(Protocol):
    """Takes what compiled autograd runs: the backward of the outermost call that made nodes last, in one piece."""

    def begin_compiled_backward(self) -> None:
        """Write that it begins."""

    def end_compiled_backward(self) -> None:
        """Write that it ended."""


class _Inside(threading.local):
    depth = 0


_inside = _Inside()


def is_inside_region() -> bool:
    """Whether this thread runs a compiled region, and so modules that torch.compile made."""
    return _inside.depth > 0


def _wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    captured = captured_in(function)
    region = CompiledRegion(function, captured)

    def call(*args: Any, **kwargs: Any) -> Any:
        regions = _watching
        if regions is None:
            return function(*args, **kwargs)
        caller = sys._getframe(1)
        if not region.label:
            region.describe(caller)
        generated, backward = region.is_generated, regions.backward
        if generated and backward is not None:
            backward.begin_compiled_backward()
        _inside.depth += 1
        try:
            result = function(*args, **kwargs) if generated else region(*args, **kwargs)
        finally:
            _inside.depth -= 1
            if generated and backward is not None:
                backward.end_compiled_backward()
        if region.is_of_step:
            regions.tell_step(caller, captured.optimizers)
        return result

    return skip_all(call)


class CompiledRegions:
    """Watches all compiled regions there are, and those made later, until it is stopped; one at a time.

    Args:
        after_step_region: called after a region in which an optimizer steps, or which is a part of an optimizer's step,
            with the frame that called it and the optimizers that step inside.

    Attributes:
        backward: told of what compiled autograd runs; None where nothing is recorded now.
    """

    def __init__(self, after_step_region: Callable[[FrameType, tuple[OptimizerRef, ...]], None]) -> None:
        self._after_step_region: Callable[[FrameType, tuple[OptimizerRef, ...]], None] | None = after_step_region
        self.backward: CompiledBackward | None = None

    def start(self) -> None:
        """Begin, at once or when torch.compile is first used."""
        global _watching
        _watching = self
        _wrap_after_import()
        # Another thread may have been importing it when the first recording began.
        note_captured()
        _wrap_all()

    def stop(self) -> None:
        """End: calls of regions are not noted any more."""
        global _watching
        if _watching is self:
            _watching = None

    def tell_step(self, caller: FrameType, optimizers: tuple[OptimizerRef, ...]) -> None:
        """Tell of a step in a region."""
        listener = self._after_step_region
        if listener is not None and not call_listener(listener, caller, optimizers):
            self._after_step_region = None


_watching: CompiledRegions | None = None


_unwrapped = threading.Lock()
"""Taken by who wraps the regions, for good."""


@cache
def _wrap_after_import() -> None:
    call_after_import(GRAPHS_MODULE, note_captured)
    call_after_import(_REGIONS_MODULE, _wrap_all)


def _wrap_all() -> None:
    """Put wrappers around all compiled regions, and those made later, once per process, where torch.compile is there.

    They stay: to take one out again would race with torch.compile, which makes and drops regions on any thread.
    """
    utils: Any = sys.modules.get(_REGIONS_MODULE)
    hook, manager = getattr(utils, "CleanupHook", None), getattr(utils, "CleanupManager", None)
    original = getattr(hook, "create", None)
    instance = getattr(manager, "instance", None)
    if hook is None or original is None or instance is None or not _unwrapped.acquire(blocking=False):
        return
    for hooks in list(instance.values.values()):
        for known in hooks:
            function = known.scope.get(known.name)
            if known.name.startswith(_PREFIX) and callable(function):
                known.scope[known.name] = _wrap(function)

    def create(scope: dict[str, Any], name: str, value: Any) -> Any:
        if name.startswith(_PREFIX) and callable(value):
            note_installed(value)
            value = _wrap(value)
        return original(scope, name, value)

    hook.create = staticmethod(create)
