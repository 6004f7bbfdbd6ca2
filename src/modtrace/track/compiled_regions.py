"""Compiled regions: the functions that torch.compile makes, each call of them, and the modules inside.

torch.compile stores a compiled function under a global name of the original's module, `__compiled_fn_…`, and calls it
from there. From the first recording on, a wrapper is stored there instead. While a recording runs, the engines see each
call as a call of a module. So the node of the region's backward is made inside a call, and a compiled function outside
all modules has a span. So does each call of a model that AOTInductor packaged. The modules inside are found by the
nodes of the captured graph, which is read before the backend gets it; their work by the nodes of AOTAutograd's graph.
"""

import inspect
import re
import sys
import threading
import weakref
from collections.abc import Callable, Container, Mapping
from functools import cache
from types import CodeType, FrameType
from typing import Any

from torch import nn

from .._after_import import call_after_import
from .call_patch import MODULE_CALL
from .compiled_graphs import GRAPHS_MODULE, NO_WORK, GraphWork, read_graphs, watch_graphs
from .compiled_kernels import OF_NO_MODULE, InnerModule, watch_kernels
from .greenlets import PerGreenlet
from .optimizer_hook import call_listener, step_frames
from .unseen import class_bases, class_name, skip_all

CAPTURING_MODULE = "torch._dynamo.output_graph"
"""The module of torch that captures graphs."""
_PACKAGE_MODULE = "torch._inductor.package.package"

_PATH_PART = re.compile(r"(?:\._modules|\.__dict__\['_modules'\])?\['?(\w+)'?\]")
_INLINED = "._compiled_call_impl._torchdynamo_inline.__self__"
"""The attribute path, in a torch source, from a module compiled with `Module.compile` to the module it calls."""
_WRAPPER_ATTRIBUTE = re.compile(r"\.(?:_orig_mod|_checkpoint_wrapped_module)\b")
"""Attributes under which transparent wrappers hold the wrapped module."""
_VARIABLE = re.compile(r"[LG]\['(\w+)'\]")
_CALLED_MODULE_VARIABLES = {"self", "fn"}
"""The variables that hold the called module in torch's functions that call modules."""


class _Thread:
    """The regions that one thread runs, and the graph that it captured.

    Attributes:
        regions: number of compiled regions that it runs, nested in each other.
        captured: the modules and the work in its last captured graph, whose compiled function is installed next.
    """

    regions = 0
    captured: tuple[tuple[InnerModule, ...], GraphWork] = (), GraphWork()


_threads = PerGreenlet(_Thread)


def _modules_in(graph: Any) -> tuple[InnerModule, ...]:
    """Return the modules in the order of their first nodes; empty if another version of torch stores them otherwise."""
    try:
        # The graph starts with all parameters: sorted last, they only add modules that have no other nodes.
        nodes = sorted(graph.graph.nodes, key=lambda node: node.op == "placeholder")
        stacks = [node.meta.get("nn_module_stack") or {} for node in nodes]
        entries = [entry for stack in stacks for entry in stack.values()]
        return tuple(dict.fromkeys((str(source), str(module_class.__name__)) for source, module_class in entries))
    except (AttributeError, TypeError, ValueError):
        return ()


def _find_self_variables(caller: FrameType, method: str) -> set[str]:
    """Return the variables that hold the called module in the frame of its `method`: mostly `self`."""
    code = caller.f_code
    if not _RESUMED_NAME.match(code.co_name):
        return _CALLED_MODULE_VARIABLES.union(code.co_varnames[: min(code.co_argcount, 1)])
    # Code that continues after a graph break gets its variables in another order.
    variables = {
        name
        for name, value in caller.f_locals.items()
        if isinstance(value, nn.Module)
        and (original := getattr(inspect.unwrap(getattr(type(value), method, None)), "__code__", None))  # type: ignore[arg-type]
        and original.co_varnames[:1] == (name,)
    }
    return _CALLED_MODULE_VARIABLES | variables


