"""Facts of a module: class, parts, wrapped or replaced module, whether torch.compile made it, and path.

They are read without running code of the module's class: that can raise, or compare elementwise as tensors do. The
object whose method calls a module is found on the stack. Wrappers are known by the names of their classes, so that
their libraries are not imported. One walk finds the paths of all modules below a module.
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

from ..unseen import attribute_of


def named_modules(module: nn.Module, repeated: list[nn.Module] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and module of each module below `module`, as `nn.Module.named_modules` does, each module once.

    A user's `named_modules` is not called: it can wait for a lock or draw a random number. Names that are not text are
    converted. A module with n paths is added n - 1 times to `repeated`.
    """
    seen: set[int] = set()
    # Stacks: two lists, because the garbage collector would count a tuple for each entry.
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
        children = attribute_of(inner, "_modules")
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
"""`__module__` of the wrappers of the parts into which torch.compile cuts the graph of a DistributedDataParallel."""


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of the module run code that torch.compile made."""
    has_compiled_call = type(module) is not MethodCall and attribute_of(module, "_compiled_call_impl") is not None
    return has_compiled_call or is_optimized(module)


def without_compile(module: nn.Module) -> nn.Module | None:
    """Return the module that torch.compile got to make this module; the module itself if torch.compile did not."""
    return getattr(module, "_orig_mod", None) if is_optimized(module) else module


def is_torch_graph(module: nn.Module) -> bool:
    """Return whether torch.compile made the module, to run it during a compilation or as a compiled backward."""
    cls = type(without_compile(module))
    if cls.__module__ == _PARTS_MODULE:
        return True
    if not issubclass(cls, GraphModule) and cls.__module__ != "torch._dynamo.utils":
        return False
    return torch._C._current_graph_task_id() != -1 or torch._guards.TracingContext.try_get() is not None


def is_optimized(module: nn.Module) -> bool:
    """Return whether torch.compile returned this module for another module."""
    # If nothing was compiled, torch._dynamo is not imported. An import lasts seconds; another thread may be in one.
    optimized_class = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return optimized_class is not None and issubclass(type(module), optimized_class)


class Wrapping(NamedTuple):
    """The way in which the modules of a class wrap other modules."""

    attribute: str  # name under which they hold the wrapped module
    does_work: bool  # whether they do work of their own, as DistributedDataParallel does; else they only pass calls on


_WRAPPERS = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): Wrapping("_orig_mod", does_work=False),
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): Wrapping("module", does_work=True),
    ("torch.nn.parallel.data_parallel", "DataParallel"): Wrapping("module", does_work=True),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): Wrapping(
        "_fsdp_wrapped_module", does_work=True
    ),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"): Wrapping(
        "_checkpoint_wrapped_module", does_work=False
    ),
    ("torch.optim.swa_utils", "AveragedModel"): Wrapping("module", does_work=False),
    ("timm.utils.model_ema", "ModelEmaV2"): Wrapping("module", does_work=False),
    ("timm.utils.model_ema", "ModelEmaV3"): Wrapping("module", does_work=False),
    ("apex.parallel.distributed", "DistributedDataParallel"): Wrapping("module", does_work=True),
    ("megatron.core.distributed.data_parallel_base", "_BaseDataParallel"): Wrapping("module", does_work=True),
    ("megatron.core.transformer.module", "Float16Module"): Wrapping("module", does_work=True),
    ("peft.peft_model", "PeftModel"): Wrapping("base_model", does_work=False),
    ("peft.mixed_model", "PeftMixedModel"): Wrapping("base_model", does_work=False),
    ("peft.tuners.tuners_utils", "BaseTuner"): Wrapping("model", does_work=False),
    ("lightning.fabric.wrappers", "_FabricModule"): Wrapping("_forward_module", does_work=False),
    ("lightning_fabric.wrappers", "_FabricModule"): Wrapping("_forward_module", does_work=False),
}
"""Wrappers, by module and name of their class or of one of its bases."""

_FORWARDING_WRAPPINGS = tuple(Wrapping(attribute, does_work=True) for attribute in ("module", "_module"))
"""Wrappings for modules of any other library that look up missing attributes in a module that they hold."""

_ATTRIBUTES = frozenset(wrapping.attribute for wrapping in (*_WRAPPERS.values(), *_FORWARDING_WRAPPINGS))

_SHARDING_CLASSES = {"FSDPModule", "ReplicateModule"}
"""Classes of torch.distributed that are the first base of a class that it makes for a module, before the original."""


def _wrappings(cls: type) -> tuple[Wrapping, ...]:
    """Return the ways in which modules of a class may wrap another module."""
    bases = ((base.__module__, base.__name__) for base in cls.__mro__)
    if (wrapper := next(filter(_WRAPPERS.__contains__, bases), None)) is not None:
        return (_WRAPPERS[wrapper],)
    # torch's `__getattr__` finds only parameters, buffers and children.
    foreign_bases = (base for base in cls.__mro__ if not base.__module__.startswith("torch."))
    return _FORWARDING_WRAPPINGS if any("__getattr__" in vars(base) for base in foreign_bases) else ()


def _is_sharding_class(cls: type) -> bool:
    bases = cls.__mro__
    if len(bases) <= 2 or bases[1].__name__ not in _SHARDING_CLASSES:
        return False
    return bases[1].__module__.startswith("torch.distributed.")


def wrapping_of(module: nn.Module) -> tuple[nn.Module, Wrapping] | None:
    """Return the module that `module` wraps, and its `Wrapping`; None if it is not a wrapper."""
    children = attribute_of(module, "_modules")
    # Most modules have no child of such a name; checking this first is faster than checking the class.
    if not children or not any(map(children.__contains__, _ATTRIBUTES)):
        return None
    for wrapping in _wrappings(type(module)):
        inner = children.get(wrapping.attribute)
        if isinstance(inner, nn.Module) and inner is not module:
            return inner, wrapping
    return None


def wrapped_in(wrapper: nn.Module, *, by_workers: bool) -> Iterator[nn.Module]:
    """Yield a module and the modules it wraps, each once; `by_workers`: also below wrappers with work of their own."""
    seen: set[int] = set()
    while id(wrapper) not in seen:
        seen.add(id(wrapper))
        yield wrapper
        wrapping = wrapping_of(wrapper)
        if wrapping is not None and (by_workers or not wrapping[1].does_work):
            wrapper = wrapping[0]


def is_inside(wrapper: nn.Module, module: nn.Module) -> bool:
    """Return whether `wrapper` wraps `module`, also through other wrappers, and no wrapper does work of its own."""
    return wrapper is not module and any(inner is module for inner in wrapped_in(wrapper, by_workers=False))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers that do no work of their own; the module itself if it is not a wrapper."""
    return [*wrapped_in(module, by_workers=False)][-1]


