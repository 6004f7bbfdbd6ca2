"""The graphs that AOTAutograd makes of a captured one: how many nodes of which module, and their FLOPs.

torch passes each graph to its compiler as the first argument of a function, which is where we read it, once, as it is.
Its nodes say of which module they are, those of a backward graph also of which forward module. What a backward graph
computes again has the mark of the forward. A graph that comes from AOTAutograd's cache passes none of these functions.
"""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._guards import CompileContext, TracingContext
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from .._interrupts import raised_by_handler
from ..timeline.contents import COMPILED_BEFORE, FROM_AUTOGRAD_CACHE
from .compiled_kernels import InnerModule, KernelLog, Owner, factors_of, note_kernels, note_owners, owner_of
from .greenlets import PerGreenlet
from .native.flops import Formula, formula_by_operator
from .unseen import skip_all, unseen_by_modes

GRAPHS_MODULE = "torch._functorch._aot_autograd.graph_compile"
"""torch's, which passes them on."""
_AROUND = "torch._functorch.aot_autograd"
"""torch's, which imports that one."""
_PASSED_BY = ("_aot_stage2b_inference_compile", "_aot_stage2b_fw_compile", "_aot_stage2b_bw_compile")

_NO_GRAPH = "its backend does not use AOTAutograd"
NO_WORK = (0,) * 6
_UNKNOWN = -1


class GraphWork(NamedTuple):
    """A captured graph: the work of each module in it, and its kernels."""

    graph: str = ""  # dynamo's number of it (`0/1`: of the first frame, compiled for the second time)
    # By module its nodes in forward, backward and recompute, and the FLOPs of these, -1 where they are not known: each
    # node counts to the innermost module.
    work: tuple[tuple[InnerModule, tuple[int, ...]], ...] = ()
    unknown: str = COMPILED_BEFORE  # why nothing is known of its nodes; else empty
    kernels: KernelLog | None = None  # those of what is compiled of it; None if that is not seen


class _Thread:
    """The work of each module in the graph that one thread compiles; None if it compiles none."""

    work: dict[InnerModule, list[int]] | None = None


_threads = PerGreenlet(_Thread)


def read_graphs(captured: Any, compile_captured: Callable[[], Any]) -> tuple[Any, GraphWork]:
    """Call what compiles a captured graph. Returns what that returns, and what AOTAutograd made of the graph."""
    thread, cached = _threads.get(), _cache_hits()
    outer_work, thread.work = thread.work, {}
    kernels = note_kernels(captured)
    try:
        compiled = compile_captured()
        work = tuple((module, tuple(counts)) for module, counts in thread.work.items())
    finally:
        thread.work = outer_work
    unknown = "" if work else _missing() or (FROM_AUTOGRAD_CACHE if _cache_hits() > cached else _NO_GRAPH)
    return compiled, GraphWork(str(CompileContext.current_compile_id() or ""), work, unknown, kernels)


@cache
def watch_graphs() -> None:
    """Read the graphs that are compiled from now on, once per process, where torch passes them on."""
    module = sys.modules[GRAPHS_MODULE]
    for name in _PASSED_BY:
        function = getattr(module, name, None)
        if function is not None:
            setattr(module, name, _reading(function, is_backward=name == _PASSED_BY[-1]))


def _missing() -> str:
    """Return what this version of torch lacks; empty if it has all."""
    module = sys.modules.get(GRAPHS_MODULE, sys.modules.get(_AROUND))
    if module is None:
        return ""
    missing = [name for name in _PASSED_BY if not hasattr(module, name)]
    return f"torch {torch.__version__} does not pass graphs by {missing[0]}" if missing else ""


def _cache_hits() -> int:
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int((counters.get("aot_autograd") or {}).get("autograd_cache_hit", 0))


def _reading(function: Callable[..., Any], *, is_backward: bool) -> Callable[..., Any]:
    """Return a function that reads the graph it is passed, then passes it on."""

    def call(graph: Any, *args: Any, **kwargs: Any) -> Any:
        thread = _threads.get()
        # Inductor compiles patterns that it looks for within the program's compilation, without a context.
        if thread.work is None or TracingContext.try_get() is None:
            return function(graph, *args, **kwargs)
        owners: dict[str, Owner] = {}
        try:
            with unseen_by_modes():
                _add_nodes(thread.work, owners, graph, is_backward=is_backward)
                note_owners(owners, is_backward=is_backward)
        except Exception as error:  # another version of torch notes something otherwise
            if raised_by_handler(error):
                raise
            thread.work.clear()
        return function(graph, *args, **kwargs)

    return skip_all(call)


def _add_nodes(work: dict[InnerModule, list[int]], owners: dict[str, Owner], graph: Any, *, is_backward: bool) -> None:
    formulas = formula_by_operator()
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        module, phase = owners[node.name] = owner_of(node, is_backward=is_backward)
        if factors := factors_of(node):
            owners[factors] = module, phase
        counts = work.setdefault(module, [*NO_WORK])
        flops = _flops_of(node, formulas)
        counts[phase] += 1
        total = counts[3 + phase]
        counts[3 + phase] = _UNKNOWN if _UNKNOWN in (flops, total) else total + flops


def _flops_of(node: Any, formulas: dict[str, Formula]) -> int:
    """Return what a node costs; -1 if its shapes are not fixed, its formula fails, or it holds a graph of its own."""
    target, positional = node.target, node.args
    if isinstance(target, HigherOrderOperator):
        # An operator that keeps the state of random numbers runs another one, with the args behind it.
        index = next((index for index, argument in enumerate(positional) if isinstance(argument, OpOverload)), None)
        if index is None:
            return _UNKNOWN
        target, positional = positional[index], positional[index + 1 :]
    packet = getattr(target, "overloadpacket", None)
    formula = formulas.get(getattr(packet, "_qualified_op_name", ""))
    if formula is None:
        return 0
    args, kwargs = map_arg((positional, node.kwargs), lambda argument: argument.meta.get("val"))
    shapes = [leaf.shape for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(type(size) is not int for shape in shapes for size in shape):
        return _UNKNOWN
    try:
        return int(formula(*args, **kwargs, out_val=node.meta.get("val")))
    except (Exception, SystemExit) as error:
        if raised_by_handler(error):
            raise
        return _UNKNOWN