def _decorates_forward(caller: FrameType, name: str) -> bool:
    """Return whether the frame of the function `name` belongs to a decorator around a module's `forward`."""
    for variable, value in caller.f_locals.items():
        function = getattr(type(value), "forward", None) if isinstance(value, nn.Module) else None
        while (code := getattr(function, "__code__", None)) is not None:
            definition = code.co_name, code.co_filename, code.co_varnames[:1]
            if definition == (name, caller.f_code.co_filename, (variable,)):
                return True
            function = getattr(function, "__wrapped__", None)
    return False


def _class_of_object(caller: FrameType, owner: str) -> str:
    """Return the class name of the object whose method runs in a frame; the class `owner` defines the method."""
    classes = map(type, caller.f_locals.values())
    return next((class_name(cls) for cls in classes if owner in map(class_name, class_bases(cls))), owner)


def _inner_path(source: str, called_module: Container[str], paths: Mapping[str, str], *, strip_wrappers: bool) -> str:
    """Return the path of a region's module below the called module, which has the path "".

    Args:
        source: torch's source of the module.
        called_module: the variables that hold the called module.
        paths: known paths of other variables, and of sources.
        strip_wrappers: leave out the attributes under which wrappers hold the wrapped module.
    """
    if source in paths:
        return paths[source]
    variable = _VARIABLE.match(source)
    path = _PATH_PART.sub(r".\1", (source[variable.end() :] if variable else source).replace(_INLINED, ""))
    path = (_WRAPPER_ATTRIBUTE.sub("", path) if strip_wrappers else path).removeprefix(".")
    if variable is None or variable[1] in called_module:
        return path
    return ".".join(part for part in (paths.get(variable[1], variable[1]), path) if part)


COMPILED_AUTOGRAD = "CompiledAutograd"
"""Prefix of the names of the classes that compiled autograd makes for backward passes."""
_REGION_PREFIX = "__compiled_fn"
_REGIONS_MODULE = "torch._dynamo.utils"
_RESUMED_NAME = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")
_MODULE_CALL_NAMES = {"forward", "__call__", "_call_impl", "_wrapped_call_impl", "inner"}