def original_class_name(module: nn.Module) -> str:
    """Return the class name of the module inside wrappers, before sharding; a wrapper with own work keeps its name."""
    cls = type(unwrapped(module))
    return cls.__mro__[2 if _is_sharding_class(cls) else 0].__name__


class Backoff:
    """Limits how often something costly that failed is tried again: at the 1st, 2nd, 4th, 8th … request."""

    def __init__(self) -> None:
        self._requests = 0

    def is_due(self) -> bool:
        """Count a request, and return whether to try."""
        self._requests += 1
        return self._requests & (self._requests - 1) == 0


# The facts are attributes of the reference, not a tuple around it: each object that the garbage collector counts brings
# its next run nearer, and a full run costs more than the rest of a recording.
class ModuleRef(weakref.ref[nn.Module]):
    """A weak reference to a module, with facts about it."""

    __slots__ = ("module_class", "module_id", "path")
    # The reference that reports the module's death has the first two; the class only if the module's name is distinct.
    module_class: str
    module_id: int  # `id()` of the module
    path: str  # path below the parent of a `ModulePaths`


class ModulePaths:
    """The path of each module below a parent, by `id(module)`, and without wrappers if `strip_wrappers`."""

    def __init__(self, refer_to: Callable[[nn.Module], ModuleRef], *, strip_wrappers: bool) -> None:
        self._refer_to = refer_to
        self._strip = strip_wrappers
        # Whether the path and the class of each module are enough for its name, below the parent and below each module
        # inside; False before the first walk.
        self.are_names = False
        self._by_id: dict[int, ModuleRef] = {}
        # Modules can be added later; a module that each call makes must not cost a walk in each call.
        self._walks = Backoff()
        self._walking: deque[None] = deque()  # an item for each walk that runs

    def find(self, parent: nn.Module, module: nn.Module) -> str | None:
        """Return the path of `module` below the parent; None if it is not there, or a new walk is not due."""
        path = self.known(module)
        # This thread walks too while another thread walks: that walk may wait for this thread, for example in a
        # finalizer.
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
        classes = {type(parent)}
        by_id = self._refs_by_id(named_modules(parent, repeated), classes)
        has_wrappers = self._strip and any(map(_wrappings, classes))
        if has_wrappers:
            by_id = self._refs_by_id(_without_wrappers(parent, named_modules(parent)), classes)
        # For sharded modules, `original_class_name` differs from the class's name.
        self.are_names = self._strip and not (repeated or has_wrappers or any(map(_is_sharding_class, classes)))
        self._by_id = by_id

    def _refs_by_id(
        self, modules: Iterable[tuple[str, nn.Module]], classes: set[type[nn.Module]]
    ) -> dict[int, ModuleRef]:
        """Return references with the paths of modules, by `id()`, and add their classes to `classes`."""
        by_id = {}
        for path, module in modules:
            classes.add(type(module))
            ref = by_id[id(module)] = self._refer_to(module)
            ref.path = path
        return by_id

    def known(self, module: nn.Module) -> str | None:
        """Return the path of `module` below the parent if a walk has found it, else None."""
        ref = self._by_id.get(id(module))
        return ref.path if ref is not None and ref() is module else None


