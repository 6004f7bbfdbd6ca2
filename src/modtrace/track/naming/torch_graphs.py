"""Which modules torch.compile made, or made other modules of."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.fx import GraphModule

from ..method_call import MethodCall
from .module_inspection import attribute, module_of_class

__all__ = ["is_compiled", "is_optimized", "is_torch_graph", "without_compile"]

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
