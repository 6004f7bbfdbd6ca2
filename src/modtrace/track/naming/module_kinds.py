"""What a module is: its class and parts, what it wraps or replaces, and whether torch.compile made it.

It is read without running code of its class: that can raise, or compare as a tensor does. Wrappers are known by the
names of their classes, so that none of the libraries they come from is imported.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import GraphModule

from ..._interrupts import WeakMap

_class_name = type.__dict__["__name__"].__get__
_class_module = type.__dict__["__module__"].__get__


def name_of_class(kind: type) -> str:
    """Return the name of a class, also where its metaclass says something else, or raises."""
    name: str = _class_name(kind)
    return name


def module_of_class(kind: type) -> str:
    """Return the name of the module in which a class was made; empty where it does not say."""
    try:
        module = _class_module(kind)
    except AttributeError:
        return ""
    return module if isinstance(module, str) else ""


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, also where its metaclass says something else."""
    return name_of_class(type(module))


def attribute(module: nn.Module, name: str) -> Any:
    """Return what a module holds under a name, past a `__getattribute__` of its own; None where it holds nothing."""
    try:
        return object.__getattribute__(module, name)
    except AttributeError:
        return None


def named_modules(module: nn.Module, repeated: list[nn.Module] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and module of each module below one, as `nn.Module.named_modules` does, each module once.

    A `named_modules` of its own is not asked: it is the user's code, which can wait for a lock or draw a random number.
    Names that are no text are turned into it.

    Args:
        module: where paths start.
        repeated: gets each module that lies in another place too, once for each of those.
    """
    seen = {id(module)}
    # The last is the next. Two lists, as a tuple for each is more for the garbage collector to count.
    paths, todo = [""], [module]
    while todo:
        path, inner = paths.pop(), todo.pop()
        if inner is not module:
            if id(inner) in seen:
                if repeated is not None:
                    repeated.append(inner)
                continue
            seen.add(id(inner))
            yield path, inner
        children = attribute(inner, "_modules")
        if children:
            prefix = f"{path}." if path else ""
            for name, child in zip(reversed(list(children.keys())), reversed(list(children.values())), strict=True):
                if child is not None:
                    paths.append(f"{prefix}{name if type(name) is str else _text(name)}")
                    todo.append(child)


def _text(name: object) -> str:
    try:
        return str(name)
    except Exception:
        return f"<{_class_name(type(name))}>"


class MethodCall(nn.Module):
    """A method of a module, which the engines see as the call of a module. No hooks of modules run around it.

    Args:
        owner: the module.
        name: the method's name.

    Attributes:
        owner: a weak reference to the module.
        method: the method's name.
    """

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
"""Of the modules around the parts into which torch.compile cuts the graph of a DistributedDataParallel."""


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module run what torch.compile made."""
    compiled = type(module) is not MethodCall and attribute(module, "_compiled_call_impl") is not None
    return compiled or is_optimized(module)


def without_compile(module: nn.Module) -> nn.Module | None:
    """Return what torch.compile was given for this module; the module itself where it was not."""
    return getattr(module, "_orig_mod", None) if is_optimized(module) else module


def is_torch_graph(module: nn.Module) -> bool:
    """Whether torch.compile made the module, to run it while it compiles, or as the backward of what it compiled."""
    kind = type(without_compile(module))
    if module_of_class(kind) == _PARTS_MODULE:
        return True
    if not issubclass(kind, GraphModule) and module_of_class(kind) != "torch._dynamo.utils":
        return False
    return torch._C._current_graph_task_id() != -1 or torch._guards.TracingContext.try_get() is not None


def is_optimized(module: nn.Module) -> bool:
    """Whether the module is what torch.compile returned for another one."""
    # Where nothing was compiled, torch._dynamo is not imported, and importing it takes seconds: another thread may just
    # be doing so.
    optimized = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return optimized is not None and issubclass(type(module), optimized)


class Wrapping(NamedTuple):
    """How the modules of a class wrap.

    Attributes:
        attribute: under which name they hold what they wrap.
        works: whether they do work of their own, as DistributedDataParallel does; else they only pass calls on.
    """

    attribute: str
    works: bool


_WRAPPERS = {
    ("torch._dynamo.eval_frame", "OptimizedModule"): Wrapping("_orig_mod", False),
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): Wrapping("module", True),
    ("torch.nn.parallel.data_parallel", "DataParallel"): Wrapping("module", True),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): Wrapping(
        "_fsdp_wrapped_module", True
    ),
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"): Wrapping(
        "_checkpoint_wrapped_module", False
    ),
    ("torch.optim.swa_utils", "AveragedModel"): Wrapping("module", False),
    ("peft.peft_model", "PeftModel"): Wrapping("base_model", False),
    ("peft.mixed_model", "PeftMixedModel"): Wrapping("base_model", False),
    ("peft.tuners.tuners_utils", "BaseTuner"): Wrapping("model", False),
    ("lightning.fabric.wrappers", "_FabricModule"): Wrapping("_forward_module", False),
    ("lightning_fabric.wrappers", "_FabricModule"): Wrapping("_forward_module", False),
}
"""By module and name of a class, from which others may be derived."""

