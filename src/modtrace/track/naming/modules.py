"""Facts of a module: its class and parts, what it wraps or replaces, whether torch.compile made it, and its path.

It is read without running code of its class: that can raise, or compare as a tensor does. The object whose method calls
a module is found on the stack. Wrappers are known by the names of their classes, so that none of the libraries they
come from is imported. One walk finds the paths of all modules below another one.
"""

import functools
import inspect
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule


def _attribute(module: nn.Module, name: str) -> Any:
    """Return what a module holds under a name, past a `__getattribute__` of its own; None if it holds nothing."""
    try:
        return object.__getattribute__(module, name)
    except AttributeError:
        return None


def named_modules(module: nn.Module, repeated: list[nn.Module] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and module of each module below one, as `nn.Module.named_modules` does, each module once.

    A `named_modules` of its own is not asked: it is the user's code, which can wait for a lock or draw a random number.
    Names that are not text are turned into it. `repeated` gets a module once for each other place it lies in.
    """
    seen: set[int] = set()
    # The last is the next. Two lists, as a tuple for each is more for the garbage collector to count.
    paths, todo = [""], [module]
    while todo:
        path, inner = paths.pop(), todo.pop()
        if id(inner) in seen:
            if repeated is not None:
                repeated.append(inner)
            continue
        seen.add(id(inner))
        if inner is not module:
            yield path, inner
        children = _attribute(inner, "_modules")
        if children:
            prefix = f"{path}." if path else ""
            for name, child in zip(reversed(list(children.keys())), reversed(list(children.values())), strict=True):
                if child is not None:
                    paths.append(f"{prefix}{name}")
                    todo.append(child)


class MethodCall(nn.Module):
    """A method of a module, which the engines see as the call of a module. No hooks of modules run around it."""

    owner: weakref.ref[nn.Module]

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.owner = weakref.ref(owner)
        self.method = name
        self._function = getattr(owner, name)
        # `nn.Module.__call__` calls this instead of the forward and its hooks.
        object.__setattr__(self, "_compiled_call_impl", self._function)

    def as_function(self) -> Callable[..., Any]:
        """Return a function in place of the method, with its name and signature."""

        @functools.wraps(self._function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return call


_PARTS_MODULE = "torch._dynamo.backends.distributed"
"""`__module__` of what wraps the parts into which torch.compile cuts the graph of a DistributedDataParallel."""


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module run what torch.compile made."""
    compiled = type(module) is not MethodCall and _attribute(module, "_compiled_call_impl") is not None
    return compiled or is_optimized(module)


def without_compile(module: nn.Module) -> nn.Module | None:
    """Return what torch.compile was given for this module; the module itself if it was not."""
    return getattr(module, "_orig_mod", None) if is_optimized(module) else module


def is_torch_graph(module: nn.Module) -> bool:
    """Whether torch.compile made the module, to run it while it compiles, or as the backward of what it compiled."""
    kind = type(without_compile(module))
    if kind.__module__ == _PARTS_MODULE:
        return True
    if not issubclass(kind, GraphModule) and kind.__module__ != "torch._dynamo.utils":
        return False
    return torch._C._current_graph_task_id() != -1 or torch._guards.TracingContext.try_get() is not None


def is_optimized(module: nn.Module) -> bool:
    """Whether the module is what torch.compile returned for another one."""
    # Where nothing was compiled, torch._dynamo is not imported, and importing it takes seconds: another thread may just
    # be doing so.
    optimized = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return optimized is not None and issubclass(type(module), optimized)


class Wrapping(NamedTuple):
    """How the modules of a class wrap."""

    attribute: str  # under which name they hold what they wrap
    works: bool  # whether they do work of their own, as DistributedDataParallel does; else they only pass calls on


_WRAPPERS = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): Wrapping("_orig_mod", works=False),
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): Wrapping("module", works=True),
    ("torch.nn.parallel.data_parallel", "DataParallel"): Wrapping("module", works=True),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): Wrapping(
        "_fsdp_wrapped_module", works=True
    ),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"): Wrapping(
        "_checkpoint_wrapped_module", works=False
    ),
    ("torch.optim.swa_utils", "AveragedModel"): Wrapping("module", works=False),
    ("timm.utils.model_ema", "ModelEmaV2"): Wrapping("module", works=False),
    ("timm.utils.model_ema", "ModelEmaV3"): Wrapping("module", works=False),
    ("apex.parallel.distributed", "DistributedDataParallel"): Wrapping("module", works=True),
    ("megatron.core.distributed.data_parallel_base", "_BaseDataParallel"): Wrapping("module", works=True),
    ("megatron.core.transformer.module", "Float16Module"): Wrapping("module", works=True),
    ("peft.peft_model", "PeftModel"): Wrapping("base_model", works=False),
    ("peft.mixed_model", "PeftMixedModel"): Wrapping("base_model", works=False),
    ("peft.tuners.tuners_utils", "BaseTuner"): Wrapping("model", works=False),
    ("lightning.fabric.wrappers", "_FabricModule"): Wrapping("_forward_module", works=False),
    ("lightning_fabric.wrappers", "_FabricModule"): Wrapping("_forward_module", works=False),
}
"""Wrappers, by module and name of their class, from which others may be derived."""

