"""Compiled regions: what torch.compile makes of a function, seen each time that it runs, and the modules inside.

torch.compile leaves what it compiled under a global name of the function's module, `__compiled_fn_…`, and calls it from
there. From the first recording on, a wrapper takes that place. While one runs, its calls are calls of a module for the
engines: so the node of the region's backward is made inside a call, and a compiled function outside of all modules has
a span. So has a model that AOTInductor packaged, whenever it is called. The nodes of the captured graph, which is read
before the backend gets it, say which modules are inside. The nodes that AOTAutograd made of it say what these do.
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
"""torch's, which captures graphs."""
_PACKAGE_MODULE = "torch._inductor.package.package"

_PART = re.compile(r"(?:\._modules|\.__dict__\['_modules'\])?\['?(\w+)'?\]")
_INLINED = "._compiled_call_impl._torchdynamo_inline.__self__"
"""How torch comes from a module that is compiled by itself, with `Module.compile`, to what it calls."""
_WRAPPED = re.compile(r"\.(?:_orig_mod|_checkpoint_wrapped_module)\b")
"""By which wrappers without work of their own hold what they wrap."""
_VARIABLE = re.compile(r"[LG]\['(\w+)'\]")
_CALLED_MODULE = {"self", "fn"}
"""The variables of the module itself in torch's functions by which modules are called."""


class _Thread:
    """The regions that one thread runs, and the graph that it captured.

    Attributes:
        regions: how many compiled regions it runs, one inside of the other.
        captured: the modules in the graph that it captured last, and the work in it: what its backend makes of it is
            installed next.
    """

    regions = 0
    captured: tuple[tuple[InnerModule, ...], GraphWork] = (), GraphWork()


_threads = PerGreenlet(_Thread)


def _modules_in(graph: Any) -> tuple[InnerModule, ...]:
    """Return the modules in the order in which the graph comes to them; none where torch notes them otherwise."""
    try:
        # Parameters, which are of modules too, are all in front; who has nothing else comes last.
        nodes = sorted(graph.graph.nodes, key=lambda node: node.op == "placeholder")
        stacks = [node.meta.get("nn_module_stack") or {} for node in nodes]
        entries = [entry for stack in stacks for entry in stack.values()]
        return tuple(dict.fromkeys((str(source), str(kind.__name__)) for source, kind in entries))
    except (AttributeError, TypeError, ValueError):
        return ()


def _called_module(caller: FrameType, method: str) -> set[str]:
    """Return what the module itself is called in a frame that is a call of one: mostly `self`."""
    code = caller.f_code
    if not _RESUMED.match(code.co_name):
        return _CALLED_MODULE.union(code.co_varnames[: min(code.co_argcount, 1)])
    # What goes on after a graph break gets its variables in another order.
    variables = {
        name
        for name, value in caller.f_locals.items()
        if isinstance(value, nn.Module)
        and (original := getattr(inspect.unwrap(getattr(type(value), method, None)), "__code__", None))  # type: ignore[arg-type]
        and original.co_varnames[:1] == (name,)
    }
    return _CALLED_MODULE | variables


def _decorates_forward(caller: FrameType, name: str) -> bool:
    """Return whether a frame, of a function of this name, is of a decorator around a module's `forward`."""
    for variable, value in caller.f_locals.items():
        function = getattr(type(value), "forward", None) if isinstance(value, nn.Module) else None
        while (code := getattr(function, "__code__", None)) is not None:
            place = code.co_name, code.co_filename, code.co_varnames[:1]
            if place == (name, caller.f_code.co_filename, (variable,)):
                return True
            function = getattr(function, "__wrapped__", None)
    return False


def _class_of_object(caller: FrameType, owner: str) -> str:
    """Return the class of the object whose method a frame is of, which may have it from the class `owner`."""
    kinds = map(type, caller.f_locals.values())
    return next((class_name(kind) for kind in kinds if owner in map(class_name, class_bases(kind))), owner)


def _inner_path(source: str, called_module: Container[str], paths: Mapping[str, str], *, strip_wrappers: bool) -> str:
    """Return the path of a module of a region below the module whose call this is, which has "".

    Args:
        source: where torch says that the module is.
        called_module: the variables of the module whose call this is.
        paths: the paths that are known of other variables, and of sources.
        strip_wrappers: leave out the parts by which wrappers hold what they wrap.
    """
    if source in paths:
        return paths[source]
    variable = _VARIABLE.match(source)
    path = _PART.sub(r".\1", (source[variable.end() :] if variable else source).replace(_INLINED, ""))
    path = (_WRAPPED.sub("", path) if strip_wrappers else path).removeprefix(".")
    if variable is None or variable[1] in called_module:
        return path
    return ".".join(part for part in (paths.get(variable[1], variable[1]), path) if part)