_ATTRIBUTES = frozenset(how.attribute for how in _WRAPPERS.values())

_PREFIXED = {"FSDPModule", "ReplicateModule"}
"""Classes of torch.distributed that it puts before a module's own, in a class that it makes for it."""

_NONE = Wrapping("", False)
_known: WeakMap[type, Wrapping] = WeakMap()


def _wrapping(kind: type) -> Wrapping | None:
    """Return how modules of a class wrap another one, None where they do not."""
    how = _known.get(kind)
    if how is None:
        bases = ((module_of_class(base), name_of_class(base)) for base in kind.__mro__)
        how = _known[kind] = next((_WRAPPERS[base] for base in bases if base in _WRAPPERS), _NONE)
    return None if how is _NONE else how


def can_wrap(kind: type[nn.Module]) -> bool:
    """Whether modules of a class wrap others."""
    return _wrapping(kind) is not None


def is_original(kind: type[nn.Module]) -> bool:
    """Whether modules of a class replace no others: `original_class_name` is their own."""
    return not (can_wrap(kind) or is_scripted(kind) or _is_prefixed(kind))


def is_scripted(kind: type) -> bool:
    """Whether modules of a class were made by torch.jit."""
    return module_of_class(kind).startswith("torch.jit")


def _is_prefixed(kind: type) -> bool:
    bases = kind.__mro__
    if len(bases) <= 2 or name_of_class(bases[1]) not in _PREFIXED:
        return False
    return module_of_class(bases[1]).startswith("torch.distributed.")


def wrapping_of(module: nn.Module) -> tuple[nn.Module, Wrapping] | None:
    """Return the module that `module` wraps, and how; None where it wraps none."""
    children = attribute(module, "_modules")
    # Most have no child under such a name, which is found sooner than what their class is.
    if not children or not any(map(children.__contains__, _ATTRIBUTES)):
        return None
    how = _wrapping(type(module))
    if how is None:
        return None
    inner = children.get(how.attribute)
    return (inner, how) if isinstance(inner, nn.Module) and inner is not module else None


def is_inside(wrapper: nn.Module, module: nn.Module) -> bool:
    """Whether `wrapper` is shown as `module`: it wraps it, over others too, and none of them does work of its own."""
    found = wrapping_of(wrapper)
    while found is not None and not found[1].works:
        if found[0] is module:
            return True
        found = wrapping_of(found[0])
    return False


def unwrapped(module: nn.Module) -> nn.Module:
    """Return what is inside of the wrappers that do no work of their own: the module itself where it is none."""
    found = wrapping_of(module)
    while found is not None and not found[1].works:
        module = found[0]
        found = wrapping_of(module)
    return module


def original_class_name(module: nn.Module) -> str:
    """Return the class of the module that `module` wraps, was scripted or traced from, or shards; else its own.

    A wrapper that does work of its own keeps its own.
    """
    module = unwrapped(module)
    kind = type(module)
    if is_scripted(kind):
        original = getattr(module, "original_name", None)
        if isinstance(original, str) and original:
            return original
    return name_of_class(kind.__mro__[2]) if _is_prefixed(kind) else class_name(module)