_FORWARDS = tuple(Wrapping(attribute, works=True) for attribute in ("module", "_module"))
"""For modules of any other library that look up their own attributes in a module which they hold by such a name."""

_ATTRIBUTES = frozenset(wrapping.attribute for wrapping in (*_WRAPPERS.values(), *_FORWARDS))

_PREFIXED = {"FSDPModule", "ReplicateModule"}
"""Classes of torch.distributed that it puts before a module's own, in a class that it makes for it."""


def _wrapping(kind: type) -> tuple[Wrapping, ...]:
    """Return the ways in which modules of a class may wrap another one."""
    bases = ((base.__module__, base.__name__) for base in kind.__mro__)
    if (wrapper := next(filter(_WRAPPERS.__contains__, bases), None)) is not None:
        return (_WRAPPERS[wrapper],)
    # A `__getattr__` of torch's finds parameters and children alone.
    not_of_torch = (base for base in kind.__mro__ if not base.__module__.startswith("torch."))
    return _FORWARDS if any("__getattr__" in vars(base) for base in not_of_torch) else ()


def _is_prefixed(kind: type) -> bool:
    bases = kind.__mro__
    if len(bases) <= 2 or bases[1].__name__ not in _PREFIXED:
        return False
    return bases[1].__module__.startswith("torch.distributed.")


def wrapping_of(module: nn.Module) -> tuple[nn.Module, Wrapping] | None:
    """Return the module that `module` wraps, and how; None if it wraps none."""
    children = _attribute(module, "_modules")
    # Most have no child under such a name, which is found sooner than what their class is.
    if not children or not any(map(children.__contains__, _ATTRIBUTES)):
        return None
    for wrapping in _wrapping(type(module)):
        inner = children.get(wrapping.attribute)
        if isinstance(inner, nn.Module) and inner is not module:
            return inner, wrapping
    return None


def wrapped_in(wrapper: nn.Module, *, by_workers: bool) -> Iterator[nn.Module]:
    """Yield a module and what it wraps, each once; `by_workers`: go on at a wrapper that does work of its own."""
    seen: set[int] = set()
    while id(wrapper) not in seen:
        seen.add(id(wrapper))
        yield wrapper
        wrapping = wrapping_of(wrapper)
        if wrapping is not None and (by_workers or not wrapping[1].works):
            wrapper = wrapping[0]


