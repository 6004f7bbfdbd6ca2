"""Modules that wrap another one: which they wrap, and whether they do work of their own.

They are known by the names of their classes, so that none of the libraries they come from is imported.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from ..._weak_map import WeakMap
from .module_inspection import attribute, class_name, module_of_class, name_of_class

__all__ = [
    "Wrapping",
    "can_wrap",
    "is_inside",
    "is_original",
    "is_scripted",
    "original_class_name",
    "unwrapped",
    "wrapping_of",
]


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
    """Whether modules of a class stand for no others: `original_class_name` is their own."""
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
    """Whether `wrapper` stands for `module`: it wraps it, over others too, and none of them does work of its own."""
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
    """Return the class of what `module` stands for: of what it wraps, was scripted or traced from, or shards.

    A wrapper that does work of its own keeps its own.
    """
    module = unwrapped(module)
    kind = type(module)
    if is_scripted(kind):
        original = getattr(module, "original_name", None)
        if isinstance(original, str) and original:
            return original
    return name_of_class(kind.__mro__[2]) if _is_prefixed(kind) else class_name(module)