class CompiledRegion(nn.Module):
    """A compiled function, as a module for the engines. No hooks of modules run around it.

    Attributes:
        inner_modules: the modules inside.
        graph: the work in its graph.
        label: name of the original function; empty before the first call.
        is_call_of_module: whether the original function is the call of a module, which has a span already.
        is_generated: whether compiled autograd made the original function, for a backward pass.
        is_of_step: whether the region is a part of an optimizer's step.
    """

    def __init__(self, function: Callable[..., Any], modules: tuple[InnerModule, ...], graph: GraphWork) -> None:
        super().__init__()
        self.inner_modules, self.graph = modules, graph
        self.label = ""
        self.is_call_of_module = self.is_generated = self.is_of_step = False
        self._self_variables: set[str] = set()
        self._variables: dict[str, weakref.ref[nn.Module]] = {}
        self._paths: dict[str, str] = {}
        # `nn.Module.__call__` calls this instead of the forward and its hooks. It must not become a submodule.
        object.__setattr__(self, "_compiled_call_impl", function)

    def describe(self, caller: FrameType) -> None:
        """Set the label and the kind by the calling frame: the original function, or its part after a graph break."""
        code: CodeType = caller.f_code
        self.is_of_step = bool(step_frames(caller))
        names: list[str] = getattr(code, "co_qualname", code.co_name).split(".")  # since Python 3.11
        resumed = _RESUMED_NAME.match(names[-1])
        name = resumed[1] if resumed else names[-1]
        # Code that torch.fx generated may belong to a traced or exported model too.
        graph = caller.f_locals.get("self") if code.co_filename.startswith("<eval_with_key>") else None
        self.is_generated = type(graph).__name__.startswith(COMPILED_AUTOGRAD)
        self.is_call_of_module = name in _MODULE_CALL_NAMES or _decorates_forward(caller, name)
        if self.is_call_of_module:
            self._self_variables = _find_self_variables(caller, name)
        variables, global_variables = caller.f_locals, caller.f_globals
        source_variables = {match[1] for source, _ in self.inner_modules if (match := _VARIABLE.match(source))}
        # Such as the variable of a loop, or a value of the stack after a graph break: `___stack0`.
        self._variables = {
            variable: weakref.ref(value)
            for variable in source_variables - self._self_variables
            if isinstance(value := variables.get(variable, global_variables.get(variable)), nn.Module)
        }
        classes = [_class_of_object(caller, owner) for owner in names[-2:-1] if owner != "<locals>"]
        self.label = ".".join([*classes, name])

    def find_variables(self, called: nn.Module, path_of: Callable[[nn.Module, nn.Module], str | None]) -> None:
        """Find the paths of modules that the compiled code has in variables, or that have several paths.

        Args:
            called: the called module, or the module in whose call the original function is called.
            path_of: returns the path of the second module below the first; None if there is none.
        """
        wrapped = called._modules.get("_orig_mod")
        top = called if wrapped is None else wrapped
        for variable, module in self._variables.items():
            value = module()
            if value is called or value is top:
                self._self_variables.add(variable)  # such as in another method of the module
            elif value is not None and (path := path_of(called, value)) is not None:
                self._paths[variable] = path
        for source, _ in [*self.inner_modules, *dict(self.graph.work)]:
            path = _inner_path(source, self._self_variables, self._paths, strip_wrappers=False)
            inner: nn.Module | None = top
            for name in path.split("."):
                inner = None if inner is None or name not in inner._modules else inner._modules[name]
            # Its first path, by which it is named in eager mode.
            if inner is not None and (first_path := path_of(top, inner)) is not None:
                self._paths[source] = first_path

    def describe_inner(self, *, strip_wrappers: bool) -> tuple[dict[str, None], dict[str, Any]]:
        """Return the names of the modules inside (`blocks.0: Block`), and the note on its graph for the ring.

        Args:
            strip_wrappers: leave out the attributes under which wrappers hold the wrapped module.
        """
        work = dict.fromkeys([*self.inner_modules, OF_NO_MODULE], NO_WORK) | dict(self.graph.work)
        graphs = [*(self.graph.kernels.made if self.graph.kernels else ())]
        # A graph from a cache has no nodes: modules may be known only by its kernels.
        for module in (owner[0] for graph in graphs for _, parts in graph.kernels for owner, _ in parts):
            work.setdefault(module, NO_WORK)
        paths = {
            source: _inner_path(source, self._self_variables, self._paths, strip_wrappers=strip_wrappers)
            for source, _ in work
        }
        # A wrapped module comes after its wrapper, and has the same path: its class stays.
        classes = {paths[source]: module_class for source, module_class in work}

        def inner_name(module: InnerModule) -> str:
            path = paths[module[0]]
            return f"{path}: {classes[path]}" if path else ""

        number = {module: index for index, module in enumerate(work)}
        kernels = [
            graph._asdict()
            | {
                "kernels": [
                    [name, [[number[module], phase, nbytes] for (module, phase), nbytes in parts]]
                    for name, parts in graph.kernels
                ]
            }
            for graph in graphs
        ]
        note = self.graph._asdict() | {
            "work": [[inner_name(module), *counts] for module, counts in work.items()],
            "kernels": kernels,
        }
        return dict.fromkeys(filter(None, map(inner_name, self.inner_modules))), note


def is_inside_region() -> bool:
    """Return whether this thread runs a compiled region, and so modules that torch.compile made."""
    return _threads.get().regions > 0