def is_inside(wrapper: nn.Module, module: nn.Module) -> bool:
    """Whether `wrapper` is shown as `module`: it wraps it, over others too, and none of them does work of its own."""
    return wrapper is not module and any(inner is module for inner in wrapped_in(wrapper, by_workers=False))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return what is inside of the wrappers that do no work of their own: the module itself if it is not a wrapper."""
    return [*wrapped_in(module, by_workers=False)][-1]


def original_class_name(module: nn.Module) -> str:
    """Return the class of the module that `module` wraps or shards; its own if that does work of its own."""
    module = unwrapped(module)
    kind = type(module)
    return kind.__mro__[2 if _is_prefixed(kind) else 0].__name__


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
    """A weak reference to a module, with what is known of it."""

    __slots__ = ("module_class", "module_id", "path")
    # The first two are set of the reference that tells the module's death; the class if it has a name of its own.
    module_class: str
    module_id: int  # its `id()`
    path: str  # its path, where it is known below another one


class ModulePaths:
    """The path of each module below one parent, perhaps without wrappers: by `id(module)`, checked against it."""

    def __init__(self, refer_to: Callable[[nn.Module], ModuleRef], *, strip_wrappers: bool) -> None:
        self._refer_to = refer_to
        self._strip = strip_wrappers
        # Whether the path and the class of each module are all that its name takes, below the parent and below each
        # module inside; False before the first walk.
        self.are_names = False
        self._by_id: dict[int, ModuleRef] = {}
        # Modules can be added later; one made anew in every call must not cost a walk in every call.
        self._walks = Backoff()
        self._walking: deque[None] = deque()  # one for each walk under way

    def find(self, parent: nn.Module, module: nn.Module) -> str | None:
        """Return the path of `module` below the parent; None if it is not there, or it is too early to look again."""
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
        wrapped = self._strip and any(map(_wrapping, kinds))
        if wrapped:
            by_id = self._by_id_of(_without_wrappers(parent, named_modules(parent)), kinds)
        # Of these `original_class_name` is another than their own.
        self.are_names = self._strip and not (repeated or wrapped or any(map(_is_prefixed, kinds)))
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
    """Yield paths without the parts by which wrappers hold modules; a module that `parent` wraps has an empty path."""
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


class OutermostModules:
    """The modules that were called outside of all others and named by themselves: the last 64 of them.

    A thread of a pool, or of `nn.DataParallel`, has no call around its outermost one. What it calls is most often a
    part of a module that another thread has called, and has a name there.
    """

    def __init__(self) -> None:
        # The module, the id of its name, and the thread.
        self._by_id: dict[int, tuple[weakref.ref[nn.Module], int, int]] = {}

    def add(self, module: nn.Module, name_id: int) -> None:
        """Note that this thread called a module, outside of all others, and that it has this name."""
        self._by_id.pop(id(module), None)
        self._by_id[id(module)] = weakref.ref(module), name_id, threading.get_ident()
        while len(self._by_id) > _MAX_MODULES:
            self._by_id.pop(next(iter(self._by_id)), None)

    def find(
        self, module: nn.Module, path_below: Callable[[nn.Module, nn.Module], str | None]
    ) -> tuple[int, str] | None:
        """Return the name of what another thread called and this module, or replica, is in, and its path there."""
        this_thread, is_replica = threading.get_ident(), _attribute(module, "_is_replica") is True
        for ref, name_id, thread in reversed(list(self._by_id.values())):
            outer = ref()
            if outer is None or outer is module or thread == this_thread:
                continue
            path = _path_of_original(outer, module) if is_replica else path_below(outer, module)
            if path is not None:
                return name_id, path
        return None


def _path_of_original(outer: nn.Module, replica: nn.Module) -> str | None:
    """Return the path of the module that a replica was copied from: the two have the same dictionary of hooks."""
    hooks = _attribute(replica, "_forward_hooks")
    for path, inner in named_modules(outer):
        if _attribute(inner, "_forward_hooks") is hooks:
            return path
    return None


_READS_LOCALS = frozenset({"dir", "eval", "exec", "locals", "vars"})
_PASSED_OVER = {"<dictcomp>", "<genexpr>", "<lambda>", "<listcomp>", "<setcomp>"}


def calling_object() -> Any:
    """Return the first argument (`self`) of the function that calls the module, over torch's and our own; else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_of_torch_or_ours(frame):
        frame = frame.f_back
    while frame is not None:
        argument = _first_argument(frame)
        if argument is not None or frame.f_code.co_name not in _PASSED_OVER:
            return argument
        frame = frame.f_back
    return None


def attribute_of_caller(module: nn.Module) -> str | None:
    """Return the attribute by which the object whose method calls `module` knows it; None if there is none."""
    try:
        attributes = object.__getattribute__(calling_object(), "__dict__")
    except AttributeError:
        return None
    if type(attributes) is not dict:
        return None
    names = (name for name, value in list(attributes.items()) if value is module and type(name) is str)
    return next(filter(str.isidentifier, names), None)


def _is_of_torch_or_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__")
    return type(name) is str and name.partition(".")[0] in ("torch", "modtrace")


def _first_argument(frame: FrameType) -> object:
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED or not _READS_LOCALS.isdisjoint(code.co_names):
        # The code of a module or a class, or one that can see that its variables were read.
        return None
    name = "self" if "self" in code.co_freevars else code.co_varnames[0] if code.co_argcount else "."
    if name.startswith("."):  # what a comprehension goes through
        return None
    variables = frame.f_locals
    value = variables.get(name)
    # Before 3.13 the frame keeps a dictionary that was made for this, and so all that its variables hold now.
    if type(variables) is dict and sys.getrefcount(variables) <= 3:
        variables.clear()
    return value