COMPILED_AUTOGRAD = "CompiledAutograd"
"""The names of classes begin so that compiled autograd makes, of backward passes."""
_PREFIX = "__compiled_fn"
_REGIONS_MODULE = "torch._dynamo.utils"
_RESUMED = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")
_CALLS_OF_MODULES = {"forward", "__call__", "_call_impl", "_wrapped_call_impl", "inner"}


class CompiledRegion(nn.Module):
    """A compiled function, as a module for the engines. No hooks of modules run around it.

    Attributes:
        inner_modules: the modules inside.
        graph: the work in its graph.
        label: name of the function that was compiled; empty before the first call.
        is_call_of_module: whether that is how a module is called, which then has a span already.
        is_generated: whether torch made that function: compiled autograd, of a backward pass.
        is_of_step: whether it is a part of an optimizer's step.
    """

    def __init__(self, function: Callable[..., Any], modules: tuple[InnerModule, ...], graph: GraphWork) -> None:
        super().__init__()
        self.inner_modules, self.graph = modules, graph
        self.label = ""
        self.is_call_of_module = self.is_generated = self.is_of_step = False
        self._called_module: set[str] = set()
        self._variables: dict[str, weakref.ref[nn.Module]] = {}
        self._paths: dict[str, str] = {}
        # `nn.Module.__call__` calls this instead of the forward and its hooks. It may be a module, but not as a part.
        object.__setattr__(self, "_compiled_call_impl", function)

    def describe(self, caller: FrameType) -> None:
        """Take name and kind from the frame that calls it: the function that was compiled, or a part after a break."""
        code: CodeType = caller.f_code
        self.is_of_step = bool(step_frames(caller))
        names: list[str] = getattr(code, "co_qualname", code.co_name).split(".")  # since Python 3.11
        resumed = _RESUMED.match(names[-1])
        name = resumed[1] if resumed else names[-1]
        # Code that torch.fx made may be of a model too, which was traced or exported.
        graph = caller.f_locals.get("self") if code.co_filename.startswith("<eval_with_key>") else None
        self.is_generated = type(graph).__name__.startswith(COMPILED_AUTOGRAD)
        self.is_call_of_module = name in _CALLS_OF_MODULES or _decorates_forward(caller, name)
        if self.is_call_of_module:
            self._called_module = _called_module(caller, name)
        variables, global_variables = caller.f_locals, caller.f_globals
        names_of = {match[1] for source, _ in self.inner_modules if (match := _VARIABLE.match(source))}
        # A loop's, or one that torch keeps on its stack, in what goes on after a graph break: `___stack0`.
        self._variables = {
            variable: weakref.ref(value)
            for variable in names_of - self._called_module
            if isinstance(value := variables.get(variable, global_variables.get(variable)), nn.Module)
        }
        owner = [_class_of_object(caller, kind) for kind in names[-2:-1] if kind != "<locals>"]
        self.label = ".".join([*owner, name])

    def find_variables(self, called: nn.Module, path_of: Callable[[nn.Module, nn.Module], str | None]) -> None:
        """Find the paths of modules that the compiled code has in variables, or that are parts in several places.

        Args:
            called: the module whose call this is, or in whose call this function is called.
            path_of: returns the path below that; None if there is none.
        """
        wrapped = called._modules.get("_orig_mod")
        top = called if wrapped is None else wrapped
        for variable, module in self._variables.items():
            value = module()
            if value is called or value is top:
                self._called_module.add(variable)  # as of another method of it
            elif value is not None and (path := path_of(called, value)) is not None:
                self._paths[variable] = path
        for source, _ in [*self.inner_modules, *dict(self.graph.work)]:
            path = _inner_path(source, self._called_module, self._paths, strip_wrappers=False)
            part: nn.Module | None = top
            for name in path.split("."):
                part = None if part is None or name not in part._modules else part._modules[name]
            # Where it is first, as it is named in eager.
            if part is not None and (first := path_of(top, part)) is not None:
                self._paths[source] = first

    def describe_inner(self, *, strip_wrappers: bool) -> tuple[dict[str, None], dict[str, Any]]:
        """Return the names of the modules inside (`blocks.0: Block`), and its graph as the ring notes it.

        Args:
            strip_wrappers: leave out the parts by which wrappers hold what they wrap.
        """
        work = dict.fromkeys([*self.inner_modules, OF_NO_MODULE], NO_WORK) | dict(self.graph.work)
        graphs = [*(self.graph.kernels.made if self.graph.kernels else ())]
        # A graph of a cache has no nodes, and its kernels may be of modules that call no other.
        for module in (owner[0] for graph in graphs for _, parts in graph.kernels for owner, _ in parts):
            work.setdefault(module, NO_WORK)
        paths = {
            source: _inner_path(source, self._called_module, self._paths, strip_wrappers=strip_wrappers)
            for source, _ in work
        }
        # What is wrapped comes after its wrapper, and has the same path.
        classes = {paths[source]: module_class for source, module_class in work}

        def named(module: InnerModule) -> str:
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
            "work": [[named(module), *counts] for module, counts in work.items()],
            "kernels": kernels,
        }
        return dict.fromkeys(filter(None, map(named, self.inner_modules))), note