def _wrap(
    function: Callable[..., Any],
    modules: tuple[InnerModule, ...] = (),
    graph: GraphWork = GraphWork(),  # noqa: B008 (nothing changes it)
    label: str = "",
) -> Callable[..., Any]:
    """Return a wrapper of a compiled function: while a recording runs, its calls are calls of a module."""
    region = CompiledRegion(function, modules, graph)
    region.label = label

    def call(*args: Any, **kwargs: Any) -> Any:
        regions = _watching
        if regions is None:
            return function(*args, **kwargs)
        if not region.label:
            region.describe(sys._getframe(1))
        module_call, is_ours = regions.module_call
        if nn.Module.__call__ is not module_call:
            is_ours = MODULE_CALL[0].is_ours_alone()
            regions.module_call = nn.Module.__call__, is_ours
        thread = _threads.get()
        thread.regions += 1
        try:
            # Wrappers that other code put around module calls would see a call that the program does not make.
            result = region(*args, **kwargs) if is_ours and not region.is_generated else function(*args, **kwargs)
        finally:
            thread.regions -= 1
        if region.is_of_step:
            regions.report_step(sys._getframe(1))
        return result

    return skip_all(call)


class CompiledRegions:
    """Watches all compiled regions, also those made later, until it is stopped; one object watches at a time."""

    def __init__(self, after_step_region: Callable[[FrameType], None]) -> None:
        self._after_step_region: Callable[[FrameType], None] | None = after_step_region
        # The last `nn.Module.__call__`, and whether no wrapper of other code was around it.
        self.module_call: tuple[object, bool] = None, False

    def start(self) -> None:
        """Start to watch: now, or when torch.compile is first used."""
        global _watching
        _watching = self
        # Each time: another thread may have been importing it when the first recording started.
        call_after_import(CAPTURING_MODULE, _wrap_all)
        call_after_import(GRAPHS_MODULE, watch_graphs)
        watch_kernels()
        call_after_import(_PACKAGE_MODULE, _wrap_packaged)

    def stop(self) -> None:
        """Stop: calls of regions are not recorded any more."""
        global _watching
        if _watching is self:
            _watching = None

    def report_step(self, caller: FrameType) -> None:
        """Report a region that is part of an optimizer's step, and that the frame `caller` called."""
        listener = self._after_step_region
        if listener is not None and not call_listener(listener, caller):
            self._after_step_region = None


_watching: CompiledRegions | None = None


_wrap_lock = threading.Lock()
"""The thread that wraps the regions acquires this lock and never releases it."""


def _wrap_all() -> None:
    """Wrap all compiled regions, also those made later, once per process, if torch.compile is imported.

    The wrappers stay: removing one would race with torch.compile, which makes and drops regions on any thread.
    """
    graphs: Any = sys.modules.get(CAPTURING_MODULE)
    utils: Any = sys.modules.get(_REGIONS_MODULE)
    try:
        graph, hook, installed = graphs.OutputGraph, utils.CleanupHook, utils.CleanupManager.instance
        compile_graph, original = graph.call_user_compiler, hook.create
    except AttributeError:  # not imported yet, or private and of another version of torch
        return
    if not _wrap_lock.acquire(blocking=False):
        return
    for hooks in list(installed.values.values()):
        for installed_hook in hooks:
            scope, name = installed_hook.scope, installed_hook.name
            function = scope.get(name)
            if name.startswith(_REGION_PREFIX) and callable(function):
                scope[name] = _wrap(function)

    def call_user_compiler(output: Any, captured: Any, *args: Any, **kwargs: Any) -> Any:
        modules = _modules_in(captured)
        compiled, graph = read_graphs(captured, lambda: compile_graph(output, captured, *args, **kwargs))
        _threads.get().captured = modules, graph
        return compiled

    def create(scope: dict[str, Any], name: str, value: Any) -> Any:
        if name.startswith(_REGION_PREFIX) and callable(value):
            thread = _threads.get()
            value, thread.captured = _wrap(value, *thread.captured), _Thread.captured
        return original(scope, name, value)

    graph.call_user_compiler = skip_all(call_user_compiler)
    hook.create = staticmethod(create)


@cache
def _wrap_packaged() -> None:
    """Make each call of a packaged model a call of a region, once per process."""
    model = getattr(sys.modules[_PACKAGE_MODULE], "AOTICompiledModel", None)
    if model is not None:
        model.__call__ = _wrap(model.__call__, label=model.__name__)