def _without_wrappers(parent: nn.Module, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with paths that omit the attributes of wrappers; the module that `parent` wraps has the path ""."""
    short_paths = {"": ""}
    by_path = {"": parent}
    for path, module in modules:
        outer, _, name = path.rpartition(".")
        wrapping = wrapping_of(by_path[outer]) if outer in by_path else None
        prefix = short_paths.get(outer, outer)
        if wrapping is not None and wrapping[0] is module:
            short_paths[path] = prefix
        else:
            short_paths[path] = f"{prefix}.{name}" if prefix else name
        by_path[path] = module
        yield short_paths[path], module


_MAX_MODULES = 64


class OutermostModules:
    """The last 64 modules that were called outside all other calls and named by themselves.

    A thread of a pool, or of `nn.DataParallel`, has no call around its outermost one. The module that it calls is
    usually part of a module that another thread has called, and has a name there.
    """

    def __init__(self) -> None:
        # By `id()`: the module, the id of its name, and the thread.
        self._by_id: dict[int, tuple[weakref.ref[nn.Module], int, int]] = {}

    def add(self, module: nn.Module, name_id: int) -> None:
        """Note that this thread called a module outside all other calls, and the id of its name."""
        self._by_id.pop(id(module), None)
        self._by_id[id(module)] = weakref.ref(module), name_id, threading.get_ident()
        while len(self._by_id) > _MAX_MODULES:
            self._by_id.pop(next(iter(self._by_id)), None)

    def find(
        self, module: nn.Module, path_below: Callable[[nn.Module, nn.Module], str | None]
    ) -> tuple[int, str] | None:
        """Return the name id of a module that another thread called and that contains `module`, and the path in it."""
        this_thread, is_replica = threading.get_ident(), attribute_of(module, "_is_replica") is True
        for ref, name_id, thread in reversed(list(self._by_id.values())):
            outer = ref()
            if outer is None or outer is module or thread == this_thread:
                continue
            path = _path_of_original(outer, module) if is_replica else path_below(outer, module)
            if path is not None:
                return name_id, path
        return None


def _path_of_original(outer: nn.Module, replica: nn.Module) -> str | None:
    """Return the path of the module that a replica was copied from: the two share their dictionary of hooks."""
    hooks = attribute_of(replica, "_forward_hooks")
    for path, inner in named_modules(outer):
        if attribute_of(inner, "_forward_hooks") is hooks:
            return path
    return None


_LOCALS_READERS = frozenset({"dir", "eval", "exec", "locals", "vars"})
_SKIPPED_FUNCTIONS = {"<dictcomp>", "<genexpr>", "<lambda>", "<listcomp>", "<setcomp>"}


def calling_object() -> Any:
    """Return the first argument (`self`) of the first caller outside torch and modtrace, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_of_torch_or_ours(frame):
        frame = frame.f_back
    while frame is not None:
        argument = _first_argument(frame)
        if argument is not None or frame.f_code.co_name not in _SKIPPED_FUNCTIONS:
            return argument
        frame = frame.f_back
    return None


def attribute_of_caller(module: nn.Module) -> str | None:
    """Return the attribute that holds `module` in the object whose method calls it; None if there is none."""
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
    if not code.co_flags & inspect.CO_OPTIMIZED or not _LOCALS_READERS.isdisjoint(code.co_names):
        # The code of a module or a class, or code that can observe that its variables were read.
        return None
    name = "self" if "self" in code.co_freevars else code.co_varnames[0] if code.co_argcount else "."
    if name.startswith("."):  # the iterator of a comprehension
        return None
    variables = frame.f_locals
    value = variables.get(name)
    # Before 3.13 the frame keeps the dictionary that `f_locals` made, and so keeps the variables' values alive.
    if type(variables) is dict and sys.getrefcount(variables) <= 3:
        variables.clear()
    return value