def is_inside_region() -> bool:
    """Whether this thread runs a compiled region, and so modules that torch.compile made."""
    return _threads.get().regions > 0


def _wrap(
    function: Callable[..., Any],
    modules: tuple[InnerModule, ...] = (),
    graph: GraphWork = GraphWork(),  # noqa: B008 (nothing changes it)
    label: str = "",
) -> Callable[..., Any]:
    """Return a function in the place of a compiled one: while a recording runs, its calls are those of a module."""
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
            # Wrappers of other code around modules' calls would get one that the program does not make.
            result = region(*args, **kwargs) if is_ours and not region.is_generated else function(*args, **kwargs)
        finally:
            thread.regions -= 1
        if region.is_of_step:
            regions.tell_step(sys._getframe(1))
        return result

    return skip_all(call)


class CompiledRegions:
    """Watches all compiled regions there are, and those made later, until it is stopped; one at a time."""

    def __init__(self, after_step_region: Callable[[FrameType], None]) -> None:
        self._after_step_region: Callable[[FrameType], None] | None = after_step_region
        # How modules were called last, and whether no wrapper of other code was around that.
        self.module_call: tuple[object, bool] = None, False

    def start(self) -> None:
        """Begin, at once or when torch.compile is first used."""
        global _watching
        _watching = self
        # Each time: another thread may have been importing it when the first recording began.
        call_after_import(CAPTURING_MODULE, _wrap_all)
        call_after_import(GRAPHS_MODULE, watch_graphs)
        watch_kernels()
        call_after_import(_PACKAGE_MODULE, _wrap_packaged)

    def stop(self) -> None:
        """End: calls of regions are not noted any more."""
        global _watching
        if _watching is self:
            _watching = None

    def tell_step(self, caller: FrameType) -> None:
        """Report a part of a step, which this frame called."""
        listener = self._after_step_region
        if listener is not None and not call_listener(listener, caller):
            self._after_step_region = None


_watching: CompiledRegions | None = None


_unwrapped = threading.Lock()
"""Taken by who wraps the regions, for good."""


def _wrap_all() -> None:
    """Put wrappers around all compiled regions, and those made later, once per process, where torch.compile is there.

    They stay: to take one out again would race with torch.compile, which makes and drops regions on any thread.
    """
    graphs: Any = sys.modules.get(CAPTURING_MODULE)
    utils: Any = sys.modules.get(_REGIONS_MODULE)
    try:
        graph, hook, installed = graphs.OutputGraph, utils.CleanupHook, utils.CleanupManager.instance
        compile_graph, original = graph.call_user_compiler, hook.create
    except AttributeError:  # not imported yet, or private and of another version of torch
        return
    if not _unwrapped.acquire(blocking=False):
        return
    for hooks in list(installed.values.values()):
        for installed_hook in hooks:
            scope, name = installed_hook.scope, installed_hook.name
            function = scope.get(name)
            if name.startswith(_PREFIX) and callable(function):
                scope[name] = _wrap(function)

    def call_user_compiler(output: Any, captured: Any, *args: Any, **kwargs: Any) -> Any:
        modules = _modules_in(captured)
        compiled, graph = read_graphs(captured, lambda: compile_graph(output, captured, *args, **kwargs))
        _threads.get().captured = modules, graph
        return compiled

    def create(scope: dict[str, Any], name: str, value: Any) -> Any:
        if name.startswith(_PREFIX) and callable(value):
            thread = _threads.get()
            value, thread.captured = _wrap(value, *thread.captured), _Thread.captured
        return original(scope, name, value)

    graph.call_user_compiler = skip_all(call_user_compiler)
    hook.create = staticmethod(create)


@cache
def _wrap_packaged() -> None:
    """Have each call of a packaged model be one of a region, once per process."""
    model = getattr(sys.modules[_PACKAGE_MODULE], "AOTICompiledModel", None)
    if model is not None:
        model.__call__ = _wrap(model.__call__, label=model.__name__)
